"""``kvd plan``, ``kvd score --request``, ``kvd evaluate --model``; and the rest without the planner's packages."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from kvd.client import WorkerSpec
from kvd.evaluate import FromMessages, evaluate
from tests.kit.daemon import Daemon
from tests.kit.publisher import Publisher, chain_of, stored
from tests.test_recordings import CASES, files

FIXTURES = Path(__file__).parents[1] / "fixtures"
GLM = FIXTURES / "glm"
PIXELS = "SGLang derives this image's identity from its pixels: the text before it is what can be planned"
FROM_MESSAGES: dict[str, tuple[str, dict[str, str]]] = {
    "vllm-mm": ("tiny-glm46v", CASES["vllm-mm"]),
    "vllm-mm5": ("tiny-glm5", CASES["vllm-mm5"]),
    "sgl-mm": (
        "tiny-glm46v",
        dict.fromkeys(
            ["img-A-again", "img-A-longer-question", "A-B", "A-C-second-swapped", "A-A-twice", "A-as-BMP-same-pixels",
             "generate-no-mm_hashes"], PIXELS,
        ),
    ),
}  # fmt: skip


def kvd(*arguments: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kvd", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=os.environ | env)


def picture(width: int, height: int, colour: str = "red") -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def body(*urls: str) -> bytes:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "look at this "}, *images, {"type": "text", "text": "and tell"}]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


@pytest.mark.parametrize("tag", FROM_MESSAGES)
def test_recorded_requests_are_predicted_from_messages_and_images(tag: str) -> None:
    model, exceptions = FROM_MESSAGES[tag]
    report = evaluate(*files(tag), FromMessages(str(GLM / "models" / model), ["tiny"]))
    assert {error.name for error in report.errors} == set(exceptions)
    assert report.requests == report.exact + len(exceptions)
    assert report.skipped == 0
    assert report.over == (0 if tag == "sgl-mm" else 1)


def test_the_command_evaluates_from_a_checkpoint() -> None:
    events, requests = files("sgl-mm")
    at = ("--events", str(events), "--requests", str(requests), "--model", str(GLM / "models" / "tiny-glm46v"))
    printed = json.loads(kvd("evaluate", *at, "--json").stdout)
    assert (printed["requests"], printed["exact"], printed["over"]) == (17, 10, 0)
    missing = kvd("evaluate", *at[:4], "--model", "/no/such")
    assert (missing.returncode, b"/no/such" in missing.stderr) == (1, True)


def test_image_tokens_is_an_object_from_size_to_count_or_error() -> None:
    told = kvd("plan", "image-tokens", "--model", str(GLM), "--json", "640x480", "224x224", "0x9", "huge")
    counts = json.loads(told.stdout)
    assert (told.returncode, counts["640x480"], counts["224x224"]) == (0, 414, 64)
    assert isinstance(counts["0x9"], str)
    assert isinstance(counts["huge"], str)
    refused = kvd("plan", "image-tokens", "--model", "/no/such", "--json", "640x480")
    assert refused.returncode == 1
    assert "/no/such" in json.loads(refused.stdout)["640x480"]


def test_plan_prints_counts_segments_and_keys() -> None:
    asked = ("plan", "--model", str(GLM), "--request", "-", "--keys", "16:media_keys", "--keys", "16:pad62")
    told = kvd(*asked, "--json", stdin=body(picture(224, 224), picture(128, 64)))
    plan = json.loads(told.stdout)
    assert (plan["basis"], plan["counts"], plan["reason"]) == ("exact", [64, 18], None)
    assert [image["tokens"] for image in plan["images"]] == [64, 18]
    wide, beside = (kind["keys"] for kind in reversed(plan["keys"]))
    assert len(beside) == len(wide) == plan["prompt_tokens"] // 16
    assert beside != wide
    assert b"basis exact" in kvd(*asked, stdin=body(picture(224, 224))).stdout


def test_a_broken_image_leaves_the_text_before_it_and_a_reason() -> None:
    broken = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\nno").decode()
    told = kvd("plan", "--model", str(GLM), "--request", "-", "--json", stdin=body(picture(224, 224), broken))
    plan = json.loads(told.stdout)
    assert (told.returncode, plan["basis"], plan["counts"], plan["images"]) == (0, "prefix", [], [])
    assert plan["reason"]
    assert plan["explanation"]
    assert "engine_extras" not in plan


def test_usage_errors_are_told() -> None:
    assert kvd("plan").returncode == 2
    assert kvd("plan", "--model", str(GLM), "--request", "-", stdin=b"not json").returncode == 2
    assert kvd("plan", "--model", str(GLM), "--request", "-", "--keys", "x", stdin=b"{}").returncode == 2
    assert kvd("plan", "image-tokens", "1x1").returncode == 2


def test_a_request_is_planned_and_scored(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_bytes(body())
    described = json.loads(kvd("plan", "--model", str(GLM), "--request", str(request), "--json").stdout)
    tokens = described["prompt_tokens"]
    with Daemon(tmp_path) as daemon, Publisher() as engine:
        daemon.client.add_worker(WorkerSpec(name="w", model="glm", endpoint=engine.endpoint, replay=engine.replay))
        engine.publish(chain_of(_tokens(GLM, request)))
        daemon.trusted("w", 0)
        at = ("--endpoint", daemon.endpoint, "--checkpoint", str(GLM), "--request", str(request), "--json")
        answer = json.loads(kvd("score", "--model", "glm", *at).stdout)
        assert answer["workers"][0]["matched_tokens"] == tokens // 4 * 4
        engine.publish(stored([99], [1, 2, 3, 4]))


def _tokens(checkpoint: Path, request: Path) -> list[int]:
    from planner.plan import Planner
    from protocols.tokens import unpack_tokens

    plan = Planner.from_pretrained(checkpoint).plan(json.loads(request.read_bytes()))
    return list(unpack_tokens(plan.tokens, wide=plan.wide))  # type: ignore[union-attr]


def test_everything_but_planning_works_without_the_planners_packages(tmp_path: Path) -> None:
    for package in ("transformers", "tokenizers", "PIL", "huggingface_hub", "jinja2"):
        raising = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')\n"
        (tmp_path / f"{package}.py").write_text(raising)
    without = {"PYTHONPATH": str(tmp_path)}
    planned = kvd("plan", "--model", str(GLM), "--request", "-", stdin=body(), **without)
    assert planned.returncode == 1
    assert b"pip install kvd[planner]" in planned.stderr
    counted = kvd("plan", "image-tokens", "--model", str(GLM), "1x1", **without)
    assert (counted.returncode, b"pip install kvd[planner]" in counted.stderr) == (1, True)
    decoded = kvd("decode", stdin=b'{"channel": "pub", "frames": []}', **without)
    assert json.loads(decoded.stdout)["error"] == "frame_count"
    events, requests = files("vllm-mm")
    assert kvd("evaluate", "--events", str(events), "--requests", str(requests), **without).returncode == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path))
        with Daemon(tmp_path) as daemon:
            assert daemon.client.workers() == []
