"""Reads KV-event messages of vLLM, SGLang, TensorRT-LLM streaming, LMCache in vLLM, Mooncake and ATOM, every release.

One shape is never assumed for a release: batch and events may each be an array or a map, so both are told apart by
their first byte. The batch is split into raw event slices first and each slice is read alone, because one bad event
must cost one event. Frame layouts, slot orders and tags: vLLM 0.9.0–0.33.0, SGLang 0.4.7–0.5.23 sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from protocols.errors import WireError
from protocols.events import MASK64, Bad, Batch, BlockExtra, Cleared, Event, Removed, ReplayEnd, Stored, Unknown
from protocols.limits import DEFAULT_LIMITS, Limits
from protocols.tokens import UINT32_MAX

END_SEQ = b"\xff" * 8
"""Sequence of the replay end marker (−1); never a live sequence."""

MAX_NAME = 4096
"""Characters of an adapter's name, a salt or a media identifier: they are kept, so they are bounded."""

_MILLISECONDS = 1e11
"""An integer time stamp above this is in milliseconds (Mooncake)."""

_STORED_SLOTS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED_SLOTS = ("block_hashes", "medium", "group_idx")
_SLOTS = {"BlockStored": _STORED_SLOTS, "BlockRemoved": _REMOVED_SLOTS, "AllBlocksCleared": ()}
_RFC1527 = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}

_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_raw_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_any = msgspec.msgpack.Decoder()
# What msgspec raises on hostile bytes: its own errors, plus two that escape from deep nesting and bad UTF-8.
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class _BadEvent(Exception):
    """Internal: this event, and only this one, cannot be read."""


def decode_pub(frames: Sequence[bytes], limits: Limits = DEFAULT_LIMITS) -> Batch:
    """Read a SUB message ``[topic, seq, payload]``. Raises :class:`WireError` and nothing else."""
    if len(frames) != 3:
        raise WireError("frame_count", f"{len(frames)} frames, expected topic, seq, payload")
    topic, seq, payload = frames
    return decode_payload(payload, _live_seq(seq), topic, limits)


def decode_replay(frames: Sequence[bytes], limits: Limits = DEFAULT_LIMITS) -> Batch | ReplayEnd:
    """Read a replay reply as a DEALER sees it: ``["", seq, payload]``, or with a topic frame from vLLM 0.26 on."""
    if len(frames) not in (3, 4) or frames[0]:
        raise WireError("frame_count", f"{len(frames)} frames, expected 3 or 4 with an empty delimiter")
    topic = frames[1] if len(frames) == 4 else None
    seq, payload = frames[-2:]
    if seq == END_SEQ:
        return ReplayEnd()
    return decode_payload(payload, _live_seq(seq), topic, limits)


def decode_replay_request(frames: Sequence[bytes]) -> int:
    """Read what a DEALER sends to ask for a replay: an empty delimiter and a big-endian start sequence."""
    if len(frames) != 2 or frames[0]:
        raise WireError("frame_count", f"{len(frames)} frames, expected an empty delimiter and a start sequence")
    if len(frames[1]) != 8:
        raise WireError("seq_len", f"{len(frames[1])} bytes, expected 8")
    return int.from_bytes(frames[1], "big")


def _live_seq(frame: bytes) -> int:
    if len(frame) != 8:
        raise WireError("seq_len", f"{len(frame)} bytes, expected 8")
    if frame == END_SEQ:
        raise WireError("seq_reserved", "ff*8 is the replay end marker")
    return int.from_bytes(frame, "big")


def decode_payload(payload: bytes, seq: int, topic: bytes | None, limits: Limits = DEFAULT_LIMITS) -> Batch:
    """Read one batch. Raises :class:`WireError` carrying ``seq`` and ``topic``."""
    try:
        ts, raw_events, rank, warn = _batch(payload, limits)
        return Batch(
            seq=seq, topic=topic, ts=ts, rank=rank, events=tuple(_event(raw, limits) for raw in raw_events),
            warn=warn if topic is None or _is_utf8(topic) else (*warn, "topic_not_utf8"),
        )  # fmt: skip
    except WireError as error:
        raise WireError(error.code, error.detail, seq=seq, topic=topic) from None


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- the batch -------------------------------------------------------------------------------------------------------


def _is_array(raw: bytes | memoryview) -> bool:
    return len(raw) > 0 and (0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD))


def _is_map(raw: bytes | memoryview) -> bool:
    return len(raw) > 0 and (0x80 <= raw[0] <= 0x8F or raw[0] in (0xDE, 0xDF))


