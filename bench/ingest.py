"""Events over real ZMQ until they are in the index: CPU time a block, kvd's daemon beside the peer's indexer.

Each side gets the same payloads from a publisher of its own, on TCP: as fast as they come (a replay or a burst), and at
a steady pace (an engine at work), where each message is a wake-up. The publisher waits for the subscription, and ends
are compared with what was sent: a side that lost something fails the measurement. No replay endpoint on either side.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bench.figure import Figure, figure
from bench.services import BLOCK, Indexer, Kvd, Service, settle

CHAIN = 1024
PACED_PER_SECOND = 1000
FORMS = ("vLLM map", "vLLM array", "SGLang map")
_encode = msgspec.msgpack.encode


class Order(msgspec.Struct, frozen=True):
    """What is sent: ``blocks`` in all, ``per`` blocks an event, one event a message."""

    form: str
    per: int
    blocks: int
    paced: bool = False

    @property
    def name(self) -> str:
        return f"ingest {'paced, ' if self.paced else ''}{self.form}, {self.per} blocks an event"


def stored(form: str, hashes: list[int], parent: int | None, tokens: list[int]) -> Any:
    """A store as these engines' current releases send it (vLLM 0.24–0.33; 0.22–0.23 for arrays; SGLang 0.5.20–)."""
    if form == "vLLM array":
        nothing = [None] * len(hashes)
        return ["BlockStored", hashes, parent, tokens, BLOCK, None, "GPU", None, nothing, 0, "full_attention", None]
    event = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": BLOCK, "lora_id": None, "medium": "GPU",
    }  # fmt: skip
    if form == "vLLM map":
        event |= {
            "lora_name": None, "extra_keys": [None] * len(hashes), "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }  # fmt: skip
    return event


def chains(blocks: int) -> Iterator[tuple[list[int], list[int]]]:
    """Engine hashes and tokens of chains, ``blocks`` in all."""
    rng = random.Random(blocks)
    for _ in range(blocks // CHAIN):
        yield [rng.getrandbits(64) for _ in range(CHAIN)], [rng.randrange(150_000) for _ in range(CHAIN * BLOCK)]


def payloads(order: Order) -> list[bytes]:
    out = []
    for hashes, tokens in chains(order.blocks):
        for first in range(0, CHAIN, order.per):
            parent = hashes[first - 1] if first else None
            some = tokens[first * BLOCK : (first + order.per) * BLOCK]
            event = stored(order.form, hashes[first : first + order.per], parent, some)
            out.append(_encode([time.time(), [event], None]))
    return out


class Publisher:
    """Sends prepared payloads once its one subscriber is there."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def subscribed(self) -> None:
        if not self._socket.poll(30_000):
            raise TimeoutError("nobody subscribes")
        self._socket.recv()

    def send(self, messages: Sequence[bytes], per_second: float | None = None) -> None:
        began = time.perf_counter()
        for seq, payload in enumerate(messages):
            if per_second is not None:
                time.sleep(max(0.0, began + seq / per_second - time.perf_counter()))
            self._socket.send_multipart([b"", seq.to_bytes(8, "big"), payload], copy=True)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def cost(service: Service, worker: int, order: Order, messages: Sequence[bytes]) -> float:
    """CPU seconds a block, from the first message until everything is in the index."""
    with closing(Publisher()) as publisher:
        service.watch(worker, publisher.endpoint)
        publisher.subscribed()
        began = settle(service)
        publisher.send(messages, PACED_PER_SECOND if order.paced else None)
        spent = settle(service) - began
        *_, (_, tokens) = chains(order.blocks)
        held = service.scores(tokens)
        assert held == {worker: CHAIN * BLOCK}, f"{service.name} knows {held} of the last chain"
        service.forget(worker)
        settle(service)
    return spent / order.blocks


def orders(quick: bool) -> list[Order]:
    sizes = {1: 24, 8: 48, 64: 128}
    fast = [Order(form, per, blocks * CHAIN) for form in FORMS for per, blocks in sizes.items()]
    paced = [Order("vLLM map", per, per * 1024, paced=True) for per in sizes]
    return [order for order in fast if order.form == "vLLM map" or not quick] + paced


def measure(python: Path, *, quick: bool = False, pairs: int = 5) -> list[Figure]:
    """Peer's cost over kvd's."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides: list[Service] = [
            stack.enter_context(closing(Kvd(Path(directory)))), stack.enter_context(closing(Indexer(python))),
        ]  # fmt: skip
        rows, worker = [], 0
        for order in orders(quick):
            messages, both = payloads(order), []
            for _ in range(3 if quick else pairs):
                worker += 1
                own, other = (cost(side, worker, order, messages) * 1e6 for side in sides)
                both.append((own, other))
            rows.append(figure(order.name, both, "µs CPU a block", must=1, aim=3))
        return rows
