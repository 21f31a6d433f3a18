"""A stream without sockets or waiting: a member of a fleet, its feed, and a transport driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvd.core.fleet import Fleet
from kvd.core.score import score
from kvd.core.signals import Remembered
from kvd.core.stream import Policy
from kvd.ingest.feed import Feed
from kvd.ingest.transport import Sink
from protocols.plan import Plan, exact_plan
from protocols.query import Trust, WorkerScore, WorkerSpec
from tests.kit.publisher import END, payload_of


class HandTransport:
    """Remembers what was asked of it; the test plays the publisher."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.replaying = False

    def open(self, sink: Sink) -> None:
        self.sink = sink

    def replay(self, start: int) -> None:
        self.asked.append(start)
        self.replaying = True

    def stop_replay(self) -> None:
        self.replaying = False

    def close(self) -> None:
        self.replaying = False


class Line:
    """One worker-rank in a fleet, fed by hand under a clock that only the test moves."""

    def __init__(
        self,
        fleet: Fleet | None = None,
        *,
        name: str = "w",
        policy: Policy | None = None,
        remembered: Remembered | None = None,
        **spec: Any,
    ) -> None:
        self.now = 0.0
        self.fleet = fleet or Fleet(max_blocks=1 << 40)
        fields = {"model": "m", "endpoint": "inproc://x"} | spec
        self.policy = policy or Policy()
        positions = None if remembered is None else {fields.get("rank", 0): remembered}
        (self.member,) = self.fleet.add(WorkerSpec(name=name, **fields), self.now, self.policy, positions)
        self.transport = HandTransport()
        self.feed = Feed(self.member, self.transport, lambda: self.now)
        self.feed.open()
        self.seq = 0
        self.sent: list[bytes] = []

    def connect(self) -> Line:
        self.feed.connected()
        return self

    def publish(self, *events: Any, seq: int | None = None, ts: float | None = None, rank: int | None = None) -> int:
        """A live batch of events in wire form, under the next sequence or the one given."""
        return self.publish_payload(payload_of(events, ts=ts, rank=rank), seq=seq)

    def publish_payload(self, payload: bytes, *, seq: int | None = None) -> int:
        number = self.seq if seq is None else seq
        self.seq = number + 1
        self.sent.append(payload)
        self.feed.message([b"", number.to_bytes(8, "big"), payload])
        return number

    def replay(self, seq: int, payload: bytes) -> None:
        self.feed.replayed([b"", b"", seq.to_bytes(8, "big"), payload])

    def replay_end(self) -> None:
        self.feed.replayed([b"", b"", END, b""])

    def wait(self, seconds: float, step: float = 0.1) -> None:
        """Let time pass in ticks."""
        for _ in range(round(seconds / step)):
            self.now += step
            self.feed.tick()

    @property
    def trust(self) -> Trust:
        return self.member.stream.trust(self.now)

    def score(self, plan: Plan | Sequence[int]) -> WorkerScore:
        asked = exact_plan("m", plan) if isinstance(plan, (list, range, tuple)) else plan
        answer = score(self.fleet, asked, [self.member.spec.name], self.now)  # type: ignore[arg-type]
        return answer.workers[0]
