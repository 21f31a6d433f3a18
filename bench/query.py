"""One question over the wire: how much of 8,192 tokens does each worker hold?

kvd's query socket (packed tokens, ZMQ) beside the peer's ``/query`` (JSON, HTTP), both over what an engine's publisher
announced to each. The requests' bytes are prepared beforehand and the replies are read whole but not decoded, so that
neither client is measured; replies are compared once before. One at a time gives the latency, several in flight (16
connections to the peer, 16 pipelined requests to kvd) the CPU time of a busy service.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from bench.figure import Figure, figure
from bench.ingest import Publisher, stored
from bench.services import BLOCK, Exchange, Indexer, Kvd, Service, settle

TOKENS = 8192
IN_FLIGHT = 16


class Holding:
    """Workers' publishers: the first worker holds the whole prompt, the others an eighth of it."""

    def __init__(self, workers: int, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.held = {n: len(tokens) if n == 0 else len(tokens) // 8 for n in range(workers)}
        self._payloads = {}
        for count in set(self.held.values()):
            hashes = [(7 << 40) + i for i in range(count // BLOCK)]
            event = stored("vLLM map", hashes, None, self.tokens[:count])
            self._payloads[count] = [msgspec.msgpack.encode([time.time(), [event], None])]

    def teach(self, service: Service, stack: ExitStack) -> None:
        """Let the service hear of all of it."""
        for worker, count in self.held.items():
            publisher = stack.enter_context(closing(Publisher()))
            service.watch(worker, publisher.endpoint)
            publisher.subscribed()
            publisher.send(self._payloads[count])
        settle(service)
        assert service.scores(self.tokens) == self.held, service.name


def latency(exchange: Exchange, request: bytes, rounds: int) -> float:
    """Seconds from request to reply, one at a time: the median."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        exchange.send(request)
        exchange.receive()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def busy(exchanges: Sequence[Exchange], request: bytes, rounds: int) -> None:
    """Keep one request in flight on each exchange."""
    for exchange in exchanges:
        exchange.send(request)
    for n in range(rounds):
        exchange = exchanges[n % len(exchanges)]
        exchange.receive()
        exchange.send(request)
    for exchange in exchanges:
        exchange.receive()


def measured(service: Service, tokens: Sequence[int], rounds: int) -> dict[str, float]:
    """Seconds: ``p50`` and CPU with one request at a time, CPU with several in flight."""
    request = service.request(tokens)
    with ExitStack() as stack:
        exchanges = [stack.enter_context(closing(service.connect())) for _ in range(IN_FLIGHT)]
        if service.name == "kvd":  # pipelined over one connection
            exchanges = exchanges[:1] * IN_FLIGHT
        busy(exchanges, request, 50)
        before = settle(service)
        p50 = latency(exchanges[0], request, rounds)
        alone = settle(service)
        busy(exchanges, request, rounds)
        after = settle(service)
    return {"p50": p50, "one": (alone - before) / rounds, "busy": (after - alone) / (rounds + IN_FLIGHT)}


def measure(python: Path, *, quick: bool = False, pairs: int = 5) -> list[Figure]:
    """Peer's cost over kvd's."""
    rng, rows = random.Random(3), []
    for workers in (8, 64):
        holding = Holding(workers, [rng.randrange(150_000) for _ in range(TOKENS)])
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            sides: list[Service] = [
                stack.enter_context(closing(Kvd(Path(directory)))), stack.enter_context(closing(Indexer(python))),
            ]  # fmt: skip
            for side in sides:
                holding.teach(side, stack)
            both = [
                tuple(measured(side, holding.tokens, 300 if quick else 1000) for side in sides)
                for _ in range(3 if quick else pairs)
            ]
        name = f"query {TOKENS:,} tokens, {workers} workers"
        for key, what, unit in (
            ("p50", "p50, one at a time", "µs"), ("one", "CPU, one at a time", "µs CPU a request"),
            ("busy", f"CPU, {IN_FLIGHT} in flight", "µs CPU a request"),
        ):  # fmt: skip
            rows.append(
                figure(f"{name}: {what}", [(a[key] * 1e6, b[key] * 1e6) for a, b in both], unit, must=5, aim=10)
            )
    return rows
