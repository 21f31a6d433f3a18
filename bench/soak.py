"""Hours compressed: what churn and comings and goings leave behind in memory, sockets and the index.

Two soaks, each measured after every tenth of it: suffixes stored and removed under a
prefix that stays, and workers that join and leave on real sockets.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time

import msgspec

from kvd.client import WorkerSpec
from kvd.core.fleet import Fleet, totals
from kvd.daemon import runtime
from tests.kit.memory import Line
from tests.kit.publisher import chain_of, removed, stored

PROMPT = list(range(100, 116))
BASE = 3
"""The mark that later ones are held against: by then churn has gone beyond the 65,536 hashes a rank remembers."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """State after a part of a soak."""

    done: int
    resident_bytes: int
    blocks: int
    nodes: int
    descriptors: int


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """``growth``: resident bytes at the end over those after the fourth tenth, when every bound is reached."""

    name: str
    seconds: float
    growth: float
    marks: list[Mark]


def churn(rounds: int = 300_000) -> Soak:
    """Store a suffix of a live prefix and remove it again, ``rounds`` times."""
    line = Line(Fleet(max_blocks=10_000_000)).connect()
    line.publish(chain_of(PROMPT))
    began, marks = time.perf_counter(), []
    for tenth in range(10):
        for number in range(tenth * rounds // 10, (tenth + 1) * rounds // 10):
            hash_ = 1_000 + number
            line.publish(stored([hash_], [number % 50_000, number // 50_000, 1, 2], parent=4), removed([hash_]))
            line.sent.clear()
        marks.append(_mark((tenth + 1) * rounds // 10, line.fleet))
    return _soak("suffixes under a live prefix", began, marks)


def comings_and_goings(workers: int = 10_000) -> Soak:
    """Workers that join and leave, each with its sockets."""
    return asyncio.run(_come_and_go(workers))


async def _come_and_go(workers: int) -> Soak:
    began, marks = time.perf_counter(), []
    async with runtime() as parts:
        for tenth in range(10):
            for number in range(tenth * workers // 10, (tenth + 1) * workers // 10):
                spec = WorkerSpec(
                    name=f"w{number}", model="m", endpoint="tcp://127.0.0.1:1", replay="tcp://127.0.0.1:1"
                )
                parts.supervisor.add(spec)
                await asyncio.sleep(0)
                parts.supervisor.remove(spec.name)
            await asyncio.sleep(0.5)  # libzmq closes sockets in its own time
            marks.append(_mark((tenth + 1) * workers // 10, parts.fleet))
    return _soak("workers that join and leave", began, marks)


def _mark(done: int, fleet: Fleet) -> Mark:
    gc.collect()
    sizes = totals(fleet)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return Mark(
        done=done, resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"), blocks=sizes.blocks, nodes=sizes.nodes,
        descriptors=len(os.listdir("/proc/self/fd")),
    )  # fmt: skip


def _soak(name: str, began: float, marks: list[Mark]) -> Soak:
    growth = marks[-1].resident_bytes / marks[BASE].resident_bytes
    return Soak(name=name, seconds=round(time.perf_counter() - began, 1), growth=round(growth, 3), marks=marks)


def text(soaks: list[Soak]) -> str:
    """For people."""
    lines = []
    for soak in soaks:
        first, last = soak.marks[BASE], soak.marks[-1]
        lines.append(f"{soak.name}: {last.done:,} in {soak.seconds} s")
        lines.append(f"  resident {first.resident_bytes >> 20} → {last.resident_bytes >> 20} MiB ({soak.growth:.3f})")
        lines.append(f"  nodes {first.nodes} → {last.nodes}, descriptors {first.descriptors} → {last.descriptors}")
    return "\n".join(lines) + "\n"
