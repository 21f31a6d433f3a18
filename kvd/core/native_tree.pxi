# The content tree: one node per block key. What ranks hold of it is the node's profile, see native_sets.pxi.
#
# Nodes are found through 256 small tables, so that growth is paid in small steps. A slot is the node's id + 2 in 27 bits
# and 5 bits of the hash; a node is looked at only where those agree.

cdef enum:
    SEGMENTS = 256
    EMPTY = 0
    GONE = 1
    NODE_BITS = 27

cdef struct Node:
    uint64_t key
    uint64_t local
    uint32_t parent
    uint32_t child  # first of them
    uint32_t before  # siblings; first blocks are nobody's children
    uint32_t after
    uint32_t space
    uint32_t profile

cdef struct Segment:
    uint32_t* slots
    uint32_t mask
    uint32_t live
    uint32_t filled  # slots that are not EMPTY


@cython.final
cdef class Space:
    """A namespace of content, with how many nodes are in it."""

    cdef object lora
    cdef object salt
    cdef uint64_t seed
    cdef uint64_t nodes
    cdef uint32_t number


@cython.final
cdef class Tree:
    """All nodes of one model. Its hot methods touch no Python object but the node's space."""

    cdef Sets sets
    cdef Pool nodes
    cdef Segment* segments
    cdef uint32_t protected  # a node that release must leave alone
    cdef dict guests  # node id → how many importers refer to it
    cdef list spaces  # by number; None where free
    cdef dict space_numbers
    cdef list free_spaces
    cdef uint32_t* stack
    cdef uint32_t stack_size
    cdef uint32_t last_node, last_slot, last_bits  # what was just written: mostly the next block's parent

    def __cinit__(self):
        self.sets = Sets()
        pool_begin(&self.nodes, sizeof(Node))
        self.segments = <Segment*>calloc(SEGMENTS, sizeof(Segment))
        if self.segments == NULL:
            raise MemoryError("no memory for the index")
        self.protected = self.last_node = NONE
        self.guests = {}
        self.spaces = []
        self.space_numbers = {}
        self.free_spaces = []

    def __dealloc__(self):
        cdef int i
        if self.segments != NULL:
            for i in range(SEGMENTS):
                free(self.segments[i].slots)
        free(self.segments)
        free(self.stack)
        pool_end(&self.nodes)

    cdef inline Node* at(self, uint32_t id_) noexcept nogil:
        return <Node*>pool_at(&self.nodes, id_)

    # --- nodes by key ---

    cdef inline void expect(self, uint64_t key) noexcept nogil:
        """The key will be looked for soon."""
        cdef uint64_t x = mixed(key)
        cdef Segment* segment = &self.segments[x >> 56]
        if segment.slots != NULL:
            prefetch(&segment.slots[<uint32_t>(x >> 20) & segment.mask])

    cdef uint32_t find(self, uint64_t key) noexcept nogil:
        """The node of the key, or NONE. O(1)."""
        cdef uint64_t x = mixed(key)
        cdef Segment* segment = &self.segments[x >> 56]
        cdef uint32_t at = <uint32_t>(x >> 20) & segment.mask, tag = <uint32_t>x << NODE_BITS, slot
        if segment.slots == NULL:
            return NONE
        while True:
            slot = segment.slots[at]
            if slot == EMPTY:
                return NONE
            if slot != GONE and (slot ^ tag) >> NODE_BITS == 0:
                slot = (slot & ((1 << NODE_BITS) - 1)) - 2
                if self.at(slot).key == key:
                    return slot
            at = (at + 1) & segment.mask

    cdef int resize(self, Segment* segment) except -1:
        """Rebuild a segment for what lives in it and half as much again."""
        cdef uint32_t size = SMALLEST, at, i, slot
        cdef uint32_t* old = segment.slots
        cdef uint32_t before = segment.mask + 1 if old != NULL else 0
        cdef uint64_t x
        while <uint64_t>size * 2 < <uint64_t>(segment.live + 1) * 4:
            size *= 2
        segment.slots = <uint32_t*>calloc(size, 4)
        if segment.slots == NULL:
            segment.slots = old
            raise MemoryError("no memory for the index")
        segment.mask = size - 1
        segment.filled = segment.live
        for i in range(before):
            slot = old[i]
            if slot > GONE:
                x = mixed(self.at((slot & ((1 << NODE_BITS) - 1)) - 2).key)
                at = <uint32_t>(x >> 20) & segment.mask
                while segment.slots[at] != EMPTY:
                    at = (at + 1) & segment.mask
                segment.slots[at] = slot
        free(old)
        return 0

    cdef uint32_t node(self, uint64_t key, uint64_t local, uint32_t parent, Space space) except? 0xFFFFFFFF:
        """The node of this key, made if it is new. O(1), amortised."""
        cdef uint32_t id_ = self.find(key), at
        cdef uint64_t x
        cdef Segment* segment
        cdef Node* node
        cdef Node* above
        if id_ != NONE:
            return id_
        x = mixed(key)
        segment = &self.segments[x >> 56]
        if segment.slots == NULL or <uint64_t>(segment.filled + 1) * 10 > <uint64_t>(segment.mask + 1) * 7:
            self.resize(segment)
        id_ = pool_take(&self.nodes)
        if id_ + 2 >= 1 << NODE_BITS:
            pool_give(&self.nodes, id_)
            raise MemoryError(f"{self.nodes.live} nodes, more than the index can name")
        node = self.at(id_)
        node.key, node.local, node.parent, node.space = key, local, parent, space.number
        node.child = node.before = node.after = NONE
        node.profile = 0
        self.sets.profile(0).refs += 1
        space.nodes += 1
        if parent != NONE:
            above = self.at(parent)
            node.after = above.child
            if above.child != NONE:
                self.at(above.child).before = id_
            above.child = id_
        at = <uint32_t>(x >> 20) & segment.mask
        while segment.slots[at] > GONE:
            at = (at + 1) & segment.mask
        segment.filled += segment.slots[at] == EMPTY
        segment.live += 1
        segment.slots[at] = <uint32_t>x << NODE_BITS | id_ + 2
        return id_

    cdef int forget(self, uint32_t id_) except -1:
        """Take a node that nobody refers to out of the tree."""
        cdef Node* node = self.at(id_)
        cdef uint64_t x = mixed(node.key)
        cdef Segment* segment = &self.segments[x >> 56]
        cdef uint32_t at = <uint32_t>(x >> 20) & segment.mask
        cdef Space space = <Space>self.spaces[node.space]
        while segment.slots[at] <= GONE or (segment.slots[at] & ((1 << NODE_BITS) - 1)) != id_ + 2:
            at = (at + 1) & segment.mask
        segment.slots[at] = GONE
        if segment.slots[(at + 1) & segment.mask] == EMPTY:
            while segment.slots[at] == GONE:
                segment.slots[at] = EMPTY
                segment.filled -= 1
                at = (at - 1) & segment.mask
        segment.live -= 1
        if segment.mask >= 64 and <uint64_t>segment.live * 8 < segment.mask:
            self.resize(segment)
        if node.before != NONE:
            self.at(node.before).after = node.after
        elif node.parent != NONE:
            self.at(node.parent).child = node.after
        if node.after != NONE:
            self.at(node.after).before = node.before
        self.sets.drop_profile(node.profile)
        space.nodes -= 1
        if space.nodes == 0:
            self.drop_space(space)
        if self.last_node == id_:
            self.last_node = NONE
        pool_give(&self.nodes, id_)
        return 0

    cdef int release(self, uint32_t id_) except -1:
        """Drop the node, and its ancestors, as far as nothing is tied to them or below them. O(dropped)."""
        cdef Node* node
        cdef uint32_t parent
        while id_ != NONE and id_ != self.protected:
            node = self.at(id_)
            if node.child != NONE or self.sets.profile(node.profile).sets[NAMED] != 0:
                return 0
            if self.guests and id_ in self.guests:
                return 0
            parent = node.parent
            self.forget(id_)
            id_ = parent
        return 0

    # --- who holds ---

    cdef inline uint32_t bits(self, uint32_t id_, uint32_t slot) noexcept nogil:
        """What the node's profile says of the rank."""
        if id_ == self.last_node and slot == self.last_slot:
            return self.last_bits
        return self.sets.bits(self.at(id_).profile, slot)

    cdef int hold(self, uint32_t id_, Rank rank, int tier, bint named) except -1:
        """The rank now holds the node on ``tier`` (4: nowhere), and names it or not. O(1), plus what is covered below."""
        cdef Node* node = self.at(id_)
        cdef uint32_t held = (0xF << tier) & 0xF
        cdef uint32_t covered = held, below = NONE, flipped
        if held and node.parent != NONE:
            covered = held & self.bits(node.parent, rank.slot) >> 4
        if node.child == self.last_node and rank.slot == self.last_slot and node.child != NONE:
            if self.at(node.child).after == NONE:  # removals come child first: what it says is known
                below = self.last_bits
        flipped = self.say(id_, rank, held | covered << 4 | (<uint32_t>named << NAMED))
        if flipped & 0xF0 and node.child != NONE and (below == NONE or (below & covered) != (below >> 4 & 0xF)):
            self.cover_below(id_, rank, flipped >> 4 & 0xF)
        return 0

    cdef uint32_t say(self, uint32_t id_, Rank rank, uint32_t bits) except? 0xFFFFFFFF:
        """Write what the node's profile says of the rank; the bits that changed."""
        cdef Node* node = self.at(id_)
        cdef uint32_t before, old = node.profile, i, flipped
        cdef uint32_t profile = self.sets.profile_with(old, rank.slot, bits, &before)
        node.profile = profile
        self.sets.drop_profile(old)
        self.last_node, self.last_slot, self.last_bits = id_, rank.slot, bits
        flipped = before ^ bits
        if flipped:
            for i in range(4):
                rank.uncovered[i] += <int>((bits & ~(bits >> 4)) >> i & 1) - <int>((before & ~(before >> 4)) >> i & 1)
        return flipped

    cdef int cover_below(self, uint32_t top, Rank rank, uint32_t levels) except -1:
        """Coverage changed at ``top``: set or clear it wherever that decides it below. O(children looked at)."""
        cdef uint32_t depth = 0, id_, child, said, wanted, above, slot = rank.slot
        cdef uint32_t on = self.bits(top, slot) >> 4 & levels
        if on == levels and not any_of(rank.uncovered, levels):
            return 0  # nothing of this rank waits to be covered
        self.push(top, &depth)
        while depth:
            depth -= 1
            id_ = self.stack[depth]
            above = self.bits(id_, slot) >> 4 & 0xF
            child = self.at(id_).child
            while child != NONE:
                said = self.sets.bits(self.at(child).profile, slot)
                wanted = (said & ~<uint32_t>0xF0) | (said & above) << 4
                if said != wanted:
                    self.say(child, rank, wanted)
                    if self.at(child).child != NONE:
                        self.push(child, &depth)
                child = self.at(child).after
        return 0

    cdef int push(self, uint32_t id_, uint32_t* depth) except -1:
        cdef uint32_t wider
        if depth[0] == self.stack_size:
            wider = 2 * self.stack_size if self.stack_size else 64
            resized(<void**>&self.stack, <size_t>wider * 4)
            self.stack_size = wider
        self.stack[depth[0]] = id_
        depth[0] += 1
        return 0

    # --- spaces ---

    cdef Space space(self, object lora, object salt):
        """The namespace of this adapter and salt. O(1)."""
        cdef Space space
        cdef object number = self.space_numbers.get((lora, salt))
        if number is not None:
            return <Space>self.spaces[number]
        space = Space()
        space.lora, space.salt, space.seed = lora, salt, namespace_seed(lora, salt)
        if self.free_spaces:
            space.number = self.free_spaces.pop()
            self.spaces[space.number] = space
        else:
            space.number = len(self.spaces)
            self.spaces.append(space)
        self.space_numbers[lora, salt] = space.number
        return space

    cdef int drop_space(self, Space space) except -1:
        """No node is in it any more."""
        del self.space_numbers[space.lora, space.salt]
        self.spaces[space.number] = None
        self.free_spaces.append(space.number)
        return 0

    cdef inline Space space_of(self, uint32_t id_):
        return <Space>self.spaces[self.at(id_).space]

    # --- soundness ---

    cdef list ids(self):
        """Every node's id. O(nodes)."""
        cdef list found = []
        cdef uint32_t i, j
        for i in range(SEGMENTS):
            if self.segments[i].slots != NULL:
                for j in range(self.segments[i].mask + 1):
                    if self.segments[i].slots[j] > GONE:
                        found.append((self.segments[i].slots[j] & ((1 << NODE_BITS) - 1)) - 2)
        return found

    cdef list faults(self):
        """Broken invariants in words. O(nodes × levels)."""
        cdef list faults = pool_faults(&self.nodes, "nodes")
        cdef list ids = self.ids()
        cdef dict profiles = {}, spaces = {}
        cdef uint32_t i, filled
        cdef Node* node
        cdef Space space
        for id_ in ids:
            node = self.at(id_)
            profiles[node.profile] = profiles.get(node.profile, 0) + 1
            spaces[node.space] = spaces.get(node.space, 0) + 1
            faults += [f"node {node.key:#018x} {fault}" for fault in self.node_faults(id_)]
        if len(ids) != self.nodes.live:
            faults.append(f"{len(ids)} nodes are filed, {self.nodes.live} live")
        for i in range(SEGMENTS):
            filled = 0
            if self.segments[i].slots != NULL:
                for j in range(self.segments[i].mask + 1):
                    filled += self.segments[i].slots[j] != EMPTY
            if filled != self.segments[i].filled or self.segments[i].live > filled:
                faults.append(f"segment {i} counts {self.segments[i].filled} slots, has {filled}")
        for (lora, salt), number in self.space_numbers.items():
            space = self.spaces[number]
            if space is None or (space.lora, space.salt, space.number) != (lora, salt, number):
                faults.append(f"space {number} is not {lora!r}, {salt!r}")
            elif space.nodes != spaces.get(number, 0):
                faults.append(f"space {number} counts {space.nodes} nodes, has {spaces.get(number, 0)}")
        if len(self.space_numbers) + len(self.free_spaces) != len(self.spaces):
            faults.append(f"{len(self.spaces)} spaces, {len(self.space_numbers)} named, {len(self.free_spaces)} free")
        if self.protected != NONE:
            faults.append("a node is still protected")
        return faults + self.sets.faults(profiles)

    cdef list node_faults(self, uint32_t id_):
        cdef Node* node = self.at(id_)
        cdef Node* above = NULL
        cdef Profile* p = self.sets.profile(node.profile)
        cdef uint32_t i, child, steps = 0
        cdef list faults = []
        cdef list masks = [self.sets.members(p.sets[i]) for i in range(9)]
        cdef list over = [-1] * 4
        if self.find(node.key) != id_:
            faults.append("is not found under its key")
        if node.parent != NONE:
            above = self.at(node.parent)
            if self.find(above.key) != node.parent:
                faults.append("has a parent that is not in the tree")
            over = [self.sets.members(self.sets.profile(above.profile).sets[4 + i]) for i in range(4)]
            if (node.before == NONE) != (above.child == id_) or (
                node.before != NONE and self.at(node.before).after != id_
            ):
                faults.append("is not linked under its parent")
        elif node.before != NONE or node.after != NONE:
            faults.append("is a first block with siblings")
        if node.after != NONE and self.at(node.after).before != id_:
            faults.append("is not linked to its sibling")
        child = node.child
        while child != NONE and steps <= self.nodes.live:
            if self.at(child).parent != id_:
                faults.append("has a child of another parent")
            child = self.at(child).after
            steps += 1
        if steps > self.nodes.live:
            faults.append("has children in a circle")
        if node.child == NONE and not masks[NAMED] and id_ not in self.guests:
            faults.append("is dead: nothing is tied to it or below it")
        for i in range(4):
            if masks[4 + i] != masks[i] & over[i]:
                faults.append(f"covered {masks[4 + i]:#x} at {LEVELS[i].name}, expected {masks[i] & over[i]:#x}")
            if i and masks[i - 1] & ~masks[i]:
                faults.append(f"held nearer than {LEVELS[i].name} by ranks that do not hold it there")
        if masks[3] & ~masks[NAMED]:
            faults.append("is held by ranks that do not name it")
        if node.space >= len(self.spaces) or self.spaces[node.space] is None:
            faults.append("is in a space that is gone")
        return faults
