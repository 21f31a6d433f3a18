"""``kvd plan``: what a request becomes, and how many tokens an image stands for. Needs the planner's packages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import typer
from rich.table import Table

from kvd.cli.exits import NEGATIVE, USAGE, fail, told
from kvd.cli.options import JsonOption
from kvd.cli.tables import console, print_json
from planner.cli import describe_plan, image_tokens
from planner.errors import MissingExtra, PlanningError
from planner.plan import Planned, Planner
from protocols.media import Scheme
from protocols.plan import Plan

app = typer.Typer(help="Plan a request without sending it anywhere.", invoke_without_command=True)

ModelOption = Annotated[str | None, typer.Option("--model", help="Checkpoint directory, or a cached repo@revision.")]
RequestOption = Annotated[Path | None, typer.Option("--request", help="Request body as JSON; - for stdin.")]


@app.callback()
def plan(
    context: typer.Context,
    model: ModelOption = None,
    request: RequestOption = None,
    keys: Annotated[list[str] | None, typer.Option(help="block_size:scheme whose block keys to print.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Segments, image counts, basis, reason and block keys of a request."""
    if context.invoked_subcommand is not None:
        return
    if model is None or request is None:
        fail("give --model and --request", USAGE)
    with told():
        planned = Planner.from_pretrained(model).prepare(read_body(request))
    described = describe_plan(planned, [_key_kind(text) for text in keys or ()])
    if as_json:
        print_json(described)
    else:
        _print(described)


def plan_request(checkpoint: str, request: Path, model: str) -> Plan:
    """The plan of a request for a model as its workers were registered."""
    planned: Planned = Planner.from_pretrained(checkpoint, model=model).prepare(read_body(request))
    return msgspec.structs.replace(planned.plan, model=model)


def read_body(request: Path) -> Any:
    """A request body from a file or stdin; exits with usage for what is not JSON."""
    try:
        raw = sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()
        return msgspec.json.decode(raw)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        fail(f"{request}: {error}", USAGE)


def _key_kind(text: str) -> tuple[int, Scheme]:
    size, _, scheme = text.partition(":")
    if not size.isdigit() or int(size) < 1 or scheme not in get_args(Scheme):
        fail(f"--keys {text!r}: expected block_size:scheme, the scheme one of {', '.join(get_args(Scheme))}", USAGE)
    return int(size), scheme  # type: ignore[return-value]


def _print(described: dict[str, Any]) -> None:
    out = console()
    head = f"basis [bold]{described['basis']}[/], {described['prompt_tokens']} tokens"
    out.print(head + (f": {described['explanation']} ({described['detail']})" if described["reason"] else ""))
    if described["images"]:
        table = Table("image", "starts at", "tokens", "size", "identifier")
        for number, image in enumerate(described["images"], start=1):
            size = f"{image['width']}x{image['height']}"
            table.add_row(str(number), str(image["start"]), str(image["tokens"]), size, image["identifier"] or "")
        out.print(table)
    for kind in described.get("keys", ()):
        out.print(f"{kind['block_size']}:{kind['scheme']}  {' '.join(kind['keys'])}")


@app.command("image-tokens")
def tokens_of_images(
    sizes: Annotated[list[str], typer.Argument(help="WIDTHxHEIGHT, several.")],
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """How many tokens images of these sizes stand for; exit 1 if none of them has a count."""
    if model is None:
        fail("give --model", USAGE)
    try:
        counts: dict[str, int | str] = image_tokens(model, sizes)
    except MissingExtra as error:
        fail(str(error), NEGATIVE)
    except PlanningError as error:  # the checkpoint itself has no counts
        counts = dict.fromkeys(sizes, str(error))
    if as_json:
        print_json(counts)
    else:
        for size, count in counts.items():
            print(f"{size}\t{count}")
    if not any(isinstance(count, int) for count in counts.values()):
        raise typer.Exit(NEGATIVE)
