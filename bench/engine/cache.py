"""The interface of an engine's cache, and what a scheduler and a test need to know of it.

A :class:`Sequence` is one request's tokens in the cache, from admission to release. Nothing here knows of time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence as Ordered
from typing import NamedTuple

from bench.engine.content import Block, Chain, Naming, Space
from bench.engine.wire import Wire
from protocols.media import MediaRun


class Sequence:
    """``computed`` of the chain's tokens are in the cache, ``cached`` of them were found there."""

    def __init__(
        self, chain: Chain, prompt_tokens: int, *, session: str | None = None, report_hits: bool = False
    ) -> None:
        self.chain = chain
        self.prompt_tokens = prompt_tokens
        self.session = session
        self.report_hits = report_hits
        self.computed = 0
        self.cached = 0
        self.first_cached: int | None = None
        """What was found at the first admission: what an engine reports, also after a preemption."""

    def admitted(self, cached: int) -> None:
        self.cached = self.computed = cached
        if self.first_cached is None:
            self.first_cached = cached


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

    def of(self, digests: Ordered[bytes]) -> Truth:
        """How far the prompt of these blocks is held. The rule is the engine's: no hole, and state at the end."""
        device = leading(digests, self.device)
        host = leading(digests, self.device | self.host) if self.host else device
        usable = device
        while self.recurrent is not None and usable and digests[usable - 1] not in self.recurrent:
            usable -= 1
        return Truth(device, host, usable)


def leading(digests: Ordered[bytes], held: frozenset[bytes] | dict[bytes, object]) -> int:
    return next((i for i, digest in enumerate(digests) if digest not in held), len(digests))


class Cache(ABC):
    """One rank's cache. Events go to ``wire`` as they happen."""

    def __init__(self, wire: Wire, naming: Naming) -> None:
        self.wire = wire
        self.naming = naming
        self.block_size = wire.block_size

    def chain(self, tokens: Ordered[int], space: Space, media: Ordered[MediaRun] = ()) -> Chain:
        """The tokens as this cache names them."""
        return Chain(tokens, self.block_size, self.naming, space, media)

    def chunk(self, seq: Sequence, want: int) -> int:
        """How many of ``want`` tokens one step may compute."""
        del seq
        return want

    @abstractmethod
    def admit(self, seq: Sequence, budget: int) -> int | None:
        """Take what is found, and room for a first chunk of at most ``budget`` tokens: its length, or None."""

    @abstractmethod
    def extend(self, seq: Sequence, tokens: int) -> bool:
        """Room for that many more computed tokens; False if there is none."""

    @abstractmethod
    def settle(self, seq: Sequence) -> None:
        """A step that computed tokens of the sequence has ended."""

    @abstractmethod
    def release(self, seq: Sequence, *, finished: bool = True) -> None:
        """The sequence gives up what it holds: it ended, or is preempted."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything. Nothing may be running."""

    @abstractmethod
    def held(self) -> Held:
        """Everything that could be found now."""

    @abstractmethod
    def hit(self, chain: Chain) -> int:
        """Tokens that a request of these would be served from the cache now, device and host."""

    @property
    @abstractmethod
    def usage(self) -> float:
        """The used share of the pool, 0 to 1: by running requests."""


class HostTier:
    """What the device gives up, up to a number of blocks; the least recently taken goes first.

    Stored here before it is removed there, as both engines do it; ``wire`` hears of both.
    """

    def __init__(self, wire: Wire, blocks: int, *, group: int = 0) -> None:
        self.wire = wire
        self.blocks = blocks
        self.group = group
        self.held: OrderedDict[bytes, Block] = OrderedDict()

    def take(self, block: Block) -> None:
        if not self.blocks:
            return
        if block.digest in self.held:
            self.held.move_to_end(block.digest)
            return
        if len(self.held) >= self.blocks:
            _, oldest = self.held.popitem(last=False)
            self.wire.removed([oldest], group=self.group, medium=self.wire.host_medium)
        self.held[block.digest] = block
        self.wire.offloaded(block, self.group)

    def following(self, digests: Ordered[bytes]) -> int:
        """How many of these, from the first on, could be loaded back."""
        return leading(digests, self.held)  # type: ignore[arg-type]

    def clear(self) -> None:
        self.held.clear()
