"""Things that go wrong between an engine and kvd, as parts that stack.

A :class:`Wire` carries one engine's stream in memory, in order and without loss, as TCP does. Each fault is a transport
around a transport: ``SilentReplay(GapTransport(Wire(engine)))``. What passes is decided by the fault's ``random``, so
that a seed tells the whole story; :meth:`Fault.calm` ends the trouble. ``SlowClient`` and ``FullDisk`` act on the real
query server and the real snapshot writer.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from xxhash import xxh3_64_intdigest

from kvd.core.stream import Stream
from kvd.ingest.transport import Sink, Transport
from tests.kit.engine import Engine, Sent
from tests.kit.publisher import END

Frames = Sequence[bytes]


class Wire:
    """An engine's PUB and replay ROUTER, in memory. Nothing moves until :meth:`deliver` or :meth:`answer` is called.

    As on ZMQ: what is published while nobody is connected is lost; what was published before a connection broke is
    delivered before the break is told, or lost with it; a replay is served by the process that is alive when it is.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.attached = False
        self.late_monitor = False
        self._queue: deque[Sent] = deque()
        self._asked: int | None = None
        self._untold = False

    # --- the transport ---

    def open(self, sink: Sink) -> None:
        self.sink = sink

    def replay(self, start: int) -> None:
        self._asked = start

    def stop_replay(self) -> None:
        self._asked = None

    def close(self) -> None:
        self._asked = None
        self._queue.clear()

    # --- what the engine and the network do ---

    def publish(self, sent: Sent | None) -> None:
        if sent is not None and self.attached:
            self._queue.append(sent)

    def connect(self, *, late_monitor: bool = False) -> None:
        """The handshake is done; with ``late_monitor`` the news comes after the first message."""
        if self.attached:
            return
        self.attached, self._untold = True, late_monitor
        if not late_monitor:
            self.sink.connected()

    def disconnect(self, *, lost: bool) -> None:
        if not self.attached:
            return
        if not lost:
            self.deliver(len(self._queue))
        self._queue.clear()
        self._tell()
        self.attached = False
        self.sink.disconnected()

    def _tell(self) -> None:
        if self._untold:
            self._untold = False
            self.sink.connected()

    def deliver(self, count: int) -> None:
        """The next live messages arrive."""
        for _ in range(min(count, len(self._queue))):
            self.sink.message(self._queue.popleft().frames)
            self._tell()
        if count and not self._queue:
            self._tell()

    def answer(self, count: int, *, end: bool = True) -> None:
        """The next messages that were asked for arrive, and the end marker once there are none."""
        for _ in range(count):
            if self._asked is None:
                return
            found = next((sent for sent in self.engine.kept if sent.seq >= (self._asked or 0)), None)
            if found is None:
                if end:
                    self._asked = None
                    self.sink.replayed([b"", b"", END, b""])
                return
            self._asked = found.seq + 1
            self.sink.replayed([b"", *found.frames])

    @property
    def idle(self) -> bool:
        """Nothing is on the way."""
        return not self._queue and self._asked is None and not self._untold

    @property
    def queued(self) -> list[Sent]:
        """Live messages on the way."""
        return list(self._queue)


class Fault:
    """A transport around a transport that does nothing: the base of those that do."""

    def __init__(self, inner: Transport, rng: random.Random) -> None:
        self.inner = inner
        self.random = rng
        self.active = False

    def open(self, sink: Sink) -> None:
        self.sink = sink
        self.inner.open(self)

    def connected(self) -> None:
        self.sink.connected()

    def disconnected(self) -> None:
        self.sink.disconnected()

    def message(self, frames: Frames) -> None:
        self.sink.message(frames)

    def replayed(self, frames: Frames) -> None:
        self.sink.replayed(frames)

    def replay_failed(self, reason: str) -> None:
        self.sink.replay_failed(reason)

    def replay(self, start: int) -> None:
        self.inner.replay(start)

    def stop_replay(self) -> None:
        self.inner.stop_replay()

    def close(self) -> None:
        self.inner.close()

    def stir(self) -> None:
        """Let the fault do what it does by itself, once a step."""

    def calm(self) -> None:
        """End the trouble; what was held up arrives."""
        self.active = False


class GapTransport(Fault):
    """Loses single live messages on their way to kvd; the publisher still has them to replay."""

    rate = 0.3

    def message(self, frames: Frames) -> None:
        if not self.active or self.random.random() >= self.rate:
            self.sink.message(frames)


