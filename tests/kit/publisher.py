"""An engine's publisher as vLLM and SGLang run it, on real sockets: PUB with a counter, ROUTER with a replay buffer.

It can lose messages on the way (they keep their sequence and stay in the buffer), restart, fall silent, or answer
replays wrongly, so that a subscriber meets what real fleets do.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import zmq

END = b"\xff" * 8
ReplayMode = Literal["serve", "silent", "end_only", "endless", "garbage", "cut"]


def stored(
    hashes: Sequence[int], tokens: Sequence[int], *, parent: int | None = None, block_size: int = 4, **fields: Any
) -> dict[str, Any]:
    """A BlockStored map as vLLM 0.24 and later send it."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": list(tokens),
        "block_size": block_size, "lora_id": None, "medium": "GPU", "lora_name": None, **fields,
    }  # fmt: skip


def removed(hashes: Sequence[int], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def chain_of(tokens: Sequence[int], *, first_hash: int = 1, block_size: int = 4) -> dict[str, Any]:
    """One store of a whole prompt from its start."""
    blocks = len(tokens) // block_size
    return stored(range(first_hash, first_hash + blocks), tokens[: blocks * block_size], block_size=block_size)


def payload_of(events: Sequence[Any], *, rank: int | None = 0, ts: float | None = None) -> bytes:
    return msgspec.msgpack.encode([time.time() if ts is None else ts, list(events), rank])


class Publisher:
    """One rank's publisher. Use as a context manager; ``endpoint`` and ``replay`` are bound when it starts."""

    def __init__(
        self, *, endpoint: str = "tcp://127.0.0.1:*", replay: str | None = "tcp://127.0.0.1:*",
        mode: ReplayMode = "serve", buffer: int = 10_000, topic: bytes = b"kv-events", rank: int = 0,
        connect: bool = False, high_water_mark: int = 100_000, old_layout: bool = False,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self.replay = replay
        self.mode: ReplayMode = mode
        self.seq = 0
        self.requests: list[int] = []
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._topic = topic
        self._rank = rank
        self._connect = connect
        self._high_water_mark = high_water_mark
        self._old_layout = old_layout
        self._lock = threading.Lock()

    def __enter__(self) -> Publisher:
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
        return self.publish_payload(payload_of(events, rank=self._rank, ts=ts), lost=lost)

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
            self.requests.append(start)
            for reply in self._replies(start):
                if self._stopping.is_set():
                    break
                router.send_multipart([identity, b"", *reply])
        router.close(linger=0)

    def _replies(self, start: int) -> Any:
        with self._lock:
            kept = [(seq, payload) for seq, payload in self._buffer if seq >= start]
        if self.mode == "silent":
            return
        if self.mode == "garbage":
            yield [b"\x00", b"nonsense"]
            return
        if self.mode in ("serve", "cut"):
            for seq, payload in kept:
                yield self._layout(seq.to_bytes(8, "big"), payload, self._topic)
        if self.mode == "endless":
            seq, payload = kept[0] if kept else (start, payload_of([]))
            while not self._stopping.wait(0.001):
                yield self._layout(seq.to_bytes(8, "big"), payload, self._topic)
        if self.mode != "cut":
            yield self._layout(END, b"", b"")

    def _layout(self, seq: bytes, payload: bytes, topic: bytes) -> list[bytes]:
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
