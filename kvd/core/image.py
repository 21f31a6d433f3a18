"""One rank's residency as values, in parts of bounded size, and back: what snapshots are made of.

Parts come in an order in which they can be taken: the head, then nodes parents first, then blocks. The rank must not
change while it is exported; each part costs O(:data:`PART`) to make and to take.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvd.core.groups import Copies, Group
from kvd.core.residency import Block, Content, Residency
from kvd.core.tree import Node, Space
from protocols.events import Kind
from protocols.keys import namespace_seed
from protocols.media import Scheme

PART = 2048
"""Nodes or blocks in one part."""


class GroupImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    number: int
    kind: Kind
    window: int | None


class Head(msgspec.Struct, frozen=True, tag="head"):
    """Groups and scheme, as learnt."""

    indexed: int | None
    tracked: list[GroupImage]
    ignored: list[int]
    scheme: Scheme | None


class NodeImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: int
    local: int
    parent: int | None
    space: int
    """Position among all spaces told so far."""


class Nodes(msgspec.Struct, frozen=True, tag="nodes"):
    """Contents, parents before children; ``spaces``: further (adapter, salt) pairs that these nodes refer to."""

    spaces: list[tuple[str | None, str | None]]
    nodes: list[NodeImage]


class BlockImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    hash: int
    copies: list[int]
    key: int | None = None
    size: int = 0
    eagle: bool = False
    chunks: list[int] | None = None


class WaitingImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block whose parent was never announced: what is to be hashed once it is."""

    hash: int
    copies: list[int]
    parent: int
    body: bytes
    size: int
    eagle: bool
    lora: str | None
    salt: str | None


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    blocks: list[BlockImage]
    waiting: list[WaitingImage]


class Tracked(msgspec.Struct, frozen=True, tag="tracked"):
    """Copies of a group that is not indexed."""

    group: int
    copies: dict[int, list[int]]


Part = Head | Nodes | Blocks | Tracked


# --- out -------------------------------------------------------------------------------------------------------------


def export(residency: Residency) -> Iterator[Part]:
    """All parts of a rank."""
    groups = residency.groups
    tracked = [GroupImage(number, group.kind, group.window) for number, group in groups.tracked.items()]
    yield Head(groups.indexed, tracked, sorted(groups.ignored), residency.learnt_scheme)
    yield from _export_nodes(residency)
    yield from _export_blocks(residency)
    for number, group in groups.tracked.items():
        yield from _export_tracked(number, group)


def _export_nodes(residency: Residency) -> Iterator[Nodes]:
    spaces: dict[tuple[str | None, str | None], int] = {}
    told = 0
    images: list[NodeImage] = []
    for node in _parents_first(residency):
        space = spaces.setdefault((node.space.lora, node.space.salt), len(spaces))
        images.append(NodeImage(node.key, node.local, None if node.parent is None else node.parent.key, space))
        if len(images) >= PART:
            yield Nodes(list(spaces)[told:], images)
            told, images = len(spaces), []
    if images:
        yield Nodes(list(spaces)[told:], images)


def _parents_first(residency: Residency) -> Iterator[Node]:
    """Every node the rank names, and every ancestor of one, each once."""
    seen: set[Node] = set()
    for named in residency.names:
        path: list[Node] = []
        node: Node | None = named
        while node is not None and node not in seen:
            seen.add(node)
            path.append(node)
            node = node.parent
        yield from reversed(path)


def _export_blocks(residency: Residency) -> Iterator[Blocks]:
    blocks: list[BlockImage] = []
    waiting: list[WaitingImage] = []
    for block in residency.blocks.values():
        content = block.content
        if content is None:
            blocks.append(_block_image(block))
        elif content.parent is not None:
            waiting.append(_waiting_image(block, content, content.parent))
        if len(blocks) + len(waiting) >= PART:
            yield Blocks(blocks, waiting)
            blocks, waiting = [], []
    if blocks or waiting:
        yield Blocks(blocks, waiting)


