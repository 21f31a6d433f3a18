"""A pool's one stream: rows per holder, tenants and clears in their scopes, bounds, and nothing scored as device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from kvd.core.fleet import Fleet, FleetError
from kvd.core.residency import Applied, Skipped
from kvd.core.score import score
from kvd.core.stream import Policy
from kvd.ingest.pool import PoolFeed, PoolHolders
from protocols.events import Bad, Cleared, Stored, Unknown
from protocols.limits import DEFAULT_LIMITS
from protocols.plan import exact_plan
from protocols.query import WorkerScore, WorkerSpec
from tests.kit.memory import HandTransport

PROMPT = list(range(100, 116))


def pool_event(kind: str, holder: str | None = "n1", **fields: Any) -> dict[str, Any]:
    """An RFC-1527 map as Mooncake's master sends it."""
    base = {"event_id": 1, "timestamp": 1_790_000_000_000, "event_type": kind, "model_name": "m", "block_size": 4,
            "additional_salt": "", "lora_name": None, "tenant_id": "default", "backend_id": holder, "medium": "cpu",
            "dp_rank": None}  # fmt: skip
    return base | fields


def pool_stored(holder: str | None = "n1", tokens: list[int] = PROMPT, first: int = 1, **fields: Any) -> dict[str, Any]:
    hashes = list(range(first, first + len(tokens) // 4))
    signed = [value - (1 << 64) if value >> 63 else value for value in hashes]
    told = {"group_id": "layers-0", "seq_hashes": hashes, "block_hashes": signed, "base_block_idx": 0,
            "token_ids": tokens, "parent_hash": None, "parent_block_hash": None, "object_key": "k"}  # fmt: skip
    return pool_event("stored", holder, **(told | fields))


def pool_removed(holder: str | None, *hashes: int, **fields: Any) -> dict[str, Any]:
    told = {"group_id": "layers-0", "seq_hashes": list(hashes), "block_hashes": list(hashes), "base_block_idx": 0}
    return pool_event("removed", holder, **(told | fields))


def pool_payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1_790_000_000_000, list(events), 0])


class Pool:
    """A pool in a fleet, fed by hand."""

    def __init__(self, **fields: Any) -> None:
        self.fleet = Fleet(max_blocks=1 << 20, max_workers=fields.pop("max_workers", 4096))
        spec = WorkerSpec(name="p", model="m", endpoint="inproc://p", source="pool")
        (self.member,) = self.fleet.add(spec, 0.0, Policy())
        self.feed = PoolFeed(self.fleet, self.member, HandTransport(), lambda: 0.0, DEFAULT_LIMITS)
        self.feed.open()
        self.feed.connected()
        self._seq = 0

    def publish(self, *events: Any, seq: int | None = None) -> None:
        number = self._seq if seq is None else seq
        self._seq = number + 1
        self.feed.message([b"", number.to_bytes(8, "big"), pool_payload(*events)])

    def rows(self, tokens: list[int] = PROMPT) -> dict[str, WorkerScore]:
        assert self.fleet.check() == []
        answer = score(self.fleet, exact_plan("m", tokens), None, 0.0)
        return {row.worker: row for row in answer.workers}

    def host(self, holder: str = "p/n1") -> int:
        return self.rows()[holder].tier_tokens["host"]


def test_every_holder_is_a_row_with_the_pool_s_trust() -> None:
    pool = Pool()
    pool.publish(pool_stored("n1"), pool_stored("n2", PROMPT[:8]))
    rows = pool.rows()
    assert list(rows) == ["p/n1", "p/n2"]  # the pool itself holds nothing
    assert {name: row.tier_tokens["host"] for name, row in rows.items()} == {"p/n1": 16, "p/n2": 8}
    assert {row.matched_tokens for row in rows.values()} == {0}
    assert {row.trust.state for row in rows.values()} == {"exact"}
    pool.publish(pool_removed("n1", 4))
    assert (pool.host("p/n1"), pool.host("p/n2")) == (12, 8)


@pytest.mark.parametrize(("medium", "tier"), [("cpu", "host"), ("disk", "disk"), ("remote", "external"),
                                              (None, "external"), ("GPU", "external")])  # fmt: skip
