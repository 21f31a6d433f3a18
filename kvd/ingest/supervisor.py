"""All feeds of the daemon: opens them when workers join, lets their deadlines pass, closes them when workers leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import zmq

from kvd.core.fleet import Fleet, FleetError
from kvd.core.signals import Remembered
from kvd.core.stream import Policy
from kvd.ingest.endpoints import validate
from kvd.ingest.feed import Feed
from kvd.ingest.polling import PollOptions
from kvd.ingest.sources import SOURCES, Wiring, policy_of
from kvd.ingest.zmq import ZmqOptions
from kvd.sockets import Pump
from protocols.limits import DEFAULT_LIMITS, Limits
from protocols.query import WorkerSpec

SWEEP_BLOCKS = 2048
"""Blocks of dropped lifetimes dismantled per tick and index: well under a millisecond of the loop."""
_CLOSE_SECONDS = 5.0


class Supervisor:
    """Feeds by (worker, rank). Everything runs on the loop that made it."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float],
        *,
        policy: Policy,
        options: ZmqOptions,
        polling: PollOptions | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.fleet = fleet
        self.feeds: dict[tuple[str, int], Feed] = {}
        self.dynamic: set[str] = set()
        self._clock = clock
        self._policy = policy
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_535)
        self._wiring = Wiring(
            fleet, self._context, Pump(), clock, options=options, polling=polling or PollOptions(), limits=limits
        )

    def add(
        self,
        spec: WorkerSpec,
        *,
        dynamic: bool = False,
        remembered: Mapping[int, Remembered] | None = None,
    ) -> None:
        """Watch a worker. Raises ConfigError or :class:`FleetError`; then nothing of it was added.

        ``dynamic``: it was added at run time, so no file brings it back. With ``remembered``, a snapshot's positions
        by rank, its streams wait for :meth:`open`, until when the shadows are filled.
        """
        validate(spec)
        members = self.fleet.add(spec, self._clock(), policy_of(spec, self._policy), remembered)
        if dynamic:
            self.dynamic.add(spec.name)
        for feed in SOURCES[spec.source](self._wiring, spec, members):
            self.feeds[feed.member.owner] = feed
        if remembered is None:
            self.open(spec.name)

    def open(self, name: str) -> None:
        """Let a worker's streams listen. Raises :class:`FleetError`; the worker is then gone."""
        spec = self.fleet.workers[name]
        try:
            for rank in range(spec.rank, spec.rank + spec.ranks):
                self.feeds[name, rank].open()
        except zmq.ZMQError as error:
            self.remove(name)
            raise FleetError(f"worker {name!r}: {spec.endpoint} cannot be used: {error}") from None

    def remove(self, name: str) -> None:
        """Forget a worker and all it held. Raises :class:`FleetError`."""
        self.dynamic.discard(name)
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
        self._wiring.pump.close()
        self._context.term()

    async def finished(self) -> None:
        """After :meth:`close`: until every task of a source has ended, or a deadline passed."""
        if self._wiring.tasks:
            await asyncio.wait(self._wiring.tasks, timeout=_CLOSE_SECONDS)