def _block_image(block: Block) -> BlockImage:
    chunks = None if block.chunks is None else sorted(block.chunks)
    if block.node is None or block.window is None:
        return BlockImage(block.hash, list(block.copies), chunks=chunks)
    return BlockImage(block.hash, list(block.copies), block.node.key, *block.window, chunks)


def _waiting_image(block: Block, content: Content, parent: int) -> WaitingImage:
    size, eagle = content.window
    return WaitingImage(
        block.hash, list(block.copies), parent, content.body, size, eagle, content.lora, content.salt
    )  # fmt: skip


def _export_tracked(number: int, group: Group) -> Iterator[Tracked]:
    part: dict[int, list[int]] = {}
    for hash_, copies in group.copies.items():
        part[hash_] = list(copies)
        if len(part) >= PART:
            yield Tracked(number, part)
            part = {}
    if part:
        yield Tracked(number, part)


# --- in --------------------------------------------------------------------------------------------------------------


class Importer:
    """Takes the parts of one rank, in order, into an empty residency.

    Raises ValueError for parts that contradict each other; the residency is then to be thrown away. Nodes that no block
    ties are released by :meth:`finish`.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._spaces: list[Space] = []
        self._nodes: dict[int, Node] = {}

    def take(self, part: Part) -> None:
        """Take the next part."""
        if isinstance(part, Head):
            self._head(part)
        elif isinstance(part, Nodes):
            self._take_nodes(part)
        elif isinstance(part, Blocks):
            self._take_blocks(part)
        else:
            self._take_tracked(part)

    def finish(self) -> None:
        """All parts were taken."""
        for node in reversed(self._nodes.values()):
            if self._residency.tree.nodes.get(node.key) is node:
                self._residency.tree.release(node)
        self._nodes.clear()

    def _head(self, part: Head) -> None:
        groups = self._residency.groups
        groups.indexed = part.indexed
        groups.tracked = {image.number: Group(image.kind, image.window) for image in part.tracked}
        groups.ignored = set(part.ignored)
        self._residency.learnt_scheme = part.scheme

    def _take_nodes(self, part: Nodes) -> None:
        for lora, salt in part.spaces:
            self._spaces.append(Space(lora, salt, namespace_seed(lora, salt)))
        for image in part.nodes:
            if image.space >= len(self._spaces) or (image.parent is not None and image.parent not in self._nodes):
                raise ValueError(f"node {image.key:#x} refers to a space or parent that was not told")
            parent = None if image.parent is None else self._nodes[image.parent]
            node = self._residency.tree.node(image.key, image.local, parent, self._spaces[image.space])
            if node.parent is not parent:
                raise ValueError(f"node {image.key:#x} is known under another parent")
            self._nodes[image.key] = node

    def _take_blocks(self, part: Blocks) -> None:
        for image in part.blocks:
            block = self._block(image.hash, image.copies)
            block.chunks = None if image.chunks is None else set(image.chunks)
            self._residency.chunked = self._residency.chunked or block.chunks is not None
            if image.key is not None:
                if image.key not in self._nodes:
                    raise ValueError(f"block {image.hash:#x} names a node that was not told")
                self._residency.adopt(block, (image.size, image.eagle), self._nodes[image.key])
        for waiting in part.waiting:
            block = self._block(waiting.hash, waiting.copies)
            window = (waiting.size, waiting.eagle)
            self._residency.adopt_waiting(
                block, Content(waiting.parent, waiting.body, window, waiting.lora, waiting.salt)
            )

    def _block(self, hash_: int, copies: Copies) -> Block:
        residency = self._residency
        if hash_ in residency.blocks or len(copies) != 4 or min(copies) < 0:
            raise ValueError(f"block {hash_:#x} is told twice, or with copies {copies}")
        block = residency.blocks[hash_] = Block(hash_)
        residency.budget.used += 1
        block.copies = list(copies)
        if not any(copies):
            residency.remembered[hash_] = block
        return block

    def _take_tracked(self, part: Tracked) -> None:
        group = self._residency.groups.tracked.get(part.group)
        if group is None or any(len(copies) != 4 or min(copies) < 0 for copies in part.copies.values()):
            raise ValueError(f"copies of group {part.group}, which was not told, or malformed")
        group.copies |= part.copies
