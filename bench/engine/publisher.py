"""An engine's publisher on real sockets: PUB with a counter, ROUTER with a replay buffer, as vLLM and SGLang run it.

It can lose a message on the way (it keeps its sequence and stays in the buffer) and restart.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Self

import zmq

from bench.engine.wire import batch

END = b"\xff" * 8
Reply = list[bytes]


class Publisher:
    """One rank's publisher. Use as a context manager; ``endpoint`` and ``replay`` are bound when it starts.

    ``connect``: engines connect to an endpoint without a wildcard. ``old_layout``: replies to a replay have no topic.
    ``high_water_mark``: messages kept for a slow subscriber; more are dropped, silently.
    """

    def __init__(
        self, *, endpoint: str = "tcp://127.0.0.1:*", replay: str | None = "tcp://127.0.0.1:*", buffer: int = 10_000,
        topic: bytes = b"kv-events", rank: int = 0, connect: bool = False, high_water_mark: int = 100_000,
        old_layout: bool = False,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self.replay = replay
        self.seq = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._topic = topic
        self._rank = rank
        self._connect = connect
        self._high_water_mark = high_water_mark
        self._old_layout = old_layout
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Bind; the same addresses as before after a stop."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.SNDHWM, self._high_water_mark)
        if self._connect:
            self._pub.connect(self.endpoint)
        else:
            self.endpoint = _bind(self._pub, self.endpoint)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if self.replay is not None:
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.SNDHWM, 0)
            self.replay = _bind(router, self.replay)
            self._thread = threading.Thread(target=self._serve, args=(router,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Unplug: sockets gone, counter and buffer kept."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._pub.close(linger=0)
        self._context.term()

    def restart(self) -> None:
        """Another process on the same addresses: sequence 0, an empty buffer."""
        self.stop()
        self.seq = 0
        self._buffer.clear()
        self.start()

    def publish(self, *events: Any, lost: bool = False, ts: float | None = None) -> int:
        """Send one batch; a lost one takes its sequence and is in the buffer, but no subscriber gets it."""
        return self.publish_payload(batch(time.time() if ts is None else ts, events, self._rank), lost=lost)

    def publish_payload(self, payload: bytes, *, lost: bool = False) -> int:
        with self._lock:
            seq, self.seq = self.seq, self.seq + 1
            self._buffer.append((seq, payload))
        if not lost:
            self.send([self._topic, seq.to_bytes(8, "big"), payload])
        return seq

    def send(self, frames: Sequence[bytes]) -> None:
        """Send raw frames."""
        self._pub.send_multipart(list(frames))

    # --- replay ------------------------------------------------------------------------------------------------------

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while not self._stopping.is_set():
            if not router.poll(20):
                continue
            identity, *frames = router.recv_multipart()
            if len(frames) != 2 or frames[0]:
                continue
            start = int.from_bytes(frames[1], "big")
            for reply in self._replies(start):
                if self._stopping.is_set():
                    break
                router.send_multipart([identity, b"", *reply])
        router.close(linger=0)

    def _replies(self, start: int) -> Iterator[Reply]:
        """Everything kept from ``start`` on, then the end."""
        for seq, payload in self._kept(start):
            yield self._layout(seq.to_bytes(8, "big"), payload, self._topic)
        yield self._layout(END, b"", b"")

    def _kept(self, start: int) -> list[tuple[int, bytes]]:
        with self._lock:
            return [(seq, payload) for seq, payload in self._buffer if seq >= start]

    def _layout(self, seq: bytes, payload: bytes, topic: bytes) -> Reply:
        return [seq, payload] if self._old_layout else [topic, seq, payload]


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    deadline = time.monotonic() + 5
    while True:  # the address of a process that has just gone may still be held for a moment
        try:
            socket.bind(endpoint)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
