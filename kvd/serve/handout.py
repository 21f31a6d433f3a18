"""A snapshot handed out in pieces to a starting peer: one file from first to last piece, whatever is written since."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import IO

from protocols.errors import RequestError
from protocols.query import FetchSnapshot, SnapshotPart

MAX_FETCHES = 4
"""Files kept open for peers; beyond it the fetch used longest ago is dropped and its peer begins anew."""
MAX_PIECE = 4 << 20


class SnapshotHandout:
    """Reads pieces of the newest snapshot. Every read is of one piece and from the page cache, as a rule."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._open: OrderedDict[str, IO[bytes]] = OrderedDict()

    def piece(self, request: FetchSnapshot) -> SnapshotPart:
        """The asked piece. Raises :class:`RequestError` ``no_snapshot``, ``unknown_fetch`` or ``bad_piece``."""
        if request.offset < 0 or not 0 < request.max_bytes <= MAX_PIECE:
            said = f"offset {request.offset}, {request.max_bytes} bytes: expected 0 or more, and 1 to {MAX_PIECE}"
            raise RequestError("bad_piece", said)
        fetch, file = self._file(request.fetch)
        data = os.pread(file.fileno(), request.max_bytes, request.offset)
        total = os.fstat(file.fileno()).st_size
        return SnapshotPart(id=request.id, fetch=fetch, offset=request.offset, total_bytes=total, data=data)

    def _file(self, fetch: str) -> tuple[str, IO[bytes]]:
        if fetch:
            if fetch not in self._open:
                raise RequestError("unknown_fetch", "this fetch is over: begin again", retriable=True)
            self._open.move_to_end(fetch)
            return fetch, self._open[fetch]
        if self._path is None or not self._path.exists():
            raise RequestError("no_snapshot", "nothing was written yet: try again later", retriable=True)
        fetch = uuid.uuid4().hex
        self._open[fetch] = self._path.open("rb")
        if len(self._open) > MAX_FETCHES:
            self._open.popitem(last=False)[1].close()
        return fetch, self._open[fetch]

    def close(self) -> None:
        """Close every file."""
        for file in self._open.values():
            file.close()
        self._open.clear()
