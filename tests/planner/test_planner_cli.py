from __future__ import annotations

import json

import pytest
from glm_fixtures import GLM, MODELS, fixture_json, png

from planner.cli import describe_plan, image_tokens
from planner.errors import PlanningError
from planner.plan import Planner


def test_image_tokens_of_sizes() -> None:
    sizes = {f"{v['width']}x{v['height']}": v["tokens"] for v in fixture_json("vectors.json")["vectors"]}
    assert image_tokens(GLM, sizes) == sizes


def test_image_tokens_that_are_none() -> None:
    found = image_tokens(
        MODELS / "tiny-glm46v", ["280x280", "0x5", "10000x10", "wide", "10", "1x1x1", "-3x4", "640X480"]
    )
    assert found["280x280"] == 100
    assert isinstance(found["640X480"], int)
    for size in ("0x5", "10000x10", "wide", "10", "1x1x1", "-3x4"):
        assert isinstance(found[size], str)
    with pytest.raises(PlanningError):
        image_tokens(GLM / "models", ["1x1"])


def test_a_described_exact_plan(glm: Planner) -> None:
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": png(224, 224)}}]
    planned = glm.prepare({"messages": [{"role": "user", "content": content}], "cache_salt": "s"})
    described = describe_plan(planned, [(16, "media_keys"), (16, "pad62")])
    assert json.loads(json.dumps(described)) == described
    assert described["basis"] == "exact"
    assert described["reason"] is None
    assert described["images"][0]["tokens"] == 64
    assert [segment["kind"] for segment in described["segments"]] == ["text", "image"]
    first, second = (entry["keys"] for entry in described["keys"])
    assert len(first) == len(second) == described["prompt_tokens"] // 16
    assert first[0] == second[0]
    assert first[-1] != second[-1]


def test_described_plans_that_are_not_exact(glm: Planner) -> None:
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    described = describe_plan(glm.prepare({"messages": [{"role": "user", "content": content}]}), [(4, "pad30")])
    assert (described["basis"], described["reason"]) == ("prefix", "image_encoding")
    assert described["explanation"]
    assert described["images"] == []
    assert "engine_extras" not in described
    assert described["keys"][0]["keys"]
    described = describe_plan(glm.prepare(None), [(4, "pad30")])
    assert (described["basis"], described["text_bytes"]) == ("text", 0)
    assert "keys" not in described
