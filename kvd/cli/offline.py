"""Commands that need no daemon: explain captured messages, measure predictions on a recording."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from kvd.cli.exits import NEGATIVE, told
from kvd.cli.options import JsonOption
from kvd.cli.tables import console, print_json
from kvd.evaluate import FromMessages, FromTokens, Report
from kvd.evaluate import evaluate as run_evaluation
from protocols.describe import describe


class _Captured(msgspec.Struct):
    channel: str
    frames: list[str]


_captured = msgspec.json.Decoder(_Captured)


def decode() -> None:
    """Explain captured messages: one JSON object {"channel", "frames": [hex, …]} a line on stdin, one a line out."""
    for line in sys.stdin.buffer:
        if line.strip():
            print_json(_described(line))
            sys.stdout.flush()


def _described(line: bytes) -> dict[str, object]:
    try:
        captured = _captured.decode(line)
        frames = [bytes.fromhex(frame) for frame in captured.frames]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return {"ok": False, "error": "line", "detail": str(error)}
    return describe(captured.channel, frames)


def evaluate(
    events: Annotated[Path, typer.Option("--events", help="TAG.jsonl: the recorded stream.")],
    requests: Annotated[Path, typer.Option("--requests", help="TAG.requests.jsonl: requests with cached tokens.")],
    base_model: Annotated[
        list[str] | None, typer.Option(help="Names that mean the base model; any other is an adapter. Default: tiny.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Checkpoint: plan from messages and images, not from token ids.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if a prediction differs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Predicted against reported cached tokens, request by request, on a recording."""
    with told():
        bases = base_model or ["tiny"]
        planning = FromTokens(bases) if model is None else FromMessages(model, bases)
        report = run_evaluation(events, requests, planning)
    if as_json:
        print_json(report)
    else:
        _print(report, events.stem)
    if strict and report.errors:
        raise typer.Exit(NEGATIVE)


def _print(report: Report, tag: str) -> None:
    out = console()
    out.print(
        f"{tag}: {report.requests} requests, [green]{report.exact} exact[/], {report.over} over, {report.under} under, "
        f"{report.skipped} without token ids"
    )
    if report.errors:
        table = Table("request", "prompt tokens", "predicted", "engine cached")
        for error in report.errors:
            table.add_row(error.name, str(error.prompt_tokens), str(error.predicted), str(error.cached))
        out.print(table)