def _batch(payload: bytes, limits: Limits) -> tuple[float | None, list[msgspec.Raw], int | None, tuple[str, ...]]:
    if len(payload) > limits.payload_bytes:
        raise WireError("payload_size", f"{len(payload)} bytes, at most {limits.payload_bytes}")
    ts, events, rank, extra = _batch_fields(payload)
    stamp, warn = _timestamp(_decode(ts, "payload_decode"))
    if not _is_array(memoryview(events)):
        raise WireError("batch_shape", "events are not an array")
    slices = _decode_raw_list(memoryview(events))
    if len(slices) > limits.events:
        raise WireError("events_limit", f"{len(slices)} events, at most {limits.events}")
    return stamp, slices, _rank(rank, limits), (("extra_positions", *warn) if extra else warn)


def _batch_fields(payload: bytes) -> tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw | None, bool]:
    if not payload:
        raise WireError("payload_decode", "empty payload")
    if _is_array(payload):
        parts = _decode_raw_list(payload)
        if len(parts) < 2:
            raise WireError("batch_shape", f"{len(parts)} fields, expected ts and events")
        return parts[0], parts[1], parts[2] if len(parts) > 2 else None, len(parts) > 3
    if _is_map(payload):
        fields = _decode_raw_map(payload)
        if "ts" not in fields or "events" not in fields:
            raise WireError("batch_shape", "map without ts and events")
        return fields["ts"], fields["events"], fields.get("data_parallel_rank", fields.get("attn_dp_rank")), False
    raise WireError("batch_shape", f"first byte {payload[0]:#04x} is neither an array nor a map")


def _decode_raw_list(raw: bytes | memoryview) -> list[msgspec.Raw]:
    try:
        return _raw_list.decode(raw)
    except _UNREADABLE as error:
        raise WireError("payload_decode", str(error)) from None


def _decode_raw_map(raw: bytes | memoryview) -> dict[str, msgspec.Raw]:
    try:
        return _raw_map.decode(raw)
    except msgspec.ValidationError as error:
        raise WireError("batch_shape", str(error)) from None
    except _UNREADABLE as error:
        raise WireError("payload_decode", str(error)) from None


def _decode(raw: msgspec.Raw, code: str) -> Any:
    try:
        return _any.decode(raw)
    except _UNREADABLE as error:
        raise WireError(code, str(error)) from None


def _timestamp(value: Any) -> tuple[float | None, tuple[str, ...]]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WireError("ts_type", f"{type(value).__name__}, expected a number of seconds")
    if isinstance(value, int) and abs(value) >= _MILLISECONDS:
        return value / 1000, ("ts_ms",)
    if not math.isfinite(value):
        return None, ("ts_not_finite",)
    return float(value), ()


def _rank(raw: msgspec.Raw | None, limits: Limits) -> int | None:
    if raw is None:
        return None
    value = _decode(raw, "payload_decode")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= limits.rank:
        raise WireError("rank", f"{value!r:.40}, expected an integer from 0 to {limits.rank} or nil")
    return value


# --- one event -------------------------------------------------------------------------------------------------------


def _event(raw: msgspec.Raw, limits: Limits) -> Event:
    try:
        value = _any.decode(raw)
    except _UNREADABLE as error:
        return Bad("event_decode", str(error))
    try:
        if isinstance(value, list):
            return _array_event(value, limits)
        if isinstance(value, dict):
            return _map_event(value, limits)
    except _BadEvent as bad:
        return Bad(*bad.args)
    return Bad("tag", f"{type(value).__name__} where an event should be")


def _array_event(value: list[Any], limits: Limits) -> Event:
    tag = value[0] if value else None
    if not isinstance(tag, str):
        raise _BadEvent("tag", f"{type(tag).__name__}, expected a string")
    slots = _SLOTS.get(tag)
    if slots is None:
        return Unknown(tag)
    body = value[1:]
    fields = dict(zip(slots, body, strict=False))
    if isinstance(fields.get("lora_name"), dict):  # SGLang 0.5.18–0.5.19: a metadata map in the adapter's slot
        metadata = fields.pop("lora_name")
        fields |= {k: metadata[k] for k in ("cache_salt", "session_id") if k in metadata}
    extra = len(body) > len(slots) and tag != "AllBlocksCleared"
    return _tagged(tag, fields, limits, ("extra_positions",) if extra else ())


def _map_event(value: dict[Any, Any], limits: Limits) -> Event:
    tag = value.get("type")
    if tag is None and "event_type" in value:
        return _rfc1527_event(value, limits)
    if not isinstance(tag, str):
        raise _BadEvent("tag", f"{type(tag).__name__}, expected a string")
    if tag not in _SLOTS:
        medium = value.get("medium")
        return Unknown(tag, medium if isinstance(medium, str) else None)
    return _tagged(tag, _with_rfc1527(value) if "event_type" in value else value, limits, ())


