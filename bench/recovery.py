"""How long kvd is blind after ``kill -9``, with and without a snapshot, at a fleet's size.

Real daemon, real sockets: one process publishes all streams, each with a replay endpoint. Without a snapshot every
stream's history is replayed; with one, only what came after it.
"""

from __future__ import annotations

import platform
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.engine.publisher import Publisher
from kvd.client import exact_plan
from tests.kit.daemon import Daemon
from tests.kit.publisher import stored
from tests.kit.waiting import eventually

BLOCK = 16
PER_MESSAGE = 64


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds_to_answer``: the query socket answers; ``seconds_to_trusted``: every stream is exact again;
    ``blind_answers``: of one score every 50 ms meanwhile, how many were not exact for every worker."""

    snapshot: bool
    seconds_to_answer: float
    seconds_to_trusted: float
    blind_answers: int
    answers: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    python: str
    implementation: str
    blocks: int
    streams: int
    snapshot_bytes: int
    snapshot_seconds: float
    rows: list[Recovery]


def measure(*, blocks: int, streams: int) -> Report:
    """Fill a fleet, kill the daemon, and watch it come back both ways."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        settings = {"snapshot.path": str(directory / "kvd.snapshot"), "snapshot.interval": 3600,
                    "ingest.replay_timeout": 30, "ingest.replay_total": 600, "ingest.probe_interval": 60}  # fmt: skip
        publishers = [stack.enter_context(Publisher(buffer=1_000_000)) for _ in range(streams)]
        per_stream = blocks // streams
        for publisher in publishers:
            _fill(publisher, per_stream)
        daemon = stack.enter_context(Daemon(directory, config=_workers(publishers), **settings))
        _until_trusted(daemon, publishers)
        began = time.perf_counter()
        daemon.client.close()
        daemon.stop(signal.SIGTERM)
        written = time.perf_counter() - began
        size = (directory / "kvd.snapshot").stat().st_size
        rows = [_restart(daemon, publishers, snapshot=True)]
        daemon.client.close()
        daemon.stop(signal.SIGKILL)
        (directory / "kvd.snapshot").unlink()
        rows.append(_restart(daemon, publishers, snapshot=False))
    return Report(
        machine=platform.platform(), python=platform.python_version(), implementation="reference", blocks=blocks,
        streams=streams, snapshot_bytes=size, snapshot_seconds=round(written, 2), rows=rows,
    )  # fmt: skip


def _fill(publisher: Publisher, blocks: int) -> None:
    for first in range(0, blocks, PER_MESSAGE):
        hashes = range(first + 1, min(first + PER_MESSAGE, blocks) + 1)
        tokens = [token % 150_000 for token in range(first * BLOCK, first * BLOCK + len(hashes) * BLOCK)]
        publisher.publish(stored(hashes, tokens, parent=first or None, block_size=BLOCK))


def _workers(publishers: list[Publisher]) -> str:
    entries = [
        f'[[workers]]\nname = "w{n}"\nmodel = "m"\nendpoint = "{p.endpoint}"\nreplay = "{p.replay}"\n'
        for n, p in enumerate(publishers)
    ]
    return "\n".join(entries)


def _until_trusted(daemon: Daemon, publishers: list[Publisher]) -> None:
    lasts = {f"w{n}": publisher.seq - 1 for n, publisher in enumerate(publishers)}
    eventually(
        lambda: all(s.trust.state == "exact" and s.last_seq == lasts[s.worker] for s in daemon.client.streams()),
        timeout=900,
    )


def _restart(daemon: Daemon, publishers: list[Publisher], *, snapshot: bool) -> Recovery:
    began = time.perf_counter()
    daemon.start(timeout=900)
    answering = time.perf_counter() - began
    plan = exact_plan("m", list(range(8 * BLOCK)))
    answers = blind = 0
    while True:
        answer = daemon.client.score(plan, timeout=60)
        answers += 1
        if all(score.trust.state == "exact" for score in answer.workers):
            break
        blind += 1
        time.sleep(0.05)
    trusted = time.perf_counter() - began
    _until_trusted(daemon, publishers)
    return Recovery(
        snapshot=snapshot, seconds_to_answer=round(answering, 2), seconds_to_trusted=round(trusted, 2),
        blind_answers=blind, answers=answers,
    )  # fmt: skip


def text(report: Report) -> str:
    """For people."""
    lines = [f"{report.blocks:,} blocks on {report.streams} streams ({report.implementation}, {report.machine})"]
    lines.append(f"snapshot: {report.snapshot_bytes:,} bytes, stopped and written in {report.snapshot_seconds} s")
    for row in report.rows:
        how = "with" if row.snapshot else "without"
        times = f"answers after {row.seconds_to_answer} s, trusted after {row.seconds_to_trusted} s"
        lines.append(f"{how} snapshot: {times}, "
                     f"{row.blind_answers} of {row.answers} answers blind")  # fmt: skip
    return "\n".join(lines) + "\n"
