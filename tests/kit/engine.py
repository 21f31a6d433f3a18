"""The simulated engine's cache, driven by hand: no time, no HTTP, and its truth kept per message.

``engine.at(life, seq)`` is what was held when that message left. Compare a subscriber with the truth at the last
message it was given, never with the present.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from enum import Enum

from bench.engine import cache, wire
from bench.engine.cache import Held, Truth
from bench.engine.content import Block, Chain, Naming, Space, Tokens, sglang_naming, vllm_naming
from bench.engine.pool import BlockPool
from bench.engine.radix import RadixCache
from bench.engine.wire import RELEASES, Wire

__all__ = ["NOTHING", "Dialect", "Engine", "Held", "Sent", "Space", "Tokens", "Truth"]

NOTHING = Held(frozenset(), None, frozenset())


class Dialect(Enum):
    """Who speaks: the shape of events and of hashes on the wire."""

    VLLM_ARRAY = "vllm-0.22.0"
    VLLM_MAP = "vllm-0.32.0"
    VLLM_BYTES = "vllm-0.32.0-bytes"
    SGLANG = "sglang-0.5.23"


class Sent(bytes):
    """A payload that knows whose it is, through any transport that passes the object on."""

    life: int
    seq: int

    @classmethod
    def of(cls, payload: bytes, life: int, seq: int) -> Sent:
        sent = cls(payload)
        sent.life, sent.seq = life, seq
        return sent

    def altered(self, payload: bytes) -> Sent:
        """Other bytes under the same identity."""
        return Sent.of(payload, self.life, self.seq)

    @property
    def frames(self) -> list[bytes]:
        return [b"kv-events", self.seq.to_bytes(8, "big"), self]


class Engine:
    """One engine process after another (``life``), on one address, with one counter each.

    ``serve`` and ``finish`` move blocks and queue events; ``step`` sends what is queued as one message.
    """

    def __init__(
        self, dialect: Dialect, *, blocks: int = 48, block_size: int = 4, host: int = 0, hybrid: bool = False,
        buffer: int = 10_000, rank: int = 0, same_hashes: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        self.dialect = dialect
        self.release = RELEASES[dialect.value]
        self.sglang = self.release.engine == "sglang"
        self.block_size = block_size
        self.hybrid = hybrid and not self.sglang
        self.rank = rank
        self.life = 0
        self.ts = 1_700_000_000.0
        self._random = random.Random(seed)
        self._blocks = blocks
        self._host_blocks = host
        self._buffer = buffer
        self._same_hashes = same_hashes
        self._history: dict[tuple[int, int], Held] = {}
        self._known: dict[tuple[Tokens, Space, int], list[Block]] = {}
        self._begin()

    def _begin(self) -> None:
        self.seq = 0
        self.running: list[cache.Sequence] = []
        self.kept: deque[Sent] = deque(maxlen=self._buffer)
        self._cache = self._empty_cache()

    def _empty_cache(self) -> cache.Cache:
        events, naming = Wire(self.release, self.block_size), self._naming(self.life)
        if self.sglang:
            return RadixCache(events, naming, pages=self._blocks, host_pages=self._host_blocks)
        return BlockPool(
            events, naming, blocks=self._blocks, recurrent=int(self.hybrid), host_blocks=self._host_blocks
        )  # fmt: skip

    def _naming(self, life: int) -> Naming:
        """Hashes are the same in every process, or its own, as the engine was started."""
        process = {} if self._same_hashes else {"seed": str(life)}
        return sglang_naming(**process) if self.sglang else vllm_naming(**process)

    # --- truth -------------------------------------------------------------------------------------------------------

    def contents(
        self, prompt: Sequence[int], space: Space = Space(), life: int | None = None  # noqa: B008
    ) -> list[Block]:  # fmt: skip
        """The prompt's whole blocks, as that process names them. Equal digest, equal content."""
        key = (tuple(prompt), space, self.life if life is None else life)
        if key not in self._known:
            if len(self._known) > 2_000:
                self._known.clear()
            self._known[key] = Chain(prompt, self.block_size, self._naming(key[2]), space).whole()
        return self._known[key]

    def held(self) -> Held:
        """What is held now, announced or not."""
        return self._cache.held()

    def at(self, life: int, seq: int) -> Held:
        """What was held when message ``seq`` of process ``life`` left (-1: before its first)."""
        return NOTHING if seq < 0 else self._history[life, seq]

    def truth_at(self, life: int, seq: int, prompt: Sequence[int], space: Space = Space()) -> Truth:  # noqa: B008
        """How far the prompt was held when that message left."""
        return self.at(life, seq).of([block.digest for block in self.contents(prompt, space, life)])

    # --- requests ----------------------------------------------------------------------------------------------------

    def serve(self, prompt: Sequence[int], space: Space = Space()) -> int | None:  # noqa: B008
        """Admit a request and compute it in chunks; the blocks it found, or None if the pool is too small for it."""
        seq = cache.Sequence(self._cache.chain(prompt, space), len(prompt))
        chunk = self._cache.admit(seq, self._tokens())
        if chunk is None:
            return None
        while True:
            seq.computed += chunk
            self._cache.settle(seq)
            if seq.computed == len(prompt):
                self.running.append(seq)
                return seq.cached // self.block_size
            chunk = self._cache.chunk(seq, min(self._tokens(), len(prompt) - seq.computed))
            if not self._cache.extend(seq, chunk):
                self._cache.release(seq, finished=False)
                return None

    def _tokens(self) -> int:
        return self._random.randint(1, 4) * self.block_size

    def finish(self, number: int = 0) -> None:
        """End a running request: its blocks become evictable."""
        self._cache.release(self.running.pop(number))

    def reset(self) -> bool:
        """Empty the cache. Refused while requests run; announced with the next step."""
        if self.running:
            return False
        self._cache.clear()
        return True

    # --- messages ----------------------------------------------------------------------------------------------------

    def step(self, *, even_if_empty: bool = False) -> Sent | None:
        """Send what happened since the last step as one message; an idle engine sends nothing."""
        events = self._cache.wire.take()
        if not events and not even_if_empty:
            return None
        self.ts += 0.001 + self._random.random() / 50
        seq, self.seq = self.seq, self.seq + 1
        sent = Sent.of(wire.batch(self.ts, events, self.rank), self.life, seq)
        self.kept.append(sent)
        self._history[self.life, seq] = self.held()
        return sent

    def restart(self) -> None:
        """Another process on the same address: sequence 0, empty cache, empty replay buffer."""
        self.life += 1
        self.ts += 1.0
        self._begin()
