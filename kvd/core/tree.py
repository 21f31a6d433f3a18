"""The content tree: one node per block key, and for each node which ranks hold it and which cover it.

A rank *holds* a node on a tier level if it has the block on that tier or a nearer one. It *covers* the node if it holds
it and every ancestor. Covered sets only shrink with depth, so a match is a jump search: probe ahead while the covered
set stays the same, bisect where it changes. Sets of ranks are integers used as bit masks: four bits a rank slot, one
per level, so that a change on all levels is one operation.

Invariant: ``node.covered == node.held & node.parent.covered`` (``== node.held`` for a first block).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from protocols.events import Tier

WIDTH = len(Tier)
_OWN = (1 << WIDTH) - 1
Window = tuple[int, bool]
"""How tokens are cut into blocks: tokens a block, and whether windows overlap by one (EAGLE)."""


def place(slot: int) -> int:
    """The lowest of a slot's bits, which stands for the slot in sets that are not about a level."""
    return 1 << WIDTH * slot


def levels_of(tier: Tier | None) -> int:
    """The levels at which a block on this tier counts: its own and every farther one."""
    return 0 if tier is None else _OWN << tier & _OWN


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
        self.held = 0
        self.covered = 0


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

    def hold(self, node: Node, slot: int, tier: Tier | None) -> None:
        """The rank now holds the node on ``tier`` (None: nowhere). O(1), plus what coverage changes below."""
        own = _OWN << WIDTH * slot
        changed = (node.held & own) ^ (levels_of(tier) << WIDTH * slot)
        if changed:
            node.held ^= changed
            self._cover(node, own)

    @staticmethod
    def _cover(top: Node, own: int) -> None:
        """Set a rank's coverage right at ``top`` and, as far as that changes it, below: children the rank holds."""
        stack = [top]
        while stack:
            node = stack.pop()
            covers = node.held & own if node.parent is None else node.held & own & node.parent.covered
            changed = (node.covered & own) ^ covers
            if changed:
                node.covered ^= changed
                stack.extend(child for child in node.children.values() if child.held & own)

    def covered(self, key: int) -> int:
        """The ranks, by level, that hold this key's block and every block before it. O(1)."""
        node = self.nodes.get(key)
        return 0 if node is None else node.covered

    def match(self, keys: KeySequence, level: Tier, among: int) -> Iterator[tuple[int, int]]:
        """Yield (reach in blocks, ranks with exactly that reach), shortest first, for the ranks in ``among``.

        Both sets are of places. Ranks with no match are left out. Cost: the number of distinct reaches times log n
        probes; keys are looked at no further than about twice the longest reach.
        """
        index, end = 0, len(keys)
        ranks = self.covered(keys[0]) & among << level if end else 0
        while ranks:
            last = self._same_until(keys, index, end, ranks)
            after = self.covered(keys[last + 1]) & ranks if last + 1 < end else 0
            yield last + 1, (ranks & ~after) >> level
            index, ranks = last + 1, after

    def _same_until(self, keys: KeySequence, index: int, end: int, ranks: int) -> int:
        """The last position whose covered set still has all of ``ranks``, which ``index`` has."""
        low, step = index, 1
        while low + step < end and self.covered(keys[low + step]) & ranks == ranks:
            low += step
            step *= 2
        high = min(low + step, end)
        while high - low > 1:
            middle = (low + high) // 2
            if self.covered(keys[middle]) & ranks == ranks:
                low = middle
            else:
                high = middle
        return low

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
        expected = node.held if above is None else node.held & above.covered
        if node.covered != expected:
            yield f"{name} covered {node.covered:#x}, expected {expected:#x}"
