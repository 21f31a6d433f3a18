"""What the command line asks an engine itself, over HTTP."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from kvd.client import Client, WorkerSpec
from protocols.query import Finding


def asked_specs(
    url: str, name: str | None, model: str | None, given: dict[str, Any], seconds: float
) -> list[WorkerSpec]:
    """Worker entries as the engine describes itself; what it did not tell goes to stderr. Raises EngineError."""
    from kvd.ingest.advertised import worker_specs  # an HTTP client takes 0.1 s to load, and few commands need one
    from kvd.ingest.discovery import discover, engine_url

    learnt = asyncio.run(discover(url, model=model, seconds=seconds))
    specs = worker_specs(learnt, name or engine_url(url)[0].partition("://")[2], **given)
    for spec in specs:
        _say(f"{learnt.engine} {learnt.version or 'of unknown version'}: {_described(spec)}")
    for field, sentence in learnt.unknown.items():
        if field not in given:
            _say(f"not learnt: {sentence}")
    return specs


def _described(spec: WorkerSpec) -> str:
    ranks = f"rank {spec.rank}" if spec.ranks == 1 else f"ranks {spec.rank} to {spec.rank + spec.ranks - 1}"
    parts = [f"model {spec.model}", f"{ranks} at {spec.endpoint}"]
    optional = {"replay": spec.replay, "block size": spec.block_size, "scheme": spec.scheme, "topic": spec.topic}
    return ", ".join(parts + [f"{key} {value}" for key, value in optional.items() if value])


def _say(line: str) -> None:
    print(f"kvd: {line}", file=sys.stderr)


def probed_worker(client: Client, worker: str, url: str | None) -> Finding:
    """Send the worker's engine one tiny prompt; what came of it. Raises EngineError."""
    from kvd.cli.probe import probe  # see above

    return probe(client, worker, url)
