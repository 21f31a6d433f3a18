"""Predicted against reported cached tokens on recordings of real engines: every exception is listed with its cause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvd.client import Answer, EmbeddedKvd, WorkerSpec
from kvd.core.fleet import Fleet
from kvd.core.score import score
from kvd.core.stream import Policy
from kvd.evaluate import FromTokens, evaluate, read_requests
from kvd.ingest.feed import Feed
from kvd.ingest.recording import RecordingTransport, read_lines, read_replays
from protocols.errors import WireError
from tests.kit.publisher import Publisher
from tests.kit.waiting import eventually_async

RECORDINGS = Path(__file__).parent / "fixtures" / "recordings"

LATE_CLEAR = "vLLM sends the clear of a reset with its next step, so the request after it is predicted from before"
TWIN = "sent while its twin was running: the engine shares blocks whose events had not been sent"
UNSEEN_KEY = "SGLang's extra_key is neither sent nor hashed in the default format, and not sent in the dynamo format"
VIDEO = "a video's item is not its placeholder runs: only the text before it is planned from recorded token ids"

CASES: dict[str, dict[str, str]] = {
    "vllm-text": {"after-reset": LATE_CLEAR, "concurrent-twins-1": TWIN, "n2": TWIN},
    "vllm-text-bytehash": {"after-reset": LATE_CLEAR, "concurrent-twins-1": TWIN, "n2": TWIN},
    "vllm-linear": {"after-reset": LATE_CLEAR, "concurrent-twins-1": TWIN, "n2": TWIN},
    "vllm-mm": {"A-after-reset_prefix": LATE_CLEAR, "video-8-frames-again": VIDEO},
    "vllm-mm5": {"A-after-reset_prefix": LATE_CLEAR, "video-8-frames-again": VIDEO},
    "sgl-text": {
        "gen-no-extra_key": UNSEEN_KEY, "salt+extra_key": UNSEEN_KEY, "no-salt": UNSEEN_KEY,
        "concurrent-twins-1": TWIN, "retract-1": TWIN, "retract-2": TWIN, "retract-3": TWIN,
    },
    "sgl-dynamo": {"gen-no-extra_key": UNSEEN_KEY, "salt+extra_key": UNSEEN_KEY, "no-salt": UNSEEN_KEY},
}  # fmt: skip


def files(tag: str) -> tuple[Path, Path]:
    return RECORDINGS / f"{tag}.jsonl", RECORDINGS / f"{tag}.requests.jsonl"


@pytest.mark.parametrize("tag", CASES)
def test_every_request_is_predicted_exactly_but_for_what_no_event_tells(tag: str) -> None:
    report = evaluate(*files(tag), FromTokens(["tiny"]))
    assert {error.name for error in report.errors} == set(CASES[tag])
    assert report.requests == report.exact + len(CASES[tag])
    assert report.requests > 20


@pytest.mark.parametrize("tag", CASES)
def test_the_command_prints_the_same(tag: str) -> None:
    events, requests = files(tag)
    command = [sys.executable, "-m", "kvd", "evaluate", "--json", "--events", str(events), "--requests", str(requests)]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert printed["requests"] == printed["exact"] + printed["over"] + printed["under"]
    assert {error["name"] for error in printed["errors"]} == set(CASES[tag])


def test_sgl_mm_has_no_token_ids_to_evaluate() -> None:
    """Its requests are planned from messages and images, which is the planner's work."""
    report = evaluate(*files("sgl-mm"), FromTokens(["tiny"]))
    assert (report.requests, report.skipped) == (0, 17)


def test_an_adapter_is_not_the_base_model() -> None:
    report = evaluate(*files("vllm-text"), FromTokens(["tiny", "my-lora"]))
    assert {error.name for error in report.errors} >= {"lora-again"}


def test_one_subscriber_across_a_restart_sees_two_lifetimes() -> None:
    fleet, transport = _played("vllm-text-across-restart")
    member = fleet.members["w", 0]
    assert member.stream.lifetime == 1
    assert member.stream.trust(0.0).state == "exact"
    assert member.stream.last == transport.last_seq
    assert fleet.check() == []