def test_a_pool_s_blocks_are_never_on_a_device(medium: str | None, tier: str) -> None:
    pool = Pool()
    pool.publish(pool_stored(medium=medium))
    row = pool.rows()["p/n1"]
    assert row.matched_tokens == 0
    assert row.tier_tokens[tier] == 16  # type: ignore[index]
    pool.publish(pool_removed("n1", 1, medium=medium))
    assert pool.rows()["p/n1"].tier_tokens["external"] == 0


def test_an_unknown_medium_scores_nowhere() -> None:
    pool = Pool()
    pool.publish(pool_stored(medium="tape"))
    assert pool.rows()["p/n1"].tier_tokens["external"] == 0
    assert pool.feed.counters["skipped_unknown_medium"] == 1


def test_other_tenants_are_never_credited_and_clear_nobody_else() -> None:
    pool = Pool()
    pool.publish(pool_stored(tenant_id="blue"))
    assert pool.rows() == {}
    pool.publish(pool_stored(tenant_id="default"), pool_stored("n2", tenant_id=None))
    pool.publish(pool_removed("n1", 1, tenant_id="blue"))
    pool.publish(pool_event("cleared", "n1", tenant_id="blue"), pool_event("cleared", None, tenant_id="blue"))
    assert (pool.host("p/n1"), pool.host("p/n2")) == (16, 16)
    assert pool.feed.counters["skipped_other_tenant"] == 4


def test_a_clear_is_of_its_holder_or_of_all() -> None:
    pool = Pool()
    pool.publish(pool_stored("n1"), pool_stored("n2"))
    pool.publish(pool_event("cleared", "n1", medium=None))
    assert (pool.host("p/n1"), pool.host("p/n2")) == (0, 16)
    pool.publish(pool_stored("n1"), pool_event("cleared", "nobody"))
    assert (pool.host("p/n1"), pool.host("p/n2")) == (16, 16)
    pool.publish(pool_event("cleared", None, medium=None))
    assert (pool.host("p/n1"), pool.host("p/n2")) == (0, 0)


def test_a_clear_of_one_medium_leaves_the_others() -> None:
    pool = Pool()
    pool.publish(pool_stored(medium="disk"), pool_stored(medium="cpu"))
    pool.publish(pool_event("cleared", "n1", medium="cpu"))
    tiers = pool.rows()["p/n1"].tier_tokens
    assert (tiers["host"], tiers["disk"]) == (0, 16)


def test_a_tag_that_may_be_a_clear_empties_every_holder_in_doubt() -> None:
    pool = Pool()
    pool.publish(pool_stored("n1"), pool_stored("n2"))
    pool.publish({"type": "TierBlocksCleared"})
    assert (pool.host("p/n1"), pool.host("p/n2")) == (0, 0)
    assert pool.rows()["p/n1"].trust.reason == "unknown_clear"


def test_a_hole_costs_trust_and_an_overflow_advances_by_one_an_event() -> None:
    pool = Pool()
    pool.publish(pool_stored("n1"))
    pool.publish(pool_stored("n2"), seq=5)
    row = pool.rows()["p/n1"]
    assert (row.trust.state, row.trust.missing, row.trust.since_seq) == ("incomplete", 4, 1)
    assert pool.host("p/n1") == 16


def test_a_restarted_master_empties_every_holder() -> None:
    pool = Pool()
    pool.publish(pool_stored("n1"), pool_stored("n2"))
    pool.publish(pool_stored("n1"))
    pool.publish(pool_stored("n2", PROMPT[:4]), seq=0)
    assert (pool.host("p/n1"), pool.host("p/n2")) == (0, 4)
    assert pool.rows()["p/n1"].trust.state == "exact"


def test_other_models_are_left_out() -> None:
    pool = Pool()
    pool.publish(pool_stored(model_name="other"))
    assert pool.rows() == {}
    assert pool.feed.counters["skipped_foreign_model"] == 1


