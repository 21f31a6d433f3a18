"""A simulated engine whose true cache is known: a block pool with prefix caching, and the events real engines send.

What it does as vLLM and SGLang do: an LRU free queue into which a request's blocks go tail first; hits that take blocks
out of the queue; a prompt of whole blocks that computes its last block again, into a second copy, and announces it
again; evictions before the stores that caused them; a reset that empties the cache now and is announced with the next
step; a host tier that takes what the device evicts; a recurrent group that keeps only the state at a chunk's end.

Truth is kept per message: ``engine.at(life, seq)`` is what was held when that message left. Compare a subscriber with
the truth at the last message it was given, never with the present.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

Tokens = tuple[int, ...]
ATTENTION, RECURRENT = "full_attention", "mamba"


class Dialect(Enum):
    """Who speaks: the shape of events and of hashes on the wire."""

    VLLM_ARRAY = "vllm-0.22"
    VLLM_MAP = "vllm-0.32"
    VLLM_BYTES = "vllm-0.32-bytes"
    SGLANG = "sglang-0.5.23"


class Space(NamedTuple):
    """A namespace: the same tokens under another adapter or salt are other blocks."""

    lora: str | None = None
    salt: str | None = None


class Content(NamedTuple):
    """One block of a prompt: its identity, its predecessor's, its tokens, and where in the prompt it is."""

    digest: bytes
    parent: bytes | None
    tokens: Tokens
    space: Space
    index: int


class Truth(NamedTuple):
    """What of a prompt is held, in leading blocks: on the device, on device or host, and reusable by the model."""

    device: int
    host: int
    usable: int


class Held(NamedTuple):
    """Everything held at one moment, by digest."""

    device: frozenset[bytes]
    recurrent: frozenset[bytes] | None
    host: frozenset[bytes]

    def of(self, digests: Sequence[bytes]) -> Truth:
        """How far the prompt of these blocks is held. The rule is the engine's: no hole, and state at the end."""
        device = _leading(digests, self.device)
        host = _leading(digests, self.device | self.host) if self.host else device
        usable = device
        while self.recurrent is not None and usable and digests[usable - 1] not in self.recurrent:
            usable -= 1
        return Truth(device, host, usable)


NOTHING = Held(frozenset(), None, frozenset())


def _leading(digests: Sequence[bytes], held: frozenset[bytes]) -> int:
    return next((i for i, digest in enumerate(digests) if digest not in held), len(digests))


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


class Slot:
    """A physical block: what it holds (None: nothing that can be hit) and how many requests use it."""

    __slots__ = ("content", "group", "number", "users")

    def __init__(self, number: int) -> None:
        self.number = number
        self.content: Content | None = None
        self.group = 0
        self.users = 0


