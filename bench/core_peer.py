"""The peer's side of ``bench.core``: runs under a Python that has ``ai-dynamo-runtime``, told on stdin what to measure.

One JSON line in, one out. Only the standard library and ``dynamo`` are needed here.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["DYN_LOG"] = "off"

CHAIN = 1024


def resident() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def chain(worker: int, number: int, shared: bool) -> tuple[list[int], list[int]]:
    """Engine hashes, and content hashes, of one chain."""
    rng = random.Random(f"{0 if shared else worker} {number}")
    return [rng.getrandbits(63) for _ in range(CHAIN)], [rng.getrandbits(63) for _ in range(CHAIN)]


def stores(hashes: list[int], contents: list[int], per: int) -> Iterator[bytes]:
    for first in range(0, len(hashes), per):
        blocks = [
            {"block_hash": name, "tokens_hash": content}
            for name, content in zip(hashes[first : first + per], contents[first : first + per], strict=True)
        ]
        data = {"stored": {"parent_hash": hashes[first - 1] if first else None, "blocks": blocks}}
        yield json.dumps({"event_id": first, "data": data, "dp_rank": 0}).encode()


def removals(hashes: list[int], per: int) -> Iterator[bytes]:
    for first in range(0, len(hashes), per):
        data = {"removed": {"block_hashes": hashes[first : first + per]}}
        yield json.dumps({"event_id": first, "data": data, "dp_rank": 0}).encode()


def apply(tree: Any, worker: int, events: list[bytes]) -> float:
    began = time.perf_counter()
    for event in events:
        tree.apply_event(worker, event)
    return time.perf_counter() - began


def churn(tree: Any, workers: int, chains: int, per: int, shared: bool) -> dict[str, float]:
    """Seconds a block to store, then to remove from the tail, everything."""
    stored = removed = 0.0
    for worker in range(workers):
        for number in range(chains):
            hashes, contents = chain(worker, number, shared)
            stored += apply(tree, worker, list(stores(hashes, contents, per)))
    for worker in range(workers):
        for number in range(chains):
            hashes, _ = chain(worker, number, shared)
            removed += apply(tree, worker, list(removals(hashes[::-1], per)))
    blocks = workers * chains * CHAIN
    return {"store": stored / blocks, "remove": removed / blocks}


def p50(run: Callable[[], object], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return sorted(times)[rounds // 2]


class Tree:
    """What is asked of the peer; one method an order."""

    def __init__(self) -> None:
        from dynamo.llm import RadixTree, compute_block_hash_for_seq

        self._new = RadixTree
        self._hash = compute_block_hash_for_seq
        self._tokens = [random.Random(1).randrange(150_000) for _ in range(8192 * 16)]
        self._held: Any = None
        self._contents: list[int] = []

    def churn(self, workers: int, chains: int, per: int, shared: bool) -> dict[str, float]:
        measured = churn(self._new(), workers, chains, per, shared)
        events = [self._tokens[i : i + per * 16] for i in range(0, CHAIN * 16, per * 16)]
        began = time.perf_counter()
        for tokens in events:
            self._hash(tokens, 16)
        return measured | {"hashed": measured["store"] + (time.perf_counter() - began) / CHAIN}

    def fill(self, blocks: int, reaches: list[int]) -> dict[str, float]:
        """Every worker holds the prompt as far as told."""
        self._held = self._new()
        hashes = [random.Random(2).getrandbits(63) + i for i in range(blocks)]
        self._contents = self._hash(self._tokens[: blocks * 16], 16)
        for worker, reach in enumerate(reaches):
            for event in stores(hashes[:reach], self._contents[:reach], 256):
                self._held.apply_event(worker, event)
        return {"reached": len(self._held.find_matches(self._contents).scores)}

    def match(self, rounds: int) -> dict[str, float]:
        return {"p50": p50(lambda: self._held.find_matches(self._contents).scores, rounds)}

    def match_tokens(self, rounds: int) -> dict[str, float]:
        asked = self._tokens[: len(self._contents) * 16]
        return {"p50": p50(lambda: self._held.find_matches(self._hash(asked, 16)).scores, rounds)}

    def hash(self, tokens: int, size: int, rounds: int) -> dict[str, float]:
        asked = self._tokens[:tokens]
        return {"p50": p50(lambda: self._hash(asked, size), rounds)}

    def memory(self, workers: int, chains: int, shared: bool) -> dict[str, float]:
        tree, before = self._new(), resident()
        for worker in range(workers):
            for number in range(chains):
                for event in stores(*chain(worker, number, shared), 64):
                    tree.apply_event(worker, event)
        return {"bytes": (resident() - before) / (workers * chains * CHAIN)}


def main() -> None:
    tree = Tree()
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, float] = getattr(tree, order.pop("kind"))(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