class StalledSubscriber(Fault):
    """kvd does not read for a while: the publisher queues ``high_water_mark`` messages for it and drops the rest."""

    high_water_mark = 5

    def __init__(self, inner: Transport, rng: random.Random) -> None:
        super().__init__(inner, rng)
        self.waiting: deque[Frames] = deque()

    def message(self, frames: Frames) -> None:
        if not self.active:
            self.sink.message(frames)
        elif len(self.waiting) < self.high_water_mark:
            self.waiting.append(frames)

    def disconnected(self) -> None:
        self._drain()
        self.sink.disconnected()

    def calm(self) -> None:
        super().calm()
        self._drain()

    def _drain(self) -> None:
        while self.waiting:
            self.sink.message(self.waiting.popleft())


class ReorderingTransport(Fault):
    """Delivers live messages to kvd late by a few places, and some twice, as an unordered bus may."""

    reach = 3

    def __init__(self, inner: Transport, rng: random.Random) -> None:
        super().__init__(inner, rng)
        self.late: list[tuple[int, Frames]] = []

    def message(self, frames: Frames) -> None:
        if self.active and self.random.random() < 0.3:
            self.late.append((self.random.randint(1, self.reach), frames))
            return
        self.sink.message(frames)
        if self.active and self.random.random() < 0.2:
            self.sink.message(frames)
        self._release()

    def _release(self) -> None:
        due = [frames for wait, frames in self.late if wait <= 1]
        self.late = [(wait - 1, frames) for wait, frames in self.late if wait > 1]
        for frames in due:
            self.sink.message(frames)

    def disconnected(self) -> None:
        self.late.clear()
        self.sink.disconnected()

    def calm(self) -> None:
        super().calm()
        while self.late:
            self._release()


class GarbageEngine(Fault):
    """The engine sends nonsense to kvd: torn payloads, unreadable events beside good ones, unknown tags, stray frames.

    A message keeps its nonsense: its replay is the same bytes. ``spoilt`` are the (life, sequence) that suffered.
    """

    rate = 0.15

    def __init__(self, inner: Transport, rng: random.Random) -> None:
        super().__init__(inner, rng)
        self.spoilt: dict[tuple[int, int], Sent] = {}
        self._seen: set[tuple[int, int]] = set()

    def message(self, frames: Frames) -> None:
        if self.active and self.random.random() < 0.1:
            self.sink.message(self.random.choice(STRAY_FRAMES))
        self.sink.message(self._spoil(frames))

    def replayed(self, frames: Frames) -> None:
        self.sink.replayed(self._spoil(frames))

    def _spoil(self, frames: Frames) -> Frames:
        sent = frames[-1]
        if not isinstance(sent, Sent):
            return frames
        identity = sent.life, sent.seq
        if self.active and identity not in self._seen and self.random.random() < self.rate:
            self.spoilt[identity] = sent.altered(self._nonsense(sent))
        self._seen.add(identity)
        return [*frames[:-1], self.spoilt.get(identity, sent)]

    def _nonsense(self, sent: Sent) -> bytes:
        kind = self.random.randrange(4)
        if kind == 0:
            return bytes(sent[: self.random.randrange(len(sent))])
        if kind == 1:
            return self.random.randbytes(self.random.randrange(1, 40))
        ts, events, rank = msgspec.msgpack.decode(sent)
        bad: Any = {"type": "BlockRemoved", "block_hashes": "no"} if kind == 2 else {"type": "TierBlocksCleared"}
        events.insert(self.random.randrange(len(events) + 1), bad)
        return msgspec.msgpack.encode([ts, events, rank])


STRAY_FRAMES: list[list[bytes]] = [[b""], [b"x"] * 7, [b"t", b"123", b"p"], [b"t", END, b"p"]]


class SilentReplay(Fault):
    """The replay endpoint takes kvd's question and never answers."""

    def replay(self, start: int) -> None:
        if self.active:
            self.inner.stop_replay()
        else:
            self.inner.replay(start)


class DeadReplay(Fault):
    """The replay endpoint refuses kvd at once, within the very call that asks."""

    def replay(self, start: int) -> None:
        if self.active:
            self.inner.stop_replay()
            self.sink.replay_failed("replay_econnrefused")
        else:
            self.inner.replay(start)


class EndlessReplay(Fault):
    """The replay endpoint sends kvd the first message that was asked for, again and again, and never the end."""

    def __init__(self, inner: Transport, rng: random.Random) -> None:
        super().__init__(inner, rng)
        self._repeated: Frames | None = None
        self._asked = False

    def replay(self, start: int) -> None:
        self._asked, self._repeated = True, None
        self.inner.replay(start)

    def stop_replay(self) -> None:
        self._asked, self._repeated = False, None
        self.inner.stop_replay()

    def replayed(self, frames: Frames) -> None:
        if not self.active:
            self.sink.replayed(frames)
        elif isinstance(frames[-1], Sent) and self._repeated is None:
            self._repeated = frames
            self.sink.replayed(frames)

    def stir(self) -> None:
        for _ in range(3):
            if self.active and self._asked and self._repeated is not None:
                self.sink.replayed(self._repeated)


