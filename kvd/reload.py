"""A configuration file read again while the daemon runs: its workers come, go and change; everything else waits.

A file that cannot be used changes nothing. Workers that were added by request are not the file's, and stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
import msgspec

from kvd.config import Config
from kvd.core.fleet import FleetError
from kvd.ingest.supervisor import Supervisor
from protocols.errors import KvdError
from protocols.query import WorkerSpec

log = logging.getLogger(__name__)

_ATTEMPTS = 40
_PAUSE = 0.05
"""A socket that was just closed may hold its address for a moment: a changed worker is tried for 2 s."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Names of workers, by what became of them; ``failed`` ones are as they were before, and tried again next time."""

    added: list[str]
    removed: list[str]
    changed: list[str]
    failed: list[str]


class Reloader:
    """Knows which workers the file put there."""

    def __init__(self, supervisor: Supervisor, config: Config, read: Callable[[], Config]) -> None:
        self._supervisor = supervisor
        self._config = config
        self._read = read
        self._ours = {spec.name: spec for spec in config.workers}

    async def reload(self) -> Changes | None:
        """Read the file and do what it says; None if it cannot be used, which is logged."""
        try:
            config = self._read()
        except (KvdError, OSError) as error:
            log.error("configuration not reloaded, nothing changed: %s", error)
            return None
        changes = await self._apply({spec.name: spec for spec in config.workers})
        counts = len(changes.added), len(changes.removed), len(changes.changed), len(changes.failed)
        log.info("configuration reloaded: workers: %d added, %d removed, %d changed, %d failed", *counts)
        if msgspec.structs.replace(config, workers=()) != msgspec.structs.replace(self._config, workers=()):
            log.warning("settings other than workers changed too: they take effect at the next start")
        return changes

    async def _apply(self, wanted: dict[str, WorkerSpec]) -> Changes:
        gone = [name for name in self._ours if name not in wanted]
        other = [name for name, spec in wanted.items() if self._ours.get(name, spec) != spec]
        fresh = [name for name in wanted if name not in self._ours]
        removed = [name for name in gone if self._remove(name)]
        changed = [name for name in other if await self._change(wanted[name])]
        added = [name for name in fresh if self._add(wanted[name])]
        failed = [name for name in (*other, *fresh) if name not in changed and name not in added]
        return Changes(added=added, removed=removed, changed=changed, failed=failed)

    def _remove(self, name: str) -> bool:
        """Take a worker away, unless a request did, or put another one in its place."""
        spec = self._ours.pop(name)
        if self._supervisor.fleet.workers.get(name) != spec:
            log.info("worker %s is no longer the file's", name)
            return False
        self._supervisor.remove(name)
        return True

    async def _change(self, spec: WorkerSpec) -> bool:
        """Another worker under the same name; the old one comes back if that fails."""
        before = self._ours[spec.name]
        removed = self._remove(spec.name)
        if await self._add_soon(spec):
            return True
        if removed:
            await self._add_soon(before)
        return False

    async def _add_soon(self, spec: WorkerSpec) -> bool:
        for _ in range(_ATTEMPTS if spec.mode == "bind" else 0):
            try:
                self._supervisor.add(spec)
            except (KvdError, FleetError):
                await anyio.sleep(_PAUSE)
            else:
                self._ours[spec.name] = spec
                return True
        return self._add(spec)

    def _add(self, spec: WorkerSpec) -> bool:
        try:
            self._supervisor.add(spec)
        except (KvdError, FleetError) as error:
            log.error("worker %s not added: %s", spec.name, error)
            return False
        self._ours[spec.name] = spec
        return True
