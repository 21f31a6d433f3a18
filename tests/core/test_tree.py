"""The jump search: what a match costs, and how far it looks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from kvd.core.tree import Space, Tree, place
from protocols.events import Tier
from tests.kit.conformance import lazy_keys

SPACE = Space(None, None, 1337)


class CountingTree(Tree):
    """Counts looks at nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.probes = 0

    def covered(self, key: int) -> int:
        self.probes += 1
        return super().covered(key)


class CountingKeys(list[int]):
    """Remembers the furthest key that was looked at."""

    furthest = -1

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.furthest = max(self.furthest, index)
        return super().__getitem__(index)


def chain_of(tree: Tree, length: int, reaches: list[int]) -> list[int]:
    """A chain of nodes, held by rank slot i up to ``reaches[i]``."""
    keys, parent = [k * 7919 + 1 for k in range(length)], None
    for depth, key in enumerate(keys):
        parent = tree.node(key, key, parent, SPACE)
        parent.pins += 1
        for slot, reach in enumerate(reaches):
            if depth < reach:
                tree.hold(parent, slot, Tier.DEVICE)
    return keys


def matched(tree: Tree, keys: list[int], among: Iterable[int] = range(80)) -> dict[int, set[int]]:
    """Slots by reach."""
    found = tree.match(keys, Tier.DEVICE, sum(map(place, among)))
    return {reach: {slot for slot in range(80) if places & place(slot)} for reach, places in found}


@pytest.mark.parametrize("reach", [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 100])
def test_one_reach_is_found_exactly(reach: int) -> None:
    tree = Tree()
    keys = chain_of(tree, 100, [reach])
    assert matched(tree, keys) == ({reach: {0}} if reach else {})


def test_any_reaches_are_found_exactly() -> None:
    rng = random.Random(5)
    for _ in range(60):
        length = rng.randint(1, 70)
        reaches = [rng.randint(0, length) for _ in range(rng.randint(1, 12))]
        tree = Tree()
        found = matched(tree, chain_of(tree, length, reaches))
        assert tree.check() == []
        assert {slot: reach for reach, slots in found.items() for slot in slots} == {
            slot: reach for slot, reach in enumerate(reaches) if reach
        }


def test_only_the_ranks_asked_about_are_found() -> None:
    tree = Tree()
    keys = chain_of(tree, 20, [5, 10, 15])
    assert matched(tree, keys, among=(0, 2)) == {5: {0}, 15: {2}}


def test_an_empty_prompt_matches_nothing() -> None:
    assert matched(Tree(), []) == {}


def test_a_miss_costs_one_probe() -> None:
    tree = CountingTree()
    chain_of(tree, 100, [100])
    assert matched(tree, [3] * 10_000) == {}
    assert tree.probes == 1


@pytest.mark.parametrize("ranks", [1, 64])
def test_equal_reaches_cost_the_logarithm_of_the_depth(ranks: int) -> None:
    tree = CountingTree()
    keys = chain_of(tree, 4096, [3000] * ranks)
    matched(tree, keys)
    assert tree.probes <= 2 * math.log2(4096) + 4


@pytest.mark.parametrize("distinct", [1, 2, 4, 8, 16])
def test_probes_grow_with_the_distinct_reaches(distinct: int) -> None:
    tree = CountingTree()
    keys = chain_of(tree, 2048, [2048 * (i % distinct + 1) // (distinct + 1) for i in range(64)])
    assert len(matched(tree, keys)) == distinct
    assert tree.probes <= distinct * (2 * math.log2(2048) + 4)


@pytest.mark.parametrize("reach", [1, 5, 30, 200])
def test_keys_are_not_looked_at_much_beyond_the_reach(reach: int) -> None:
    tree = Tree()
    keys = CountingKeys(chain_of(tree, 4096, [reach]))
    assert matched(tree, keys) == {reach: {0}}
    assert keys.furthest <= 2 * reach


def test_lazy_keys_are_hashed_only_as_far() -> None:
    prompt = lazy_keys(range(8192))
    tree, parent = Tree(), None
    for i in range(10):
        parent = tree.node(prompt[i], prompt[i], parent, SPACE)
        tree.hold(parent, 0, Tier.DEVICE)
    fresh = lazy_keys(range(8192))
    assert matched(tree, fresh) == {10: {0}}  # type: ignore[arg-type]
    assert len(fresh._keys) <= 21


def test_a_hole_cuts_coverage_and_filling_it_restores_it_at_once() -> None:
    tree = Tree()
    keys = chain_of(tree, 10, [10, 10])
    middle = tree.nodes[keys[4]]
    tree.hold(middle, 0, None)
    assert matched(tree, keys) == {4: {0}, 10: {1}}
    assert tree.check() == []
    tree.hold(middle, 0, Tier.DEVICE)
    assert matched(tree, keys) == {10: {0, 1}}
    assert tree.check() == []


def test_a_nearer_tier_counts_for_every_farther_level() -> None:
    tree = Tree()
    keys = chain_of(tree, 3, [0])
    for key, tier in zip(keys, (Tier.DEVICE, Tier.DISK, Tier.HOST), strict=True):
        tree.hold(tree.nodes[key], 0, tier)
    assert [list(tree.match(keys, level, place(0))) for level in Tier] == [[(1, 1)], [(1, 1)], [(3, 1)], [(3, 1)]]


def test_released_nodes_take_their_dead_ancestors_along() -> None:
    tree = Tree()
    keys = chain_of(tree, 5, [0])
    for key in keys[:4]:
        tree.nodes[key].pins -= 1
        tree.release(tree.nodes[key])
    assert len(tree.nodes) == 5, "a live descendant keeps the chain"
    last = tree.nodes[keys[4]]
    last.pins -= 1
    tree.release(last)
    assert tree.nodes == {}


def test_check_says_what_is_broken() -> None:
    tree = Tree()
    keys = chain_of(tree, 3, [3])
    tree.nodes[keys[1]].covered = 0
    tree.nodes[keys[2]].depth = 7
    faults = tree.check()
    assert any("covered 0x0, expected 0xf" in fault for fault in faults)
    assert any("has depth 7" in fault for fault in faults)
