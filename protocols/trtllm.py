"""TensorRT-LLM's pull API: JSON events of ``get_kv_cache_events`` / ``POST /kv_cache_events``.

``event_id`` counts per rank; a gap means the engine's buffer overflowed. Blocks shorter than ``tokens_per_block`` are
announced too and must not be indexed. Cache level 0 is the device, 1 the host.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.errors import WireError
from protocols.events import MASK64
from protocols.jsonwire import decode_object, require


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """A pool exists: blocks per cache level. The largest window is the one of global attention."""

    event_id: int
    levels: list[int]
    window: int | None
    rank: int | None


class StoredBlock(msgspec.Struct, frozen=True, kw_only=True):
    hash: int
    tokens: list[int]
    level: int
    priority: int | None
    media: list[str]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    event_id: int
    parent: int | None
    blocks: list[StoredBlock]
    window: int | None
    rank: int | None


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    event_id: int
    hashes: list[int]
    window: int | None
    rank: int | None


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """A block moved; ``level`` and ``priority`` are (old, new), None where unchanged."""

    event_id: int
    hash: int
    level: tuple[int, int] | None
    priority: tuple[int, int] | None
    window: int | None
    rank: int | None


Event = Created | Stored | Removed | Updated


def decode(payload: bytes) -> Event:
    """Read one event object. Raises :class:`WireError`."""
    return from_object(decode_object(payload))


def from_object(value: dict[str, Any]) -> Event:
    data = require(value, "data", dict)
    where = {
        "event_id": require(value, "event_id", int), "window": _optional(value, "window_size"),
        "rank": _optional(value, "attention_dp_rank"),
    }  # fmt: skip
    kind = data.get("type")
    if kind == "created":
        return Created(levels=require(data, "num_blocks_per_cache_level", list), **where)
    if kind == "stored":
        blocks = [_block(block) for block in require(data, "blocks", list)]
        parent = _optional(data, "parent_hash")
        return Stored(parent=None if parent is None else parent & MASK64, blocks=blocks, **where)
    if kind == "removed":
        return Removed(hashes=[_integer(h) & MASK64 for h in require(data, "block_hashes", list)], **where)
    if kind == "updated":
        level, priority = _diff(data.get("cache_level")), _diff(data.get("priority"))
        return Updated(hash=require(data, "block_hash", int) & MASK64, level=level, priority=priority, **where)
    raise WireError("tag", f"{kind!r:.40} is not created, stored, removed or updated")


def _block(block: Any) -> StoredBlock:
    if not isinstance(block, dict):
        raise WireError("field", f"a block is {type(block).__name__}")
    return StoredBlock(
        hash=require(block, "block_hash", int) & MASK64,
        tokens=[_integer(_entry(token, "token_id")) for token in require(block, "tokens", list)],
        level=block.get("cache_level") or 0, priority=_optional(block, "priority"),
        media=[str(_entry(key, "hash")) for key in block.get("mm_keys") or []],
    )  # fmt: skip


def _entry(value: Any, name: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise WireError("field", f"{name} missing")
    return value[name]


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise WireError("field", f"{type(value).__name__}, expected an integer")
    return value


def _optional(value: dict[str, Any], name: str) -> int | None:
    return None if value.get(name) is None else _integer(value[name])


def _diff(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    return _integer(_entry(value, "old_value")), _integer(_entry(value, "new_value"))