def _rfc1527_event(value: dict[Any, Any], limits: Limits) -> Event:
    event_type = value["event_type"]
    if not isinstance(event_type, str):
        raise _BadEvent("tag", f"event_type is {type(event_type).__name__}, expected a string")
    if event_type not in _RFC1527:
        return Unknown(event_type)
    return _tagged(_RFC1527[event_type], _with_rfc1527(value), limits, ("rfc1527",))


def _with_rfc1527(value: dict[Any, Any]) -> dict[Any, Any]:
    """A Mooncake map under this module's names; its group ids are strings of another space and are left out."""
    fields = {k: v for k, v in value.items() if k not in ("group_id", "group_idx")}
    if value.get("seq_hashes") is not None:
        fields["block_hashes"] = value["seq_hashes"]
    if value.get("parent_hash") is not None:
        fields["parent_block_hash"] = value["parent_hash"]
    fields["token_ids"] = value.get("token_ids") or []
    fields["block_size"] = value.get("block_size") or 0
    if value.get("additional_salt"):
        fields["cache_salt"] = value["additional_salt"]
    return fields


def _tagged(tag: str, fields: dict[Any, Any], limits: Limits, warn: tuple[str, ...]) -> Event:
    if tag == "BlockStored":
        return _stored(fields, limits, warn)
    if tag == "BlockRemoved":
        return _removed(fields, limits, warn)
    return Cleared(
        medium=_text(fields, "medium"), tenant_id=_text(fields, "tenant_id"), backend_id=_text(fields, "backend_id"),
        warn=warn,
    )  # fmt: skip


def _removed(fields: dict[Any, Any], limits: Limits, warn: tuple[str, ...]) -> Removed:
    return Removed(
        hashes=_hashes(fields.get("block_hashes"), limits), medium=_text(fields, "medium"),
        group=_index(fields, "group_idx"), locality=_text(fields, "locality"), tenant_id=_text(fields, "tenant_id"),
        backend_id=_text(fields, "backend_id"), object_key=_text(fields, "object_key"), warn=warn,
    )  # fmt: skip


def _stored(fields: dict[Any, Any], limits: Limits, warn: tuple[str, ...]) -> Stored:
    hashes = _hashes(fields.get("block_hashes"), limits)
    parent = None if fields.get("parent_block_hash") is None else _hash(fields["parent_block_hash"])
    tokens, pairs, strings = _tokens(fields.get("token_ids"), limits)
    block_size = _block_size(fields.get("block_size"), limits)
    lora_name = _text(fields, "lora_name")
    extra = _extra_keys(fields.get("extra_keys"), lora_name)
    counted = len(tokens) - 1 if pairs else len(tokens)
    dense = bool(hashes) and block_size > 0 and not strings and counted == block_size * len(hashes)
    notes = {
        "placeholder": not tokens,
        "non_dense": bool(tokens) and block_size > 0 and counted != block_size * len(hashes),
        "bigram": pairs,
        "wide_token": not strings and bool(tokens) and max(cast(list[int], tokens)) > UINT32_MAX,
        "string_token": strings,
        **dict.fromkeys(warn, True),
        "repeated_hash": len(set(hashes)) != len(hashes),
        "self_parent": parent is not None and parent in hashes,
        "zero_block_size": bool(tokens) and block_size == 0,
        "extra_keys_len": extra is not None and len(extra) != len(hashes),
    }
    return Stored(
        hashes=hashes, parent=parent, tokens=tokens, block_size=block_size, medium=_text(fields, "medium"),
        dense=dense, eagle=pairs, group=_index(fields, "group_idx"), spec_kind=_text(fields, "kv_cache_spec_kind"),
        sliding_window=_index(fields, "kv_cache_spec_sliding_window"), lora_id=_lora_id(fields.get("lora_id")),
        lora_name=lora_name, cache_salt=_text(fields, "cache_salt"), extra=extra,
        locality=_text(fields, "locality"), session_id=_text(fields, "session_id"),
        lookahead=_lookahead(fields.get("lookahead_token_ids")), mm_keys=fields.get("mm_keys"),
        block_mm_infos=fields.get("block_mm_infos"), tenant_id=_text(fields, "tenant_id"),
        backend_id=_text(fields, "backend_id"), object_key=_text(fields, "object_key"),
        model_name=_text(fields, "model_name"), warn=tuple(name for name, applies in notes.items() if applies),
    )  # fmt: skip


# --- fields ----------------------------------------------------------------------------------------------------------


