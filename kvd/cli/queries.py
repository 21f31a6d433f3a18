"""Commands that ask a running daemon."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from kvd.cli.asking import asked_specs, probed_worker
from kvd.cli.exits import NEGATIVE, USAGE, fail, told
from kvd.cli.options import EndpointOption, JsonOption, TimeoutOption, query_endpoint
from kvd.cli.planning import plan_request
from kvd.cli.tables import answer_table, console, print_json, stream_table
from kvd.client import Client, MediaRun, Plan, WorkerSpec, exact_plan

workers_app = typer.Typer(help="Workers the daemon watches.", invoke_without_command=True, no_args_is_help=False)

Mode = Literal["connect", "bind"]
Copies = Literal["counted", "single"]
SourceOption = Literal["zmq", "trtllm-http", "atom", "pool"]
SchemeName = Literal["media_keys", "pad30", "pad62", "dynamo"]


@contextmanager
def _daemon(endpoint: str | None, timeout: float) -> Iterator[Client]:
    with told(), Client(query_endpoint(endpoint), timeout=timeout) as client:
        yield client


def score(
    model: Annotated[str, typer.Option("--model", help="Model name as the workers were registered with it.")],
    tokens: Annotated[str | None, typer.Option(help="Token ids, separated by commas or spaces.")] = None,
    tokens_file: Annotated[Path | None, typer.Option(help="File of token ids, JSON or text; - for stdin.")] = None,
    request: Annotated[Path | None, typer.Option(help="Request body as JSON, to be planned; - for stdin.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint to plan the request with; default: the model's name.")
    ] = None,
    media: Annotated[
        list[str] | None, typer.Option(help="start:count:identifier of a media item; in prompt order.")
    ] = None,
    lora: Annotated[str | None, typer.Option(help="Adapter name.")] = None,
    salt: Annotated[str | None, typer.Option(help="Cache salt.")] = None,
    worker: Annotated[list[str] | None, typer.Option(help="Only these workers.")] = None,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """How much of a prompt each worker holds."""
    with _daemon(endpoint, timeout) as client:
        plan: Plan
        if request is not None:
            plan = plan_request(checkpoint or model, request, model)
        else:
            runs = [_media_run(text) for text in media or ()]
            plan = exact_plan(model, _token_ids(tokens, tokens_file), media=runs, lora_name=lora, cache_salt=salt)
        answer = client.score(plan, workers=worker)
    if as_json:
        print_json(answer)
    else:
        console().print(answer_table(answer))


def _token_ids(tokens: str | None, file: Path | None) -> list[int]:
    if (tokens is None) == (file is None):
        fail("give one of --tokens, --tokens-file and --request", USAGE)
    text = tokens if tokens is not None else sys.stdin.read() if str(file) == "-" else (file or Path()).read_text()
    try:
        if text.lstrip().startswith("["):
            return msgspec.json.decode(text, type=list[int])
        return [int(word) for word in text.replace(",", " ").split()]
    except (ValueError, msgspec.DecodeError) as error:
        fail(f"token ids: {error}", USAGE)


def _media_run(text: str) -> MediaRun:
    start, _, rest = text.partition(":")
    count, _, identifier = rest.partition(":")
    if not start.isdigit() or not count.isdigit() or not identifier:
        fail(f"--media {text!r}: expected start:count:identifier", USAGE)
    return MediaRun(int(start), int(count), identifier)


def streams(
    worker: Annotated[str | None, typer.Argument(help="Only this worker.")] = None,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Every engine stream: state, trust, position, what was learnt."""
    with _daemon(endpoint, timeout) as client:
        infos = client.streams(worker)
    if as_json:
        print_json(infos)
    else:
        console().print(stream_table(infos))


