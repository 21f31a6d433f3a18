"""Snapshots: what every stream held at a known message, used again only by streams that prove to be the same.

The file is a magic, a version, and frames of ``u32 length ‖ u64 XXH3-64 ‖ msgpack``, little-endian. One section a
stream: its worker, its position, its rank's parts. Each section is of one instant of its stream; different streams'
instants may differ. A file is read to its end mark, every checksum included, before any of it is used.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from xxhash import xxh3_64_intdigest

from kvd.core.fleet import Member
from kvd.core.image import Blocks, Head, Nodes, Part, Tracked
from kvd.core.signals import Remembered
from kvd.ingest.feed import Feed
from kvd.ingest.supervisor import Supervisor
from protocols.errors import KvdError
from protocols.query import WorkerSpec

log = logging.getLogger(__name__)

MAGIC = b"kvd-snapshot\n"
VERSION = 1
_PREFIX = struct.Struct("<IQ")
_VERSION = struct.Struct("<I")
MAX_FRAME = 64 << 20
TURN_SECONDS = 0.002
"""Work between two turns of the loop."""


class SnapshotError(KvdError):
    """A file that is truncated, foreign, newer or damaged."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """``created``: seconds since the epoch."""

    created: float
    instance: str


class StreamBegin(msgspec.Struct, frozen=True, tag="stream"):
    """A section: whose it is, at which message; ``dynamic``: the worker was added at run time."""

    spec: WorkerSpec
    rank: int
    endpoint: str
    position: Remembered
    dynamic: bool


class StreamEnd(msgspec.Struct, frozen=True, tag="stream_end"):
    """``complete`` is false where the section was given up half-way: it is to be ignored."""

    complete: bool


class End(msgspec.Struct, frozen=True, tag="end"):
    sections: int


Frame = Begin | StreamBegin | StreamEnd | End | Head | Nodes | Blocks | Tracked
_frames: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Frame)
_encoder = msgspec.msgpack.Encoder()


def frame_bytes(frame: Frame) -> bytes:
    """A frame as it is written."""
    payload = _encoder.encode(frame)
    return _PREFIX.pack(len(payload), xxh3_64_intdigest(payload)) + payload


# --- reading ---------------------------------------------------------------------------------------------------------


class Section(msgspec.Struct, frozen=True):
    """One stream's part of a file; ``offset`` is where its parts begin."""

    begin: StreamBegin
    path: Path
    offset: int

    def parts(self) -> Iterator[Part]:
        """The parts, read anew. Raises :class:`SnapshotError` if the file changed meanwhile."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while not isinstance(frame := _read_frame(file, self.path), StreamEnd):
                if isinstance(frame, (Begin, StreamBegin, End)):
                    raise SnapshotError(f"{self.path}: a section without an end")
                yield frame


Sections = dict[tuple[str, int], Section]


def read(path: Path, *, max_bytes: int) -> Sections:
    """Check a whole file and find its sections by (worker, rank). Raises :class:`SnapshotError` or OSError."""
    size = path.stat().st_size
    if size > max_bytes:
        raise SnapshotError(f"{path}: {size} bytes, at most {max_bytes}: raise snapshot.max_bytes")
    with path.open("rb") as file:
        _read_header(file, path)
        return dict(_read_sections(file, path))


def _read_header(file: IO[bytes], path: Path) -> None:
    if file.read(len(MAGIC)) != MAGIC:
        raise SnapshotError(f"{path}: not a kvd snapshot")
    raw = file.read(_VERSION.size)
    version = _VERSION.unpack(raw)[0] if len(raw) == _VERSION.size else 0
    if version != VERSION:
        raise SnapshotError(f"{path}: version {version}, this kvd reads {VERSION}")


def _read_sections(file: IO[bytes], path: Path) -> Iterator[tuple[tuple[str, int], Section]]:
    if not isinstance(_read_frame(file, path), Begin):
        raise SnapshotError(f"{path}: does not begin")
    count = 0
    while not isinstance(frame := _read_frame(file, path), End):
        if not isinstance(frame, StreamBegin):
            raise SnapshotError(f"{path}: {type(frame).__name__} outside a section")
        count += 1
        section = Section(frame, path, file.tell())
        while not isinstance(part := _read_frame(file, path), StreamEnd):
            if isinstance(part, (Begin, StreamBegin, End)):
                raise SnapshotError(f"{path}: a section without an end")
        if part.complete:
            yield (frame.spec.name, frame.rank), section
    if frame.sections != count or file.read(1):
        raise SnapshotError(f"{path}: {count} sections, its end says {frame.sections}, or something follows")


def _read_frame(file: IO[bytes], path: Path) -> Frame:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise SnapshotError(f"{path}: truncated at byte {file.tell()}")
    length, checksum = _PREFIX.unpack(prefix)
    payload = file.read(length) if length <= MAX_FRAME else b""
    if len(payload) < length:
        raise SnapshotError(f"{path}: truncated at byte {file.tell()}, or a frame of {length} bytes")
    if xxh3_64_intdigest(payload) != checksum:
        raise SnapshotError(f"{path}: damaged before byte {file.tell()}")
    try:
        frame: Frame = _frames.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"{path}: unreadable before byte {file.tell()}: {error}") from None
    return frame


def load(path: Path, *, max_bytes: int) -> Sections:
    """The sections of a snapshot; none if there is none. A file that cannot be used is said and kept aside."""
    try:
        return read(path, max_bytes=max_bytes)
    except FileNotFoundError:
        return {}
    except (SnapshotError, OSError) as error:
        log.error("snapshot not used, starting empty: %s", error)
        _set_aside(path)
        return {}


def _set_aside(path: Path) -> None:
    aside = path.with_name(path.name + ".rejected")
    try:
        path.replace(aside)
    except OSError as error:
        log.error("snapshot cannot be kept aside as %s: %s", aside, error)
    else:
        log.error("kept aside as %s", aside)


class Restoration(msgspec.Struct, frozen=True):
    """A worker whose streams wait for what a snapshot kept of them; ``sections`` by rank."""

    spec: WorkerSpec
    sections: dict[int, Section]
    dynamic: bool


def add_worker(
    supervisor: Supervisor, spec: WorkerSpec, sections: Sections, *, dynamic: bool = False
) -> Restoration | None:
    """Watch a worker; what is still to be restored of it, if a snapshot kept anything of this very worker.

    Raises what :meth:`Supervisor.add` raises.
    """
    own = {rank: s for (name, rank), s in sections.items() if name == spec.name and s.begin.spec == spec}
    positions = {rank: section.begin.position for rank, section in own.items()}
    supervisor.add(spec, dynamic=dynamic, remembered=positions or None)
    return Restoration(spec, own, dynamic) if own else None


async def restore(supervisor: Supervisor, restoration: Restoration) -> None:
    """Fill the worker's shadows, in turns of the loop, and let its streams listen and prove themselves.

    A section that cannot be used costs itself: the worker then starts empty. Raises FleetError as Supervisor.open does.
    """
    spec = restoration.spec
    members = [supervisor.fleet.members.get((spec.name, rank)) for rank in restoration.sections]
    try:
        for member, section in zip(members, restoration.sections.values(), strict=True):
            if member is not None:
                await _fill_shadow(supervisor, member, section)
    except (SnapshotError, OSError, ValueError) as error:
        log.error("snapshot of worker %s not used: %s", spec.name, error)
        supervisor.remove(spec.name)
        supervisor.add(spec, dynamic=restoration.dynamic)
        return
    if all(member is not None and _is_there(supervisor, member) for member in members):
        supervisor.open(spec.name)


def _is_there(supervisor: Supervisor, member: Member) -> bool:
    return supervisor.fleet.members.get(member.owner) is member


async def _fill_shadow(supervisor: Supervisor, member: Member, section: Section) -> None:
    if not _is_there(supervisor, member):
        return
    member.shadow = member.new_handle()
    importer = member.index.import_rank(member.shadow)
    turn = time.perf_counter()
    try:
        for part in section.parts():
            importer.take(part)
            if time.perf_counter() - turn >= TURN_SECONDS:
                await anyio.lowlevel.checkpoint()
                turn = time.perf_counter()
                if not _is_there(supervisor, member):  # removed meanwhile, its shadow with it
                    return
    finally:
        importer.finish()


def dynamic_workers(sections: Sections) -> list[WorkerSpec]:
    """The workers that were added at run time, each once."""
    specs = {s.begin.spec.name: s.begin.spec for s in sections.values() if s.begin.dynamic}
    return list(specs.values())


# --- writing ---------------------------------------------------------------------------------------------------------


class Written(msgspec.Struct, frozen=True):
    """What became of a snapshot: sections, bytes, seconds it took."""

    sections: int
    size: int
    seconds: float


class SnapshotWriter:
    """Writes all streams of a supervisor to one file. The old file is replaced only by a whole new one."""

    def __init__(self, path: Path, supervisor: Supervisor, instance: str) -> None:
        self.path = path
        self.last: Written | None = None
        self.last_at: float | None = None
        self.failures = 0
        self._supervisor = supervisor
        self._instance = instance

    async def write(self) -> Written | None:
        """Write now; None if that failed, which is logged and counted. The loop gets its turn every 2 ms."""
        began = time.perf_counter()
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                sections = await self._write_all(file)
                size = file.tell()
                await anyio.to_thread.run_sync(_sync, file)
            await anyio.to_thread.run_sync(_replace, partial, self.path)
        except OSError as error:
            self.failures += 1
            log.error("snapshot not written: %s", error)
            partial.unlink(missing_ok=True)
            return None
        self.last, self.last_at = Written(sections, size, time.perf_counter() - began), time.time()
        return self.last

    async def _write_all(self, file: IO[bytes]) -> int:
        out = _Output(file)
        out.add(MAGIC + _VERSION.pack(VERSION) + frame_bytes(Begin(time.time(), self._instance)))
        sections = 0
        for owner in list(self._supervisor.feeds):
            feed = self._supervisor.feeds.get(owner)
            if feed is None or feed.member.spec.source == "pool":  # holders are not kept: a pool begins anew
                continue
            if feed.member.stream.position is not None:
                sections += 1
                await self._write_section(out, owner, feed)
        out.add(frame_bytes(End(sections)))
        await out.flush()
        return sections

    async def _write_section(self, out: _Output, owner: tuple[str, int], feed: Feed) -> None:
        """One stream at a standstill; given up if it is removed, or waits too long, meanwhile."""
        member, position = feed.member, feed.member.stream.position
        assert position is not None
        dynamic = owner[0] in self._supervisor.dynamic
        out.add(frame_bytes(StreamBegin(member.spec, member.rank, member.endpoint, position, dynamic)))
        feed.pause()
        complete = True
        try:
            for part in member.index.export_rank(member.handle if member.shadow is None else member.shadow):
                out.add(frame_bytes(part))
                await out.turn()
                if self._supervisor.feeds.get(owner) is not feed or feed.overflowing:
                    complete = False
                    break
        except RuntimeError as error:  # the rank gave up blocks to make room for others
            log.info("snapshot of %s given up: %s", owner, error)
            complete = False
        finally:
            feed.resume()
        out.add(frame_bytes(StreamEnd(complete)))


class _Output:
    """Bytes on their way to a file; written by a thread, between turns of the loop."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._waiting = bytearray()
        self._turn = time.perf_counter()

    def add(self, data: bytes) -> None:
        self._waiting += data

    async def turn(self) -> None:
        """Let the loop run if this turn was long enough."""
        if time.perf_counter() - self._turn >= TURN_SECONDS:
            await self.flush()

    async def flush(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        await anyio.to_thread.run_sync(self._file.write, waiting)
        self._turn = time.perf_counter()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _replace(partial: Path, path: Path) -> None:
    partial.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
