"""Composition: what the daemon is made of, in the order it starts; stopping is the reverse."""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from kvd.config import Config
from kvd.core.fleet import Fleet
from kvd.ingest.supervisor import Supervisor
from kvd.serve.service import Service
from kvd.serve.zmq import QueryServer

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1


class Runtime:
    """A fleet, its streams and the service over both; no query socket yet."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.clock = time.monotonic
        self.fleet = Fleet(
            max_blocks=config.index.max_blocks, max_workers=config.index.max_workers,
            routed_entries=config.index.routed_entries,
        )  # fmt: skip
        self.supervisor = Supervisor(
            self.fleet, self.clock, policy=config.ingest.policy(), options=config.ingest.options(),
            limits=config.ingest.limits(),
        )  # fmt: skip
        self.service = Service(
            self.fleet, self.supervisor, self.clock, limits=config.query_limits(),
            routed_ttl_ms=config.index.routed_ttl_ms, text_ttl_ms=config.index.text_ttl_ms,
        )  # fmt: skip


@asynccontextmanager
async def runtime(config: Config | None = None) -> AsyncIterator[Runtime]:
    """A running fleet with the configured workers, until the context ends."""
    parts = Runtime(config or Config())
    try:
        for spec in parts.config.workers:
            parts.supervisor.add(spec)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tick_forever, parts.supervisor, name="ticks")
            yield parts
            tasks.cancel_scope.cancel()
    finally:
        parts.supervisor.close()


async def _tick_forever(supervisor: Supervisor) -> None:
    while True:
        supervisor.tick()
        await anyio.sleep(TICK_SECONDS)


async def serve(config: Config) -> None:
    """Run the daemon until SIGTERM or SIGINT. Raises ConfigError if it cannot start."""
    async with runtime(config) as parts:
        server = QueryServer(parts.service, config.endpoint, parts.clock, socket_mode=config.query.socket_mode)
        server.open()
        # What was loaded stays: the collector need not walk it again.
        gc.collect()
        gc.freeze()
        log.info("serving at %s, %d workers", server.endpoint, len(parts.fleet.workers))
        try:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for number in signals:
                    log.info("stopping on %s", signal.Signals(number).name)
                    break
        finally:
            server.close()
