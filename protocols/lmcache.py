"""LMCache's controller messages (ZMQ PUSH, one msgpack map tagged ``type``) and coordinator batches (JSON)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from protocols.errors import WireError
from protocols.jsonwire import decode_object, require

_any = msgspec.msgpack.Decoder()


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """A chunk was admitted or evicted; ``seq`` is None in releases that do not count (0.3.9 and before)."""

    op: Literal["admit", "evict"]
    key: int
    seq: int | None


class ControllerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """``operations`` is empty for messages that move no chunk (register, heartbeat, full-sync framing)."""

    type: str
    instance_id: str | None
    worker_id: int | None
    location: str | None
    operations: tuple[Operation, ...]


class CoordinatorBatch(msgspec.Struct, frozen=True, kw_only=True):
    """``incarnation`` is the publisher's lifetime; a higher one fences off everything before it."""

    instance_id: str
    incarnation: int
    seq: int
    event_type: str
    tier: str | None


def decode_push(frame: bytes) -> ControllerMessage:
    """Read one controller message. Raises :class:`WireError`."""
    try:
        value = _any.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("payload_decode", str(error)) from None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise WireError("shape", "expected a map tagged type")
    return ControllerMessage(
        type=value["type"], instance_id=value.get("instance_id"), worker_id=value.get("worker_id"),
        location=value.get("location"), operations=_operations(value),
    )  # fmt: skip


def _operations(value: dict[str, Any]) -> tuple[Operation, ...]:
    kind = value["type"]
    if kind in ("KVAdmitMsg", "KVEvictMsg"):
        return (
            Operation("admit" if kind == "KVAdmitMsg" else "evict", require(value, "key", int), value.get("seq_num")),
        )
    if kind != "BatchedKVOperationMsg":
        return ()
    return tuple(_operation(entry) for entry in require(value, "operations", list))


def _operation(entry: Any) -> Operation:
    if not isinstance(entry, dict) or entry.get("op_type") not in ("admit", "evict"):
        raise WireError("field", "an operation is not admit or evict")
    return Operation(entry["op_type"], require(entry, "key", int), entry.get("seq_num"))


def decode_coordinator(payload: bytes) -> list[CoordinatorBatch]:
    """Read a coordinator's ``{"batches": [...]}``. Raises :class:`WireError`."""
    batches = require(decode_object(payload), "batches", list)
    return [_batch(batch) for batch in batches]


def _batch(value: Any) -> CoordinatorBatch:
    if not isinstance(value, dict):
        raise WireError("shape", f"a batch is {type(value).__name__}")
    return CoordinatorBatch(
        instance_id=require(value, "instance_id", str), incarnation=require(value, "incarnation", int),
        seq=require(value, "seq", int), event_type=require(value, "event_type", str), tier=value.get("tier"),
    )  # fmt: skip
