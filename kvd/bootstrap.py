"""A starting daemon without a snapshot fetches one from a running peer: in pieces, with deadline and bound."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

import anyio

from kvd.client.asynchronous import AsyncClient
from kvd.client.calls import read
from kvd.snapshot import SnapshotError
from kvd.snapshot import read as read_snapshot
from protocols.errors import KvdError
from protocols.query import FetchSnapshot, SnapshotPart

log = logging.getLogger(__name__)

PIECE = 1 << 20


async def fetch(endpoint: str, path: Path, *, max_bytes: int, timeout: float) -> bool:
    """Fetch the peer's snapshot to ``path``; False, with the reason logged, if that cannot be done in time."""
    partial = path.with_name(path.name + ".fetched")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with anyio.fail_after(timeout), partial.open("wb") as file:
            async with AsyncClient(endpoint, timeout=timeout) as peer:
                size = await _fetch_all(peer, file, max_bytes)
        read_snapshot(partial, max_bytes=max_bytes)
        partial.replace(path)
    except (KvdError, OSError, TimeoutError) as error:
        log.error("no snapshot from peer %s: %s", endpoint, error or f"not within {timeout:g} s")
        partial.unlink(missing_ok=True)
        return False
    log.info("fetched a snapshot of %d bytes from %s", size, endpoint)
    return True


async def _fetch_all(peer: AsyncClient, file: IO[bytes], max_bytes: int) -> int:
    name, offset, told = "", 0, 0
    while True:
        request = FetchSnapshot(id=0, fetch=name, offset=offset, max_bytes=PIECE)
        part = read(await peer.request(request), SnapshotPart)
        if part.total_bytes > max_bytes:
            raise SnapshotError(f"the peer's snapshot has {part.total_bytes} bytes, at most {max_bytes}")
        if part.offset != offset or (not part.data and offset < part.total_bytes):
            raise SnapshotError(f"the peer sent {len(part.data)} bytes at {part.offset}, expected some at {offset}")
        file.write(part.data)
        name, offset = part.fetch, offset + len(part.data)
        told = _tell_progress(offset, part.total_bytes, told)
        if offset >= part.total_bytes:
            return offset


def _tell_progress(offset: int, total: int, told: int) -> int:
    tenth = offset * 10 // max(total, 1)
    if tenth > told:
        log.info("fetching a snapshot: %d of %d bytes", offset, total)
    return tenth
