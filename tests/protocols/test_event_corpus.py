"""Every captured or hand-made message of the corpus says what is expected of it, and survives being damaged."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.describe import describe
from protocols.engine import decode_pub, decode_replay
from protocols.errors import WireError
from protocols.events import Bad

CORPUS = json.loads((Path(__file__).parents[1] / "fixtures/events/corpus.json").read_text())["cases"]
MESSAGES = [case for case in CORPUS if case["channel"] in ("pub", "replay-reply")]


def frames_of(case: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in case["frames"]]


def lacking(expected: Any, said: Any, path: str = "") -> list[str]:
    """What of ``expected`` is not said: maps may say more, lists may not."""
    if isinstance(expected, dict) and isinstance(said, dict):
        absent = [f"{path}.{key} is absent" for key in expected if key not in said]
        present = [(key, value) for key, value in expected.items() if key in said]
        return absent + [fault for key, value in present for fault in lacking(value, said[key], f"{path}.{key}")]
    if isinstance(expected, list) and isinstance(said, list) and len(expected) == len(said):
        pairs = enumerate(zip(expected, said, strict=True))
        return [fault for i, (e, s) in pairs for fault in lacking(e, s, f"{path}[{i}]")]
    return [] if expected == said and type(expected) is type(said) else [f"{path} is {said!r}, expected {expected!r}"]


def same_fields(expected: dict[str, Any], said: dict[str, Any]) -> list[str]:
    more = [
        set(s) - set(e) - {"detail"} for e, s in zip(expected.get("events", ()), said.get("events", ()), strict=True)
    ]
    return [f"event {i} says {keys} beyond" for i, keys in enumerate(more) if keys]


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case["name"])
def test_a_message_is_described_as_expected(case: dict[str, Any]) -> None:
    said = describe(case["channel"], frames_of(case))
    assert lacking(case["expect"], said) == []
    if case["channel"] == "pub" and case["expect"]["ok"]:
        assert same_fields(case["expect"], said) == []


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case["name"])
def test_a_description_is_json(case: dict[str, Any]) -> None:
    said = describe(case["channel"], frames_of(case))
    assert json.loads(msgspec.json.encode(said)).keys() == said.keys()


def test_an_unknown_channel_is_named() -> None:
    assert describe("carrier-pigeon", [b""])["error"] == "channel"


# --- damage ----------------------------------------------------------------------------------------------------------


def damaged(payload: bytes, rng: random.Random, other: bytes) -> bytes:
    """Flipped, cut, or continued with another message's bytes."""
    kind, at = rng.randrange(5), rng.randrange(len(payload) + 1)
    if kind == 0:
        return payload[:at]
    if kind == 1:
        return payload[:at] + other[rng.randrange(len(other) + 1) :]
    if kind == 2:
        return payload[:at] + payload[at + rng.randrange(1, 9) :]
    out = bytearray(payload)
    for _ in range(1 if kind == 3 else rng.randrange(1, 12)):
        if out:
            out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


@pytest.mark.parametrize("case", MESSAGES, ids=lambda case: case["name"])
def test_a_damaged_message_is_a_value_or_a_named_error(case: dict[str, Any]) -> None:
    rng = random.Random(case["name"])
    decode = decode_pub if case["channel"] == "pub" else decode_replay
    frames = frames_of(case)
    for _ in range(60):
        other = bytes.fromhex(rng.choice(MESSAGES)["frames"][-1])
        damage = [*frames[:-1], damaged(frames[-1], rng, other)]
        with suppress(WireError):
            assert decode(damage) is not None
        msgspec.json.encode(describe(case["channel"], damage))


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case["name"])
def test_a_message_on_the_wrong_channel_is_a_named_error(case: dict[str, Any]) -> None:
    for channel in ("pub", "replay-reply", "replay-request", "json", "dynamo-zmq", "lmcache-push"):
        assert isinstance(describe(channel, frames_of(case))["ok"], bool)


# --- one bad event ---------------------------------------------------------------------------------------------------

PAYLOADS = [frames_of(case)[2] for case in MESSAGES if case["expect"].get("events") and case["channel"] == "pub"]
_slices = msgspec.msgpack.Decoder(list[msgspec.Raw])


def raw_events() -> list[bytes]:
    """Every event of the corpus on its own."""
    found: list[bytes] = []
    for payload in PAYLOADS:
        if 0x90 <= payload[0] <= 0x9F:
            found += [bytes(raw) for raw in _slices.decode(_slices.decode(payload)[1])]
    return found


EVENTS = raw_events()
GARBAGE = st.one_of(
    st.binary(min_size=1, max_size=12).filter(lambda raw: is_value(raw)),
    st.sampled_from(
        [b"\xc0", b"\x90", b"\x80", b"\xa3abc", b"\x91\x91\xc0", b"\x92\xacBlockRemoved\x05", b"\xd4\x05\x00"]
    ),
    st.just(b"\x91" * 900 + b"\xc0"),
    st.just(b"\x92\xabBlockStored\xa2\xff\xfe"),
)


def is_value(raw: bytes) -> bool:
    """One whole msgpack value: a batch can be split around it, whatever is in it."""
    try:
        msgspec.msgpack.decode(raw, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def batch_of(events: list[bytes]) -> list[bytes]:
    return [b"", bytes(8), b"\x93\x01\xdc" + len(events).to_bytes(2, "big") + b"".join(events) + b"\xc0"]


@given(st.lists(st.sampled_from(EVENTS), max_size=5), st.integers(0, 5), GARBAGE)
def test_one_bad_event_never_costs_its_neighbours(events: list[bytes], at: int, garbage: bytes) -> None:
    at = min(at, len(events))
    alone = decode_pub(batch_of(events)).events
    among = decode_pub(batch_of([*events[:at], garbage, *events[at:]])).events
    assert among[:at] + among[at + 1 :] == alone


@pytest.mark.parametrize("case", [c for c in MESSAGES if c["expect"].get("events")], ids=lambda case: case["name"])
def test_bad_events_are_named(case: dict[str, Any]) -> None:
    frames = frames_of(case)
    batch = decode_pub(frames) if case["channel"] == "pub" else decode_replay(frames)
    for event, expected in zip(batch.events, case["expect"]["events"], strict=True):  # type: ignore[union-attr]
        assert isinstance(event, Bad) == (expected["kind"] == "bad")
