"""What each kind of source is made of: one table from a worker's ``source`` to the feeds of its ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import zmq

from kvd.core.fleet import Fleet, Member
from kvd.core.stream import Policy
from kvd.ingest.atom import AtomFeed
from kvd.ingest.endpoints import rank_endpoint
from kvd.ingest.feed import Feed
from kvd.ingest.polling import PollOptions
from kvd.ingest.pool import PoolFeed
from kvd.ingest.trtllm import Poller, RankTransport
from kvd.ingest.zmq import ZmqOptions, ZmqTransport
from kvd.sockets import Pump
from protocols.limits import Limits
from protocols.query import SourceName, WorkerSpec

log = logging.getLogger(__name__)


class Wiring:
    """What all sources share: sockets and their pump, the clock, bounds, and the tasks that some of them need."""

    def __init__(
        self, fleet: Fleet, context: zmq.Context[zmq.Socket[bytes]], pump: Pump, clock: Callable[[], float], *,
        options: ZmqOptions, polling: PollOptions, limits: Limits,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self.context = context
        self.pump = pump
        self.clock = clock
        self.options = options
        self.polling = polling
        self.limits = limits
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task that belongs to a source; that it failed is logged, whoever awaits it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s ended", task.get_name(), exc_info=task.exception())

    def zmq_transport(self, spec: WorkerSpec, member: Member) -> ZmqTransport:
        """The sockets of one rank."""
        offset = member.rank - spec.rank
        member.endpoint = rank_endpoint(spec.endpoint, offset)
        member.replay = None if spec.replay is None else rank_endpoint(spec.replay, offset)
        return ZmqTransport(
            self.context, self.pump, endpoint=member.endpoint, replay=member.replay, bind=spec.mode == "bind",
            topic=spec.topic.encode(), options=self.options,
        )  # fmt: skip


def policy_of(spec: WorkerSpec, policy: Policy) -> Policy:
    """The stream policy of a worker's source."""
    return msgspec.structs.replace(policy, drained=True) if spec.source == "trtllm-http" else policy


def _zmq(wiring: Wiring, spec: WorkerSpec, members: list[Member]) -> list[Feed]:
    return [Feed(member, wiring.zmq_transport(spec, member), wiring.clock, wiring.limits) for member in members]


def _atom(wiring: Wiring, spec: WorkerSpec, members: list[Member]) -> list[Feed]:
    return [AtomFeed(member, wiring.zmq_transport(spec, member), wiring.clock, wiring.limits) for member in members]


def _pool(wiring: Wiring, spec: WorkerSpec, members: list[Member]) -> list[Feed]:
    (member,) = members
    return [PoolFeed(wiring.fleet, member, wiring.zmq_transport(spec, member), wiring.clock, wiring.limits)]


def _trtllm(wiring: Wiring, spec: WorkerSpec, members: list[Member]) -> list[Feed]:
    poller = Poller(spec, wiring.polling, wiring.limits, wiring.start)
    for member in members:
        transport = RankTransport(poller, member.rank)
        poller.feeds[member.rank] = Feed(member, transport, wiring.clock, wiring.limits)
    return list(poller.feeds.values())


SOURCES: dict[SourceName, Callable[[Wiring, WorkerSpec, list[Member]], list[Feed]]] = {
    "zmq": _zmq, "atom": _atom, "pool": _pool, "trtllm-http": _trtllm,
}  # fmt: skip
"""The feeds of a worker's ranks, not open yet."""
