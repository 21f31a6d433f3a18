"""All feeds of the daemon: opens them when workers join, lets their deadlines pass, closes them when workers leave."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from kvd.core.fleet import Fleet, FleetError, Member
from kvd.core.stream import Policy
from kvd.ingest.endpoints import rank_endpoint, validate
from kvd.ingest.feed import Feed
from kvd.ingest.zmq import ZmqOptions, ZmqTransport
from kvd.sockets import Pump
from protocols.limits import DEFAULT_LIMITS, Limits
from protocols.query import WorkerSpec

SWEEP_BLOCKS = 2048
"""Blocks of dropped lifetimes dismantled per tick and index: well under a millisecond of the loop."""


class Supervisor:
    """Feeds by (worker, rank). Everything runs on the loop that made it."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float],
        *,
        policy: Policy,
        options: ZmqOptions,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.fleet = fleet
        self.feeds: dict[tuple[str, int], Feed] = {}
        self._clock = clock
        self._policy = policy
        self._options = options
        self._limits = limits
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_535)
        self._pump = Pump()

    def add(self, spec: WorkerSpec) -> None:
        """Watch a worker. Raises ConfigError or :class:`FleetError`; then nothing of it was added."""
        validate(spec)
        members = self.fleet.add(spec, self._clock(), self._policy)
        try:
            for member in members:
                self._open(spec, member)
        except zmq.ZMQError as error:
            self.remove(spec.name)
            raise FleetError(f"worker {spec.name!r}: {spec.endpoint} cannot be used: {error}") from None

    def _open(self, spec: WorkerSpec, member: Member) -> None:
        offset = member.rank - spec.rank
        member.endpoint = rank_endpoint(spec.endpoint, offset)
        member.replay = None if spec.replay is None else rank_endpoint(spec.replay, offset)
        transport = ZmqTransport(
            self._context, self._pump, endpoint=member.endpoint, replay=member.replay, bind=spec.mode == "bind",
            topic=spec.topic.encode(), options=self._options,
        )  # fmt: skip
        feed = Feed(member, transport, self._clock, self._limits)
        feed.open()
        self.feeds[member.owner] = feed

    def remove(self, name: str) -> None:
        """Forget a worker and all it held. Raises :class:`FleetError`."""
        for member in self.fleet.remove(name):
            feed = self.feeds.pop(member.owner, None)
            if feed is not None:
                feed.close()

    def tick(self) -> None:
        """Let time pass for every stream, and dismantle a little of what was dropped."""
        for feed in self.feeds.values():
            feed.tick()
        self.fleet.sweep(SWEEP_BLOCKS)

    def close(self) -> None:
        """Close every socket."""
        for feed in self.feeds.values():
            feed.close()
        self.feeds.clear()
        self._pump.close()
        self._context.term()
