"""Token counts against the vectors and, over thousands of sizes, against transformers' own image processors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from glm_fixtures import MODELS, fixture_json
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

from planner.errors import CountError
from planner.families import ContextBudget, ImageFamily
from planner.families.glm4v import Glm4v
from planner.families.glm5_next import Glm5Next
from planner.families.metadata import Patches
from planner.layout import Placeholder
from planner.plan import Planner

VECTORS = fixture_json("vectors.json")
IDS = Placeholder(image=3, image_start=1, image_end=2)
CONFIGS = [
    (14, 2, 2, 16, 8000),
    (14, 2, 2, 16, 512),
    (14, 2, 2, 16, 600),
    (7, 4, 2, 8, 512),
    (16, 2, 1, 1, 100),
    (14, 2, 2, 1, 1),
]


def _glm5(patch: int, merge: int, frames: int, low: int, high: int) -> Glm5Next:
    return Glm5Next(Patches(patch, merge, frames), low, high, IDS, None)


def _tables() -> Iterator[Any]:
    config = VECTORS["config"]
    real = _glm5(14, 2, 2, config["min_image_tokens"], config["max_image_tokens"])
    for v in VECTORS["vectors"]:
        yield real, v["width"], v["height"], v["resized_height"], v["resized_width"], v["tokens"]
    for row in VECTORS["random_w_h_H_W_tokens"]:
        yield real, *row
    for other in VECTORS["alternate_configs"]:
        c = other["config"]
        family = _glm5(
            c["patch_size"], c["merge_size"], c["temporal_patch_size"], c["min_image_tokens"], c["max_image_tokens"]
        )
        for row in other["vectors_w_h_H_W_tokens"]:
            yield family, *row


@pytest.mark.parametrize(("family", "width", "height", "high", "wide", "tokens"), list(_tables()))
def test_vectors(family: Glm5Next, width: int, height: int, high: int, wide: int, tokens: int) -> None:
    assert family.count_image((width, height)) == tokens
    rows, columns = family.canvas((width, height))
    assert (rows * family.patches.factor, columns * family.patches.factor) == (high, wide)


def test_width_and_height_are_not_interchangeable(glm_family: ImageFamily) -> None:
    for example in VECTORS["transpose_asymmetry"]["examples"]:
        size = example["width"], example["height"]
        assert glm_family.count_images([size, size[::-1]]) == (example["tokens"], example["tokens_transposed"])


def _sizes(seed: int, amount: int) -> list[tuple[int, int]]:
    """Random sizes over six magnitudes, and those around every edge: factors, bounds, extreme ratios."""
    source = random.Random(seed)
    some = [(source.randint(1, 10**k), source.randint(1, 10**j)) for k in range(1, 6) for j in range(1, 6)] * 8
    some += [(source.randint(1, 12000), source.randint(1, 12000)) for _ in range(amount)]
    edges = [1, 2, 13, 14, 15, 27, 28, 29, 55, 56, 57, 111, 112, 113, 223, 224, 225, 2491, 2492, 2493, 2519, 2800, 2801]
    some += [(width, height) for width in edges for height in edges]
    some += [(28 * k + d, 28) for k in (1, 16, 199, 200, 201, 8000) for d in (-1, 0, 1)]
    some += [(1, side) for side in (300_000, 224_000, 224_001)] + [(side, 1) for side in (300_000, 224_000, 224_001)]
    return some


@pytest.mark.parametrize("config", CONFIGS)
def test_glm5_next_counts_as_transformers_does(config: tuple[int, int, int, int, int]) -> None:
    patch, merge, frames, low, high = config
    family = _glm5(*config)
    oracle = Glm5NextImageProcessorPil(
        patch_size=patch, merge_size=merge, temporal_patch_size=frames, min_image_tokens=low, max_image_tokens=high
    )
    for width, height in _sizes(hash(config), 1200):
        expected = oracle.get_number_of_image_patches(height, width) // merge**2
        assert family.count_image((width, height)) == expected, (width, height)


@pytest.mark.parametrize("oracle_class", [Glm4vImageProcessorPil, Glm46VImageProcessorPil])
@pytest.mark.parametrize("edges", [(12_544, 11_760_000), (12_544, 470_400), (3136, 100_352)])
def test_glm4v_counts_as_transformers_does(oracle_class: Any, edges: tuple[int, int]) -> None:
    family = Glm4v(Patches(14, 2, 2), *edges, IDS, None)
    oracle = oracle_class(size={"shortest_edge": edges[0], "longest_edge": edges[1]})
    for width, height in _sizes(sum(edges), 800):
        try:
            expected = oracle.get_number_of_image_patches(height, width) // 4
        except ValueError:
            with pytest.raises(CountError):
                family.count_image((width, height))
        else:
            assert family.count_image((width, height)) == expected, (width, height)


@pytest.mark.parametrize("size", [(0, 0), (0, 10), (10, 0), (10, -5), (-5, 10), (-1, -1)])
@pytest.mark.parametrize("family", [_glm5(14, 2, 2, 16, 8000), Glm4v(Patches(14, 2, 2), 12_544, 470_400, IDS, None)])
def test_a_size_without_pixels_has_no_count(family: ImageFamily, size: tuple[int, int]) -> None:
    with pytest.raises(CountError):
        family.count_image(size)


def test_an_extreme_ratio_has_a_count_in_one_family_and_none_in_the_other(glm_family: ImageFamily) -> None:
    assert glm_family.count_image((201 * 28, 28)) == 201
    with pytest.raises(CountError, match="200"):
        Glm4v(Patches(14, 2, 2), 12_544, 470_400, IDS, None).count_image((201 * 28, 28))


def test_a_batch_fails_as_a_whole(glm_family: ImageFamily) -> None:
    assert glm_family.count_images([(224, 224), (128, 64)]) == (64, 18)
    assert glm_family.count_images([(224, 224)], ContextBudget(100, 10)) == (64,)
    with pytest.raises(CountError):
        glm_family.count_images([(224, 224), (0, 64), (128, 64)])


def test_the_recorded_checkpoints_have_their_own_budgets() -> None:
    sizes = [(64, 64), (56, 56), (301, 199), (800, 120), (90, 700), (560, 560), (280, 280)]
    counts = {"tiny-glm5": (16, 16, 88, 145, 100, 400, 100), "tiny-glm46v": (9, 9, 77, 116, 75, 289, 100)}
    for model, expected in counts.items():
        family = Planner.from_pretrained(MODELS / model).family
        assert isinstance(family, ImageFamily)
        assert family.count_images(sizes) == expected
