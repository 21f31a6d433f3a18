"""Hybrid models: which group is indexed, and what the others must hold for a prefix to be usable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.core.groups import MAX_GROUPS
from kvd.core.residency import Skipped
from protocols.events import Stored
from tests.kit.conformance import FACTORIES, AnyIndex, cleared, device, keys_of, removed, stored

TOKENS = list(range(1, 17))
"""Eight blocks of two tokens."""
HASHES = [10, 20, 30, 40, 50, 60, 70, 80]


@pytest.fixture(params=FACTORIES)
def index(request: pytest.FixtureRequest) -> Iterator[AnyIndex]:
    index = FACTORIES[request.param]()
    yield index
    assert index.check() == []


@pytest.fixture
def rank(index: AnyIndex) -> int:
    return index.add_rank()


def attention(*hashes: int, group: int = 3, kind: str = "full_attention") -> Stored:
    tokens = [t for h in hashes for t in TOKENS[2 * HASHES.index(h) : 2 * HASHES.index(h) + 2]]
    first = HASHES.index(hashes[0])
    return stored(hashes, tokens, HASHES[first - 1] if first else None, group=group, spec_kind=kind)


def state(*hashes: int, group: int = 0) -> Stored:
    """A recurrent group's store: blocks masked out are absent, their tokens are not."""
    return Stored(
        hashes=hashes, parent=None, tokens=TOKENS, block_size=2, dense=len(hashes) == 8, group=group, spec_kind="mamba"
    )


def window(*hashes: int, tokens: int = 5, group: int = 1) -> Stored:
    return Stored(
        hashes=hashes, parent=None, tokens=TOKENS, block_size=2, group=group, spec_kind="sliding_window",
        sliding_window=tokens,
    )  # fmt: skip


def usable(index: AnyIndex, rank: int) -> tuple[int, int]:
    """Reach and usable blocks of the whole prompt."""
    found = index.match(keys_of(TOKENS), [rank]).get(rank)
    return (0, 0) if found is None else (found.tiers[0], found.usable)


def test_without_groups_all_that_is_reached_is_usable(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored(HASHES[:5], TOKENS[:10]))
    assert usable(index, rank) == (5, 5)


def test_a_recurrent_state_is_usable_only_where_it_was_kept(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(30))
    index.apply(rank, attention(*HASHES))
    assert usable(index, rank) == (8, 3)
    index.apply(rank, state(60))
    assert usable(index, rank) == (8, 6)
    index.apply(rank, removed(60, group=0))
    assert usable(index, rank) == (8, 3)
    index.apply(rank, removed(30, group=0))
    assert usable(index, rank) == (8, 0)


def test_a_state_beyond_the_reach_is_of_no_use(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(20, 80))
    index.apply(rank, attention(*HASHES))
    index.apply(rank, removed(50, group=3))
    assert usable(index, rank) == (4, 2)


def test_every_recurrent_group_must_have_kept_it(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(30, 60, group=0))
    index.apply(rank, state(30, 80, group=1))
    index.apply(rank, attention(*HASHES))
    assert usable(index, rank) == (8, 3)


@pytest.mark.parametrize(("tokens", "needs"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (100, 8)])
def test_a_sliding_window_needs_its_last_blocks(index: AnyIndex, rank: int, tokens: int, needs: int) -> None:
    index.apply(rank, window(*HASHES[8 - needs :], tokens=tokens))
    index.apply(rank, attention(*HASHES))
    assert usable(index, rank) == (8, 8)
    if needs:
        index.apply(rank, removed(HASHES[8 - needs], group=1))
        assert usable(index, rank)[1] < 8


def test_a_prefix_shorter_than_the_window_needs_all_of_it(index: AnyIndex, rank: int) -> None:
    index.apply(rank, window(10, 20, 40, tokens=100))
    index.apply(rank, attention(*HASHES))
    assert usable(index, rank) == (8, 2)


def test_a_second_attention_group_needs_every_block(index: AnyIndex, rank: int) -> None:
    index.apply(rank, attention(*HASHES, group=3))
    index.apply(rank, attention(*HASHES[:4], group=4, kind="mla_attention"))
    assert usable(index, rank) == (8, 4)


def test_states_on_the_host_are_not_usable_on_the_device(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(30))
    index.apply(rank, Stored(hashes=(30,), parent=None, tokens=[], block_size=0, medium="CPU", group=0))
    index.apply(rank, attention(*HASHES))
    index.apply(rank, removed(30, group=0))
    assert usable(index, rank) == (8, 0)


def test_either_name_of_a_block_will_do(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(31))
    index.apply(rank, attention(*HASHES))
    index.apply(rank, stored([31], TOKENS[4:6], 20, group=3))
    assert usable(index, rank) == (8, 3)


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_group_zero_is_indexed_if_it_is_attention_or_does_not_say(index: AnyIndex, rank: int, kind: str | None) -> None:
    index.apply(rank, stored(HASHES[:2], TOKENS[:4], group=0, spec_kind=kind))
    assert device(index, rank, TOKENS) == 2


def test_another_group_that_does_not_say_its_kind_is_not_indexed(index: AnyIndex, rank: int) -> None:
    assert index.apply(rank, stored([10], TOKENS[:2], group=2)) == Skipped("unlearned_group")
    assert index.apply(rank, removed(10, group=2)) == Skipped("unlearned_group")
    assert device(index, rank, TOKENS) == 0


@pytest.mark.parametrize("kind", ["mamba", "sliding_window", "chunked_local_attention", "cross_attention", "unknown"])
def test_other_kinds_are_never_scored(index: AnyIndex, rank: int, kind: str) -> None:
    index.apply(rank, stored(HASHES, TOKENS, group=0, spec_kind=kind))
    assert device(index, rank, TOKENS) == 0


def test_a_kind_that_constrains_nothing_is_counted_and_left_out(index: AnyIndex, rank: int) -> None:
    index.apply(rank, attention(*HASHES))
    assert index.apply(rank, stored([10], TOKENS[:2], group=7, spec_kind="cross_attention")) == Skipped("group_kind")
    assert index.apply(rank, removed(10, group=7)) == Skipped("group_kind")
    assert usable(index, rank) == (8, 8)


def test_an_event_without_a_group_belongs_to_the_indexed_one(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(40, 80))
    index.apply(rank, attention(*HASHES))
    index.apply(rank, removed(80))
    assert usable(index, rank) == (7, 4)


def test_a_removal_in_one_group_leaves_the_others(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(*HASHES))
    index.apply(rank, attention(*HASHES))
    index.apply(rank, removed(80, group=0))
    assert usable(index, rank) == (8, 7)


def test_tracked_groups_count_copies_too(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(80))
    index.apply(rank, state(80))
    index.apply(rank, attention(*HASHES))
    index.apply(rank, removed(80, group=0))
    assert usable(index, rank) == (8, 8)


def test_a_clear_empties_every_group(index: AnyIndex, rank: int) -> None:
    index.apply(rank, state(80))
    index.apply(rank, attention(*HASHES))
    index.apply(rank, cleared())
    index.apply(rank, attention(*HASHES))
    assert usable(index, rank) == (8, 0)


def test_groups_are_bounded(index: AnyIndex, rank: int) -> None:
    for group in range(MAX_GROUPS):
        index.apply(rank, state(10, group=group))
    assert index.apply(rank, state(10, group=MAX_GROUPS)) == Skipped("too_many_groups")
