"""1,185 cases of router and engine for three engine kinds; and every mistake is caught where it must be."""

from __future__ import annotations

import math

import pytest
from glm_fixtures import GLM
from simulation import BLOCK_SIZES, ENGINES, TEXT_LENGTHS, Mutation, failures

from planner.families import ImageFamily

CASES = [(block, text) for block in BLOCK_SIZES for text in TEXT_LENGTHS]
SINGLE_IMAGE = {"repeat.router", "isolation.router", "expansion.total", "isolation.total"}


@pytest.fixture(scope="module")
def counts(glm_family: ImageFamily) -> dict[int, int]:
    """Per block size, the tokens of a nearly square picture that is longer than a block wherever it starts."""
    return {block: glm_family.count_image(_size(block + 1)) for block in BLOCK_SIZES}


def _size(tokens: int) -> tuple[int, int]:
    rows = math.isqrt(tokens - 1) + 1
    return 28 * -(-tokens // rows), 28 * rows


def _broken(counts: dict[int, int], engine: str, mutation: Mutation, every: int = 1) -> list[set[str]]:
    return [failures(block, text, counts[block], engine, mutation) for block, text in CASES[::every]]


def test_the_grid_is_that_of_the_contract(counts: dict[int, int]) -> None:
    assert GLM.exists()
    assert len(CASES) == 1185
    assert all(count > block for block, count in counts.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_holds(engine: str, counts: dict[int, int]) -> None:
    assert [found for found in _broken(counts, engine, Mutation.NONE) if found] == []


@pytest.mark.parametrize(("engine", "every"), [("vllm", 1), ("sglang-narrow", 17), ("sglang-wide", 17)])
class TestMistakes:
    def test_content_left_out_of_router_keys(self, engine: str, every: int, counts: dict[int, int]) -> None:
        for broken in _broken(counts, engine, Mutation.ROUTER_IGNORES_CONTENT, every):
            assert broken == {"isolation.router", "two.swap_second.router", "two.swapped_order.router"}

    def test_content_left_out_of_engine_keys(self, engine: str, every: int, counts: dict[int, int]) -> None:
        for broken in _broken(counts, engine, Mutation.ENGINE_IGNORES_CONTENT, every):
            assert broken == {"isolation.engine", "two.swap_second.engine"}

    def test_keying_by_all_images_is_caught_by_the_swap_alone(
        self, engine: str, every: int, counts: dict[int, int]
    ) -> None:
        for broken in _broken(counts, engine, Mutation.ALL_IMAGES, every):
            assert broken == {"two.swap_second.router"}

    def test_a_count_off_by_one_hides_behind_one_image(self, engine: str, every: int, counts: dict[int, int]) -> None:
        found = _broken(counts, engine, Mutation.COUNT_OFF_BY_ONE, every)
        assert all("two.repeat.router" in broken for broken in found)
        assert sum(bool(broken & SINGLE_IMAGE) for broken in found) < len(found) / 20

    def test_dropped_delimiters(self, engine: str, every: int, counts: dict[int, int]) -> None:
        for broken in _broken(counts, engine, Mutation.NO_DELIMITERS, every):
            assert "repeat.router" in broken
