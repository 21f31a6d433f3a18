"""Dynamo's event plane: router events in a versioned envelope over ZMQ, or as JSON on NATS in older releases.

ZMQ form: ``[topic, publisher id (8 bytes BE), sequence (8 bytes BE), 01 ‖ u32 BE length ‖ msgpack envelope]``; the
envelope's payload is a list of router events, or a single one before July 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from protocols.errors import WireError
from protocols.jsonwire import decode_object, require

_VERSION = 1
_HEADER = 5


class RouterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's event with block keys given by the publisher; ``data`` is stored, removed or cleared."""

    worker_id: int
    storage_tier: str
    event_id: int
    dp_rank: int
    data: dict[str, Any] | str
    raw: dict[str, Any]


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    publisher_id: int
    seq: int
    events: list[RouterEvent]


class _Envelope(msgspec.Struct):
    payload: bytes
    publisher_id: int
    sequence: int


_envelope = msgspec.msgpack.Decoder(_Envelope)
_any = msgspec.msgpack.Decoder()
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def decode_zmq(frames: Sequence[bytes]) -> Envelope:
    """Read a ZMQ event-plane message. Raises :class:`WireError`."""
    if len(frames) != 4:
        raise WireError("frame_count", f"{len(frames)} frames, expected 4")
    _, publisher, sequence, body = frames
    if len(publisher) != 8 or len(sequence) != 8:
        raise WireError("seq_len", "publisher id and sequence must be 8 bytes each")
    if not body or body[0] != _VERSION:
        raise WireError("frame_version", f"{body[:1].hex() or 'no byte'}, expected 01")
    length = int.from_bytes(body[1:_HEADER], "big")
    if len(body) != _HEADER + length:
        raise WireError("frame_length", f"{len(body) - _HEADER} bytes of envelope, header says {length}")
    return _open(body[_HEADER:])


def _open(packed: bytes) -> Envelope:
    try:
        envelope = _envelope.decode(packed)
        inner = _any.decode(envelope.payload)
    except _UNREADABLE as error:
        raise WireError("payload_decode", str(error)) from None
    events = inner if isinstance(inner, list) else [inner]
    return Envelope(
        publisher_id=envelope.publisher_id, seq=envelope.sequence, events=[router_event(event) for event in events]
    )


def decode_json(payload: bytes) -> RouterEvent:
    """Read one router event as JSON (NATS, up to Dynamo 0.8). Raises :class:`WireError`."""
    return router_event(decode_object(payload))


def router_event(value: Any) -> RouterEvent:
    if not isinstance(value, dict):
        raise WireError("shape", f"{type(value).__name__}, expected a router event")
    event = require(value, "event", dict)
    return RouterEvent(
        worker_id=require(value, "worker_id", int), storage_tier=str(value.get("storage_tier", "device")),
        event_id=require(event, "event_id", int), dp_rank=event.get("dp_rank") or 0,
        data=require(event, "data", (dict, str)), raw=value,
    )  # fmt: skip
