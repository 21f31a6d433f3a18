"""Any bytes become a value or a named error: nothing else escapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import query
from protocols.describe import describe
from protocols.dynamo import decode_json, decode_zmq
from protocols.engine import END_SEQ, decode_pub, decode_replay, decode_replay_request
from protocols.errors import WireError
from protocols.limits import Limits
from protocols.lmcache import decode_coordinator, decode_push

CHANNELS = ("pub", "replay-reply", "replay-request", "json", "dynamo-zmq", "lmcache-push")
FIELDS = (
    "type", "event_type", "block_hashes", "seq_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "ts",
    "lora_name", "extra_keys", "group_idx", "events", "data", "event", "worker_id", "event_id", "blocks", "batches",
    "operations", "key", "op_type", "removed", "stored", "tokens", "block_hash", "mm_keys", "cache_level", "payload",
    "publisher_id", "sequence", "seq", "incarnation", "instance_id", "window_size", "lookahead_token_ids",
)  # fmt: skip
TAGS = (
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "stored",
    "removed",
    "cleared",
    "created",
    "updated",
    "GPU",
    "BatchedKVOperationMsg",
    "KVAdmitMsg",
    "KVEvictMsg",
    "admit",
    "evict",
    "TierBlocksCleared",
    "score",
    "hello",
    "exact",
)

numbers = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-2, 20), st.floats(), st.sampled_from([0, -1, (1 << 64) - 1])
)
texts = st.one_of(st.sampled_from(TAGS), st.text(max_size=6))
leaves = st.one_of(st.none(), st.booleans(), numbers, texts, st.binary(max_size=40))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.dictionaries(st.one_of(st.sampled_from(FIELDS), texts), inner, max_size=6),
        st.builds(lambda tag, rest: [tag, *rest], st.sampled_from(TAGS), st.lists(inner, max_size=11)),
    ),
    max_leaves=25,
)
packed = values.map(msgspec.msgpack.encode)
batches = st.builds(
    lambda ts, events, rank: msgspec.msgpack.encode([ts, events, rank]), leaves, st.lists(values, max_size=4), leaves
)
jsons = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6)),
    max_leaves=20,
).map(msgspec.json.encode)
payloads = st.one_of(st.binary(max_size=80), packed, batches, jsons)
seqs = st.one_of(st.binary(max_size=9), st.just(bytes(8)), st.just(END_SEQ))
messages = st.one_of(
    st.lists(st.binary(max_size=30), max_size=5),
    st.builds(lambda topic, seq, payload: [topic, seq, payload], st.binary(max_size=3), seqs, payloads),
    st.builds(lambda topic, seq, payload: [b"", topic, seq, payload], st.binary(max_size=3), seqs, payloads),
    payloads.map(lambda payload: [payload]),
    st.builds(
        lambda version, cut, payload: [
            b"",
            bytes(8),
            bytes(8),
            version + len(payload).to_bytes(4, "big") + payload[cut:],
        ],
        st.sampled_from([b"\x01", b"\x02", b""]),
        st.sampled_from([0, 0, 1]),
        payloads,
    ),
)

SMALL = Limits(payload_bytes=4096, events=8, hashes=16, tokens=64)
DECODERS: dict[str, Callable[[list[bytes]], Any]] = {
    "pub": decode_pub, "pub, small limits": lambda frames: decode_pub(frames, SMALL), "replay": decode_replay,
    "replay request": decode_replay_request, "dynamo": decode_zmq,
}  # fmt: skip
PAYLOAD_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "request": query.decode_request, "reply": query.decode_reply, "router event": decode_json, "lmcache": decode_push,
    "coordinator": decode_coordinator,
}  # fmt: skip


def outcome(decode: Callable[[Any], Any], given_: Any) -> Any:
    """The value, or the name of the error; anything else that is raised fails the test."""
    try:
        return decode(given_)
    except WireError as error:
        return error.code


@pytest.mark.parametrize("name", DECODERS)
@given(messages)
def test_frames_become_a_value_or_a_named_error(name: str, frames: list[bytes]) -> None:
    assert outcome(DECODERS[name], frames) not in (None, "")


@pytest.mark.parametrize("name", PAYLOAD_DECODERS)
@given(payloads)
def test_a_payload_becomes_a_value_or_a_named_error(name: str, payload: bytes) -> None:
    assert outcome(PAYLOAD_DECODERS[name], payload) not in (None, "")


@pytest.mark.parametrize("channel", CHANNELS)
@settings(max_examples=250)
@given(messages)
def test_everything_is_described_and_the_description_is_json(channel: str, frames: list[bytes]) -> None:
    said = describe(channel, frames)
    assert said["ok"] is True or said["error"]
    msgspec.json.encode(said)


@given(payloads)
def test_the_id_of_any_request_is_a_number(payload: bytes) -> None:
    assert isinstance(query.request_id(payload), int)


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
@pytest.mark.parametrize("bomb", [b"\x91", b"\x81\xa1a", b"\x81\xa4type", b"[", b'{"a":'])
def test_depth_bombs_are_named_errors(depth: int, bomb: bytes) -> None:
    for channel in CHANNELS:
        payload = bomb * depth
        body = b"\x01" + len(payload).to_bytes(4, "big") + payload
        router = [b"", bytes(8), bytes(8), body]
        for frames in ([b"", bytes(8), payload], [b"", b"", bytes(8), payload], [payload], router):
            assert describe(channel, frames)["ok"] is False
    for decode in PAYLOAD_DECODERS.values():
        with pytest.raises(WireError):
            decode(payload)
