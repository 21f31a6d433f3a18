"""Composition: what the daemon is made of, in the order it starts; stopping is the reverse."""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread

from kvd.bootstrap import fetch
from kvd.config import Config
from kvd.core.fleet import Fleet, FleetError
from kvd.ingest.supervisor import Supervisor
from kvd.reload import Reloader
from kvd.serve.service import Service
from kvd.serve.zmq import QueryServer
from kvd.snapshot import Restoration, Sections, SnapshotWriter, add_worker, dynamic_workers, load, restore
from protocols.errors import KvdError

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1


class Runtime:
    """A fleet, its streams and the service over both; no query socket yet."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.clock = time.monotonic
        self.restored = False
        self.fleet = Fleet(
            max_blocks=config.index.max_blocks, max_workers=config.index.max_workers,
            routed_entries=config.index.routed_entries,
        )  # fmt: skip
        self.supervisor = Supervisor(
            self.fleet, self.clock, policy=config.ingest.policy(), options=config.ingest.options(),
            polling=config.ingest.polling(), limits=config.ingest.limits(),
        )  # fmt: skip
        self.service = Service(
            self.fleet, self.supervisor, self.clock, limits=config.query_limits(),
            routed_ttl_ms=config.index.routed_ttl_ms, text_ttl_ms=config.index.text_ttl_ms,
            snapshot=config.snapshot.file,
        )  # fmt: skip


@asynccontextmanager
async def runtime(config: Config | None = None) -> AsyncIterator[Runtime]:
    """A running fleet with the configured workers, until the context ends."""
    parts = Runtime(config or Config())
    try:
        sections = await _sections(parts)
        waiting = _added(parts, sections)
        path = parts.config.snapshot.file
        writer = None if path is None else SnapshotWriter(path, parts.supervisor, parts.service.instance)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tick_forever, parts, name="ticks")
            tasks.start_soon(_restore_and_write, parts, waiting, writer, name="snapshots")
            yield parts
            tasks.cancel_scope.cancel()
        if writer is not None and parts.restored:  # the old file still holds what was not restored yet
            await writer.write()
    finally:
        parts.service.handout.close()
        parts.supervisor.close()
        await parts.supervisor.finished()


async def _sections(parts: Runtime) -> Sections:
    """What the snapshot holds, fetched from a peer if there is none here."""
    settings = parts.config.snapshot
    path = settings.file
    if path is None:
        return {}
    if settings.peer and not path.exists():
        await fetch(settings.peer, path, max_bytes=settings.max_bytes, timeout=settings.peer_timeout)
    return await anyio.to_thread.run_sync(partial(load, path, max_bytes=settings.max_bytes))


def _added(parts: Runtime, sections: Sections) -> list[Restoration]:
    """Add every worker, those of an earlier run too; what is still to be restored of them."""
    waiting = [add_worker(parts.supervisor, spec, sections) for spec in parts.config.workers]
    for spec in dynamic_workers(sections):
        if spec.name in parts.fleet.workers:
            continue
        try:
            waiting.append(add_worker(parts.supervisor, spec, sections, dynamic=True))
        except (KvdError, FleetError) as error:  # it does not keep the daemon from starting
            log.error("worker %s of the snapshot is left out: %s", spec.name, error)
    return [restoration for restoration in waiting if restoration is not None]


async def _restore_and_write(parts: Runtime, waiting: list[Restoration], writer: SnapshotWriter | None) -> None:
    """Restore worker by worker while queries are answered; then write snapshots for ever."""
    gc.disable()  # a million blocks are made here, none of them garbage
    try:
        for restoration in waiting:
            try:
                await restore(parts.supervisor, restoration)
            except (KvdError, FleetError) as error:
                log.error("worker %s is left out: %s", restoration.spec.name, error)
    finally:
        gc.enable()
    parts.restored = True
    if waiting:
        gc.freeze()  # what was restored stays: the collector need not walk it again
        log.info("restored what the snapshot kept of %d workers", len(waiting))
    while writer is not None:
        await anyio.sleep(parts.config.snapshot.interval)
        await writer.write()


async def _tick_forever(parts: Runtime) -> None:
    while True:
        due = parts.clock() + TICK_SECONDS
        await anyio.sleep(TICK_SECONDS)
        parts.service.loop_lag.note(parts.clock(), due)
        parts.supervisor.tick()


async def serve(config: Config, read: Callable[[], Config] | None = None) -> None:
    """Run the daemon until SIGTERM or SIGINT; on SIGHUP, ``read`` the workers anew. Raises ConfigError at the start."""
    async with runtime(config) as parts:
        server = QueryServer(parts.service, config.endpoint, parts.clock, socket_mode=config.query.socket_mode)
        server.open()
        # What was loaded stays: the collector need not walk it again.
        gc.collect()
        gc.freeze()
        log.info("serving at %s, %d workers", server.endpoint, len(parts.fleet.workers))
        reloader = Reloader(parts.supervisor, config, read or (lambda: config))
        try:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                async for number in signals:
                    if number == signal.SIGHUP:
                        await reloader.reload()
                        continue
                    log.info("stopping on %s", signal.Signals(number).name)
                    break
        finally:
            server.close()
