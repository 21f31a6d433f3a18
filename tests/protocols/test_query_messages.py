"""The query protocol: every message survives the wire, and what is none is refused by name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import query
from protocols.errors import WireError
from protocols.media import MediaRun
from protocols.plan import Segment, TextPlan, exact_plan, prefix_plan


def made(kind: type[Any], **fields: Any) -> Any:
    """A message with these fields, and something in every other that it must have."""
    types = get_type_hints(kind)
    required = [field.name for field in msgspec.structs.fields(kind) if field.required and field.name not in fields]
    return kind(**fields, **{name: 5 if types[name] is int else types[name]() for name in required})


PLANS = [
    exact_plan(
        "m", [1, 2, 3], media=[MediaRun(1, 1, "a", 5)], lora_name="l", cache_salt="s", segments=[Segment(0, 1, "t")]
    ),
    exact_plan("m", [1 << 60]),
    prefix_plan("m", [1], "accounting", detail="d"),
    TextPlan(model="m", text="é", reason="no_tokenizer"),
]
WORKER = query.WorkerSpec(name="w", model="m", endpoint="tcp://h:5557", replay="tcp://h:5558", ranks=2, scheme="pad62")
TRUST = query.Trust(state="incomplete", reason="history_lost", since_seq=3, missing=4)
SCORE = query.WorkerScore(
    worker="w", rank=1, block_size=16, matched_blocks=2, matched_tokens=32, usable_tokens=16,
    tier_tokens={"device": 32, "host": 48, "disk": 48, "external": 48}, trust=TRUST,
)  # fmt: skip
ANSWER = query.Answer(model="m", basis="exact", prompt_tokens=50, workers=[SCORE], zero_reason=None)
STREAM = query.StreamInfo(
    worker="w", rank=0, model="m", endpoint="e", replay=None, state="live", trust=TRUST, lifetime=0, last_seq=None,
    quiet_seconds=None, blocks=0, block_sizes=[16], scheme=None, counters={"gaps": 1},
)  # fmt: skip
LIMITS = made(query.Limits)

REQUESTS: list[Any] = [
    query.Hello(id=1, client="c"), query.Score(id=(1 << 63) - 1, plans=PLANS, workers=["w"], timeout_ms=5),
    query.ScoreKeys(id=2, model="m", keys=b"\0" * 8, block_size=16), query.Routed(id=3, plan=PLANS[0], worker="w"),
    query.Observed(id=4, worker="w", predicted_tokens=1, cached_tokens=2), query.AddWorker(id=5, worker=WORKER),
    query.RemoveWorker(id=6, name="w"), query.ListWorkers(id=7), query.ListStreams(id=8, worker="w"), query.Check(id=9),
]  # fmt: skip
REPLIES: list[Any] = [
    query.Welcome(
        id=1,
        server="s",
        protocol=1,
        instance="i",
        limits=LIMITS,
        models=[query.ModelInfo(model="m", block_sizes=[1], schemes=["pad30"], workers=1)],
    ),
    query.Scores(id=2, answers=[ANSWER]),
    query.Ok(id=3),
    query.Workers(id=4, workers=[query.WorkerInfo(worker=WORKER, streams=[STREAM])]),
    query.Streams(id=5, streams=[STREAM]),
    made(query.Checked, id=6, failures=["f"]),
    query.Error(id=0, code="busy", message="m", retriable=True),
]


def kind(message: Any) -> str:
    return type(message).__name__


@pytest.mark.parametrize("request_", REQUESTS, ids=kind)
def test_a_request_survives_the_wire(request_: Any) -> None:
    packed = query.encode(request_)
    assert query.decode_request(packed) == request_
    assert query.request_id(packed) == request_.id


@pytest.mark.parametrize("reply", REPLIES, ids=kind)
def test_a_reply_survives_the_wire(reply: Any) -> None:
    assert query.decode_reply(query.encode(reply)) == reply


def test_the_first_messages_are_all_tried() -> None:
    assert {type(r) for r in REQUESTS} <= set(get_args(query.AnyRequest))
    assert {type(r) for r in REPLIES} <= set(get_args(query.AnyReply))


def refusal(payload: bytes) -> str:
    with pytest.raises(WireError) as caught:
        query.decode_request(payload)
    return caught.value.code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "teleport", "id": 1}, "unknown_request"),
        ({"id": 1}, "unknown_request"),
        ({"type": 5, "id": 1}, "unknown_request"),
        ({"type": "score", "id": 1}, "malformed"),
        ({"type": "score", "id": "1", "plans": []}, "malformed"),
        ({"type": "score", "id": 1, "plans": [{"type": "exact", "model": "m"}]}, "malformed"),
        ({"type": "check", "id": 1, "tenant": "t"}, "malformed"),
        ({"type": "score_keys", "id": 1, "model": "m", "keys": [1], "block_size": 2}, "malformed"),
        ([1, 2], "malformed"),
        (None, "malformed"),
    ],
)
def test_what_is_no_request_is_named(message: Any, code: str) -> None:
    assert refusal(msgspec.msgpack.encode(message)) == code


@pytest.mark.parametrize("payload", [b"", b"\xc1", b'{"type": "check", "id": 1}', query.encode(REQUESTS[-1]) + b"\0"])
def test_what_is_no_message_at_all_is_malformed(payload: bytes) -> None:
    assert refusal(payload) == "malformed"


@pytest.mark.parametrize("message", [{"type": "teleport", "id": 7}, {"type": "score", "id": 7}])
def test_a_refused_request_still_has_its_id(message: Any) -> None:
    assert query.request_id(msgspec.msgpack.encode(message)) == 7


@pytest.mark.parametrize("payload", [b"", b"\xc0", msgspec.msgpack.encode({"id": "x"}), msgspec.msgpack.encode({})])
def test_a_request_whose_id_cannot_be_read_has_none(payload: bytes) -> None:
    assert query.request_id(payload) == 0


@given(st.sampled_from([*REQUESTS, *REPLIES]), st.data())
def test_a_damaged_message_is_a_value_or_a_named_error(message: Any, data: st.DataObject) -> None:
    raw = bytearray(query.encode(message))
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    payload = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for decode in (query.decode_request, query.decode_reply):
        with suppress(WireError):
            assert decode(payload) is not None
