# One rank's residency as values, in parts of bounded size, and back: the counterpart of image.py, whose order it keeps.


def export(Tree tree, Rank rank):
    """All parts of a rank. Raises RuntimeError if blocks came or went since the first one."""
    cdef uint32_t version = rank.version
    groups = rank.groups
    tracked = [GroupImage(number, group.kind, group.window) for number, group in groups.tracked.items()]
    yield Head(groups.indexed, tracked, sorted(groups.ignored), rank.learnt_scheme)
    spaces = {}
    told = 0
    images = []
    seen = set()
    e = 0
    unchanged(rank, version)
    while e < rank.used:
        for node in untold(tree, rank, e, seen):
            images.append(node_image(tree, node, spaces))
            if len(images) >= PART:
                yield Nodes(list(spaces)[told:], images)
                unchanged(rank, version)
                told, images = len(spaces), []
        e += 1
    if images:
        yield Nodes(list(spaces)[told:], images)
        unchanged(rank, version)
    blocks = []
    waiting = []
    e = 0
    while e < rank.used:
        add_block(tree, rank, e, blocks, waiting)
        e += 1
        if len(blocks) + len(waiting) >= PART:
            yield Blocks(blocks, waiting)
            unchanged(rank, version)
            blocks, waiting = [], []
    if blocks or waiting:
        yield Blocks(blocks, waiting)
    for number, group in groups.tracked.items():
        part = {}
        for hash_, copies in group.copies.items():
            part[hash_] = list(copies)
            if len(part) >= PART:
                yield Tracked(number, part)
                part = {}
        if part:
            yield Tracked(number, part)


cdef int unchanged(Rank rank, uint32_t version) except -1:
    if rank.version != version:
        raise RuntimeError("the rank changed while it was exported")
    return 0


cdef list untold(Tree tree, Rank rank, uint32_t e, set seen):
    """The node the block is tied to, and its ancestors, as far as they were not seen yet; parents first."""
    cdef uint32_t node = rank.entries[e].node
    cdef list path = []
    while node < HOLE and node not in seen:
        seen.add(node)
        path.append(node)
        node = tree.at(node).parent
    path.reverse()
    return path


cdef object node_image(Tree tree, uint32_t id_, dict spaces):
    cdef Node* node = tree.at(id_)
    cdef Space space = tree.space_of(id_)
    number = spaces.setdefault((space.lora, space.salt), len(spaces))
    return NodeImage(node.key, node.local, None if node.parent == NONE else tree.at(node.parent).key, number)


cdef int add_block(Tree tree, Rank rank, uint32_t e, list blocks, list waiting) except -1:
    cdef uint64_t hash_ = rank.entries[e].hash
    cdef uint32_t node = rank.entries[e].node
    if node == HOLE:
        return 0
    if rank.entries[e].state & WAITING:
        parent, body, size, eagle, lora, salt = rank.contents[hash_]
        waiting.append(WaitingImage(hash_, rank.copies_of(e), parent, body, size, eagle, lora, salt))
        return 0
    chunks = sorted(rank.chunks[hash_]) if rank.entries[e].state & CHUNKED else None
    if node == NONE:
        blocks.append(BlockImage(hash_, rank.copies_of(e), chunks=chunks))
    else:
        blocks.append(BlockImage(hash_, rank.copies_of(e), tree.at(node).key, *rank.window_of(e), chunks))
    return 0


