"""What people see: rich tables of answers, workers and streams."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.table import Table

from protocols.query import Answer, StreamInfo, Trust, WorkerScore

_COLOURS = {"exact": "green", "incomplete": "yellow", "stale": "yellow", "unknown": "red"}


def console() -> Console:
    """Standard output; as wide as it takes when nobody is looking."""
    return Console(width=None if sys.stdout.isatty() else 160, soft_wrap=False)


def print_json(value: object) -> None:
    """One JSON document."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def trust_text(trust: Trust) -> str:
    """How sure, since when not, and why."""
    parts: list[str] = [trust.state]
    if trust.state == "stale":
        parts.append(f"for {trust.stale_seconds:.0f} s")
    if trust.since_seq is not None:
        parts.append(f"since message {trust.since_seq}")
    if trust.missing:
        parts.append(f"{trust.missing} missing")
    text = ", ".join(parts) + (f" ({trust.reason.replace('_', ' ')})" if trust.reason else "")
    return f"[{_COLOURS[trust.state]}]{text}[/]"


def answer_table(answer: Answer, title: str = "") -> Table:
    """One row a worker-rank."""
    table = Table(
        title=title or f"{answer.model}: {answer.prompt_tokens} tokens, basis {answer.basis}", title_justify="left"
    )
    for name in ("worker", "rank", "matched tokens", "usable", "host+", "predicted", "trust", "why zero"):
        table.add_column(name, justify="right" if name not in ("worker", "trust", "why zero") else "left")
    for row in answer.workers:
        table.add_row(*_score_cells(row))
    if answer.zero_reason is not None:
        table.add_row("—", "", "", "", "", "", "", answer.zero_reason.replace("_", " "))
    return table


def _score_cells(row: WorkerScore) -> list[str]:
    farther = row.tier_tokens["external"] - row.matched_tokens
    predicted = f"{row.predicted_bytes} B" if row.predicted_bytes else str(row.predicted_tokens or "")
    why = "" if row.zero_reason is None else row.zero_reason.replace("_", " ")
    return [
        row.worker, str(row.rank), f"[bold]{row.matched_tokens}[/]", str(row.usable_tokens), str(farther or ""),
        predicted, trust_text(row.trust), why,
    ]  # fmt: skip


def stream_table(streams: Iterable[StreamInfo]) -> Table:
    """One row a stream."""
    table = Table()
    for name in (
        "worker",
        "rank",
        "model",
        "endpoint",
        "state",
        "trust",
        "seq",
        "life",
        "blocks",
        "block size",
        "scheme",
    ):
        table.add_column(name)
    for info in streams:
        sizes = ", ".join(map(str, info.block_sizes)) or "?"
        table.add_row(
            info.worker, str(info.rank), info.model, info.endpoint, info.state, trust_text(info.trust),
            "" if info.last_seq is None else str(info.last_seq), str(info.lifetime), str(info.blocks), sizes,
            info.scheme or "?",
        )  # fmt: skip
    return table
