"""Requests that real engines served, planned from messages and pictures: the engines' own tokens must come out."""

from __future__ import annotations

import hashlib
import json
from array import array
from functools import cache
from typing import Any

import pytest
from glm_fixtures import MODELS, RECORDINGS

from planner.plan import Planned, Planner
from planner.recorded import picture, request_of
from protocols.engine import decode_pub
from protocols.events import Stored
from protocols.media import wide_pads
from protocols.plan import ExactPlan, PrefixPlan, TextPlan
from protocols.tokens import unpack_tokens

MODEL = {"vllm-mm": "tiny-glm46v", "vllm-mm5": "tiny-glm5", "sgl-mm": "tiny-glm46v"}


@cache
def planner_of(tag: str) -> Planner:
    return Planner.from_pretrained(MODELS / MODEL[tag], model="tiny")


def _lines(tag: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDINGS / f"{tag}.requests.jsonl").read_text().splitlines()]


def _planned(tag: str, recorded: dict[str, Any]) -> Planned:
    body = request_of(recorded)
    assert body is not None
    return planner_of(tag).prepare(body)


def _tokens(planned: Planned) -> list[int]:
    assert not isinstance(planned.plan, TextPlan)
    return list(unpack_tokens(planned.plan.tokens, wide=planned.plan.wide))


def _is_image_request(recorded: dict[str, Any]) -> bool:
    images = recorded.get("images") or [{}]
    video = "video" in recorded["name"]
    return request_of(recorded) is not None and "prompt_token_ids" in recorded and not video and None not in [
        image.get("identifier", "") for image in images
    ]  # fmt: skip


VLLM = [(tag, line) for tag in ("vllm-mm", "vllm-mm5") for line in _lines(tag) if _is_image_request(line)]


@pytest.mark.parametrize(("tag", "recorded"), VLLM, ids=[f"{tag}:{line['name']}" for tag, line in VLLM])
def test_vllm_requests(tag: str, recorded: dict[str, Any]) -> None:
    planned = _planned(tag, recorded)
    assert isinstance(planned.plan, ExactPlan), (planned.reason, planned.detail)
    assert _tokens(planned) == recorded["prompt_token_ids"]
    assert [[run.start, run.count] for run in planned.plan.media] == [run[1:] for run in recorded["placeholder_runs"]]
    known = [image["identifier"] for image in recorded.get("images") or []]
    assert [run.identifier for run in planned.plan.media] == known


def test_enough_was_recorded() -> None:
    assert len(VLLM) == 82
    assert sum(len(line.get("images") or []) for _, line in VLLM) == 92


@pytest.mark.parametrize("tag", ["vllm-mm", "vllm-mm5"])
def test_what_vllm_does_not_tell_stays_a_text_prefix(tag: str) -> None:
    reasons = {}
    for recorded in _lines(tag):
        if request_of(recorded) is not None and "prompt_token_ids" in recorded and not _is_image_request(recorded):
            planned = _planned(tag, recorded)
            assert isinstance(planned.plan, PrefixPlan)
            assert recorded["prompt_token_ids"][: len(_tokens(planned))] == _tokens(planned)
            reasons[recorded["name"]] = planned.plan.reason
    assert reasons == {
        "mm_processor_kwargs": "request_override", "media_io_kwargs": "request_override", "video-8-frames": "video",
        "video-8-frames-again": "video", "video-other-frames": "video", "video-and-image": "video",
    }  # fmt: skip


def test_the_tokenize_route_says_the_same() -> None:
    for tag in ("vllm-mm", "vllm-mm5"):
        recorded = next(line for line in _lines(tag) if line["name"] == "tokenize-image")
        assert _tokens(_planned(tag, recorded)) == recorded["response"]["tokens"]


SGLANG = [line for line in _lines("sgl-mm") if request_of(line) is not None]


@pytest.mark.parametrize("recorded", SGLANG, ids=[line["name"] for line in SGLANG])
def test_sglang_requests(recorded: dict[str, Any]) -> None:
    planned = _planned("sgl-mm", recorded)
    assert isinstance(planned.plan, ExactPlan), (planned.reason, planned.detail)
    assert len(_tokens(planned)) == recorded["prompt_tokens"]


def _announced(first: int, last: int) -> list[int]:
    """All tokens of the store events in lines ``[first, last)``."""
    lines = (RECORDINGS / "sgl-mm.jsonl").read_text().splitlines()[first:last]
    batches = [decode_pub([bytes.fromhex(frame) for frame in json.loads(line)["frames_hex"]]) for line in lines]
    stores = [event for batch in batches for event in batch.events if isinstance(event, Stored)]
    return [token for store in stores for token in store.tokens if isinstance(token, int)]


def test_the_pads_of_given_hashes_are_what_sglang_announced() -> None:
    recorded = next(line for line in SGLANG if line["name"] == "generate-mm_hashes")
    planned = _planned("sgl-mm", recorded)
    assert isinstance(planned.plan, ExactPlan)
    (run,) = planned.plan.media
    assert run.hash64 == 0xDEADBEEF
    expected = array("Q", _tokens(planned))
    cycle = wide_pads(run.hash64)
    expected[run.start : run.end] = array("Q", [cycle[i % 4] for i in range(run.count)])
    announced = _announced(*recorded["events_lines"])
    assert len(announced) >= 96
    # The leading text page part was in the cache already, so the announcement may begin behind it.
    whole = list(expected)
    assert announced in [whole[start : start + len(announced)] for start in range(0, 17, 16)]


def test_other_pixels_under_a_given_hash_are_the_same_plan() -> None:
    first, other = (line for line in SGLANG if line["name"].startswith("generate-mm_hashes"))
    assert first["request"]["image_data"] != other["request"]["image_data"]
    assert _planned("sgl-mm", first).plan == _planned("sgl-mm", other).plan


def test_pictures_are_made_by_the_recorded_rule() -> None:
    from io import BytesIO

    from PIL import Image

    for kind in ("PNG", "BMP"):
        data = picture({"w": 7, "h": 5, "seed": 3, "fmt": kind})
        with Image.open(BytesIO(data)) as image:
            x, y = 6, 4
            assert image.size == (7, 5)
            assert image.getpixel((x, y)) == ((7 * x + 93) % 256, (11 * y + 51) % 256, (x * y + 303) % 256)
    assert len({hashlib.sha256(picture({"w": 9, "h": 9, "seed": s, "fmt": "PNG"})).digest() for s in range(9)}) == 9


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ({"name": "reset", "request": None}, None),
        ({"name": "reset"}, None),
        ({"name": "flush", "request": {}}, None),
        ({"name": "abort", "request": {"rid": "x"}}, None),
        ({"request": {"model": "tiny", "prompt": [1]}}, {"model": "tiny", "prompt": [1]}),
        ({"request": {"model": "my-lora", "prompt": [1]}}, {"model": "tiny", "lora": "my-lora", "prompt": [1]}),
        ({"request": {"lora_path": "a", "input_ids": [1]}}, {"lora_path": "a", "input_ids": [1]}),
    ],
)
def test_recorded_lines_as_bodies(line: dict[str, Any], body: dict[str, Any] | None) -> None:
    assert request_of(line) == body
