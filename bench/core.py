"""The index in process: the compiled core against the reference and, where it is installed, the peer's RadixTree.

Every ratio is of two sides measured in turn in one run. The peer runs in an environment of its own
(``--peer PYTHON``). For ``store`` it is given content hashes made beforehand, where kvd hashes the tokens of each event
itself; in the rows "hashing too" its own hashing of the same tokens is added to its side. A match ends with every
worker's figures in the form its side hands on: the peer's dict of scores, kvd's packed rows (five figures a worker).
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from bench import figure
from bench.core_peer import CHAIN, chain, p50, resident
from bench.environment import Machine, machine
from kvd.core import IMPLEMENTATIONS, Index
from kvd.core.tree import KeySequence
from protocols.events import Removed, Stored
from protocols.keys import plan_keys, token_keys
from protocols.plan import exact_plan

SIZE = 16
TOKENS = [random.Random(1).randrange(150_000) for _ in range(8192 * SIZE)]


class Figure(figure.Figure, frozen=True, kw_only=True):
    """A row, and against whom; a bound is asked for only against the peer."""

    other_side: str


class Report(msgspec.Struct, frozen=True):
    """All rows of a run."""

    machine: Machine
    rows: list[Figure]


# --- sides -----------------------------------------------------------------------------------------------------------


class Own:
    """An implementation of the index in this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._index: Index = IMPLEMENTATIONS[name](max_blocks=1 << 30)
        self._ranks: list[int] = []

    def ask(self, kind: str, **order: Any) -> dict[str, float]:
        answer: dict[str, float] = getattr(self, kind)(**order)
        return answer

    def churn(self, workers: int, chains: int, per: int, shared: bool) -> dict[str, float]:
        index = IMPLEMENTATIONS[self.name](max_blocks=1 << 30)
        ranks = [index.add_rank() for _ in range(workers)]
        stored = removed = 0.0
        for worker, rank in enumerate(ranks):
            for number in range(chains):
                stored += _apply(index, rank, _stores(worker, number, shared, per))
        for worker, rank in enumerate(ranks):
            for number in range(chains):
                hashes = chain(worker, number, shared)[0][::-1]
                events = [Removed(hashes=tuple(hashes[i : i + per]), medium="GPU") for i in range(0, CHAIN, per)]
                removed += _apply(index, rank, events)
        blocks = workers * chains * CHAIN
        return {"store": stored / blocks, "remove": removed / blocks, "hashed": stored / blocks}

    def fill(self, blocks: int, reaches: list[int]) -> dict[str, float]:
        self._index = IMPLEMENTATIONS[self.name](max_blocks=1 << 30)
        self._ranks = [self._index.add_rank() for _ in reaches]
        hashes = [random.Random(2).getrandbits(63) + i for i in range(blocks)]
        for rank, reach in zip(self._ranks, reaches, strict=True):
            self._index.apply(rank, _store(hashes[:reach], TOKENS[: reach * SIZE], None))
        self._keys = token_keys(TOKENS[: blocks * SIZE], SIZE)
        self._plan = exact_plan("m", TOKENS[: blocks * SIZE])
        return {"reached": len(self._index.match(self._keys, self._ranks))}

    def match(self, rounds: int) -> dict[str, float]:
        return {"p50": p50(lambda: self._answer(self._keys), rounds)}

    def match_tokens(self, rounds: int) -> dict[str, float]:
        plan = self._plan
        return {"p50": p50(lambda: self._answer(plan_keys(plan, SIZE, None)), rounds)}

    def _answer(self, keys: KeySequence) -> object:
        """All workers' figures, in the form that the side hands on: packed, or a dict."""
        found = self._index.match(keys, self._ranks)
        return found if isinstance(found, dict) else found.packed()  # type: ignore[attr-defined]  # the native one's

    def hash(self, tokens: int, size: int, rounds: int) -> dict[str, float]:
        plan = exact_plan("m", TOKENS[:tokens])
        if self.name == "reference":
            return {"p50": p50(lambda: list(plan_keys(plan, size, None)), rounds)}
        from kvd.core._native import packed_keys

        return {"p50": p50(lambda: packed_keys(plan_keys(plan, size, None)), rounds)}

    def memory(self, workers: int, chains: int, shared: bool) -> dict[str, float]:
        """In a fresh process, so that what others left behind is not counted."""
        program = f"import bench.core; print(bench.core.grown({self.name!r}, {workers}, {chains}, {shared}))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return {"bytes": float(done.stdout)}


class Peer:
    """``ai-dynamo-runtime`` under its own Python."""

    name = "peer"

    def __init__(self, python: Path) -> None:
        self._python = python
        self._start()

    def _start(self) -> None:
        program = Path(__file__).with_name("core_peer.py")
        self._process = subprocess.Popen(
            [self._python, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, kind: str, **order: Any) -> dict[str, float]:
        if kind == "memory":
            self.close()
            self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"kind": kind} | order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(30)


def _store(hashes: list[int], tokens: list[int], parent: int | None) -> Stored:
    return Stored(hashes=tuple(hashes), parent=parent, tokens=tokens, block_size=SIZE, dense=True, medium="GPU")


def _stores(worker: int, number: int, shared: bool, per: int) -> list[Stored]:
    hashes, _ = chain(worker, number, shared)
    rng = random.Random(hashes[0])
    tokens = [rng.randrange(150_000) for _ in range(CHAIN * SIZE)]
    return [
        _store(hashes[i : i + per], tokens[i * SIZE : (i + per) * SIZE], hashes[i - 1] if i else None)
        for i in range(0, CHAIN, per)
    ]


