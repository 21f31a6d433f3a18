"""TensorRT-LLM's events, polled over HTTP: ``POST /kv_cache_events`` hands each event out once.

The drain is destructive, so there must be exactly one reader per engine: two kvd daemons (or kvd beside the engine's
own router) each see half of the events, as gaps, and each gap costs a rank everything that was known of it. One URL
serves all ranks of a worker; every event names its rank, and each rank counts its own ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2
import msgspec

from kvd.core.signals import Message
from kvd.fetch import fetch, http_client
from kvd.ingest.feed import Feed
from kvd.ingest.polling import PollOptions
from kvd.ingest.transport import Sink
from protocols.errors import EngineError, WireError
from protocols.events import Batch
from protocols.limits import Limits
from protocols.query import WorkerSpec
from protocols.translator import Translator
from protocols.trtllm import Part, read, split

log = logging.getLogger(__name__)

PATH = "/kv_cache_events"
_BURST_SECONDS = 0.002


Starter = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Starts a task by name, for whoever owns tasks."""


class Poller:
    """The one reader of a worker's events. It polls as long as one of its ranks listens."""

    def __init__(self, spec: WorkerSpec, options: PollOptions, limits: Limits, start: Starter) -> None:
        self.url = spec.endpoint.rstrip("/") + PATH
        self.feeds: dict[int, Feed] = {}
        self._task: asyncio.Task[None] | None = None
        self._start = start
        self._spec = spec
        self._options = options
        self._limits = limits
        self._translators: dict[int, Translator] = {}
        self._reachable = False

    def start(self) -> None:
        """Begin to poll, once."""
        if self._task is None:
            self._task = self._start(self.run(), f"poll {self.url}")

    def leave(self, rank: int) -> None:
        """A rank no longer listens; with the last one the polling ends."""
        self.feeds.pop(rank, None)
        if not self.feeds and self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Poll until cancelled. Nothing an engine answers ends it."""
        wait = 0.0
        async with http_client() as client:
            while True:
                wait = await self._round(client, wait)
                await asyncio.sleep(wait)

    async def _round(self, client: httpx2.AsyncClient, waited: float) -> float:
        """One poll; how long to wait before the next one."""
        options = self._options
        try:
            await self._poll(client)
        except (EngineError, WireError) as error:
            self._lost(str(error), "polls_failed")
        except Exception:
            log.exception("polling %s failed", self.url)
            self._lost("the daemon failed", "polls_internal")
        else:
            return options.poll_interval
        return min(max(2 * waited, options.poll_interval), options.poll_backoff)

    async def _poll(self, client: httpx2.AsyncClient) -> None:
        body = await fetch(
            client, "POST", self.url, limit=self._limits.payload_bytes, seconds=self._options.poll_timeout
        )
        raws = split(body, self._limits)
        self._found()
        deadline = time.perf_counter() + _BURST_SECONDS
        for raw in raws:
            self._take(raw)
            if time.perf_counter() >= deadline:  # a long list must not hold queries up
                await asyncio.sleep(0)
                deadline = time.perf_counter() + _BURST_SECONDS

    # --- the connection ----------------------------------------------------------------------------------------------

    def _found(self) -> None:
        if not self._reachable:
            self._reachable = True
            log.info("%s answers", self.url)
            for feed in self.feeds.values():
                feed.connected()

    def _lost(self, why: str, counter: str) -> None:
        self._count(counter)
        if self._reachable:
            self._reachable = False
            log.warning("lost %s", why)
            for feed in self.feeds.values():
                feed.disconnected()

    def _count(self, name: str) -> None:
        """What concerns no rank in particular is counted at the first."""
        for feed in self.feeds.values():
            feed.counters[name] += 1
            break

    # --- events ------------------------------------------------------------------------------------------------------

    def _take(self, raw: msgspec.Raw) -> None:
        try:
            part = read(raw, self._limits)
        except WireError as error:  # not even its id: if an event was lost, the next id shows it
            self._count(f"events_{error.code}")
            return
        rank = self._rank(part)
        feed = None if rank is None else self.feeds.get(rank)
        if rank is None or feed is None:
            self._count("rank_missing" if rank is None else "rank_mismatch")
            return
        feed.received(self._message(rank, part, feed))

    def _rank(self, part: Part) -> int | None:
        if part.rank is None and self._spec.ranks == 1:
            return self._spec.rank
        return part.rank

    def _message(self, rank: int, part: Part, feed: Feed) -> Message:
        translator = self._translators.get(rank)
        if translator is None or (translator.last is not None and part.event_id <= translator.last):
            translator = self._translators[rank] = Translator(self._spec.block_size, feed.counters)
        if part.event is None:
            translator.last = part.event_id
            return Message(seq=part.event_id, digest=0, batch=None, fault=part.fault)
        events = translator.translate(part.event)
        batch = Batch(seq=part.event_id, topic=None, ts=None, rank=None, events=events)
        return Message(seq=part.event_id, digest=0, batch=batch)


class RankTransport:
    """One rank's share of a poller: the first to open starts it, the last to close stops it."""

    def __init__(self, poller: Poller, rank: int) -> None:
        self._poller = poller
        self._rank = rank

    def open(self, sink: Sink) -> None:
        del sink  # the poller decodes, so it speaks to the feed itself
        self._poller.start()

    def replay(self, start: int) -> None:
        """What was handed out is gone."""

    def stop_replay(self) -> None:
        """There is no replay."""

    def close(self) -> None:
        self._poller.leave(self._rank)
