"""``python -m bench NAME``: one measurement, as text or JSON. Ratios are of pairs measured alternately in one run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench import core, figure, ingest, planning, query, recovery, soak
from bench.environment import machine, peer_python
from bench.ratio import Row

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
PeerOption = Annotated[Path | None, typer.Option(help="A Python that has the peer; else one is made in the cache.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer pairs and rows.")]


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


@app.command("core")
def index_core(
    peer: Annotated[Path | None, typer.Option(help="A Python that has ai-dynamo-runtime.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer pairs, less memory.")] = False,
    reference: Annotated[bool, typer.Option(help="Measure the reference, too.")] = True,
    growth: Annotated[bool, typer.Option("--growth", help="Only: a match's cost by distinct reaches.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The compiled index against the reference and the peer's tree, in process."""
    if growth:
        for reaches, microseconds in core.growth():
            print(f"{reaches:>4} distinct reaches: {microseconds:.1f} µs")
        return
    report = core.measure(peer=peer, quick=quick, reference=reference)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    sys.stdout.write(encoded if as_json else core.text(report))


@app.command("ingest")
def ingesting(peer: PeerOption = None, quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Events over ZMQ, CPU time a block, beside the peer's indexer service."""
    _compare(ingest.measure, peer, quick, as_json)


@app.command("query")
def querying(peer: PeerOption = None, quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """8,192 tokens asked over the wire, latency and CPU time a request, beside the peer's indexer service."""
    _compare(query.measure, peer, quick, as_json)


@app.command("soak")
def soaks(as_json: JsonOption = False) -> None:
    """What churn, and workers that come and go, leave behind."""
    done = [soak.churn(), soak.comings_and_goings()]
    encoded = msgspec.json.format(msgspec.json.encode({"soaks": done}), indent=2).decode() + "\n"
    sys.stdout.write(encoded if as_json else soak.text(done))


def _compare(measure: Callable[..., list[figure.Figure]], peer: Path | None, quick: bool, as_json: bool) -> None:
    where = machine()
    rows = measure(peer_python(peer), quick=quick)
    if as_json:
        encoded = msgspec.json.encode({"machine": where, "rows": rows})
        sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    else:
        sys.stdout.write(figure.text(rows))


def _tell(rows: list[Row], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode({"rows": rows}).decode() + "\n")
        return
    for row in rows:
        print(f"{row.name}: {row.ratio:.2f} ({row.low:.2f}–{row.high:.2f}), must {row.must}")


app()
