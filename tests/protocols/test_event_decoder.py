"""The decoder on input nobody should send: each is one named error, or one bad event among good ones."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgspec
import pytest

from protocols.describe import describe
from protocols.engine import END_SEQ, decode_payload, decode_pub, decode_replay, decode_replay_request
from protocols.errors import WireError
from protocols.events import Bad, Batch, Cleared, Event, Removed, ReplayEnd, Stored, Unknown
from protocols.limits import Limits

pack = msgspec.msgpack.encode
SEQ = bytes(8)


def batch(*events: Any, ts: Any = 1.0, rank: Any = None) -> bytes:
    return pack([ts, list(events), rank])


def decode(payload: bytes, limits: Limits | None = None) -> Batch:
    return decode_payload(payload, 7, b"topic", limits or Limits())


def refusal(payload: bytes, limits: Limits | None = None) -> str:
    """The error's code; it must know where it came from."""
    with pytest.raises(WireError) as caught:
        decode(payload, limits)
    assert (caught.value.seq, caught.value.topic) == (7, b"topic")
    return caught.value.code


def one(event: Any) -> Event:
    """The event between two good ones, which must be unharmed."""
    clear = ["AllBlocksCleared"]
    first, event, last = decode(batch(clear, event, clear)).events
    assert first == last == Cleared()
    return event


def fault(event: Any) -> str:
    bad = one(event)
    assert isinstance(bad, Bad), bad
    return bad.error


def store(**fields: Any) -> dict[str, Any]:
    good = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2}
    return {name: value for name, value in (good | fields).items() if value != "absent"}


def told(**fields: Any) -> Stored:
    event = one(store(**fields))
    assert isinstance(event, Stored), event
    return event


# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [[], [b""], [b"", SEQ], [b"", SEQ, b"\x92\x01\x90", b""]])
def test_a_live_message_has_three_frames(frames: list[bytes]) -> None:
    with pytest.raises(WireError, match="frame_count") as caught:
        decode_pub(frames)
    assert caught.value.seq is None


@pytest.mark.parametrize("seq", [b"", b"\0" * 7, b"\0" * 9, b"\0" * 16])
def test_a_sequence_has_eight_bytes(seq: bytes) -> None:
    for decode_frames in (lambda: decode_pub([b"", seq, b"\x92\x01\x90"]), lambda: decode_replay([b"", seq, b"x"])):
        with pytest.raises(WireError, match="seq_len"):
            decode_frames()


def test_the_largest_live_sequence() -> None:
    assert decode_pub([b"", b"\xff" * 7 + b"\xfe", b"\x92\x01\x90"]).seq == (1 << 64) - 2


@pytest.mark.parametrize("frames", [[b"", END_SEQ, b""], [b"", b"", END_SEQ, b""], [b"", b"kv", END_SEQ, b"anything"]])
def test_a_replay_ends(frames: list[bytes]) -> None:
    assert decode_replay(frames) == ReplayEnd()


@pytest.mark.parametrize("frames", [[], [b"", SEQ], [b"x", SEQ, b""], [b"", b"", SEQ, b"", b""]])
def test_a_replay_reply_has_a_delimiter_and_three_or_four_frames(frames: list[bytes]) -> None:
    with pytest.raises(WireError, match="frame_count"):
        decode_replay(frames)


@pytest.mark.parametrize(
    ("frames", "code"), [([b"", b"\0" * 7], "seq_len"), ([b"x", SEQ], "frame_count"), ([], "frame")]
)
def test_a_replay_request_that_is_none(frames: list[bytes], code: str) -> None:
    with pytest.raises(WireError, match=code):
        decode_replay_request(frames)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "payload_decode"),
        (b'{"ts": 1, "events": []}', "batch_shape"),
        (b"\x92\x01\x90\x00", "payload_decode"),
        (b"\xc1", "batch_shape"),
        (b"\x90", "batch_shape"),
        (b"\x91\x01", "batch_shape"),
        (b"\x80", "batch_shape"),
        (pack({"ts": 1.0}), "batch_shape"),
        (pack({"events": []}), "batch_shape"),
        (pack({1: 2}), "batch_shape"),
        (b"\xdd\xff\xff\xff\xff", "payload_decode"),
        (b"\xdf\xff\xff\xff\xff", "payload_decode"),
        (b"\x92\x01\xdd\xff\xff\xff\xff", "payload_decode"),
        (b"\x92\x01\xc6\xff\xff\xff\xff", "payload_decode"),
        (b"\x91" * 5000, "payload_decode"),
        (b"\x92\x01" + b"\x91" * 100_000, "payload_decode"),
        (b"\x92\x01\xc0", "batch_shape"),
        (pack([1.0, {"a": 1}, None]), "batch_shape"),
        (pack([1.0, 5, None]), "batch_shape"),
    ],
)
def test_a_payload_that_is_no_batch(payload: bytes, code: str) -> None:
    assert refusal(payload) == code


