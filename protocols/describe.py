"""Any captured message in plain words: the vocabulary of ``kvd decode``, one JSON-able dict per message.

``ok``, ``error``, ``seq``, ``topic``, ``ts``, ``rank``, ``events`` (``kind`` stored | removed | cleared | unknown | bad
with ``hashes``, ``parent``, ``tokens``, ``block_size``, ``medium`` …) and ``warn``. Absent fields are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from protocols import dynamo, lmcache, trtllm
from protocols.engine import decode_pub, decode_replay, decode_replay_request
from protocols.errors import WireError
from protocols.events import Batch, BlockExtra, Cleared, Event, Removed, ReplayEnd, Stored, Unknown
from protocols.jsonwire import decode_object, require

Described = dict[str, Any]


def describe(channel: str, frames: Sequence[bytes]) -> Described:
    """What a message says. Never raises: an unreadable one is ``{"ok": false, "error": …}``."""
    reader = _CHANNELS.get(channel)
    if reader is None:
        return {"ok": False, "error": "channel", "detail": f"{channel!r}, expected one of {', '.join(_CHANNELS)}"}
    try:
        return reader(frames)
    except WireError as error:
        return _error(error)


def _error(error: WireError) -> Described:
    out: Described = {"ok": False, "error": error.code}
    if error.seq is not None:
        out["seq"] = error.seq
        out |= _topic(error.topic)
    if error.detail:
        out["detail"] = error.detail
    return out


def _topic(topic: bytes | None) -> Described:
    if topic is None:
        return {"topic": None}
    try:
        return {"topic": topic.decode()}
    except UnicodeDecodeError:
        return {"topic": None, "topic_hex": topic.hex()}


def _batch(batch: Batch) -> Described:
    return {
        "ok": True, "seq": batch.seq, **_topic(batch.topic), "ts": batch.ts, "rank": batch.rank,
        "events": [_event(event) for event in batch.events], "warn": list(batch.warn),
    }  # fmt: skip


def _replay(frames: Sequence[bytes]) -> Described:
    reply = decode_replay(frames)
    return {"ok": True, "end": True} if isinstance(reply, ReplayEnd) else _batch(reply)


def _replay_request(frames: Sequence[bytes]) -> Described:
    start = decode_replay_request(frames)
    return {"ok": True, "start": start, "note": "what a DEALER sends: empty delimiter, 8-byte big-endian start"}


def _event(event: Event) -> Described:
    if isinstance(event, Stored):
        return _stored(event)
    if isinstance(event, Removed):
        hashes = list(event.hashes)
        return {"kind": "removed", "hashes": hashes, "medium": event.medium, "warn": list(event.warn), **_holder(event)}
    if isinstance(event, Cleared):
        return {"kind": "cleared", "medium": event.medium, "warn": list(event.warn), **_holder(event)}
    if isinstance(event, Unknown):
        return {"kind": "unknown", "tag": event.tag}
    return {"kind": "bad", "error": event.error} | ({"detail": event.detail} if event.detail else {})


def _stored(event: Stored) -> Described:
    optional = {
        "lora_id": event.lora_id, "lora_name": event.lora_name, "cache_salt": event.cache_salt,
        "extra_keys": None if event.extra is None else [_extra(extra) for extra in event.extra],
        "kv_cache_spec_kind": event.spec_kind, "sliding_window": event.sliding_window, "session_id": event.session_id,
        "lookahead_token_ids": _plain(event.lookahead), "mm_keys": _plain(event.mm_keys),
        "block_mm_infos": _plain(event.block_mm_infos),
    }  # fmt: skip
    return {
        "kind": "stored", "hashes": list(event.hashes), "parent": event.parent, "tokens": event.tokens,
        "block_size": event.block_size, "medium": event.medium, "warn": list(event.warn),
        **_present(optional), **_holder(event),
    }  # fmt: skip


def _holder(event: Stored | Removed | Cleared) -> Described:
    names = {"group": "group", "locality": "locality", "tenant_id": "tenant_id", "backend_id": "backend_id",
             "object_key": "object_key"}  # fmt: skip
    return _present({name: getattr(event, field, None) for field, name in names.items()})


def _extra(extra: BlockExtra | None) -> Described | None:
    if extra is None:
        return None
    media = [[identifier, offset] for identifier, offset in extra.media]
    out: Described = {"mm": media, "strings": list(extra.strings), "digests": list(extra.digests)}
    return out | _present({"lora": extra.lora})


_DEEPEST = 32


def _plain(value: Any, depth: int = 0) -> Any:
    """A value nobody checked, as JSON has it: bytes in hex, keys as text, and no deeper than a reader would follow."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if depth >= _DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    return repr(value)


