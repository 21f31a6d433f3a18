"""`make demo`: the real daemon, engines' recorded event streams over real sockets, a few requests scored.

The streams were recorded from a vLLM and an SGLang server that serve the same small model, and from a vLLM server with
GLM-5.3-Flash's image processor; they are published here byte by byte as those engines sent them. One more worker is
configured but down, as happens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.engine.publisher import Publisher
from kvd.cli.tables import trust_text
from kvd.client import Client, ExactPlan, Plan, PrefixPlan, Unreachable, WorkerScore, WorkerSpec
from kvd.evaluate import MODEL, FromTokens, Recorded, read_requests
from kvd.ingest.recording import read_lines
from planner.plan import Planner
from planner.recorded import request_of
from protocols.plan import basis_of
from tests.kit.waiting import eventually

RECORDINGS = Path(__file__).parents[1] / "tests" / "fixtures" / "recordings"
CHECKPOINT = RECORDINGS.parent / "glm" / "models" / "tiny-glm5"
VISION = "glm-5.3-flash"
ENGINES = {
    "vllm-1": (MODEL, "vllm-text", 20),
    "sglang-1": (MODEL, "sgl-text", 15),
    "vllm-glm": (VISION, "vllm-mm5", 8),
}
"""Worker name: model, recording, and how many of its messages are published before the requests are scored."""

REQUESTS = [
    ("vllm-text", "chat-turn2", "second turn of a chat that both have seen"),
    ("vllm-text", "five-blocks-shared-2-repeat", "a prompt of vllm-1; sglang-1 has seen its beginning"),
    ("vllm-text", "salt-x-again", "the same text in another tenant's namespace (cache salt)"),
    ("sgl-text", "ten-pages-again", "a prompt of sglang-1; vllm-1 has seen its beginning"),
    ("vllm-text", "evict-0", "a prompt that nobody has seen"),
]


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{directory}/kvd.sock"
        daemon = subprocess.Popen([sys.executable, "-m", "kvd", "serve", "--endpoint", endpoint])
        try:
            with Client(endpoint) as kvd:
                eventually(lambda: _answers(kvd))
                _show(kvd, console)
        finally:
            daemon.terminate()
            daemon.wait(timeout=20)


def _answers(kvd: Client) -> bool:
    try:
        return bool(kvd.hello())
    except Unreachable:
        return False


def _show(kvd: Client, console: Console) -> None:
    publishers = {name: Publisher(replay=None) for name in ENGINES}
    try:
        for name, publisher in publishers.items():
            publisher.start()
            _publish(kvd, name, publisher)
        kvd.add_worker(WorkerSpec(name="vllm-2", model=MODEL, endpoint="tcp://127.0.0.1:1"))
        for tag, request, what in REQUESTS:
            plan = _plan(tag, request)
            console.print(_table(kvd, plan, f"\n[bold]{what}[/] ({request})"))
        console.print(
            "\n[bold]matched[/] is what the worker holds of the prompt now; an engine computes at least the last token"
            " again.\n[bold]trust[/] says how far to believe it: sglang-1's first message was sent before anybody"
            " listened,\nand vllm-2 never answered, so its zero means [bold]unknown[/], not [bold]cold[/].\n"
        )
        for plan, what in _image_plans():
            console.print(_table(kvd, plan, f"\n[bold]{what}[/]"))
    finally:
        for publisher in publishers.values():
            publisher.stop()


def _publish(kvd: Client, name: str, publisher: Publisher) -> None:
    """Publish the recording's first messages under their recorded sequence numbers, once the daemon listens."""
    model, tag, count = ENGINES[name]
    lines = read_lines(RECORDINGS / f"{tag}.jsonl")[:count]
    kvd.add_worker(WorkerSpec(name=name, model=model, endpoint=publisher.endpoint))
    eventually(lambda: kvd.streams(name)[0].state == "live")
    for line in lines:
        publisher.send(line.frames)
    last = int.from_bytes(lines[-1].frames[1], "big")
    eventually(lambda: kvd.streams(name)[0].last_seq == last)


def _recorded(tag: str, name: str) -> Recorded:
    return next(r for r in read_requests(RECORDINGS / f"{tag}.requests.jsonl") if r.name == name)


def _plan(tag: str, name: str) -> ExactPlan | PrefixPlan:
    return _planned(_recorded(tag, name))


def _image_plans() -> Iterator[tuple[Plan, str]]:
    """A request with two images, planned from messages and image bytes as a client would, and two variations of it."""
    planner = Planner.from_pretrained(CHECKPOINT, model=VISION)
    two, swapped = (_body("A-B"), _body("A-C-second-swapped"))
    broken = msgspec.msgpack.decode(msgspec.msgpack.encode(two))
    _images(broken)[1]["image_url"]["url"] = b"\x89PNG\r\n\x1a\n and then nothing"
    for body, what in (
        (two, "a GLM request with two images that vllm-glm has seen"),
        (swapped, "the same with the second image swapped: the first one's blocks still count"),
        (broken, "the same with a broken second image"),
    ):
        planned = planner.prepare(body)
        why = "" if planned.reason is None else f", {planned.reason.sentence.rstrip('.').lower()}"
        yield (
            msgspec.structs.replace(planned.plan, model=VISION),
            f"{what}[/] (basis {basis_of(planned.plan)}{why})[bold]",
        )


def _body(name: str) -> dict[str, Any]:
    body = request_of(msgspec.json.decode(_recorded("vllm-mm5", name).line))
    assert body is not None
    return body


def _images(body: dict[str, Any]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part["type"] == "image_url"]


def _planned(recorded: Recorded) -> ExactPlan | PrefixPlan:
    plan = FromTokens(["tiny"]).plan(recorded)
    assert plan is not None
    return plan


def _table(kvd: Client, plan: Plan, title: str) -> Table:
    answer = kvd.score(plan)
    table = Table(title=f"{title}: {answer.prompt_tokens} tokens", title_justify="left")
    table.add_column("worker", min_width=14)
    table.add_column("matched tokens", justify="right")
    table.add_column("trust", min_width=60)
    table.add_column("why zero", min_width=14)
    for score in answer.workers:
        table.add_row(*_cells(score))
    return table


def _cells(score: WorkerScore) -> tuple[str, str, str, str]:
    why = "" if score.zero_reason is None else score.zero_reason.replace("_", " ")
    return score.worker, f"[bold]{score.matched_tokens}[/]", trust_text(score.trust), why


if __name__ == "__main__":
    main()