@pytest.mark.parametrize("ts", ["1.0", None, True, False, b"\0", [1.0], {}, msgspec.msgpack.Ext(5, b"x")])
def test_a_time_stamp_is_a_number(ts: Any) -> None:
    assert refusal(batch(ts=ts)) == "ts_type"


@pytest.mark.parametrize(
    ("raw", "ts", "warn"),
    [
        (pack(5), 5.0, ()),
        (b"\xca\x3f\x80\x00\x00", 1.0, ()),
        (pack(-3), -3.0, ()),
        (pack(1_700_000_000_123), 1_700_000_000.123, ("ts_ms",)),
        (pack(math.nan), None, ("ts_not_finite",)),
        (pack(-math.inf), None, ("ts_not_finite",)),
    ],
)
def test_time_stamps_of_every_type(raw: bytes, ts: float | None, warn: tuple[str, ...]) -> None:
    read = decode(b"\x93" + raw + b"\x90\xc0")
    assert (read.ts, read.warn) == (ts, warn)


@pytest.mark.parametrize("rank", [-1, 1 << 31, 1.0, "0", True, [0]])
def test_a_rank_is_a_small_number(rank: Any) -> None:
    assert refusal(batch(rank=rank)) == "rank"


def test_of_duplicate_keys_the_last_counts() -> None:
    payload = b"\x83\xa2ts\x01\xa6events\x90\xa2ts\x02"
    assert decode(payload).ts == 2.0


def test_sizes_are_bounded() -> None:
    clear = ["AllBlocksCleared"]
    assert refusal(batch(*[clear] * 5), Limits(events=4)) == "events_limit"
    assert refusal(batch(clear), Limits(payload_bytes=8)) == "payload_size"
    small = Limits(hashes=2, tokens=3, block_size=16)
    hashes, tokens, size, fine = decode(
        batch(store(block_hashes=[1, 2, 3]), store(token_ids=[1] * 4), store(block_size=17), clear), small
    ).events
    assert (hashes.error, tokens.error, size.error) == ("block_hashes", "token_range", "block_size_range")  # type: ignore[union-attr]
    assert fine == Cleared()


@pytest.mark.parametrize(
    "payload",
    [b"\x92\x01\xdd\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff" + b"\xc0" * 50, b"\x92\x01\x91\xdf\xff\xff\xff\xff"],
)
def test_claimed_lengths_are_not_allocated(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(payload)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", [None, 5, "BlockStored", True, b"x", 1.5, [], {}, [None], [5], [["BlockStored"]], {"type": 5}]
)
def test_an_event_without_a_tag(event: Any) -> None:
    assert fault(event) == "tag"


@pytest.mark.parametrize("tag", ["BlockTransferred", "", "blockstored", "TierBlocksCleared"])
def test_unknown_tags_are_told_apart_from_bad_events(tag: str) -> None:
    assert one([tag, 1, 2]) == Unknown(tag)
    assert one({"type": tag, "medium": "CPU"}) == Unknown(tag, "CPU")
    assert one({"type": tag, "medium": 5}) == Unknown(tag)


def test_an_event_nested_beyond_reason_is_one_bad_event() -> None:
    deep = b"\x91" * 900 + b"\xc0"
    events = decode(b"\x93\x01\x92" + deep + pack(["AllBlocksCleared"]) + b"\xc0").events
    assert isinstance(events[0], Bad)
    assert events[1] == Cleared()


def test_text_that_is_not_utf8_is_one_bad_event() -> None:
    raw = b"\x92\xacBlockRemoved\x91\x01"[:-2] + b"\xa2\xff\xfe"
    events = decode(b"\x93\x01\x92" + raw + pack(["AllBlocksCleared"]) + b"\xc0").events
    assert (events[0].error, events[1]) == ("event_decode", Cleared())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "key", [b"\x90", b"\x80", b"\xc0", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xd6\xff\0\0\0\0", b"\xd4\x05\0"]
)
def test_odd_keys_of_a_map_cost_one_event_at_most(key: bytes) -> None:
    good = pack(store())
    raw = bytes([good[0] + 1]) + good[1:] + key + b"\x01"
    events = decode(b"\x93\x01\x92" + raw + pack(["AllBlocksCleared"]) + b"\xc0").events
    assert events[1] == Cleared()


