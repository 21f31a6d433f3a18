"""SGLang's radix cache: a tree of page runs, no page twice, whole leaves evicted by when they were last used.

As SGLang does it: pages enter the tree after a prefill and when a request ends, and are said then; a request holds its
path locked; room is made by evicting the least recently used leaves, their pages said in one event, root to leaf; a
node that is only partly shared is split, which nobody hears of.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from bench.engine.cache import Cache, Held, HostTier, Sequence, leading
from bench.engine.content import Block, Chain, Naming, Space
from bench.engine.wire import Wire


class Node:
    """A run of pages below its parent. ``locks`` counts the running requests at it or below it."""

    __slots__ = ("children", "locks", "pages", "parent", "used")

    def __init__(self, pages: list[Block], parent: Node | None) -> None:
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0

    def path(self) -> Iterator[Node]:
        """This node and those above it, but not the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixCache(Cache):
    """``pages`` of room. ``backwards``: a mutation; the most recently used leaf goes, the due one is said to."""

    def __init__(
        self, wire: Wire, naming: Naming, *, pages: int, host_pages: int = 0, backwards: bool = False
    ) -> None:  # fmt: skip
        super().__init__(wire, naming)
        self.pages = pages
        self.host = HostTier(wire, host_pages)
        self._backwards = backwards
        self._at: dict[Sequence, Node] = {}
        self._own: dict[Sequence, int] = {}
        self._plant()
        wire.cleared()  # the tree's constructor resets it: a lifetime begins with a clear

    def _plant(self) -> None:
        self._clock = 0
        self._free = self.pages
        self._roots: dict[Space, Node] = {}

    def _root(self, space: Space) -> Node:
        return self._roots.setdefault(space, Node([], None))

    @property
    def usage(self) -> float:
        running = sum(self._own.values()) + sum(
            len(n.pages) for n in {n for at in self._at.values() for n in at.path()}
        )
        return running / self.pages

    # --- what is found -----------------------------------------------------------------------------------------------

    def held(self) -> Held:
        device = frozenset(page.digest for node in self._nodes() for page in node.pages)
        return Held(device, None, frozenset(self.host.held))

    def hit(self, chain: Chain) -> int:
        _, device, loaded = self._reusable(chain)
        return (device + loaded) * self.block_size

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _reusable(self, chain: Chain) -> tuple[Node, int, int]:
        """The deepest node, whole pages of at most all but the last token found there, and beyond it on the host."""
        pages = chain.upto(len(chain) - 1)
        node, device = self._match(chain.space, pages)
        loaded = self.host.following([page.digest for page in pages[device:]]) if self.host.held else 0
        return node, device, loaded

    def _match(self, space: Space, pages: list[Block]) -> tuple[Node, int]:
        """Follow the pages; a node left in its middle is split there."""
        node, depth = self._root(space), 0
        self._clock += 1
        node.used = self._clock
        while depth < len(pages) and (child := node.children.get(pages[depth].digest)) is not None:
            shared = _shared(child.pages, pages, depth)
            if shared < len(child.pages):
                child = self._split(child, shared)
            child.used = self._clock
            node, depth = child, depth + shared
        return node, depth

    def _split(self, child: Node, at: int) -> Node:
        """The upper part of a node as a node of its own."""
        assert child.parent is not None
        upper = Node(child.pages[:at], child.parent)
        upper.locks, upper.used = child.locks, child.used
        child.parent.children[upper.pages[0].digest] = upper
        child.pages, child.parent = child.pages[at:], upper
        upper.children[child.pages[0].digest] = child
        return upper

    # --- a sequence's way --------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence, budget: int) -> int | None:
        node, device, loaded = self._reusable(seq.chain)
        self._lock(node, 1)
        computed = (device + loaded) * self.block_size
        chunk = min(budget, len(seq.chain) - computed)
        # room for one page more than needed, as SGLang asks for
        if not self._make_room(self._needed(computed + chunk) - device, spare=1):
            self._lock(node, -1)
            return None
        self._at[seq], self._own[seq] = node, 0
        seq.admitted(computed)
        if loaded:
            self._load(seq, node, device, device + loaded)
        assert self.extend(seq, chunk)
        return chunk

    def extend(self, seq: Sequence, tokens: int) -> bool:
        """Room for the tokens; what they become is found by others only when the step has ended."""
        missing = self._needed(seq.computed + tokens) - self._depth(seq) - self._own[seq]
        if missing > 0 and not self._make_room(missing):
            return False
        self._free -= missing
        self._own[seq] += missing
        return True

    def settle(self, seq: Sequence) -> None:
        """After a prefill, its pages enter the tree; decoded ones wait for the end."""
        if seq.computed <= seq.prompt_tokens:
            self._insert(seq)

    def release(self, seq: Sequence, *, finished: bool = True) -> None:
        """At the end all whole pages enter the tree; a retracted request gives its own up."""
        if finished:
            self._insert(seq)
        self._free += self._own.pop(seq)
        self._lock(self._at.pop(seq), -1)

    def clear(self) -> None:
        assert not self._at
        self._plant()
        self.host.clear()
        self.wire.cleared()

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _depth(self, seq: Sequence) -> int:
        return sum(len(node.pages) for node in self._at[seq].path())

    def _insert(self, seq: Sequence) -> None:
        """Whole computed pages become the tree's; those that are in it already are given back."""
        pages = seq.chain.upto(seq.computed)
        own = len(pages) - self._depth(seq)
        if own <= 0:
            return
        node, depth = self._match(seq.chain.space, pages)
        if depth < len(pages):
            node = self._grow(node, pages[depth:])
            self.wire.stored(node.pages, session=seq.session)
        self._own[seq] -= own
        self._free += own - (len(pages) - depth)
        self._lock(node, 1)
        self._lock(self._at[seq], -1)
        self._at[seq] = node

    def _grow(self, parent: Node, pages: list[Block]) -> Node:
        node = Node(list(pages), parent)
        node.used = self._clock
        parent.children[pages[0].digest] = node
        return node

    def _load(self, seq: Sequence, node: Node, device: int, end: int) -> None:
        """Host pages come back to the device and into the tree; the host keeps its copy."""
        grown = self._grow(node, seq.chain.upto(end * self.block_size)[device:])
        self._free -= end - device
        self._lock(grown, 1)
        self._lock(node, -1)
        self._at[seq] = grown
        self.wire.stored(grown.pages, session=seq.session)

    # --- room --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _lock(node: Node, by: int) -> None:
        for each in node.path():
            each.locks += by

    def _make_room(self, pages: int, spare: int = 0) -> bool:
        """Evict leaves until there are ``pages`` free, and ``spare`` more where that is possible."""
        missing = pages + spare - self._free
        if missing > 0:
            self._evict(missing)
        return self._free >= pages

    def _evict(self, pages: int) -> None:
        leaves = [node for node in self._nodes() if node.parent is not None and not node.children and not node.locks]
        order = -1 if self._backwards else 1
        heap = [(order * leaf.used, id(leaf), leaf) for leaf in leaves]
        heapq.heapify(heap)
        due = iter(sorted(leaves, key=lambda leaf: leaf.used))
        said: list[Block] = []
        while pages > 0 and heap:
            _, _, leaf = heapq.heappop(heap)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.pages[0].digest]
            pages -= len(leaf.pages)
            self._free += len(leaf.pages)
            for page in leaf.pages:
                self.host.take(page)
            said += next(due, leaf).pages if self._backwards else leaf.pages
            parent = leaf.parent
            if parent.parent is not None and not parent.children and not parent.locks:
                heapq.heappush(heap, (order * parent.used, id(parent), parent))
        if said:
            self.wire.removed(said)


def _shared(run: list[Block], pages: list[Block], depth: int) -> int:
    """How many pages of the run the prompt goes along with."""
    ahead = frozenset(page.digest for page in pages[depth : depth + len(run)])
    return leading([page.digest for page in run], ahead)
