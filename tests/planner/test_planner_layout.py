"""The ten rules: every way in which tokens and images do not fit together, and the expansion of those that do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import CountError, LayoutError, Reason
from planner.layout import Placeholder, expand, positions, validate

IDS = Placeholder(image=50, image_start=30, image_end=31, video=55, video_start=32, video_end=33)
IMAGE = [30, 50, 31]

FAILURES: list[tuple[str, list[int], int, Reason]] = [
    ("no placeholder", [1, 2, 3], 1, Reason.PLACEHOLDER_MISSING),
    ("empty prompt", [], 1, Reason.PLACEHOLDER_MISSING),
    ("one missing", [*IMAGE, 1], 2, Reason.PLACEHOLDER_COUNT),
    ("one too many", [*IMAGE, 1, *IMAGE], 1, Reason.PLACEHOLDER_COUNT),
    ("typed in the text", [1, 50, 2, *IMAGE], 1, Reason.PLACEHOLDER_COUNT),
    ("a whole typed triple", [*IMAGE, 1, *IMAGE, 2], 1, Reason.PLACEHOLDER_COUNT),
    ("a typed triple in place of an image", [30, 50, 31, 1, 50], 2, Reason.DELIMITER_STRAY),
    ("begin without end", [30, 50, 1], 1, Reason.DELIMITER_STRAY),
    ("end without begin", [1, 50, 31], 1, Reason.DELIMITER_STRAY),
    ("a stray begin", [30, *IMAGE], 1, Reason.DELIMITER_STRAY),
    ("a stray end", [*IMAGE, 31], 1, Reason.DELIMITER_STRAY),
    ("nested", [30, 30, 50, 31, 31], 1, Reason.DELIMITER_STRAY),
    ("end before begin", [31, 50, 30], 1, Reason.PLACEHOLDER_BARE),
    ("text after begin", [30, 1, 50, 31], 1, Reason.PLACEHOLDER_BARE),
    ("text before end", [30, 50, 1, 31], 1, Reason.PLACEHOLDER_BARE),
    ("delimiters elsewhere", [50, 1, 30, 31], 1, Reason.PLACEHOLDER_BARE),
    ("first token", [50, 30, 31], 1, Reason.PLACEHOLDER_BARE),
    ("last token", [30, 31, 50], 1, Reason.PLACEHOLDER_BARE),
    ("swapped between two", [30, 50, 30, 31, 50, 31], 2, Reason.PLACEHOLDER_BARE),
    ("side by side", [30, 50, 50, 31], 1, Reason.PLACEHOLDER_ADJACENT),
    ("already expanded", [30, 50, 50, 50, 31], 1, Reason.PLACEHOLDER_ADJACENT),
    ("side by side for two images", [30, 50, 50, 31], 2, Reason.PLACEHOLDER_ADJACENT),
    ("video placeholder", [32, 55, 33, *IMAGE], 1, Reason.VIDEO_TOKENS),
    ("video begin", [32, *IMAGE], 1, Reason.VIDEO_TOKENS),
    ("video end", [*IMAGE, 33], 1, Reason.VIDEO_TOKENS),
    ("frames in a video wrapper", [32, *IMAGE, 33], 1, Reason.VIDEO_TOKENS),
    ("a pad value", [1_000_000, *IMAGE], 1, Reason.TOKEN_RANGE),
    ("a wide pad value", [1 << 62, *IMAGE], 1, Reason.TOKEN_RANGE),
]


@pytest.mark.parametrize(
    ("tokens", "images", "reason"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES]
)
def test_what_does_not_fit_is_refused_by_name(tokens: list[int], images: int, reason: Reason) -> None:
    before = list(tokens)
    with pytest.raises(LayoutError) as caught:
        validate(tokens, IDS, images)
    assert caught.value.reason is reason
    assert tokens == before


@pytest.mark.parametrize("images", [1, 2, 3])
def test_what_fits(images: int) -> None:
    validate([1, *IMAGE * images, 2], IDS, images)
    validate([token for _ in range(images) for token in (7, *IMAGE, 8)], IDS, images)


def test_without_images_there_is_nothing_to_check() -> None:
    validate([50, 50, 32, 1 << 40], IDS, 0)


def test_a_model_without_video_ids() -> None:
    validate([32, *IMAGE], Placeholder(image=50, image_start=30, image_end=31), 1)


@pytest.mark.parametrize(
    "counts", [[], [1], [1, 2, 3], [0, 1], [-1, 1], [True, 1], [1.0, 1], ["1", 1], [None, 1], [1 << 32, 1]]
)
def test_counts_that_are_none(counts: list[Any]) -> None:
    with pytest.raises(CountError) as caught:
        expand([*IMAGE, *IMAGE], IDS, counts)
    assert caught.value.reason is Reason.COUNT_INVALID


def test_the_context_bounds_the_expanded_prompt() -> None:
    assert len(expand([1, *IMAGE, 2], IDS, [10], context_length=14).tokens) == 14
    with pytest.raises(LayoutError, match="15 tokens"):
        expand([1, *IMAGE, 2], IDS, [11], context_length=14)
    with pytest.raises(LayoutError) as caught:
        expand([*IMAGE, *IMAGE], IDS, [(1 << 32) - 2, (1 << 32) - 2])
    assert caught.value.reason is Reason.PROMPT_TOO_LONG


TEXT = st.lists(st.integers(100, 999), max_size=6)


@given(st.lists(st.tuples(TEXT, st.integers(1, 40)), max_size=6), TEXT)
def test_expansion_replaces_placeholders_and_nothing_else(images: list[tuple[list[int], int]], tail: list[int]) -> None:
    short = [token for text, _ in images for token in (*text, *IMAGE)] + tail
    counts = [count for _, count in images]
    validate(short, IDS, len(images))
    before = list(short)
    expansion = expand(short, IDS, counts)
    assert short == before
    assert len(expansion.tokens) == len(short) - len(counts) + sum(counts)
    for start, count in zip(expansion.starts, counts, strict=True):
        assert expansion.tokens[start - 1 : start + count + 1] == [30, *[50] * count, 31]
    folded = [t for i, t in enumerate(expansion.tokens) if t != 50 or i in expansion.starts]
    assert folded == short


@given(st.lists(st.integers(0, 3)), st.integers(0, 3))
def test_positions(tokens: list[int], wanted: int) -> None:
    assert positions(tokens, wanted) == [i for i, token in enumerate(tokens) if token == wanted]
