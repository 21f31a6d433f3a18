"""Recordings of engine streams: written by ``kvd record``, read back through the same interface as a live one.

``TAG.jsonl`` holds one PUB message a line: ``{"t": seconds, "endpoint", "frames_hex": [topic, seq, payload]}``;
``TAG.replay.jsonl`` raw replays: ``{"request_hex", "replies_hex": [[frame, …], …]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from kvd.ingest.transport import Sink
from protocols.engine import END_SEQ
from protocols.errors import WireError

T = TypeVar("T")
R = TypeVar("R")


class Line(msgspec.Struct, frozen=True):
    """One recorded message."""

    t: float
    endpoint: str
    frames_hex: list[str]

    @property
    def frames(self) -> list[bytes]:
        return [bytes.fromhex(frame) for frame in self.frames_hex]


class ReplayLine(msgspec.Struct, frozen=True):
    """One recorded replay: what was asked and every reply, the end marker included."""

    request_hex: str
    replies_hex: list[list[str]]

    @property
    def replies(self) -> list[list[bytes]]:
        short = next((reply for reply in self.replies_hex if len(reply) < 3), None)
        if short is not None:
            raise ValueError(f"a reply of {len(short)} frames, expected 3 or 4")
        return [[bytes.fromhex(frame) for frame in reply] for reply in self.replies_hex]


def read_lines(path: Path) -> list[Line]:
    """All messages of a recording. Raises :class:`WireError` naming file and line."""
    lines = _read(path, msgspec.json.Decoder(Line), lambda line: line.frames)
    return [line for line, _ in lines]


def read_replays(path: Path) -> list[list[bytes]]:
    """The replies of every recorded replay, without end markers."""
    lines = _read(path, msgspec.json.Decoder(ReplayLine), lambda line: line.replies)
    return [reply for _, replies in lines for reply in replies if END_SEQ not in reply]


def _read(path: Path, decoder: msgspec.json.Decoder[T], unpack: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Each line with what it unpacks to, so that a frame that is no hex is told with its line as well."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                line = decoder.decode(raw)
                unpacked = unpack(line)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise WireError("recording", f"{path}, line {number}: {error}") from None
            yield line, unpacked


def write_line(file: IO[bytes], t: float, endpoint: str, frames: Sequence[bytes]) -> None:
    """Append one message."""
    line = Line(t, endpoint, [frame.hex() for frame in frames])
    file.write(msgspec.json.encode(line) + b"\n")


class RecordingTransport:
    """A recording as a transport: ``play`` delivers the next messages, and replays come from the recorded buffer.

    Replays are answered within ``replay``'s caller's next ``play`` (or ``settle``), as a publisher answers between
    batches.
    """

    def __init__(self, lines: Iterable[Line], replies: Sequence[Sequence[bytes]] = ()) -> None:
        self._lines = list(lines)
        self._replies = sorted(replies, key=_sequence)
        self._sink: Sink | None = None
        self._asked: int | None = None
        self._next = 0

    def open(self, sink: Sink) -> None:
        self._sink = sink
        sink.connected()
        self.settle()

    def play(self, until: int | None = None) -> None:
        """Deliver messages up to line ``until`` (all if None), then answer what was asked."""
        assert self._sink is not None
        end = len(self._lines) if until is None else min(until, len(self._lines))
        while self._next < end:
            line = self._lines[self._next]
            self._next += 1
            self._sink.message(line.frames)
            self.settle()

    def settle(self) -> None:
        """Answer the replay that was asked for, if any."""
        while self._asked is not None and self._sink is not None:
            start, self._asked = self._asked, None
            for reply in self._replies:
                if _sequence(reply) >= start:
                    self._sink.replayed(reply)
            self._sink.replayed([b"", b"", END_SEQ, b""])

    def replay(self, start: int) -> None:
        self._asked = start

    def stop_replay(self) -> None:
        self._asked = None

    def close(self) -> None:
        self._sink = None


def _sequence(reply: Sequence[bytes]) -> int:
    return int.from_bytes(reply[-2], "big")
