"""Messages of one, two and three frames: without a sequence, trust never says more than it can know."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.fleet import Fleet
from kvd.core.score import score
from kvd.core.stream import Policy
from kvd.ingest.atom import AtomFeed
from protocols.plan import exact_plan
from protocols.query import Trust, WorkerSpec
from tests.kit.memory import HandTransport
from tests.kit.publisher import payload_of

PROMPT = list(range(100, 116))


def atom_stored(tokens: list[int] = PROMPT, *, extra: tuple[Any, ...] = ()) -> list[Any]:
    """ATOM's array form."""
    return ["BlockStored", list(range(1, 1 + len(tokens) // 4)), None, tokens, 4, None, "GPU", None, *extra]


def atom_removed(*hashes: int) -> list[Any]:
    return ["BlockRemoved", list(hashes), "GPU"]


class Atom:
    """An ATOM stream fed by hand."""

    def __init__(self) -> None:
        self.fleet = Fleet(max_blocks=1 << 20)
        spec = WorkerSpec(name="w", model="m", endpoint="inproc://w", source="atom")
        (self.member,) = self.fleet.add(spec, 0.0, Policy())
        self.feed = AtomFeed(self.member, HandTransport(), lambda: 0.0)
        self.feed.open()
        self.feed.connected()

    def publish(self, *events: Any, topic: bytes | None = None, seq: int | None = None, **batch: Any) -> None:
        frames = [payload_of(events, **batch)]
        if topic is not None:
            frames.insert(0, topic)
        if seq is not None:
            frames.insert(1, seq.to_bytes(8, "big"))
        self.feed.message(frames)

    @property
    def trust(self) -> Trust:
        return self.member.stream.trust(0.0)

    def matched(self, tokens: list[int] = PROMPT) -> int:
        assert self.fleet.check() == []
        return score(self.fleet, exact_plan("m", tokens), None, 0.0).workers[0].matched_tokens


@pytest.mark.parametrize("topic", [None, b"kv"])
def test_messages_without_sequence_are_applied_and_never_exact(topic: bytes | None) -> None:
    atom = Atom()
    atom.publish(atom_stored(), topic=topic)
    assert atom.matched() == 16
    assert (atom.trust.state, atom.trust.reason) == ("incomplete", "gaps_undetectable")
    atom.publish(atom_removed(4), topic=topic)
    assert atom.matched() == 12
    atom.publish(["AllBlocksCleared"], topic=topic)
    assert atom.matched() == 0
    assert (atom.trust.state, atom.trust.reason) == ("incomplete", "gaps_undetectable")


def test_messages_with_sequence_are_as_good_as_any() -> None:
    atom = Atom()
    atom.publish(atom_stored(extra=(None, None, None, None, 0)), topic=b"kv", seq=0)
    assert atom.matched() == 16
    assert atom.trust.state == "exact"
    atom.publish(atom_removed(4), topic=b"kv", seq=3)
    assert (atom.trust.state, atom.trust.missing) == ("incomplete", 2)


def test_a_reconnect_is_another_lifetime_because_nothing_tells_otherwise() -> None:
    atom = Atom()
    atom.publish(atom_stored())
    atom.publish(atom_removed(4))
    atom.feed.disconnected()
    assert atom.trust.state == "stale"
    atom.feed.connected()
    atom.publish(atom_stored(PROMPT[:4]))
    assert atom.member.stream.lifetime == 1
    assert atom.matched() == 4


def test_equal_messages_are_not_taken_for_repeats() -> None:
    atom = Atom()
    for _ in range(3):
        atom.publish(atom_stored(), ts=1.0)
    atom.publish(atom_removed(1), ts=1.0)
    atom.publish(atom_removed(1), ts=1.0)
    assert atom.matched() == 16  # one of three copies is left
    atom.publish(atom_removed(1), ts=1.0)
    assert atom.matched() == 0


def test_the_reserved_tag_is_counted_and_skipped() -> None:
    atom = Atom()
    atom.publish(["BlockTransferred", [1], "GPU", "CPU"], atom_stored())
    assert atom.matched() == 16
    assert atom.member.info(0.0).counters["skipped_unknown_tag"] == 1


def test_garbage_and_another_rank_cost_themselves() -> None:
    atom = Atom()
    atom.feed.message([b"\xc1"])
    atom.publish(atom_stored(), rank=5)
    assert atom.matched() == 0
    atom.publish(atom_stored())
    assert atom.matched() == 16
    assert atom.trust.missing == 2
    assert atom.feed.counters["rank_mismatch"] == 1
    atom.feed.message([])
    atom.feed.message([b""] * 5)
    assert atom.feed.counters["frames_frame_count"] == 2
