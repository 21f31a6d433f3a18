"""What a rank holds: every rule of the index by name, for every implementation."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from kvd.core.residency import Applied, Bounds, Skipped
from protocols.events import Bad, BlockExtra, Cleared, Stored, Unknown
from protocols.keys import plan_keys
from protocols.media import MediaRun
from protocols.plan import exact_plan
from tests.kit.conformance import (
    FACTORIES,
    TIGHT,
    AnyIndex,
    cleared,
    device,
    images,
    keys_of,
    placeholder,
    reach,
    removed,
    stored,
)

ABCD = [1, 2, 3, 4, 5, 6, 7, 8]
"""Four blocks of two tokens."""
HASHES = [11, 12, 13, 14]


@pytest.fixture(params=FACTORIES)
def index(request: pytest.FixtureRequest) -> Iterator[AnyIndex]:
    """An empty index; whatever a test did, it must be sound at the end."""
    index = FACTORIES[request.param]()
    yield index
    assert index.check() == []
    while not index.sweep():
        pass
    assert index.check() == []


@pytest.fixture
def rank(index: AnyIndex) -> int:
    return index.add_rank()


@pytest.fixture
def full(index: AnyIndex, rank: int) -> int:
    """A rank that holds the four blocks."""
    index.apply(rank, stored(HASHES, ABCD))
    return rank


# --- reach -----------------------------------------------------------------------------------------------------------


def test_a_stored_prefix_is_reached(index: AnyIndex, full: int) -> None:
    assert device(index, full, ABCD) == 4
    assert device(index, full, ABCD[:4]) == 2
    assert device(index, full, [*ABCD[:4], 9, 9]) == 2


def test_a_rank_without_the_first_block_is_left_out(index: AnyIndex, full: int) -> None:
    assert index.match(keys_of([9, 9, 3, 4]), [full]) == {}
    assert index.match([], [full]) == {}


def test_evicting_from_the_tail_shortens_the_reach(index: AnyIndex, full: int) -> None:
    for left, hash_ in ((3, 14), (2, 13), (1, 12), (0, 11)):
        index.apply(full, removed(hash_))
        assert device(index, full, ABCD) == left


def test_a_hole_heals_at_once(index: AnyIndex, full: int) -> None:
    index.apply(full, removed(12))
    assert device(index, full, ABCD) == 1
    index.apply(full, stored([12], ABCD[2:4], 11))
    assert device(index, full, ABCD) == 4


def test_the_first_block_gone_and_back(index: AnyIndex, full: int) -> None:
    index.apply(full, removed(11))
    assert device(index, full, ABCD) == 0
    index.apply(full, stored([11], ABCD[:2]))
    assert device(index, full, ABCD) == 4


def test_ranks_do_not_share_residency(index: AnyIndex, full: int) -> None:
    other = index.add_rank()
    index.apply(other, stored(HASHES[:2], ABCD[:4]))
    index.apply(full, removed(11))
    assert (device(index, full, ABCD), device(index, other, ABCD)) == (0, 2)


def test_engines_with_other_hashes_for_the_same_content_are_independent(index: AnyIndex, full: int) -> None:
    other = index.add_rank()
    index.apply(other, stored([91, 92], ABCD[:4]))
    index.apply(other, stored([93], ABCD[4:6], 92))
    assert device(index, other, ABCD) == 3
    index.apply(other, removed(11, 12, 13))  # the first rank's names mean nothing here
    assert device(index, other, ABCD) == 3
    index.apply(other, removed(92))
    assert (device(index, other, ABCD), device(index, full, ABCD)) == (1, 4)


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_block_is_gone_when_its_last_copy_is(index: AnyIndex, full: int) -> None:
    index.apply(full, stored([14], ABCD[6:], 13))
    index.apply(full, removed(14))
    assert device(index, full, ABCD) == 4
    index.apply(full, removed(14))
    assert device(index, full, ABCD) == 3


def test_removals_beyond_zero_do_not_go_into_debt(index: AnyIndex, full: int) -> None:
    for _ in range(3):
        index.apply(full, removed(14))
    index.apply(full, stored([14], ABCD[6:], 13))
    assert device(index, full, ABCD) == 4


def test_an_unknown_hash_does_not_stop_the_removal_of_its_neighbours(index: AnyIndex, full: int) -> None:
    assert index.apply(full, removed(999, 14, 998, 13)) == Applied(2)
    assert device(index, full, ABCD) == 2
    assert index.counters(full)["unknown_removals"] == 2


def test_two_names_for_one_content_hold_it_until_both_are_gone(index: AnyIndex, full: int) -> None:
    index.apply(full, stored([24], ABCD[6:], 13))
    index.apply(full, removed(14))
    assert device(index, full, ABCD) == 4
    index.apply(full, removed(24))
    assert device(index, full, ABCD) == 3


def test_a_reused_hash_undoes_what_it_named(index: AnyIndex, full: int) -> None:
    index.apply(full, stored([12], [7, 7], 11))
    assert device(index, full, ABCD) == 1
    assert device(index, full, [1, 2, 7, 7]) == 2
    assert index.counters(full)["reused_hashes"] == 1
    index.apply(full, removed(12))
    assert device(index, full, [1, 2, 7, 7]) == 1


def test_a_reused_hash_does_not_inherit_the_copies_of_what_it_named(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([5], [1, 2], 77))  # waits for 77
    index.apply(rank, stored([5], [3, 4]))
    index.apply(rank, removed(5))
    assert device(index, rank, [3, 4]) == 0


def test_a_known_hash_under_an_unknown_parent_is_not_claimed_where_it_was(index: AnyIndex, full: int) -> None:
    index.apply(full, stored([14], ABCD[6:], 500))  # hashes that ignore the prefix: it may be elsewhere now
    assert device(index, full, ABCD) == 3


def test_a_reused_hash_leaves_the_offloaded_chunk_it_was_in(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored(HASHES[:3], ABCD[:6], medium="CPU"))
    index.apply(rank, stored([12], [7, 7], 11))
    index.apply(rank, stored([11, 12], [1, 2, 7, 7], medium="CPU"))
    index.apply(rank, removed(12))
    assert reach(index, rank, [1, 2, 7, 7]) == [0, 2, 2, 2]


# --- parents ---------------------------------------------------------------------------------------------------------


def test_blocks_wait_for_their_parent(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([13, 14], ABCD[4:], 12))
    assert device(index, rank, ABCD) == 0
    assert device(index, rank, ABCD[4:]) == 0, "a child of an unknown parent is no first block"
    index.apply(rank, stored([11, 12], ABCD[:4]))
    assert device(index, rank, ABCD) == 4


def test_a_family_that_arrives_in_reverse_is_linked_when_the_last_one_comes(index: AnyIndex, rank: int) -> None:
    for i in (3, 2, 1):
        index.apply(rank, stored([HASHES[i]], ABCD[2 * i : 2 * i + 2], HASHES[i - 1]))
    index.apply(rank, stored([11], ABCD[:2]))
    assert device(index, rank, ABCD) == 4


def test_a_waiting_block_that_is_removed_waits_no_more(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([13, 14], ABCD[4:], 12))
    index.apply(rank, removed(13))
    index.apply(rank, stored([11, 12], ABCD[:4]))
    assert device(index, rank, ABCD) == 2


def test_the_child_of_an_unknown_parent_is_not_credited_to_the_unsalted_space(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([12], ABCD[2:4], 11))
    index.apply(rank, stored([11], ABCD[:2], cache_salt="tenant"))
    assert device(index, rank, ABCD) == 0
    assert device(index, rank, ABCD, cache_salt="tenant") == 2


@pytest.mark.parametrize("root", [0, 5740354900026072187])
def test_parents_that_mean_none(index: AnyIndex, rank: int, root: int) -> None:
    index.apply(rank, stored([11], ABCD[:2], root))
    assert device(index, rank, ABCD) == 1


def test_a_true_hash_of_zero_is_a_parent(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([0], ABCD[:2]))
    index.apply(rank, stored([12], ABCD[2:4], 0))
    assert device(index, rank, ABCD) == 2


def test_a_block_that_is_its_own_parent_is_harmless(index: AnyIndex, full: int) -> None:
    index.apply(full, stored([50], [9, 9], 50))
    index.apply(full, stored([11], [9, 9], 11))
    assert device(index, full, [9, 9]) == 0
    index.apply(full, removed(50, 11))


def test_hashes_that_repeat_within_an_event_are_harmless(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([1, 2, 1], [5, 5, 6, 6, 5, 5]))
    assert device(index, rank, [5, 5, 6, 6, 5, 5]) == 0
    index.apply(rank, stored([1], [5, 5]))
    assert device(index, rank, [5, 5, 6, 6]) == 2


def test_parents_in_a_circle_are_harmless(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([1], [1, 1], 2))
    index.apply(rank, stored([2], [2, 2], 3))
    index.apply(rank, stored([3], [3, 3], 1))
    assert device(index, rank, [1, 1]) == 0
    index.apply(rank, stored([1], [1, 1]))
    assert device(index, rank, [1, 1, 3, 3, 2, 2]) == 3


# --- tiers -----------------------------------------------------------------------------------------------------------


def test_tiers_are_cumulative(index: AnyIndex, full: int) -> None:
    index.apply(full, placeholder([12, 13]))
    index.apply(full, placeholder([14], "STORAGE"))
    index.apply(full, removed(12, 13, 14))
    assert reach(index, full, ABCD) == [1, 3, 4, 4]


def test_a_placeholder_without_tokens_keeps_what_the_stream_announced(index: AnyIndex, full: int) -> None:
    index.apply(full, removed(*HASHES))
    assert device(index, full, ABCD) == 0
    index.apply(full, placeholder(HASHES))
    assert reach(index, full, ABCD) == [0, 4, 4, 4]


def test_a_placeholder_of_an_unknown_hash_scores_nothing(index: AnyIndex, rank: int) -> None:
    index.apply(rank, placeholder([11]))
    assert reach(index, rank, ABCD) == [0, 0, 0, 0]
    index.apply(rank, removed(11, medium="CPU"))
    assert index.block_count(rank) == 0


def test_a_removal_without_a_medium_is_the_devices(index: AnyIndex, full: int) -> None:
    index.apply(full, placeholder(HASHES))
    index.apply(full, removed(*HASHES))
    assert reach(index, full, ABCD) == [0, 4, 4, 4]


def test_holding_only_the_tail_on_the_host_reaches_nothing(index: AnyIndex, full: int) -> None:
    index.apply(full, placeholder([13, 14]))
    index.apply(full, removed(*HASHES))
    assert reach(index, full, ABCD) == [0, 0, 0, 0]


@pytest.mark.parametrize("medium", ["GPU", "gpu", "DEVICE", ""])
def test_media_are_folded(index: AnyIndex, rank: int, medium: str) -> None:
    index.apply(rank, stored([11], ABCD[:2], medium=medium))
    assert device(index, rank, ABCD) == 1


def test_what_is_not_here_is_counted_by_reason_and_never_scored(index: AnyIndex, rank: int) -> None:
    events = {
        "unknown_medium": stored([11], ABCD[:2], medium="TAPE"), "not_local": stored([11], ABCD[:2], locality="REMOTE"),
        "foreign_holder": stored([11], ABCD[:2], backend_id="pool-0"),
    }  # fmt: skip
    for reason, event in events.items():
        assert index.apply(rank, event) == Skipped(reason)
        assert index.counters(rank)[f"skipped_{reason}"] == 1
    assert reach(index, rank, ABCD) == [0, 0, 0, 0]


def test_a_local_locality_is_local(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([11], ABCD[:2], locality="LOCAL"))
    assert device(index, rank, ABCD) == 1


# --- clears ----------------------------------------------------------------------------------------------------------


def test_a_clear_empties_the_rank_and_no_other(index: AnyIndex, full: int) -> None:
    other = index.add_rank()
    index.apply(other, stored(HASHES, ABCD))
    index.apply(full, cleared())
    assert (device(index, full, ABCD), device(index, other, ABCD)) == (0, 4)


def test_after_a_clear_the_other_tiers_do_not_count_until_announced_again(index: AnyIndex, full: int) -> None:
    index.apply(full, placeholder(HASHES))
    index.apply(full, cleared())
    assert reach(index, full, ABCD) == [0, 0, 0, 0]
    assert index.counters(full)["unconfirmed"] == 4
    index.apply(full, placeholder(HASHES))
    assert reach(index, full, ABCD) == [0, 4, 4, 4]


def test_a_clear_of_one_medium_leaves_the_others(index: AnyIndex, full: int) -> None:
    index.apply(full, placeholder(HASHES))
    index.apply(full, cleared("GPU"))
    assert reach(index, full, ABCD) == [0, 4, 4, 4]


def test_a_clear_of_a_foreign_pool_changes_nothing(index: AnyIndex, full: int) -> None:
    index.apply(full, Cleared(backend_id="pool-0"))
    index.apply(full, Cleared(tenant_id="team"))
    index.apply(full, Cleared(medium="TAPE"))
    assert device(index, full, ABCD) == 4


def test_an_unknown_clear_makes_the_tiers_it_may_concern_unconfirmed(index: AnyIndex, full: int) -> None:
    index.apply(full, placeholder(HASHES))
    index.apply(full, Unknown("TierBlocksCleared", "CPU"))
    assert reach(index, full, ABCD) == [4, 4, 4, 4]
    index.apply(full, removed(14))
    assert reach(index, full, ABCD) == [3, 3, 3, 3]
    index.apply(full, Unknown("EverythingCleared"))
    assert reach(index, full, ABCD) == [0, 0, 0, 0]


def test_unreadable_and_unknown_events_change_nothing(index: AnyIndex, full: int) -> None:
    assert index.apply(full, Bad("token_type")) == Skipped("bad_event")
    assert index.apply(full, Unknown("Ignored")) == Skipped("unknown_tag")
    assert device(index, full, ABCD) == 4


# --- content that is not beyond doubt --------------------------------------------------------------------------------


def test_tokens_that_are_not_dense_are_not_trusted(index: AnyIndex, rank: int) -> None:
    index.apply(rank, Stored(hashes=(11, 12), parent=None, tokens=[1, 2, 3], block_size=2))
    assert device(index, rank, ABCD) == 0
    assert index.counters(rank)["not_dense"] == 1
    assert index.block_count(rank) == 2


def test_a_block_size_other_than_the_registered_one_is_refused_and_said(index: AnyIndex) -> None:
    rank = index.add_rank(block_size=4)
    assert index.apply(rank, stored([11], ABCD[:2])) == Skipped("block_size_mismatch")
    index.apply(rank, stored([11], ABCD[:4]))
    assert device(index, rank, ABCD, 4) == 1


def test_block_sizes_of_one_stream_are_bounded(index: AnyIndex, rank: int) -> None:
    for size in range(1, 12):
        index.apply(rank, stored([size], [1] * size))
    assert len(index.windows(rank)) == Bounds().block_sizes
    assert index.counters(rank)["block_size_varies"] == 3


def test_streams_that_cut_the_same_bytes_otherwise_keep_their_own_block_size(index: AnyIndex, rank: int) -> None:
    other = index.add_rank()
    index.apply(rank, stored([11], [1, 2, 3, 4], block_size=4))
    index.apply(other, stored([11], [1, 2, 3, 4], block_size=3, eagle=True, dense=True))
    assert index.windows(rank) == {(4, False): 1}
    assert index.windows(other) == {(3, True): 1}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ((None, None, None), "media_unreadable"),
        ((None, BlockExtra(strings=("what?",))), "ambiguous_extra_keys"),
        ((BlockExtra(strings=("salt", "what?")), None), "ambiguous_extra_keys"),
    ],
)
def test_extra_keys_that_cannot_be_understood_score_nothing(
    index: AnyIndex, rank: int, extra: tuple[BlockExtra | None, ...], reason: str
) -> None:
    index.apply(rank, stored([11, 12], ABCD[:4], extra=extra))
    assert device(index, rank, ABCD[:4]) < 2
    assert index.counters(rank)[reason] == 1


# --- namespaces and media --------------------------------------------------------------------------------------------


def test_adapters_and_salts_are_worlds_of_their_own(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([11], ABCD[:2], lora_name="a"))
    index.apply(rank, stored([12], ABCD[:2], cache_salt="a"))
    index.apply(rank, stored([13], ABCD[:2], lora_name="b", cache_salt="a"))
    assert device(index, rank, ABCD) == 0
    assert device(index, rank, ABCD, lora_name="a") == 1
    assert device(index, rank, ABCD, cache_salt="a") == 1
    assert device(index, rank, ABCD, lora_name="b", cache_salt="a") == 1
    assert device(index, rank, ABCD, lora_name="a", cache_salt="a") == 0


def test_a_salt_among_the_extra_keys_of_the_first_block_counts_for_the_chain(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([11], ABCD[:2], extra=(BlockExtra(strings=("tenant",)),)))
    index.apply(rank, stored([12], ABCD[2:4], 11))
    assert device(index, rank, ABCD) == 0
    assert device(index, rank, ABCD, cache_salt="tenant") == 2


def test_a_child_of_another_namespace_than_its_parent_scores_nothing(index: AnyIndex, full: int) -> None:
    index.apply(full, stored([15], [9, 9], 14, lora_name="a"))
    index.apply(full, stored([16], [9, 9], 14, cache_salt="s"))
    assert device(index, full, [*ABCD, 9, 9]) == 4
    assert index.counters(full)["ambiguous_namespace"] == 2


def test_an_adapter_number_is_not_the_base_model(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored([11], ABCD[:2], lora_id=1))
    assert device(index, rank, ABCD) == 0


def image_reach(index: AnyIndex, rank: int, identifier: str) -> int:
    runs = [MediaRun(1, 4, identifier)]
    keys = plan_keys(exact_plan("m", [1, 9, 9, 9, 9, 2], media=runs), 2, index.scheme(rank))
    found = index.match(keys, [rank]).get(rank)
    return found.tiers[0] if found else 0


def test_images_are_told_apart_by_their_whole_identifier(index: AnyIndex, rank: int) -> None:
    name = "f" * 64
    at = images([(name, 1)], [(name, -1)], [(name, -3)])
    index.apply(rank, stored([11, 12, 13], [1, 9, 9, 9, 9, 2], extra=at))
    assert index.scheme(rank) == "media_keys"
    assert image_reach(index, rank, name) == 3
    for other in ("f" * 63 + "e", "e" + "f" * 63, "f" * 16, "f" * 65):
        assert image_reach(index, rank, other) == 0


@pytest.mark.parametrize(
    ("token", "scheme"), [(7, None), (1_000_005, "pad30"), (1 << 40, "pad62"), ((1 << 32) - 1, None)]
)
def test_the_scheme_is_learnt_from_the_first_media_event(
    index: AnyIndex, rank: int, token: int, scheme: str | None
) -> None:
    index.apply(rank, stored([11], [1, token]))
    assert index.scheme(rank) == scheme


def test_a_registered_scheme_is_not_unlearnt(index: AnyIndex) -> None:
    rank = index.add_rank(scheme="dynamo")
    index.apply(rank, stored([11], [1, 1 << 40]))
    assert index.scheme(rank) == "dynamo"


# --- lifetimes and memory --------------------------------------------------------------------------------------------


def test_a_new_lifetime_sees_nothing_of_the_old_one_at_once(index: AnyIndex, full: int) -> None:
    index.clear_rank(full)
    assert device(index, full, ABCD) == 0
    index.apply(full, stored([13], ABCD[4:6], 12))
    assert device(index, full, ABCD) == 0, "the old lifetime's parent is not the new one's"
    index.apply(full, stored([11, 12], ABCD[:4]))
    assert device(index, full, ABCD) == 3


def test_many_lifetimes_and_ranks_leave_nothing_behind(index: AnyIndex, full: int) -> None:
    for _ in range(50):
        index.clear_rank(full)
        index.apply(full, stored(HASHES, ABCD))
        extra = index.add_rank()
        index.apply(extra, stored(HASHES, ABCD))
        index.remove_rank(extra)
        index.sweep(6)
    index.sweep(10_000)
    statistics = index.statistics()
    assert (statistics.blocks, statistics.nodes, statistics.buried, statistics.ranks) == (4, 4, 0, 1)
    assert device(index, full, ABCD) == 4


def test_sweeping_takes_bounded_steps(index: AnyIndex, full: int) -> None:
    index.clear_rank(full)
    assert not index.sweep(3)
    assert index.statistics().buried == 1
    assert index.sweep(3)


def test_dismantling_does_not_slow_down_as_it_goes(index: AnyIndex, rank: int) -> None:
    count = 40_000
    index.apply(rank, stored(range(1, count + 1), [7] * count))
    index.clear_rank(rank)
    steps: list[float] = []
    done = False
    while not done:
        begun = time.process_time()
        done = index.sweep(2000)
        steps.append(time.process_time() - begun)
    early, late = min(steps[:5]), min(steps[-5:-1])
    assert late < 3 * early + 0.01, f"{early:.4f} s for 2,000 blocks at first, {late:.4f} s at last"


def test_churn_of_suffixes_under_a_live_prefix_returns_to_the_base(index: AnyIndex) -> None:
    rank = index.add_rank(bounds=Bounds(remembered=8))
    index.apply(rank, stored(HASHES, ABCD))
    rng = random.Random(1)
    for round_ in range(200):
        hashes = [1000 + round_ * 4 + i for i in range(4)]
        index.apply(rank, stored(hashes, [rng.randrange(100) for _ in range(8)], rng.choice(HASHES)))
        index.apply(rank, removed(*reversed(hashes)))
    statistics = index.statistics()
    assert statistics.blocks == 4
    assert statistics.nodes <= 4 + 8
    assert device(index, rank, ABCD) == 4


def test_blocks_that_wait_are_bounded_and_counted(index: AnyIndex) -> None:
    rank = index.add_rank(bounds=TIGHT)
    for i in range(10):
        index.apply(rank, stored([100 + i], [i, i], 5000 + i))
    assert index.counters(rank)["unlinked_dropped"] == 7
    for i in range(10):
        index.apply(rank, stored([5000 + i], [50 + i, i]))
    assert [device(index, rank, [50 + i, i, i, i]) for i in range(10)] == [1] * 7 + [2] * 3


def test_a_full_index_refuses_and_keeps_what_it_has() -> None:
    for factory in FACTORIES.values():
        index = factory(max_blocks=4)
        rank = index.add_rank()
        index.apply(rank, stored(HASHES, ABCD))
        assert index.apply(rank, stored([15], [9, 9], 14)) == Skipped("index_full")
        assert device(index, rank, [*ABCD, 9, 9]) == 4
        index.apply(rank, removed(14))
        assert index.apply(rank, stored([15], [9, 9], 13)) == Applied(1)


def test_remembered_blocks_give_way_before_a_store_is_refused() -> None:
    for factory in FACTORIES.values():
        index = factory(max_blocks=4)
        gone, rank = index.add_rank(), index.add_rank()
        index.apply(gone, stored(HASHES, ABCD))
        index.apply(gone, removed(*HASHES))
        assert index.apply(rank, stored(HASHES, ABCD)) == Applied(4)
        assert device(index, rank, ABCD) == 4


def test_unlinked_blocks_are_given_up_oldest_first(index: AnyIndex, rank: int) -> None:
    index.apply(rank, stored(HASHES, ABCD))
    for i in range(6):
        index.apply(rank, stored([100 + i], [i, i], 5000 + i))
    assert index.forget_unlinked(4) == {rank: 4}
    assert index.counters(rank)["unlinked_dropped"] == 4
    assert index.block_count(rank) == len(HASHES) + 2
    for i in range(6):
        index.apply(rank, stored([5000 + i], [50 + i, i]))
    assert [device(index, rank, [50 + i, i, i, i]) for i in range(6)] == [1] * 4 + [2] * 2
    assert index.forget_unlinked(4) == {}
    assert device(index, rank, ABCD) == 4


def test_dropped_lifetimes_give_way_before_a_store_is_refused() -> None:
    for factory in FACTORIES.values():
        index = factory(max_blocks=4)
        rank = index.add_rank()
        for _ in range(3):
            assert index.apply(rank, stored(HASHES, ABCD)) == Applied(4)
            index.clear_rank(rank)
        assert index.check() == []


def test_check_says_what_is_broken(rank: int, index: AnyIndex) -> None:
    if index.implementation != "reference":
        pytest.skip("looks inside the reference")
    index.apply(rank, stored([11], ABCD[:2]))
    block = index._ranks[rank].blocks[11]
    block.copies[0] = 0
    assert len(index.check()) >= 2
    block.copies[0] = 1