def _hash(value: Any) -> int:
    if type(value) is int:
        return value & MASK64
    if isinstance(value, bytes):
        if not value:
            raise _BadEvent("hash_empty", "a hash of no bytes")
        return int.from_bytes(value[-8:], "big")
    raise _BadEvent("hash_type", f"{type(value).__name__}, expected an integer or bytes")


def _hashes(value: Any, limits: Limits) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _BadEvent("block_hashes", f"{type(value).__name__}, expected an array")
    if len(value) > limits.hashes:
        raise _BadEvent("block_hashes", f"{len(value)} hashes, at most {limits.hashes}")
    return tuple(map(_hash, value))


def _tokens(value: Any, limits: Limits) -> tuple[list[int] | list[int | str], bool, bool]:
    """Tokens, whether they came as pairs (EAGLE), and whether strings are among them (TensorRT-LLM media)."""
    if not isinstance(value, list):
        raise _BadEvent("token_ids_type", f"{type(value).__name__}, expected an array")
    if len(value) > limits.tokens:
        raise _BadEvent("token_range", f"{len(value)} tokens, at most {limits.tokens}")
    kinds = set(map(type, value))
    if kinds == {list}:
        return _flattened(value), True, False
    if not kinds <= {int, str}:
        wrong = next(iter(kinds - {int, str}))
        raise _BadEvent("token_type", f"{wrong.__name__}, expected an integer")
    if kinds == {int} and min(value) < 0:
        raise _BadEvent("token_range", f"{min(value)}, expected 0 or more")
    if len(kinds) == 2 and any(type(token) is int and token < 0 for token in value):
        raise _BadEvent("token_range", "a negative token")
    return value, False, str in kinds


def _flattened(pairs: list[list[Any]]) -> list[int]:
    """n pairs (t0,t1),(t1,t2)… describe n + 1 tokens: the first of each and the last one's second."""
    if any(len(pair) != 2 or type(pair[0]) is not int or type(pair[1]) is not int for pair in pairs):
        raise _BadEvent("token_type", "a pair that is not two integers")
    tokens = [pair[0] for pair in pairs]
    tokens.append(pairs[-1][1])
    if min(tokens) < 0:
        raise _BadEvent("token_range", f"{min(tokens)}, expected 0 or more")
    return tokens


def _block_size(value: Any, limits: Limits) -> int:
    if type(value) is not int:
        raise _BadEvent("block_size_type", f"{type(value).__name__}, expected an integer")
    if not 0 <= value <= limits.block_size:
        raise _BadEvent("block_size_range", f"{value}, expected 0 to {limits.block_size}")
    return value


def _text(fields: dict[Any, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _BadEvent(f"{name}_type", f"{type(value).__name__}, expected a string or nil")
    if len(value) > MAX_NAME:
        raise _BadEvent(f"{name}_range", f"{len(value)} characters, at most {MAX_NAME}")
    return value


def _index(fields: dict[Any, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise _BadEvent(f"{name}_type", f"{value!r:.40}, expected an integer of 0 or more, or nil")


def _lora_id(value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    raise _BadEvent("lora_id_type", f"{type(value).__name__}, expected an integer or nil")


def _lookahead(value: Any) -> list[list[int]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        raise _BadEvent("lookahead_token_ids_type", "expected an array of arrays")
    return value


def _extra_keys(value: Any, lora_name: str | None) -> tuple[BlockExtra | None, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise _BadEvent("extra_keys_type", f"{type(value).__name__}, expected an array")
    return tuple(None if entry is None else _block_extra(entry, lora_name) for entry in value)


def _is_media(item: Any) -> bool:
    if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str) or type(item[1]) is not int:
        return False
    return len(item[0]) <= MAX_NAME and -(1 << 63) <= item[1] < 1 << 63


def _block_extra(entry: Any, lora_name: str | None) -> BlockExtra:
    """vLLM lists, in this order: adapter name, media items, cache salt (first block only), prompt-embeds digest."""
    if not isinstance(entry, list):
        raise _BadEvent("extra_keys_type", f"{type(entry).__name__} for a block, expected an array or nil")
    media: list[tuple[str, int]] = []
    strings: list[str] = []
    digests: list[str] = []
    for item in entry:
        if isinstance(item, str) and len(item) <= MAX_NAME:
            strings.append(item)
        elif isinstance(item, bytes):
            digests.append(item.hex())
        elif _is_media(item):
            media.append((item[0], item[1]))
        else:
            raise _BadEvent("extra_keys_type", f"{item!r:.60} is neither a string, a digest nor [identifier, offset]")
    lora = lora_name if lora_name is not None and lora_name in strings else None
    if lora is not None:
        strings.remove(lora)
    return BlockExtra(tuple(media), tuple(strings), tuple(digests), lora)