def test_salt_and_adapter_are_spaces_of_their_own() -> None:
    pool = Pool()
    pool.publish(pool_stored(additional_salt="s"), pool_stored("n2", lora_name="a"))
    rows = pool.rows()
    assert {row.tier_tokens["host"] for row in rows.values()} == {0}
    salted = score(pool.fleet, exact_plan("m", PROMPT, cache_salt="s"), None, 0.0)
    assert [row.tier_tokens["host"] for row in salted.workers] == [16, 0]


@pytest.mark.parametrize("holder", [None, "", "x" * 300])
def test_events_without_a_usable_holder_are_left_out(holder: str | None) -> None:
    pool = Pool()
    pool.publish(pool_stored(holder))
    assert pool.rows() == {}
    assert pool.feed.counters["skipped_no_holder"] == 1


def test_blocks_without_tokens_are_resident_and_match_nothing() -> None:
    pool = Pool()
    pool.publish(pool_stored(token_ids=None, block_size=None))
    assert pool.host() == 0
    assert pool.fleet.members["p/n1", 0].info(0.0).blocks == 4


def test_holders_are_bounded_and_empty_ones_make_room() -> None:
    fleet = Fleet(max_blocks=1 << 20)
    spec = WorkerSpec(name="p", model="m", endpoint="inproc://p", source="pool")
    (member,) = fleet.add(spec, 0.0, Policy())
    counters: Counter[str] = Counter()
    holders = PoolHolders(fleet, member, counters, limit=2)
    events = [Stored(hashes=(1,), parent=None, tokens=[1], block_size=1, dense=True, backend_id=n) for n in "abc"]
    assert [holders.apply(event) for event in events] == [Applied(1), Applied(1), Skipped("too_many_holders")]
    assert counters["skipped_too_many_holders"] == 1
    holders.apply(Cleared(backend_id="a"))
    assert holders.apply(events[2]) == Applied(1)
    assert {name for name, _ in fleet.members} == {"p", "p/b", "p/c"}
    assert fleet.check() == []


def test_what_is_no_event_of_a_pool_is_counted() -> None:
    pool = Pool()
    holders = PoolHolders(pool.fleet, pool.member, pool.feed.counters)
    assert holders.apply(Bad("x")) == Skipped("bad_event")
    assert holders.apply(Unknown("renamed")) == Skipped("unknown_tag")
    pool.publish(pool_removed("never", 1))
    assert pool.feed.counters["skipped_unknown_holder"] == 1


def test_holders_go_with_the_pool_and_can_be_asked_by_its_name() -> None:
    pool = Pool()
    pool.publish(pool_stored("n1"), pool_stored("n2"))
    named = score(pool.fleet, exact_plan("m", PROMPT), ["p"], 0.0)
    assert [row.worker for row in named.workers] == ["p/n1", "p/n2"]
    pool.fleet.remove("p/n1")
    pool.publish(pool_stored("n1", PROMPT[:4]))  # it is still there, so it comes back
    assert pool.host("p/n1") == 4
    pool.fleet.remove("p")
    assert (pool.fleet.members, pool.fleet.workers) == ({}, {})
    with pytest.raises(FleetError):
        pool.fleet.remove("p/n2")


def test_a_worker_of_the_holder_s_name_is_not_taken_over() -> None:
    pool = Pool()
    other = WorkerSpec(name="p/n1", model="m", endpoint="inproc://y")
    pool.fleet.add(other, 0.0, Policy())
    pool.publish(pool_stored("n1"))
    assert pool.rows()["p/n1"].tier_tokens["external"] == 0
    assert pool.feed.counters["skipped_too_many_holders"] == 1


def test_no_more_holders_than_worker_ranks() -> None:
    pool = Pool(max_workers=2)
    pool.publish(pool_stored("n1"), pool_stored("n2"))
    assert list(pool.rows()) == ["p/n1"]


def test_a_holder_s_events_in_an_ordinary_stream_stay_refused() -> None:
    fleet = Fleet(max_blocks=1 << 20)
    (member,) = fleet.add(WorkerSpec(name="w", model="m", endpoint="inproc://w"), 0.0, Policy())
    store = Stored(hashes=(1,), parent=None, tokens=[1], block_size=1, dense=True, backend_id="n1")
    assert member.apply(store) == Skipped("foreign_holder")