@pytest.mark.parametrize("tag", ["BlockStored", "BlockRemoved"])
@pytest.mark.parametrize("hashes", [None, 5, "abc", {}, b"x", "absent"])
def test_hashes_are_an_array(tag: str, hashes: Any) -> None:
    assert fault(store(type=tag, block_hashes=hashes)) == "block_hashes"


@pytest.mark.parametrize(
    ("hash_", "code"),
    [
        (1.5, "hash_type"),
        ("ab", "hash_type"),
        (None, "hash_type"),
        (True, "hash_type"),
        ([1], "hash_type"),
        (b"", "hash_empty"),
    ],
)
def test_a_hash_is_an_integer_or_bytes(hash_: Any, code: str) -> None:
    assert fault(store(block_hashes=[1, hash_])) == code
    assert fault(["BlockRemoved", [hash_]]) == code


@pytest.mark.parametrize(
    ("hash_", "folded"),
    [
        (0, 0),
        (-1, (1 << 64) - 1),
        (-(1 << 63), 1 << 63),
        ((1 << 64) - 1, (1 << 64) - 1),
        (b"\x07", 7),
        (bytes(range(16)), 0x08090A0B0C0D0E0F),
        (bytes(range(32)), 0x18191A1B1C1D1E1F),
        (bytes(range(36)), 0x1C1D1E1F20212223),
    ],
)
def test_hashes_of_any_width_fold_to_their_last_eight_bytes(hash_: Any, folded: int) -> None:
    assert told(block_hashes=[hash_], parent_block_hash=hash_).hashes == (folded,)
    assert told(block_hashes=[1], parent_block_hash=hash_).parent == folded
    assert one(["BlockRemoved", [hash_]]) == Removed(hashes=(folded,))


def test_a_parent_of_nothing_is_no_hash() -> None:
    assert told(parent_block_hash="absent").parent is None
    assert fault(store(parent_block_hash="x")) == "hash_type"


@pytest.mark.parametrize(
    ("tokens", "code"),
    [
        ("absent", "token_ids_type"),
        (None, "token_ids_type"),
        ("ab", "token_ids_type"),
        ([1.0, 2.0], "token_type"),
        ([1, None], "token_type"),
        ([1, True], "token_type"),
        ([1, b"x"], "token_type"),
        ([-1, 2], "token_range"),
        (["a", -1], "token_range"),
        ([[1, 2], 3], "token_type"),
        ([[1, 2], [3]], "token_type"),
        ([[1, 2], [2, "a"]], "token_type"),
        ([[1, 2], [2, -3]], "token_range"),
        ([[]], "token_type"),
    ],
)
def test_tokens_are_integers_or_pairs(tokens: Any, code: str) -> None:
    assert fault(store(token_ids=tokens)) == code


@pytest.mark.parametrize(
    ("size", "code"),
    [("absent", "type"), (None, "type"), (2.0, "type"), (True, "type"), (-1, "range"), (1 << 31, "range")],
)
def test_a_block_size_is_a_small_number(size: Any, code: str) -> None:
    assert fault(store(block_size=size)) == f"block_size_{code}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("medium", 5),
        ("medium", b"GPU"),
        ("lora_name", 5),
        ("lora_id", "1"),
        ("lora_id", 1.0),
        ("lora_id", True),
        ("cache_salt", []),
        ("group_idx", -1),
        ("group_idx", "0"),
        ("group_idx", 1.0),
        ("kv_cache_spec_kind", 3),
        ("kv_cache_spec_sliding_window", -5),
        ("locality", {}),
        ("session_id", 5),
        ("lookahead_token_ids", [5]),
        ("lookahead_token_ids", "x"),
        ("extra_keys", "x"),
        ("extra_keys", ["x"]),
        ("extra_keys", [[5]]),
        ("extra_keys", [[None]]),
        ("extra_keys", [[["a", 1, 2]]]),
        ("extra_keys", [[["a", "b"]]]),
        ("extra_keys", [[["a", 1.0]]]),
        ("extra_keys", [[[b"a", 1]]]),
        ("extra_keys", {}),
    ],
)
def test_a_field_of_the_wrong_type_is_one_bad_event(field: str, value: Any) -> None:
    assert fault(store(**{field: value})).startswith(field)