def _present(fields: Described) -> Described:
    return {name: value for name, value in fields.items() if value is not None}


# --- other systems ---------------------------------------------------------------------------------------------------


def _one_frame(frames: Sequence[bytes]) -> bytes:
    if len(frames) != 1:
        raise WireError("frame_count", f"{len(frames)} frames, expected 1")
    return frames[0]


def _json(frames: Sequence[bytes]) -> Described:
    payload = _one_frame(frames)
    value = decode_object(payload)
    if "event_id" in value and "data" in value:
        return _trtllm(trtllm.from_object(value))
    if "worker_id" in value and "event" in value:
        return _router_json(dynamo.router_event(value))
    if "batches" in value:
        batches = lmcache.decode_coordinator(payload)
        if not batches:
            raise WireError("shape", "no batch in batches")
        return {"ok": True, "incarnation": batches[0].incarnation, "seq": batches[0].seq, "batches": len(batches)}
    raise WireError("shape", f"keys {sorted(value)[:8]} are of no known system")


def _trtllm(event: trtllm.Event) -> Described:
    where = {"ok": True, "event_id": event.event_id} | _present({"window": event.window, "rank": event.rank})
    if isinstance(event, trtllm.Created):
        return where | {"kind": "created", "levels": event.levels}
    if isinstance(event, trtllm.Removed):
        return where | {"kind": "removed", "hashes": event.hashes}
    if isinstance(event, trtllm.Updated):
        level = None if event.level is None else list(event.level)
        priority = None if event.priority is None else list(event.priority)
        return where | {"kind": "updated", "hash": event.hash, "level": level, "priority": priority}
    blocks = event.blocks
    out = where | {
        "kind": "stored", "hashes": [block.hash for block in blocks], "parent": event.parent,
        "token_ids": [token for block in blocks for token in block.tokens],
        "level": blocks[0].level if blocks else None, "priority": blocks[0].priority if blocks else None,
    }  # fmt: skip
    media = [name for block in blocks for name, _ in block.media]
    return out | ({"mm": media} if media else {})


def _router_json(event: dynamo.RouterEvent) -> Described:
    out: Described = {"ok": True, "worker_id": event.worker_id, "dp_rank": event.dp_rank}
    if isinstance(event.data, str):
        return out | {event.data: True}
    if "removed" in event.data:
        return out | {"removed": _plain(require(event.data, "removed", dict).get("block_hashes"))}
    data: Described = _plain(event.data)
    return out | data


def _router_zmq(frames: Sequence[bytes]) -> Described:
    envelope = dynamo.decode_zmq(frames)
    events = [_plain(event.raw) for event in envelope.events]
    return {"ok": True, "publisher_id": envelope.publisher_id, "seq": envelope.seq, "router_events": events}


def _lmcache_push(frames: Sequence[bytes]) -> Described:
    message = lmcache.decode_push(_one_frame(frames))
    out: Described = {"ok": True, "type": message.type}
    if message.type == "BatchedKVOperationMsg":
        return out | {"ops": [[op.op, op.key, op.seq] for op in message.operations]}
    if message.operations:
        return out | {"key": message.operations[0].key, "seq": message.operations[0].seq}
    return out


_CHANNELS: dict[str, Callable[[Sequence[bytes]], Described]] = {
    "pub": lambda frames: _batch(decode_pub(frames)),
    "replay-reply": _replay,
    "replay-request": _replay_request,
    "json": _json,
    "dynamo-zmq": _router_zmq,
    "lmcache-push": _lmcache_push,
}
