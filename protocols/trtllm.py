"""TensorRT-LLM's pull API: JSON events of ``get_kv_cache_events`` / ``POST /kv_cache_events``.

``event_id`` counts per rank; a gap means the engine's buffer overflowed. Blocks shorter than ``tokens_per_block`` are
announced too and must not be indexed. Cache level 0 is the device, 1 the host. What the events mean for an index is
:mod:`protocols.translator`'s to say.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.errors import WireError
from protocols.events import MASK64
from protocols.jsonwire import decode_object, require
from protocols.limits import DEFAULT_LIMITS, Limits

MAX_EVENT_ID = (1 << 63) - 1
MAX_WINDOW = (1 << 31) - 1
MAX_TEXT = 4096


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """A pool exists: blocks per cache level. The largest window is the one of global attention."""

    event_id: int
    levels: list[int]
    window: int | None
    rank: int | None


class StoredBlock(msgspec.Struct, frozen=True, kw_only=True):
    """``media``: (identity, offset within the item of its first token in this block); ``plain``: token ids and media
    say all there is (no prompt-tuning ids beside them)."""

    hash: int
    tokens: list[int]
    level: int
    priority: int | None
    media: list[tuple[str, int | None]]
    salt: str | None = None
    lora_id: int | None = None
    plain: bool = True


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
        "event_id": require(value, "event_id", int), "window": _window(value),
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
    tokens = require(block, "tokens", list)
    return StoredBlock(
        hash=require(block, "block_hash", int) & MASK64,
        tokens=[_token(_entry(token, "token_id")) for token in tokens],
        level=_optional(block, "cache_level") or 0, priority=_optional(block, "priority"),
        media=[_mm_key(key) for key in _list(block, "mm_keys")], salt=_salt(block.get("cache_salt")),
        lora_id=_optional(block, "lora_id"), plain=not any(token.get("token_extra_id") for token in tokens),
    )  # fmt: skip


def _mm_key(value: Any) -> tuple[str, int | None]:
    identity = _entry(value, "hash")
    if not isinstance(identity, str) or not 0 < len(identity) <= MAX_TEXT:
        raise WireError("field", f"hash of an mm_key is not text of 1 to {MAX_TEXT} characters")
    return identity, _optional(value, "start_offset")


def _salt(value: Any) -> str | None:
    """A cache salt; releases that send a numeric id for it get a namespace of their own, which no plan names."""
    if value is None or (isinstance(value, str) and len(value) <= MAX_TEXT):
        return value or None
    return f"\0cache_salt_id={_integer(value)}"


def _list(value: dict[str, Any], name: str) -> list[Any]:
    field = value.get(name)
    if field is None:
        return []
    if not isinstance(field, list):
        raise WireError("field", f"{name} is {type(field).__name__}")
    return field


def _token(value: Any) -> int:
    token = _integer(value)
    if not 0 <= token <= MASK64:
        raise WireError("field", f"token_id {token}, expected 0 to 2^64-1")
    return token


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


def _window(value: dict[str, Any]) -> int | None:
    window = _optional(value, "window_size")
    if window is not None and not -MAX_WINDOW <= window <= MAX_WINDOW:
        raise WireError("window_size", f"{window!r:.40}, expected a 32-bit integer")
    return window


def _diff(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    return _integer(_entry(value, "old_value")), _integer(_entry(value, "new_value"))


# --- a drained list -------------------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One element of a drained list; ``event`` is None where no more than its id and rank could be read (``fault``)."""

    event_id: int
    rank: int | None
    event: Event | None
    fault: str = ""


class _Head(msgspec.Struct):
    event_id: int
    attention_dp_rank: int | None = None


_raws = msgspec.json.Decoder(list[msgspec.Raw])
_head = msgspec.json.Decoder(_Head)


def split(body: bytes, limits: Limits = DEFAULT_LIMITS) -> list[msgspec.Raw]:
    """The raw events of a drained list. Raises :class:`WireError`; one bad event is not among its reasons."""
    if len(body) > limits.payload_bytes:
        raise WireError("payload_size", f"{len(body)} bytes, at most {limits.payload_bytes}")
    try:
        raws = _raws.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("payload_decode", str(error)) from None
    if len(raws) > limits.events:
        raise WireError("events_limit", f"{len(raws)} events, at most {limits.events}")
    return raws


def read(raw: msgspec.Raw, limits: Limits = DEFAULT_LIMITS) -> Part:
    """One event of a drained list. Raises :class:`WireError` if not even its id can be read."""
    payload = bytes(raw)
    try:
        event = decode(payload)
        _within(event, limits)
    except WireError as error:
        head = _read_head(payload)
        return Part(event_id=head.event_id, rank=head.attention_dp_rank, event=None, fault=error.code)
    return Part(event_id=event.event_id, rank=event.rank, event=event)


def _within(event: Event, limits: Limits) -> None:
    hashes = event.hashes if isinstance(event, Removed) else event.blocks if isinstance(event, Stored) else ()
    if len(hashes) > limits.hashes:
        raise WireError("block_hashes", f"{len(hashes)} hashes, at most {limits.hashes}")
    _within_id(event.event_id)


def _within_id(event_id: int) -> None:
    if not 0 <= event_id <= MAX_EVENT_ID:
        raise WireError("event_id", f"{event_id!r:.40}, expected 0 to 2^63-1")


def _read_head(payload: bytes) -> _Head:
    try:
        head = _head.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("event_decode", str(error)) from None
    _within_id(head.event_id)
    return head