def test_wrong_types_in_slots_of_the_array_form() -> None:
    good = ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, None, 0, "full_attention", None]
    assert isinstance(one(good), Stored)
    for slot in range(1, len(good)):
        wrong = [*good[:slot], 1.5, *good[slot + 1 :]]
        assert isinstance(one(wrong), Bad), f"slot {slot}"


def test_missing_slots_of_the_array_form() -> None:
    good = ["BlockStored", [1], None, [5, 6], 2]
    assert isinstance(one(good), Stored)
    assert [fault(good[:n]) for n in range(1, 5)] == [
        "block_hashes",
        "token_ids_type",
        "token_ids_type",
        "block_size_type",
    ]


def test_extra_keys_of_another_length_are_warned_of() -> None:
    event = told(extra_keys=[None, None])
    assert event.extra == (None, None)
    assert event.warn == ("extra_keys_len",)


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, True),
        ({"token_ids": [5, 6, 7]}, False),
        ({"token_ids": []}, False),
        ({"block_size": 0}, False),
        ({"block_hashes": []}, False),
        ({"token_ids": ["a", 5]}, False),
        ({"token_ids": [[5, 6], [6, 7]]}, True),
        ({"token_ids": [[5, 6]]}, False),
    ],
)
def test_only_dense_tokens_are_called_so(fields: dict[str, Any], dense: bool) -> None:
    assert told(**fields).dense is dense


def test_pairs_describe_one_token_more() -> None:
    event = told(token_ids=[[5, 6], [6, 7]])
    assert (event.tokens, event.eagle) == ([5, 6, 7], True)


def test_unknown_fields_and_further_slots_are_read_over() -> None:
    assert told(surprise=[1, {"a": 2}]).hashes == (1,)
    assert one(["AllBlocksCleared", "source", 5]) == Cleared()
    assert one(["BlockRemoved", [1], "GPU", 0, None, 7, 8]) == Removed(
        hashes=(1,), medium="GPU", group=0, warn=("extra_positions",)
    )


@pytest.mark.parametrize("value", [{"removed": 5}, {"removed": []}, {"stored": 5}, {}, "cleared", ""])
def test_router_events_of_any_shape_are_described(value: Any) -> None:
    event = {"worker_id": 1, "event": {"event_id": 2, "dp_rank": 0, "data": value}}
    assert isinstance(describe("json", [msgspec.json.encode(event)])["ok"], bool)


NESTED: list[Any] = [[]]
for _ in range(400):
    NESTED = [NESTED]


@pytest.mark.parametrize("field", ["mm_keys", "block_mm_infos", "lookahead_token_ids"])
@pytest.mark.parametrize(
    "value", [NESTED, [[msgspec.msgpack.Ext(5, b"x")]], [[{(1, 2): b"x"}]], [[{b"k": {None: math.inf}}]]], ids=range(4)
)
def test_fields_nobody_checks_are_described_as_json(field: str, value: Any) -> None:
    said = describe("pub", [b"", SEQ, batch(store(**{field: value}))])
    assert field in said["events"][0]
    msgspec.json.encode(said)


@pytest.mark.parametrize("data", [{"stored": NESTED}, {"removed": {"block_hashes": NESTED}}, {"stored": {1: b"x"}}])
def test_router_events_are_described_as_json(data: Any) -> None:
    inner = pack([{"worker_id": 1, "event": {"event_id": 2, "data": data}}])
    envelope = pack({"payload": inner, "publisher_id": 1, "sequence": 2})
    frames = [b"", SEQ, SEQ, b"\x01" + len(envelope).to_bytes(4, "big") + envelope]
    said = describe("dynamo-zmq", frames)
    assert said["ok"] is True
    msgspec.json.encode(said)


@pytest.mark.parametrize("field", ["mm_keys", "cache_level", "priority", "tokens"])
@pytest.mark.parametrize("value", [5, "x", [5], {}, None, True])
def test_trtllm_blocks_of_any_shape_are_described(field: str, value: Any) -> None:
    block = {"block_hash": 1, "tokens": [{"token_id": 1}], "cache_level": 0, "priority": 3, field: value}
    event = {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": [block]}}
    assert isinstance(describe("json", [msgspec.json.encode(event)])["ok"], bool)
