"""Events of an engine by hand, and a publisher that can fall silent or answer replays wrongly, as real fleets do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from bench.engine import publisher
from bench.engine.publisher import END, Reply
from bench.engine.wire import batch

__all__ = ["END", "Publisher", "ReplayMode", "chain_of", "cleared", "payload_of", "removed", "stored"]

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
    return batch(time.time() if ts is None else ts, events, rank)


class Publisher(publisher.Publisher):
    """The engine's publisher, with a ``mode`` of answering replays."""

    def __init__(self, *, mode: ReplayMode = "serve", **settings: Any) -> None:
        super().__init__(**settings)
        self.mode: ReplayMode = mode

    def _replies(self, start: int) -> Iterator[Reply]:
        if self.mode == "serve":
            yield from super()._replies(start)
        elif self.mode == "cut":
            yield from list(super()._replies(start))[:-1]
        elif self.mode == "garbage":
            yield [b"\x00", b"nonsense"]
        elif self.mode == "end_only":
            yield self._layout(END, b"", b"")
        elif self.mode == "endless":
            kept = self._kept(start)
            seq, payload = kept[0] if kept else (start, payload_of([]))
            while not self._stopping.wait(0.001):
                yield self._layout(seq.to_bytes(8, "big"), payload, self._topic)