def _apply(index: Index, rank: int, events: list[Any]) -> float:
    began = time.perf_counter()
    for event in events:
        index.apply(rank, event)
    return time.perf_counter() - began


def grown(name: str, workers: int, chains: int, shared: bool) -> float:
    """Resident bytes a (worker, block) that an index of this kind grows by."""
    index = IMPLEMENTATIONS[name](max_blocks=1 << 30)
    _apply(index, index.add_rank(), _stores(-1, 0, False, 64))
    gc.collect()
    before = resident()
    for worker in range(workers):
        rank = index.add_rank()
        for number in range(chains):
            _apply(index, rank, _stores(worker, number, shared, 64))
    gc.collect()
    return (resident() - before) / (workers * chains * CHAIN)


# --- rows ------------------------------------------------------------------------------------------------------------


def measure(*, peer: Path | None, quick: bool = False, reference: bool = True) -> Report:
    """All rows."""
    native = Own("native")
    others: list[Any] = [Own("reference")] if reference else []
    if peer is not None:
        others.append(Peer(peer))
    gc.freeze()
    rows = [row for other in others for row in _rows(native, other, quick)]
    return Report(machine(), rows)


def _rows(native: Own, other: Any, quick: bool) -> list[Figure]:
    pairs, rows = (5 if quick else 9), []
    for shared in (False, True):
        for per in (1, 8, 64):
            order = {"workers": 4, "chains": 4, "per": per, "shared": shared}
            both = [(native.ask("churn", **order), other.ask("churn", **order)) for _ in range(pairs)]
            for what in ("store", "hashed", "remove"):
                if what == "hashed" and other.name != "peer":
                    continue
                title = "store, hashing too" if what == "hashed" else what
                name = f"{title} {'shared' if shared else 'unique'}, {per} blocks an event"
                rows.append(_figure(name, other, [(a[what] * 1e6, b[what] * 1e6) for a, b in both], "µs/block", 3, 10))
    for blocks in (1024, 8192):
        for workers in (8, 64, 512):
            rows += _match_rows(native, other, blocks, workers, pairs)
    for size in (16, 64):
        asked = {"tokens": 8192, "size": size, "rounds": 30}
        both_ = [
            (native.ask("hash", **asked)["p50"] * 1e6, other.ask("hash", **asked)["p50"] * 1e6) for _ in range(pairs)
        ]
        rows.append(_figure(f"hash 8,192 tokens, block {size}", other, both_, "µs", 5, 20))
    for name, order in {
        "bytes, all different": {"workers": 8, "chains": 32 if quick else 128, "shared": False},
        "bytes, 64 workers share": {"workers": 64, "chains": 4 if quick else 16, "shared": True},
    }.items():
        measured = [(native.ask("memory", **order)["bytes"], other.ask("memory", **order)["bytes"])]
        rows.append(_figure(name, other, measured, "bytes", 1, 2))
    return rows


def _match_rows(native: Own, other: Any, blocks: int, workers: int, pairs: int) -> list[Figure]:
    rows = []
    scenes = {"typical": [blocks] + [blocks // 8] * (workers - 1)}
    scenes["stair"] = [max(1, blocks * (i + 1) // workers) for i in range(workers)]
    rounds = 7 if other.name == "reference" else 25
    for scene, reaches in scenes.items():
        for side in (native, other):
            assert side.ask("fill", blocks=blocks, reaches=reaches)["reached"] == workers
        name = f"match {blocks:,} blocks, {workers} workers, {scene}"
        orders: list[tuple[str, dict[str, int]]] = [("match", {"rounds": rounds})]
        if scene == "typical":
            orders.append(("match_tokens", {"rounds": rounds}))
        for kind, order in orders:
            both = [
                (native.ask(kind, **order)["p50"] * 1e6, other.ask(kind, **order)["p50"] * 1e6) for _ in range(pairs)
            ]
            rows.append(_figure(name + (", from tokens" if "tokens" in kind else ""), other, both, "µs", 5, 50))
    return rows


def _figure(name: str, other: Any, both: Sequence[tuple[float, float]], unit: str, must: float, aim: float) -> Figure:
    asked = {"must": must, "aim": aim} if other.name == "peer" else {}
    row = figure.figure(name, both, unit, **asked)
    return Figure(other_side=other.name, **msgspec.structs.asdict(row))


def growth(blocks: int = 8192, workers: int = 512) -> list[tuple[int, float]]:
    """(distinct reaches, p50 in µs) of a match: it grows with the reaches, not with blocks × workers."""
    native, points = Own("native"), []
    for distinct in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        reaches = [max(1, blocks * (i % distinct + 1) // distinct) for i in range(workers)]
        native.ask("fill", blocks=blocks, reaches=reaches)
        points.append((distinct, native.ask("match", rounds=50)["p50"] * 1e6))
    assert all(before[0] < after[0] for before, after in pairwise(points))
    return points


def text(report: Report) -> str:
    """The rows as lines."""
    where = report.machine
    head = f"{where.cpu}, {where.cores} cores, Python {where.python}, load {where.load[0]:.1f}\n"
    return head + "".join(f"{row.other_side:>9}  {figure.text([row])}" for row in report.rows)
