"""``python -m bench NAME``: one measurement, as text or JSON. Ratios are of pairs measured alternately in one run."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from bench import planning, recovery
from bench.ratio import Row

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.callback()
def main() -> None:
    """Measurements of kvd."""


@app.command("planner")
def planner(as_json: JsonOption = False) -> None:
    """Planning 8,192 tokens with 4 images against tokenizing alone."""
    _tell(planning.measure(), as_json)


@app.command("recovery")
def recover(
    blocks: Annotated[int, typer.Option(min=1000, help="Blocks over all streams.")] = 1_000_000,
    streams: Annotated[int, typer.Option(min=1, help="Streams.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """From kill -9 to trusted, with and without a snapshot."""
    report = recovery.measure(blocks=blocks, streams=streams)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    sys.stdout.write(encoded if as_json else recovery.text(report))


def _tell(rows: list[Row], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode({"rows": rows}).decode() + "\n")
        return
    for row in rows:
        print(f"{row.name}: {row.ratio:.2f} ({row.low:.2f}–{row.high:.2f}), must {row.must}")


app()