@pytest.mark.parametrize("tag", ["sgl-text", "vllm-text"])
def test_recorded_replays_fill_what_the_subscriber_missed(tag: str) -> None:
    late, _ = _played(tag, skip=20, replays=True)
    whole, _ = _played(tag, replays=True)
    assert late.members["w", 0].stream.trust(0.0).state == "exact"
    assert late.members["w", 0].info(0.0).blocks == whole.members["w", 0].info(0.0).blocks


def test_a_recording_begun_late_says_what_is_missing() -> None:
    fleet, _ = _played("sgl-text")
    trust = fleet.members["w", 0].stream.trust(0.0)
    assert trust.state == "exact"  # its last flush made it whole; before that:
    fleet, _ = _played("sgl-dynamo")
    trust = fleet.members["w", 0].stream.trust(0.0)
    assert (trust.state, trust.since_seq, trust.missing) == ("incomplete", 0, 1)


class _Transport(RecordingTransport):
    last_seq = -1


def _played(tag: str, *, skip: int = 0, until: int | None = None, replays: bool = False) -> tuple[Fleet, _Transport]:
    lines = read_lines(RECORDINGS / f"{tag}.jsonl")
    replies = read_replays(RECORDINGS / f"{tag}.replay.jsonl") if replays else []
    fleet = Fleet(max_blocks=1 << 40)
    replay = "inproc://replay" if replays else None
    (member,) = fleet.add(WorkerSpec(name="w", model="m", endpoint="inproc://x", replay=replay), 0.0, Policy())
    transport = _Transport(lines[skip:until], replies)
    transport.last_seq = int.from_bytes(lines[-1].frames[1], "big")
    Feed(member, transport, lambda: 0.0).open()
    transport.play()
    return fleet, transport


@pytest.mark.parametrize(("tag", "count"), [("vllm-text", 20), ("vllm-linear", 40), ("sgl-text", 15), ("vllm-mm5", 30)])
async def test_over_real_sockets_the_scores_are_those_of_the_recording(tag: str, count: int) -> None:
    lines = read_lines(RECORDINGS / f"{tag}.jsonl")[:count]
    planned = [FromTokens(["tiny"]).plan(request) for request in read_requests(files(tag)[1])]
    plans = [plan for plan in planned if plan is not None]
    fleet = _played(tag, until=count)[0]
    expected = [score(fleet, msgspec.structs.replace(plan, model="m"), None, 0.0) for plan in plans]
    with Publisher() as engine:
        engine.seq = first = int.from_bytes(lines[0].frames[1], "big")
        spec = WorkerSpec(name="w", model="recorded", endpoint=engine.endpoint, replay=engine.replay)
        async with EmbeddedKvd(workers=[spec]) as kvd:
            for line in lines:
                engine.publish_payload(line.frames[2])

            async def caught_up() -> bool:
                return (await kvd.streams())[0].last_seq == first + count - 1

            await eventually_async(caught_up)
            answers = await kvd.score_many(plans)
    assert [_tokens(answer) for answer in answers] == [_tokens(answer) for answer in expected]
    assert sum(matched > 0 for matched, _ in map(_tokens, answers)) > 5


def _tokens(answer: Answer) -> tuple[int, int]:
    return answer.workers[0].matched_tokens, answer.workers[0].usable_tokens


def test_a_broken_recording_is_named_with_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "x.jsonl"
    broken.write_text('{"t": 1.0, "endpoint": "e", "frames_hex": ["", "", ""]}\nnot json\n')
    with pytest.raises(WireError, match=r"x\.jsonl, line 2"):
        read_lines(broken)


@pytest.mark.parametrize("frame", ["zz", "0", "é"])
def test_a_frame_that_is_no_hex_is_named_with_its_line(tmp_path: Path, frame: str) -> None:
    broken = tmp_path / "x.jsonl"
    broken.write_text(json.dumps({"t": 1.0, "endpoint": "e", "frames_hex": ["", frame]}))
    with pytest.raises(WireError, match=r"x\.jsonl, line 1"):
        read_lines(broken)
    broken.write_text(json.dumps({"request_hex": "00", "replies_hex": [["", "", frame]]}))
    with pytest.raises(WireError, match=r"x\.jsonl, line 1"):
        read_replays(broken)