def check(
    worker: Annotated[str | None, typer.Option(help="What is wrong with this worker, instead of the index.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Send its engine one tiny prompt, and compare what it announces.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="The engine's http://host:port, for --probe.")] = None,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Assert every invariant of the live index, or say why a worker does not match; exit 1 if something is wrong."""
    if worker is None:
        if probe or url is not None:
            fail("--probe and --url need --worker", USAGE)
        _check_index(endpoint, timeout, as_json)
    else:
        _check_worker(worker, probe, url, endpoint, timeout, as_json)


def _check_index(endpoint: str | None, timeout: float, as_json: bool) -> None:
    with _daemon(endpoint, timeout) as client:
        checked = client.check()
    if as_json:
        print_json(checked)
    else:
        sizes = f"{checked.blocks} blocks, {checked.nodes} nodes"
        print(f"{'sound' if checked.ok else 'BROKEN'}: {sizes}, loop at most {checked.loop_lag_seconds:.3f} s late")
        for failure in checked.failures:
            print(f"  {failure}")
    if not checked.ok:
        raise typer.Exit(NEGATIVE)


def _check_worker(
    worker: str, probe: bool, url: str | None, endpoint: str | None, timeout: float, as_json: bool
) -> None:
    with _daemon(endpoint, timeout) as client:
        probed = probed_worker(client, worker, url) if probe else None
        diagnoses = client.diagnose(worker)
    if as_json:
        print_json({"diagnoses": diagnoses, "probe": probed})
    else:
        for diagnosis in diagnoses:
            said = [f"{finding.code}: {finding.says}" for finding in diagnosis.findings]
            for line in said or ["nothing is known to be wrong"]:
                print(f"{diagnosis.worker}/{diagnosis.rank}: {line}")
        if probed is not None:
            print(f"probe: {probed.code}: {probed.says}")
    found = [finding for diagnosis in diagnoses for finding in diagnosis.findings]
    if any(finding.never for finding in found) or (probed is not None and probed.never):
        raise typer.Exit(NEGATIVE)


@workers_app.callback()
def workers(
    context: typer.Context, endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False
) -> None:
    """List workers, or add and remove them."""
    if context.invoked_subcommand is not None:
        return
    _list(endpoint, timeout, as_json)


@workers_app.command("list")
def list_workers(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """List workers with their streams."""
    _list(endpoint, timeout, as_json)


def _list(endpoint: str | None, timeout: float, as_json: bool) -> None:
    with _daemon(endpoint, timeout) as client:
        infos = client.workers()
    if as_json:
        print_json(infos)
    else:
        console().print(stream_table([stream for info in infos for stream in info.streams]))


@workers_app.command("add")
def add_worker(
    name: Annotated[str, typer.Argument(help="A name of your choice, or the engine's http://host:port to be asked.")],
    events: Annotated[
        str | None, typer.Argument(help="Where its KV events are: tcp://host:port, ipc://path; with a source, a URL.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model it serves; asked if left out.")] = None,
    called: Annotated[str | None, typer.Option("--name", help="Its name, where the engine is asked.")] = None,
    source: Annotated[SourceOption, typer.Option(help="How its events come.")] = "zmq",
    replay: Annotated[str | None, typer.Option(help="Its replay endpoint.")] = None,
    bind: Annotated[bool, typer.Option("--bind", help="The engine connects; kvd binds.")] = False,
    rank: Annotated[int, typer.Option(help="First data-parallel rank.")] = 0,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks, on consecutive ports.")] = 1,
    block_size: Annotated[int | None, typer.Option(help="Tokens a block; learnt if left out.")] = None,
    scheme: Annotated[SchemeName | None, typer.Option(help="How media is told apart; learnt if left out.")] = None,
    topic: Annotated[str, typer.Option(help="Topic prefix to subscribe to.")] = "",
    copies: Annotated[Copies, typer.Option(help="single: the engine announces cache hits again.")] = "counted",
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Watch a worker: as described, or (given only its URL) as the engine itself says."""
    mode: Mode = "bind" if bind else "connect"
    given = {
        "replay": replay, "block_size": block_size, "scheme": scheme, "topic": topic or None,
        "mode": mode if bind else None, "copies": copies,
    }  # fmt: skip
    fixed = {key: value for key, value in given.items() if value is not None}
    with told():
        if events is None:
            specs = asked_specs(name, called, model, fixed, timeout)
        elif model is None:
            fail("give --model, or only the engine's http://host:port to have it asked", USAGE)
        else:
            fixed |= {"source": source, "rank": rank, "ranks": ranks}
            specs = [msgspec.convert({"name": name, "model": model, "endpoint": events} | fixed, WorkerSpec)]
    with _daemon(endpoint, timeout) as client:
        for spec in specs:
            client.add_worker(spec)
            print(f"added {spec.name}")


@workers_app.command("remove")
def remove_worker(
    name: Annotated[str, typer.Argument(help="Worker to forget.")],
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Stop watching a worker; what it held is forgotten."""
    with _daemon(endpoint, timeout) as client:
        client.remove_worker(name)
    print(f"removed {name}")