@cython.final
cdef class NativeImporter:
    """Takes the parts of one rank, in order, into an empty one.

    Raises ValueError for parts that contradict each other; the rank is then to be thrown away. Nodes that no block ties
    are released by :meth:`finish`.
    """

    cdef Tree tree
    cdef Rank rank
    cdef list spaces
    cdef dict nodes

    def __init__(self, Tree tree, Rank rank):
        self.tree, self.rank = tree, rank
        self.spaces = []
        self.nodes = {}

    def take(self, part):
        """Take the next part."""
        if isinstance(part, Head):
            self._head(part)
        elif isinstance(part, Nodes):
            self._take_nodes(part)
        elif isinstance(part, Blocks):
            self._take_blocks(part)
        else:
            self._take_tracked(part)

    def finish(self):
        """All parts were taken."""
        cdef Space space
        for id_ in self.nodes.values():
            guests = self.tree.guests.get(id_, 0) - 1
            if guests > 0:
                self.tree.guests[id_] = guests
            else:
                self.tree.guests.pop(id_, None)
        for key in reversed(self.nodes):
            id_ = self.tree.find(key)
            if id_ != NONE:
                self.tree.release(id_)
        self.nodes.clear()
        for lora, salt in self.spaces:
            number = self.tree.space_numbers.get((lora, salt))
            if number is not None:
                space = <Space>self.tree.spaces[number]
                if space.nodes == 0:
                    self.tree.drop_space(space)
        self.spaces.clear()

    cdef int _head(self, object part) except -1:
        groups = self.rank.groups
        groups.indexed = part.indexed
        groups.tracked = {image.number: Group(image.kind, image.window) for image in part.tracked}
        groups.ignored = set(part.ignored)
        if groups.tracked:
            self.rank.make_special()
        self.rank.learnt_scheme = part.scheme
        return 0

    cdef int _take_nodes(self, object part) except -1:
        cdef uint32_t id_, parent
        cdef Space space
        for lora, salt in part.spaces:
            self.spaces.append((lora, salt))
        for image in part.nodes:
            if not 0 <= image.space < len(self.spaces) or (
                image.parent is not None and image.parent not in self.nodes
            ):
                raise ValueError(f"node {image.key:#x} refers to a space or parent that was not told")
            parent = NONE if image.parent is None else self.nodes[image.parent]
            lora, salt = self.spaces[image.space]
            space = self.tree.space(lora, salt)
            id_ = self.tree.node(image.key, image.local, parent, space)
            if self.tree.at(id_).parent != parent:
                raise ValueError(f"node {image.key:#x} is known under another parent")
            if image.key not in self.nodes:
                self.nodes[image.key] = id_
                self.tree.guests[id_] = self.tree.guests.get(id_, 0) + 1
        return 0

    cdef int _take_blocks(self, object part) except -1:
        cdef uint32_t e
        self.rank.reserve(len(part.blocks) + len(part.waiting))
        for image in part.blocks:
            e = self._block(image.hash, image.copies)
            if image.chunks is not None:
                self.rank.chunked = True
                self.rank.make_special()
                self.rank.chunks[image.hash] = set(image.chunks)
                self.rank.entries[e].state |= CHUNKED
            if image.key is not None:
                if image.key not in self.nodes:
                    raise ValueError(f"block {image.hash:#x} names a node that was not told")
                self.rank.adopt(e, image.size, image.eagle, self.nodes[image.key], False)
        for image in part.waiting:
            e = self._block(image.hash, image.copies)
            content = (image.parent, image.body, image.size, image.eagle, image.lora, image.salt)
            self.rank.adopt_waiting(e, content)
        return 0

    cdef uint32_t _block(self, object hash_, object copies) except? 0xFFFFFFFF:
        cdef uint32_t e
        cdef int tier
        if self.rank.find(hash_) != NONE or len(copies) != 4 or min(copies) < 0:
            raise ValueError(f"block {hash_:#x} is told twice, or with copies {copies}")
        e = self.rank.insert(hash_)
        self.rank.budget.used += 1
        if not any(copies):
            self.rank.remember(e)
        for tier in range(4):
            if copies[tier]:
                self.rank.set_copies(e, tier, copies[tier])
        return e

    cdef int _take_tracked(self, object part) except -1:
        group = self.rank.groups.tracked.get(part.group)
        if group is None or any([len(copies) != 4 or min(copies) < 0 for copies in part.copies.values()]):
            raise ValueError(f"copies of group {part.group}, which was not told, or malformed")
        group.copies |= part.copies
        return 0
