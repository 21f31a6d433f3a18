"""The content tree: one node per block key, and for each node which ranks hold it and which cover it.

A rank *holds* a node on a tier level if it has the block on that tier or a nearer one. It *covers* the node if it holds
it and every ancestor. Covered sets only shrink with depth, so a match is a jump search: probe ahead while the covered
set stays the same, bisect where it changes. Sets of ranks are integers used as bit masks (bit = rank slot).

Invariant, at every level: ``node.covered == node.held & node.parent.covered`` (``== node.held`` for a first block).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from protocols.events import Tier

LEVELS = tuple(Tier)
Masks = list[int]
Window = tuple[int, bool]
"""How tokens are cut into blocks: tokens a block, and whether windows overlap by one (EAGLE)."""


class KeySequence(Protocol):
    """Block keys of a prompt; may be computed as they are looked at."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...


class Space:
    """A namespace of content: blocks of another adapter or salt never share a key."""

    __slots__ = ("lora", "salt", "seed")

    def __init__(self, lora: str | None, salt: str | None, seed: int) -> None:
        self.lora = lora
        self.salt = salt
        self.seed = seed


class Node:
    """One block of content in its chain; ``pins`` counts the blocks of all ranks that are tied to it."""

    __slots__ = ("children", "covered", "depth", "held", "key", "local", "parent", "pins", "space")

    def __init__(self, key: int, local: int, parent: Node | None, space: Space) -> None:
        self.key = key
        self.local = local
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.space = space
        self.children: dict[int, Node] = {}
        self.pins = 0
        self.held: Masks = [0] * len(LEVELS)
        self.covered: Masks = [0] * len(LEVELS)


class Tree:
    """All nodes of one model. Every method's cost is stated; n is the length of a prompt in blocks."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}

    def node(self, key: int, local: int, parent: Node | None, space: Space) -> Node:
        """The node of this key, made if it is new. O(1)."""
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(key, local, parent, space)
            if parent is not None:
                parent.children[key] = node
        return node

    def release(self, node: Node | None) -> None:
        """Drop the node, and its ancestors, as far as nothing is tied to them or below them. O(dropped)."""
        while node is not None and not node.pins and not node.children:
            del self.nodes[node.key]
            if node.parent is not None:
                del node.parent.children[node.key]
            node = node.parent

    def hold(self, node: Node, bit: int, tier: Tier | None) -> None:
        """The rank now holds the node on ``tier`` (None: nowhere). O(1), plus what coverage changes below."""
        for level in LEVELS:
            holds = tier is not None and tier <= level
            if holds == bool(node.held[level] & bit):
                continue
            node.held[level] ^= bit
            parent = node.parent
            if parent is None or parent.covered[level] & bit:
                self._cover(node, bit, level, on=holds)

    @staticmethod
    def _cover(top: Node, bit: int, level: Tier, *, on: bool) -> None:
        """Set or clear coverage at ``top`` and wherever that decides it below: children the rank holds."""
        stack = [top]
        while stack:
            node = stack.pop()
            node.covered[level] ^= bit
            stack.extend(
                c for c in node.children.values() if c.held[level] & bit and bool(c.covered[level] & bit) != on
            )

    def covered(self, key: int, level: Tier) -> int:
        """The ranks that hold this key's block and every block before it. O(1)."""
        node = self.nodes.get(key)
        return 0 if node is None else node.covered[level]

    def match(self, keys: KeySequence, level: Tier, among: int) -> Iterator[tuple[int, int]]:
        """Yield (reach in blocks, ranks with exactly that reach), shortest first, for the ranks in ``among``.

        Ranks with no match are left out. Cost: the number of distinct reaches times log n probes; keys are looked at
        no further than about twice the longest reach.
        """
        index, end = 0, len(keys)
        ranks = self.covered(keys[0], level) & among if end else 0
        while ranks:
            last = self._same_until(keys, level, index, end, ranks)
            after = self.covered(keys[last + 1], level) & ranks if last + 1 < end else 0
            yield last + 1, ranks & ~after
            index, ranks = last + 1, after

    def _same_until(self, keys: KeySequence, level: Tier, index: int, end: int, ranks: int) -> int:
        """The last position whose covered set still has all of ``ranks``, which ``index`` has."""
        low, step = index, 1
        while low + step < end and self.covered(keys[low + step], level) & ranks == ranks:
            low += step
            step *= 2
        high = min(low + step, end)
        while high - low > 1:
            middle = (low + high) // 2
            if self.covered(keys[middle], level) & ranks == ranks:
                low = middle
            else:
                high = middle
        return low

    def path(self, keys: Sequence[int] | KeySequence, length: int) -> list[Node]:
        """The nodes of the first ``length`` keys, all of which must exist. O(length)."""
        return [self.nodes[keys[i]] for i in range(length)]

    def check(self) -> list[str]:
        """Every invariant that is broken, in words; empty when sound. O(nodes)."""
        return [fault for node in self.nodes.values() for fault in self._faults(node)]

    def _faults(self, node: Node) -> Iterator[str]:
        name = f"node {node.key:#018x}"
        above = node.parent
        if self.nodes.get(node.key) is not node:
            yield f"{name} is not found under its key"
        if above is not None and (above.children.get(node.key) is not node or self.nodes.get(above.key) is not above):
            yield f"{name} is not linked under its parent"
        if node.depth != (1 if above is None else above.depth + 1):
            yield f"{name} has depth {node.depth}, its parent {above.depth if above else 0}"
        if not node.pins and not node.children:
            yield f"{name} is dead: nothing is tied to it or below it"
        for level in LEVELS:
            expected = node.held[level] & (~0 if above is None else above.covered[level])
            if node.covered[level] != expected:
                yield f"{name} covered {node.covered[level]:#x} at {level.name}, expected {expected:#x}"
            if level and node.held[level - 1] & ~node.held[level]:
                yield f"{name} held at {Tier(level - 1).name} by ranks that do not hold it at {level.name}"