class CutReplay(Fault):
    """The replay channel to kvd loses what comes after a few messages, the end marker with it (a ROUTER's mark)."""

    def __init__(self, inner: Transport, rng: random.Random) -> None:
        super().__init__(inner, rng)
        self._left = 0

    def replay(self, start: int) -> None:
        self._left = self.random.randint(0, 6)
        self.inner.replay(start)

    def replayed(self, frames: Frames) -> None:
        if self.active and self._left <= 0:
            return
        self._left -= 1
        self.sink.replayed(frames)


class Delivered(Fault):
    """Nearest to kvd: notes the newest message that kvd was given, live or by replay.

    One thing it withholds from kvd: a live message of a process whose start was hidden, if it has exactly the sequence
    that the old process would have sent next. Nobody could tell it from a continuation. And what kvd had not applied
    when a connection broke counts as never given: kvd drops it, and asks for it again.
    """

    def __init__(
        self, inner: Transport, rng: random.Random, engine: Engine, stream: Callable[[], Stream],
        life: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(inner, rng)
        self.newest = (0, -1)
        self._engine = engine
        self._stream = stream
        self._told = 0 if life is None else life
        self._remembers = life is not None
        self._given: dict[int, tuple[int, int]] = {}

    def connected(self) -> None:
        """A break of the connection tells of a restart; the first connection after kvd's own start tells nothing."""
        if not self._remembers:
            self._told = self._engine.life
        self._remembers = False
        self.sink.connected()

    def disconnected(self) -> None:
        self.sink.disconnected()
        stream = self._stream()
        applied = None if stream.last is None else self._given.get(stream._evidence.get(stream.last, -1))
        self.newest = applied or (self.newest[0], -1)

    def message(self, frames: Frames) -> None:
        sent = frames[-1]
        if isinstance(sent, Sent) and sent.life > self._told and sent.seq == self._following():
            return
        self._note(frames)
        self.sink.message(frames)

    def _following(self) -> int:
        stream = self._stream()
        return stream._held[-1].seq + 1 if stream._held else stream._expected

    def replayed(self, frames: Frames) -> None:
        self._note(frames)
        self.sink.replayed(frames)

    def _note(self, frames: Frames) -> None:
        sent = frames[-1]
        if isinstance(sent, Sent):
            self._given[xxh3_64_intdigest(sent)] = sent.life, sent.seq
            self.newest = max(self.newest, (sent.life, sent.seq))
            self._told = max(self._told, sent.life)


class RestartingEngine:
    """Kills an engine and starts another process on its address: sequence 0, empty cache, empty replay buffer.

    ``noticed``: kvd's connection breaks, as TCP's does; else a proxy in between hides it from kvd, and only sequences
    and payloads tell. A question that the old process had not answered is never answered.
    """

    def __init__(self, wire: Wire, rng: random.Random) -> None:
        self.wire = wire
        self.random = rng

    def restart(self, *, noticed: bool) -> None:
        self.wire.stop_replay()
        if noticed:
            self.wire.disconnect(lost=self.random.random() < 0.5)
        else:
            self.wire.deliver(len(self.wire.queued))
        self.wire.stop_replay()
        self.wire.engine.restart()


class ClockJump:
    """Moves clocks: kvd's own leaps ahead (a suspended host), an engine's is set back or forward under its messages."""

    def __init__(self, rng: random.Random) -> None:
        self.random = rng

    def leap(self) -> float:
        """Seconds by which kvd's monotonic clock leaps."""
        return self.random.choice([5.0, 60.0, 3_600.0])

    def shift(self, engine: Engine) -> None:
        """Set the engine's clock."""
        engine.ts += self.random.choice([-3_600.0, -10.0, -1.0, 30.0, 3_600.0])


class SlowClient:
    """A client of the real query server that sends and never reads: replies pile up on its connection."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(endpoint)

    def send(self, payload: bytes, times: int) -> None:
        for _ in range(times):
            self._socket.send(payload)

    def received(self) -> list[bytes]:
        """Everything that reached it after all, without waiting."""
        found: list[bytes] = []
        while self._socket.poll(0):
            found.append(self._socket.recv_multipart()[-1])
        return found

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> SlowClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FullDisk:
    """The disk is full when the snapshot writer writes its next file: the kernel itself refuses, with ENOSPC."""

    def __init__(self, snapshot: Path) -> None:
        self._partial = snapshot.with_name(snapshot.name + ".partial")

    def __enter__(self) -> FullDisk:
        self._partial.symlink_to("/dev/full")
        return self

    def __exit__(self, *_: object) -> None:
        self._partial.unlink(missing_ok=True)
