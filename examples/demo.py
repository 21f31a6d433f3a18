"""`make demo`: the real daemon, two engines' recorded event streams over real sockets, a few requests scored.

The streams were recorded from a vLLM and an SGLang server that serve the same small model; they are published here
byte by byte as those engines sent them. A third worker is configured but down, as happens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvd.cli.tables import trust_text
from kvd.client import Client, ExactPlan, PrefixPlan, Unreachable, WorkerScore, WorkerSpec
from kvd.evaluate import MODEL, Planning, Recorded, read_requests
from kvd.ingest.recording import read_lines
from tests.kit.publisher import Publisher
from tests.kit.waiting import eventually

RECORDINGS = Path(__file__).parents[1] / "tests" / "fixtures" / "recordings"
ENGINES = {"vllm-1": ("vllm-text", 20), "sglang-1": ("sgl-text", 15)}
"""Worker name: recording, and how many of its messages are published before the requests are scored."""

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
    finally:
        for publisher in publishers.values():
            publisher.stop()


def _publish(kvd: Client, name: str, publisher: Publisher) -> None:
    """Publish the recording's first messages under their recorded sequence numbers, once the daemon listens."""
    tag, count = ENGINES[name]
    lines = read_lines(RECORDINGS / f"{tag}.jsonl")[:count]
    kvd.add_worker(WorkerSpec(name=name, model=MODEL, endpoint=publisher.endpoint))
    eventually(lambda: kvd.streams(name)[0].state == "live")
    for line in lines:
        publisher.send(line.frames)
    last = int.from_bytes(lines[-1].frames[1], "big")
    eventually(lambda: kvd.streams(name)[0].last_seq == last)


def _plan(tag: str, name: str) -> ExactPlan | PrefixPlan:
    recorded = next(r for r in read_requests(RECORDINGS / f"{tag}.requests.jsonl") if r.name == name)
    return _planned(recorded)


def _planned(recorded: Recorded) -> ExactPlan | PrefixPlan:
    plan = Planning(["tiny"]).plan(recorded)
    assert plan is not None
    return plan


def _table(kvd: Client, plan: ExactPlan | PrefixPlan, title: str) -> Table:
    answer = kvd.score(plan)
    table = Table(title=f"{title}: {answer.prompt_tokens} tokens", title_justify="left")
    for column in ("worker", "matched tokens", "trust", "why zero"):
        table.add_column(column, justify="right" if column == "matched tokens" else "left", min_width=14)
    for score in answer.workers:
        table.add_row(*_cells(score))
    return table


def _cells(score: WorkerScore) -> tuple[str, str, str, str]:
    why = "" if score.zero_reason is None else score.zero_reason.replace("_", " ")
    return score.worker, f"[bold]{score.matched_tokens}[/]", trust_text(score.trust), why


if __name__ == "__main__":
    main()