class Running:
    """A request that holds its blocks until it finishes."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots


class Engine:
    """One engine process after another (``life``), on one address, with one counter each.

    ``serve`` and ``finish`` move blocks and queue events; ``step`` sends what is queued as one message. ``copies``:
    vLLM recomputes and duplicates a last block, SGLang's radix tree never holds a block twice.
    """

    def __init__(
        self, dialect: Dialect, *, blocks: int = 48, block_size: int = 4, host: int = 0, hybrid: bool = False,
        buffer: int = 10_000, rank: int = 0, same_hashes: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        self.dialect = dialect
        self.block_size = block_size
        self.hybrid = hybrid and dialect is not Dialect.SGLANG
        self.copies = dialect is not Dialect.SGLANG
        self.rank = rank
        self.life = 0
        self.ts = 1_700_000_000.0
        self._random = random.Random(seed)
        self._blocks = blocks
        self._host_blocks = host
        self._buffer = buffer
        self._same_hashes = same_hashes
        self._history: dict[tuple[int, int], Held] = {}
        self._digests: dict[tuple[Tokens, Space], list[Content]] = {}
        self._begin()

    def _begin(self) -> None:
        self.seq = 0
        self.running: list[Running] = []
        self.kept: deque[Sent] = deque(maxlen=self._buffer)
        self._events: list[Any] = []
        self._process = b"" if self._same_hashes else self.life.to_bytes(4, "big")
        self._slots = [Slot(number) for number in range(self._blocks)]
        self._free: OrderedDict[int, Slot] = OrderedDict((slot.number, slot) for slot in self._slots)
        self._cached: dict[tuple[int, bytes], list[Slot]] = {}
        self._host: OrderedDict[bytes, Content] = OrderedDict()
        if self.dialect is Dialect.SGLANG:  # its radix tree's constructor resets: a lifetime begins with a clear
            self._events.append(self._cleared())

    # --- truth -------------------------------------------------------------------------------------------------------

    def contents(self, prompt: Sequence[int], space: Space = Space()) -> list[Content]:  # noqa: B008
        """The prompt's whole blocks. The digest chains over namespace and tokens: equal digest, equal content."""
        tokens = tuple(prompt)
        known = self._digests.get((tokens, space))
        if known is None:
            if len(self._digests) > 2_000:
                self._digests.clear()
            known = self._digests[tokens, space] = list(self._cut(tokens, space))
        return known

    def _cut(self, tokens: Tokens, space: Space) -> Iterable[Content]:
        parent: bytes | None = None
        for index in range(len(tokens) // self.block_size):
            block = tokens[index * self.block_size : (index + 1) * self.block_size]
            digest = hashlib.sha256(msgspec.msgpack.encode((parent or space, block))).digest()
            yield Content(digest, parent, block, space, index)
            parent = digest

    def held(self) -> Held:
        """What is held now, announced or not."""
        groups: list[set[bytes]] = [set(), set()]
        for (group, digest), _ in self._cached.items():
            groups[group].add(digest)
        recurrent = frozenset(groups[1]) if self.hybrid else None
        return Held(frozenset(groups[0]), recurrent, frozenset(self._host))

    def truth(self, prompt: Sequence[int], space: Space = Space()) -> int:  # noqa: B008
        """Blocks of the prompt that the engine could really reuse now."""
        return self.held().of([content.digest for content in self.contents(prompt, space)]).usable

    def at(self, life: int, seq: int) -> Held:
        """What was held when message ``seq`` of process ``life`` left (-1: before its first)."""
        return NOTHING if seq < 0 else self._history[life, seq]

    def truth_at(self, life: int, seq: int, prompt: Sequence[int], space: Space = Space()) -> Truth:  # noqa: B008
        """How far the prompt was held when that message left."""
        return self.at(life, seq).of([content.digest for content in self.contents(prompt, space)])

    # --- requests ----------------------------------------------------------------------------------------------------

    def serve(self, prompt: Sequence[int], space: Space = Space()) -> int | None:  # noqa: B008
        """Admit a request and compute it; the blocks it found, or None if the pool is too small for it now."""
        contents = self.contents(prompt, space)
        hit = self._hit(contents, len(prompt))
        reused = [self._cached[0, content.digest][0] for content in contents[:hit]]
        if self.hybrid and hit:
            reused.append(self._cached[1, contents[hit - 1].digest][0])
        fresh = contents[hit:]
        partial = len(prompt) % self.block_size > 0
        if self._free_besides(reused) < len(fresh) * (2 if self.hybrid else 1) + partial:
            return None
        for slot in reused:
            self._use(slot)
        running = Running(reused)
        self.running.append(running)
        self._compute(fresh, running)
        if partial:
            running.slots.append(self._allocate())
        return hit

    def _hit(self, contents: Sequence[Content], tokens: int) -> int:
        digests = [content.digest for content in contents]
        hit = self.held().of(digests).usable
        if not self.copies:
            return hit
        hit = min(hit, (tokens - 1) // self.block_size)  # the last token must be computed
        while self.hybrid and hit and (1, digests[hit - 1]) not in self._cached:
            hit -= 1
        return hit

    def _free_besides(self, reused: Sequence[Slot]) -> int:
        return len(self._free) - sum(slot.number in self._free for slot in set(reused))

    def _use(self, slot: Slot) -> None:
        slot.users += 1
        self._free.pop(slot.number, None)

    def _compute(self, fresh: Sequence[Content], running: Running) -> None:
        """In chunks, as prefill is: one store a chunk and group."""
        at = 0
        while at < len(fresh):
            chunk = fresh[at : at + self._random.randint(1, 4)]
            at += len(chunk)
            slots = [self._allocate() for _ in chunk]
            state = self._allocate() if self.hybrid else None
            for slot, content in zip(slots, chunk, strict=True):
                self._fill(slot, 0, content)
            running.slots += slots
            if state is not None:
                self._fill(state, 1, chunk[-1])
                running.slots.append(state)
                self._events.append(self._stored(chunk, "GPU", group=1, hashes=chunk[-1:]))
            self._events.append(self._stored(chunk, "GPU", group=0))

    def _allocate(self) -> Slot:
        _, slot = self._free.popitem(last=False)
        if slot.content is not None:
            self._evict(slot)
        slot.users = 1
        return slot

    def _fill(self, slot: Slot, group: int, content: Content) -> None:
        slot.group, slot.content = group, content
        self._cached.setdefault((group, content.digest), []).append(slot)

    def _evict(self, slot: Slot) -> None:
        content = slot.content
        assert content is not None
        copies = self._cached[slot.group, content.digest]
        copies.remove(slot)
        if not copies:
            del self._cached[slot.group, content.digest]
        slot.content = None
        if self._host_blocks and slot.group == 0:
            self._write_back(content)
        self._events.append(self._removed([content], "GPU", slot.group))

    def _write_back(self, content: Content) -> None:
        """The host takes what the device gives up: stored there first, then removed here."""
        if content.digest in self._host:
            self._host.move_to_end(content.digest)
            return
        if len(self._host) >= self._host_blocks:
            _, oldest = self._host.popitem(last=False)
            self._events.append(self._removed([oldest], "CPU_PINNED", 0))
        self._host[content.digest] = content
        self._events.append(self._stored([content], "CPU_PINNED", group=0))

    def finish(self, number: int = 0) -> None:
        """End a running request: its blocks become evictable, the last one first."""
        for slot in reversed(self.running.pop(number).slots):
            slot.users -= 1
            if not slot.users:
                self._free[slot.number] = slot
                if slot.content is None:  # nothing in it that could be hit: taken before anything else
                    self._free.move_to_end(slot.number, last=False)

    def reset(self) -> bool:
        """Empty the cache. Refused while requests run; announced with the next step (SGLang: as its own event)."""
        if self.running:
            return False
        for slot in self._slots:
            slot.content = None
        self._cached.clear()
        self._host.clear()
        self._events.append(self._cleared())
        return True

    # --- messages ----------------------------------------------------------------------------------------------------

    def step(self, *, even_if_empty: bool = False) -> Sent | None:
        """Send what happened since the last step as one message; an idle engine sends nothing."""
        if not self._events and not even_if_empty:
            return None
        events, self._events = self._events, []
        self.ts += 0.001 + self._random.random() / 50
        seq, self.seq = self.seq, self.seq + 1
        sent = Sent.of(msgspec.msgpack.encode([self.ts, events, self.rank]), self.life, seq)
        self.kept.append(sent)
        self._history[self.life, seq] = self.held()
        return sent

    def restart(self) -> None:
        """Another process on the same address: sequence 0, empty cache, empty replay buffer."""
        self.life += 1
        self.ts += 1.0
        self._begin()

    # --- wire forms --------------------------------------------------------------------------------------------------

    def _hash(self, digest: bytes | None) -> int | bytes | None:
        if digest is None:
            return None
        if self._process:
            digest = hashlib.sha256(self._process + digest).digest()
        if self.dialect is Dialect.VLLM_BYTES:
            return digest
        if self.dialect is Dialect.SGLANG:
            return int.from_bytes(digest[:8], "big", signed=True)
        return int.from_bytes(digest[-8:], "big")

    def _stored(
        self, chunk: Sequence[Content], medium: str, *, group: int, hashes: Sequence[Content] | None = None
    ) -> Any:
        names = [self._hash(content.digest) for content in (chunk if hashes is None else hashes)]
        fields = {
            "block_hashes": names, "parent_block_hash": self._hash(chunk[0].parent),
            "token_ids": [token for content in chunk for token in content.tokens], "block_size": self.block_size,
            "lora_id": 1 if chunk[0].space.lora and self.dialect is not Dialect.SGLANG else None, "medium": medium,
        }  # fmt: skip
        space = chunk[0].space
        if self.dialect is Dialect.SGLANG:
            fields |= {"cache_salt": space.salt} if space.salt else {}
            fields |= {"lora_name": space.lora} if space.lora else {}
            return {"type": "BlockStored", **fields}
        fields["lora_name"] = space.lora
        extra = [self._extra(content) for content in (chunk if hashes is None else hashes)]
        kind = RECURRENT if group else ATTENTION
        fields |= {
            "extra_keys": extra if any(extra) else None, "group_idx": group, "kv_cache_spec_kind": kind,
            "kv_cache_spec_sliding_window": None,
        }  # fmt: skip
        if self.dialect is Dialect.VLLM_ARRAY:
            return ["BlockStored", *fields.values()]
        optional = ("extra_keys", "kv_cache_spec_sliding_window")
        return {"type": "BlockStored"} | {k: v for k, v in fields.items() if k not in optional or v is not None}

    @staticmethod
    def _extra(content: Content) -> list[str] | None:
        """The adapter with every block, the salt with the prompt's first."""
        names = [content.space.lora] if content.space.lora else []
        names += [content.space.salt] if content.space.salt and not content.index else []
        return names or None

    def _removed(self, contents: Sequence[Content], medium: str, group: int) -> Any:
        names = [self._hash(content.digest) for content in contents]
        if self.dialect is Dialect.VLLM_ARRAY:
            return ["BlockRemoved", names, medium, group]
        fields = {"type": "BlockRemoved", "block_hashes": names, "medium": medium}
        return fields if self.dialect is Dialect.SGLANG else fields | {"group_idx": group}

    def _cleared(self) -> Any:
        return ["AllBlocksCleared"] if self.dialect is Dialect.VLLM_ARRAY else {"type": "AllBlocksCleared"}
