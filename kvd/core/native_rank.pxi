# What one rank holds: its blocks in a compact table, found by engine hash; the counterpart of residency.py.
#
# Entries lie in the order they were made, as in a dict, 16 bytes each; an index of 32-bit slots finds them. A slot is the
# entry's number + 2 in the low bits and bits of the hash in the high ones. What few blocks have is beside the table in
# dicts by hash, and a flag says so: counts that do not fit, unusual windows, contents that wait, chunks, second names.

cdef enum:
    REMEMBERED = 1  # no copies: the 24 bits of copies are a position in the queue of remembered blocks
    WAITING = 2
    CHUNKED = 4
    SHARED = 8  # other blocks of this rank name the same node
    FLAGS = 15
    WINDOWS = 15
    COUNT = 63  # a count of this and more is in ``overflow``
    NOWHERE = 4
    QUEUE_MAX = 1 << 22

cdef uint32_t HOLE = 0xFFFFFFFE  # as an entry's node: the entry is gone

cdef dict _DOUBT_BITS = {name: 1 << i for i, name in enumerate(DOUBTS)}

cdef struct Entry:
    uint64_t hash
    uint32_t node
    uint32_t state  # bits 0–3 flags, 4–7 window, 8–31 copies, 6 bits a tier

cdef struct CWindow:
    uint64_t size
    uint64_t blocks
    uint64_t since
    uint32_t eagle

cdef struct Content:
    bint root
    uint64_t parent
    const char* body
    Py_ssize_t length
    uint64_t size
    uint32_t eagle
    PyObject* lora
    PyObject* salt
    uint32_t above  # the parent's entry if that is known, else NONE
    const uint64_t* hint  # local hash, key, seed and parent's key, as expected; or NULL


cdef inline int nearest_of(uint32_t state) noexcept nogil:
    """The nearest tier with a copy, NOWHERE without."""
    cdef uint32_t copies = state >> 8
    if state & REMEMBERED or copies == 0:
        return NOWHERE
    return trailing_zeros(copies) // 6


@cython.final
cdef class Rank:
    """One rank's side of the index. All methods are O(blocks in the event) unless they say more."""

    cdef Tree tree
    cdef object budget
    cdef uint32_t slot
    cdef uint32_t[4] uncovered  # nodes it holds but does not cover, by level
    cdef Entry* entries
    cdef uint32_t used, live, room  # ``used`` counts holes as well
    cdef uint32_t* index
    cdef uint32_t bits, filled  # 2^bits slots; those that are not EMPTY
    cdef uint32_t* queue  # remembered blocks, oldest at ``oldest``; NONE where one was taken out
    cdef uint64_t oldest, newest
    cdef uint32_t queue_size, remembered
    cdef uint32_t* named  # node → entry, 2^named_bits slots of entry + 2; only where that was ever asked
    cdef uint32_t named_bits, named_filled
    cdef CWindow[15] windows
    cdef uint64_t window_stamp
    cdef uint32_t version  # changes whenever a block comes or goes
    cdef uint32_t most_remembered
    cdef bint single_copies, chunked
    cdef bint special  # chunks or further groups have a say in what it can use
    cdef Search search
    cdef uint32_t doubts  # which of DOUBTS were counted since this was last 0
    cdef object registered_size, registered_scheme, learnt_scheme, bounds
    cdef dict counters
    cdef object groups
    cdef dict overflow  # hash × 4 + tier → copies
    cdef dict odd  # hash → (size, eagle) of blocks whose window has no number
    cdef dict odd_windows  # (size, eagle) → [blocks, since]
    cdef dict contents  # hash → (parent, body, size, eagle, lora, salt), oldest first
    cdef dict waiting  # parent → hashes
    cdef dict chunks  # hash → last hashes of its chunks
    cdef dict shared  # node → hashes that name it, two or more

    def __cinit__(self):
        self.groups = Groups()
        self.counters, self.overflow, self.odd, self.odd_windows = {}, {}, {}, {}
        self.contents, self.waiting, self.chunks, self.shared = {}, {}, {}, {}

    def __dealloc__(self):
        free(self.entries)
        free(self.index)
        free(self.queue)
        free(self.named)

    cdef int make_special(self) except -1:
        self.special = self.search.special = True
        return 0

    cdef int count(self, str reason, Py_ssize_t more=1) except -1:
        self.counters[reason] = self.counters.get(reason, 0) + more
        self.doubts |= <uint32_t>_DOUBT_BITS.get(reason, 0)
        return 0

    # --- entries by hash ---

    cdef inline uint32_t home(self, uint64_t x) noexcept nogil:
        return <uint32_t>(x >> (64 - self.bits))

    cdef inline void expect(self, uint64_t hash_) noexcept nogil:
        """The hash will be looked for soon."""
        if self.index != NULL:
            prefetch(&self.index[self.home(mixed(hash_))])

    cdef inline void approach(self, uint64_t hash_) noexcept nogil:
        """The same, once its slot has come: ask for the entry."""
        cdef uint32_t slot
        if self.index != NULL:
            slot = self.index[self.home(mixed(hash_))] & ((<uint32_t>1 << (self.bits + 1)) - 1)
            if slot > GONE:
                prefetch(&self.entries[slot - 2])

    cdef uint32_t find(self, uint64_t hash_) noexcept nogil:
        """The entry of the hash, or NONE. O(1)."""
        cdef uint64_t x
        cdef uint32_t at, slot, low, mask, tag
        if self.index == NULL:
            return NONE
        x = mixed(hash_)
        at, mask, low = self.home(x), (<uint32_t>1 << self.bits) - 1, self.bits + 1
        tag = <uint32_t>x << low
        while True:
            slot = self.index[at]
            if slot == EMPTY:
                return NONE
            if slot != GONE and (slot ^ tag) >> low == 0:
                slot = (slot & ((<uint32_t>1 << low) - 1)) - 2
                if self.entries[slot].hash == hash_:
                    return slot
            at = (at + 1) & mask

    cdef int reserve(self, Py_ssize_t more) except -1:
        """Room for this many blocks, so that entries keep their numbers meanwhile. O(1) a block, amortised."""
        cdef uint64_t used = self.used + <uint64_t>more, filled = self.filled + <uint64_t>more
        if self.index == NULL or filled * 10 > <uint64_t>7 << self.bits or used + 4 > <uint64_t>2 << self.bits:
            return self.rebuild(more)
        if used > self.room:
            if (self.used - self.live) * 4 > self.used:
                return self.rebuild(more)
            self.room = <uint32_t>max(used, self.room + self.room // 4 + 16)
            resized(<void**>&self.entries, <size_t>self.room * sizeof(Entry))
        return 0

    cdef int rebuild(self, Py_ssize_t more) except -1:
        """Close the holes, and size everything for what is there and ``more``. O(blocks)."""
        cdef uint64_t wanted = self.live + <uint64_t>more
        cdef uint32_t i, at, to = 0, bits = 3, mask, low
        cdef uint32_t* index
        cdef uint64_t x
        while <uint64_t>5 << bits < (wanted + wanted // 16) * 10:
            bits += 1
        if bits > 29:
            raise MemoryError(f"{self.live} blocks, more than a rank can have")
        index = <uint32_t*>calloc(<size_t>1 << bits, 4)
        if index == NULL:
            raise MemoryError("no memory for the index")
        free(self.index)
        self.index, self.bits, self.filled = index, bits, self.live
        mask, low = (<uint32_t>1 << bits) - 1, bits + 1
        for i in range(self.used):
            if self.entries[i].node == HOLE:
                continue
            if i != to:
                self.entries[to] = self.entries[i]
                if self.entries[to].state & REMEMBERED:
                    self.queue[self.entries[to].state >> 8] = to
            x = mixed(self.entries[to].hash)
            at = self.home(x)
            while index[at] != EMPTY:
                at = (at + 1) & mask
            index[at] = <uint32_t>x << low | to + 2
            to += 1
        self.used = to
        if wanted > self.room or wanted * 4 < self.room or more == 0:
            self.room = <uint32_t>(wanted + wanted // 8 + 4)
            resized(<void**>&self.entries, <size_t>self.room * sizeof(Entry))
        if self.named != NULL:
            self.name_all()
        return 0

    cdef int shrink(self) except -1:
        """Give memory back after much was removed. O(1), amortised."""
        if self.room > 64 and self.live < self.room // 8:
            self.rebuild(0)
        return 0

    cdef uint32_t insert(self, uint64_t hash_) except? 0xFFFFFFFF:
        """A new block without copies; room must be reserved, the budget is the caller's. O(1)."""
        cdef uint64_t x = mixed(hash_)
        cdef uint32_t at = self.home(x), mask = (<uint32_t>1 << self.bits) - 1, e = self.used
        while self.index[at] > GONE:
            at = (at + 1) & mask
        self.filled += self.index[at] == EMPTY
        self.index[at] = <uint32_t>x << (self.bits + 1) | e + 2
        self.entries[e].hash, self.entries[e].node, self.entries[e].state = hash_, NONE, 0
        self.used += 1
        self.live += 1
        self.version += 1
        return e

    cdef int delete(self, uint32_t e) except -1:
        """The block is tied to nothing, in no queue, and goes. O(1)."""
        cdef Entry* entry = &self.entries[e]
        cdef uint64_t x = mixed(entry.hash)
        cdef uint32_t at = self.home(x), mask = (<uint32_t>1 << self.bits) - 1
        cdef uint32_t low = (<uint32_t>1 << (self.bits + 1)) - 1
        while self.index[at] <= GONE or self.index[at] & low != e + 2:
            at = (at + 1) & mask
        self.index[at] = GONE
        if self.index[(at + 1) & mask] == EMPTY:
            while self.index[at] == GONE:
                self.index[at] = EMPTY
                self.filled -= 1
                at = (at - 1) & mask
        entry.node, entry.state = HOLE, 0
        self.live -= 1
        self.version += 1
        while self.used and self.entries[self.used - 1].node == HOLE:
            self.used -= 1
        return 0

    # --- copies ---

    cdef uint64_t copies(self, uint32_t e, int tier) except? 0xFFFFFFFFFFFFFFFF:
        cdef uint32_t state = self.entries[e].state, few
        if state & REMEMBERED:
            return 0
        few = state >> (8 + 6 * tier) & COUNT
        return few if few < COUNT else <uint64_t>self.overflow[self.overflow_key(e, tier)]

    cdef object overflow_key(self, uint32_t e, int tier):
        return <object>self.entries[e].hash * 4 + tier

    cdef int set_copies(self, uint32_t e, int tier, uint64_t copies) except -1:
        """The block must not be remembered."""
        cdef uint32_t shift = 8 + 6 * tier
        cdef uint32_t few = self.entries[e].state >> shift & COUNT
        if copies >= COUNT:
            self.overflow[self.overflow_key(e, tier)] = copies
        elif few == COUNT:
            del self.overflow[self.overflow_key(e, tier)]
        few = COUNT if copies >= COUNT else <uint32_t>copies
        self.entries[e].state = self.entries[e].state & ~(<uint32_t>COUNT << shift) | few << shift
        return 0

    cdef int no_copies(self, uint32_t e) except -1:
        cdef int tier
        if not self.entries[e].state & REMEMBERED and self.entries[e].state >> 8:
            for tier in range(4):
                self.set_copies(e, tier, 0)
        return 0

    cdef list copies_of(self, uint32_t e):
        return [self.copies(e, 0), self.copies(e, 1), self.copies(e, 2), self.copies(e, 3)]

    # --- remembered blocks ---

    cdef int remember(self, uint32_t e) except -1:
        """The block has no copies any more. O(1), amortised."""
        if self.newest - self.oldest == self.queue_size:
            self.requeue()
        cdef uint32_t at = <uint32_t>self.newest & (self.queue_size - 1)
        self.queue[at] = e
        self.newest += 1
        self.remembered += 1
        self.entries[e].state = self.entries[e].state & 0xFF | REMEMBERED | at << 8
        return 0

    cdef int unremember(self, uint32_t e) except -1:
        """It leaves the queue: it is stored again, or forgotten. O(1), amortised."""
        self.queue[self.entries[e].state >> 8] = NONE
        self.entries[e].state &= 0xFF & ~REMEMBERED
        self.remembered -= 1
        while self.oldest != self.newest and self.queue[<uint32_t>self.oldest & (self.queue_size - 1)] == NONE:
            self.oldest += 1
        if self.queue_size > 64 and self.remembered < self.queue_size // 8:
            self.requeue()
        return 0

    cdef int requeue(self) except -1:
        """Close the gaps, with room for as many again. O(remembered)."""
        cdef uint32_t size = 16, at = 0, e
        cdef uint32_t* queue
        cdef uint64_t i
        while size < 2 * self.remembered:
            size *= 2
        queue = <uint32_t*>malloc(<size_t>size * 4)
        if queue == NULL:
            raise MemoryError("no memory for the index")
        i = self.oldest
        while i != self.newest:
            e = self.queue[<uint32_t>i & (self.queue_size - 1)]
            i += 1
            if e != NONE:
                queue[at] = e
                self.entries[e].state = self.entries[e].state & 0xFF | at << 8
                at += 1
        free(self.queue)
        self.queue, self.queue_size, self.oldest, self.newest = queue, size, 0, at
        return 0

    cdef uint32_t oldest_remembered(self) noexcept nogil:
        return self.queue[<uint32_t>self.oldest & (self.queue_size - 1)]

    # --- windows ---

    cdef uint32_t window_number(self, uint64_t size, uint32_t eagle) except? 0xFFFFFFFF:
        """The number of a window, a new one if it is not in use; WINDOWS where there is none left."""
        cdef uint32_t i, vacant = WINDOWS
        for i in range(WINDOWS):
            if self.windows[i].blocks:
                if self.windows[i].size == size and self.windows[i].eagle == eagle:
                    return i
            elif vacant == WINDOWS:
                vacant = i
        if self.odd_windows and (size, bool(eagle)) in self.odd_windows:
            return WINDOWS
        return vacant

    cdef int enter_window(self, uint32_t e, uint64_t size, uint32_t eagle) except -1:
        cdef uint32_t i = self.window_number(size, eagle)
        cdef CWindow* window
        self.entries[e].state = self.entries[e].state & ~<uint32_t>0xF0 | i << 4
        if i == WINDOWS:
            counted = self.odd_windows.get((size, bool(eagle)))
            if counted is None:
                self.window_stamp += 1
                counted = self.odd_windows[size, bool(eagle)] = [0, self.window_stamp]
            counted[0] += 1
            self.odd[self.entries[e].hash] = (size, bool(eagle))
            return 0
        window = &self.windows[i]
        if not window.blocks:
            self.window_stamp += 1
            window.size, window.eagle, window.since = size, eagle, self.window_stamp
        window.blocks += 1
        return 0

    cdef int leave_window(self, uint32_t e) except -1:
        cdef uint32_t i = self.entries[e].state >> 4 & 15
        if i == WINDOWS:
            window = self.odd.pop(self.entries[e].hash)
            self.odd_windows[window][0] -= 1
            if not self.odd_windows[window][0]:
                del self.odd_windows[window]
        else:
            self.windows[i].blocks -= 1
        return 0

    cdef tuple window_of(self, uint32_t e):
        cdef uint32_t i = self.entries[e].state >> 4 & 15
        if i == WINDOWS:
            return self.odd[self.entries[e].hash]
        return (self.windows[i].size, bool(self.windows[i].eagle))

    cdef dict all_windows(self):
        """Windows with how many blocks each has, in the order they came into use."""
        cdef list found = [(since, window, blocks) for window, (blocks, since) in self.odd_windows.items()]
        cdef uint32_t i
        for i in range(WINDOWS):
            if self.windows[i].blocks:
                window = (self.windows[i].size, bool(self.windows[i].eagle))
                found.append((self.windows[i].since, window, self.windows[i].blocks))
        return {window: blocks for _, window, blocks in sorted(found)}

    cdef bint knows_window(self, uint64_t size, uint32_t eagle) except -1:
        cdef uint32_t i = self.window_number(size, eagle)
        if i == WINDOWS:
            return (size, bool(eagle)) in self.odd_windows
        return self.windows[i].blocks > 0

    cdef Py_ssize_t window_count(self) except -1:
        cdef uint32_t i
        cdef Py_ssize_t count = len(self.odd_windows)
        for i in range(WINDOWS):
            count += self.windows[i].blocks > 0
        return count

    # --- names: which blocks are tied to a node ---

    cdef int name_all(self) except -1:
        """(Re)build the table from nodes to entries. O(blocks)."""
        cdef uint32_t e
        cdef uint32_t bits = 3
        while <uint64_t>5 << bits < <uint64_t>(self.live + 1) * 10:
            bits += 1
        free(self.named)
        self.named = <uint32_t*>calloc(<size_t>1 << bits, 4)
        if self.named == NULL:
            raise MemoryError("no memory for the index")
        self.named_bits, self.named_filled = bits, 0
        for e in range(self.used):
            if self.entries[e].node < HOLE and not self.entries[e].state & SHARED:
                self.name(e)
        return 0

    cdef int name(self, uint32_t e) except -1:
        """The entry is the only one of its node now. O(1), amortised."""
        if self.named == NULL:
            return 0
        if <uint64_t>(self.named_filled + 1) * 10 > <uint64_t>7 << self.named_bits:
            return self.name_all()  # which names this one too
        cdef uint32_t at = <uint32_t>(mixed(self.entries[e].node) >> (64 - self.named_bits))
        cdef uint32_t mask = (<uint32_t>1 << self.named_bits) - 1
        while self.named[at] > GONE:
            if self.named[at] == e + 2:
                return 0
            at = (at + 1) & mask
        self.named_filled += self.named[at] == EMPTY
        self.named[at] = e + 2
        return 0

    cdef int unname(self, uint32_t e) except -1:
        """The entry, which still has its node, is no longer its only one. O(1)."""
        if self.named == NULL:
            return 0
        cdef uint32_t at = <uint32_t>(mixed(self.entries[e].node) >> (64 - self.named_bits))
        cdef uint32_t mask = (<uint32_t>1 << self.named_bits) - 1
        while self.named[at] != e + 2:
            if self.named[at] == EMPTY:
                raise AssertionError("a tied block is not in the table of names")
            at = (at + 1) & mask
        self.named[at] = GONE
        return 0

    cdef uint32_t name_of(self, uint32_t node) except? 0xFFFFFFFF:
        """The only entry of a node that this rank names and does not share; NONE if there is none. O(1)."""
        if self.named == NULL:
            self.name_all()
        cdef uint32_t at = <uint32_t>(mixed(node) >> (64 - self.named_bits))
        cdef uint32_t mask = (<uint32_t>1 << self.named_bits) - 1
        while self.named[at] != EMPTY:
            if self.named[at] != GONE and self.entries[self.named[at] - 2].node == node:
                return self.named[at] - 2
            at = (at + 1) & mask
        return NONE

    cdef list hashes_of(self, uint32_t node):
        """What this rank calls a node's content, the first name first. Raises KeyError where it has no name."""
        cdef uint32_t e
        if self.shared and node in self.shared:
            return self.shared[node]
        e = self.name_of(node)
        if e == NONE:
            raise KeyError(self.tree.at(node).key)
        return [self.entries[e].hash]

    # --- ties ---

    cdef int hold(self, uint32_t e) except -1:
        """The tree learns where the block's node is held now. O(names), plus what coverage changes below."""
        cdef uint32_t node = self.entries[e].node
        cdef int tier
        if node == NONE:
            return 0
        tier = nearest_of(self.entries[e].state)
        if self.entries[e].state & SHARED:
            tier = self.nearest_of_shared(node)
        return self.tree.hold(node, self, tier, True)

    cdef int nearest_of_shared(self, uint32_t node) except -1:
        cdef int tier = NOWHERE
        for hash_ in self.shared[node]:
            tier = min(tier, nearest_of(self.entries[self.find(hash_)].state))
        return tier

    cdef int adopt(self, uint32_t e, uint64_t size, uint32_t eagle, uint32_t node, bint later) except -1:
        """Tie a block that is tied to nothing. O(1), plus what coverage changes below. ``later``: hold is still called."""
        cdef uint32_t other
        cdef bint second = self.tree.bits(node, self.slot) >> NAMED & 1
        if second:
            if node in self.shared:
                self.shared[node].append(self.entries[e].hash)
            else:
                other = self.name_of(node)
                self.unname(other)
                self.entries[other].state |= SHARED
                self.shared[node] = [self.entries[other].hash, self.entries[e].hash]
            self.entries[e].state |= SHARED
        self.entries[e].node = node
        if not second:
            self.name(e)
        self.enter_window(e, size, eagle)
        return 0 if later else self.hold(e)

    cdef int untie(self, uint32_t e) except -1:
        """Undo what the block is tied to or waits for; its copies stay."""
        cdef uint32_t node = self.entries[e].node
        if self.entries[e].state & WAITING:
            self.unwait(self.entries[e].hash)
        if node == NONE:
            return 0
        if self.entries[e].state & SHARED:
            self.entries[e].node = NONE
            self.unshare(e, node)
            self.tree.hold(node, self, self.nearest_by_name(node), True)
        else:
            self.unname(e)
            self.entries[e].node = NONE
            self.tree.hold(node, self, NOWHERE, False)
        self.leave_window(e)
        return self.tree.release(node)

    cdef int unshare(self, uint32_t e, uint32_t node) except -1:
        cdef list hashes = self.shared[node]
        cdef uint32_t other
        hashes.remove(self.entries[e].hash)
        self.entries[e].state &= ~<uint32_t>SHARED
        if len(hashes) == 1:
            del self.shared[node]
            other = self.find(hashes[0])
            self.entries[other].state &= ~<uint32_t>SHARED
            self.name(other)
        return 0

    cdef int nearest_by_name(self, uint32_t node) except -1:
        if node in self.shared:
            return self.nearest_of_shared(node)
        return nearest_of(self.entries[self.name_of(node)].state)

    cdef int reuse(self, uint32_t e) except -1:
        """The hash now names other content: what it named is gone."""
        self.count("reused_hashes")
        if self.entries[e].state & CHUNKED:
            self.unchunk(e)
        return self.no_copies(e)

    # --- content ---

    cdef int announce(self, uint32_t e, const Content* content, bint later) except -1:
        """Tie the block to its content, or let it wait for its parent; then link whoever waited for it."""
        cdef uint64_t hash_ = self.entries[e].hash
        cdef uint32_t node = self.node_of(e, content)
        if node == NONE:
            return 0
        self.tie(e, content, node, later and not self.waiting)
        if self.waiting:
            self.link(hash_)
        return 0

    cdef int link(self, uint64_t hash_) except -1:
        """Link whoever waited for the block, and so on. O(linked)."""
        cdef Content content
        cdef uint32_t e, node
        cdef list ready = []
        self.add_ready(hash_, ready)
        while ready:
            child, told = ready.pop()
            parent, body, size, eagle, lora, salt = told
            e = self.find(child)
            content.root, content.parent, content.above, content.hint = False, parent, NONE, NULL
            content.body, content.length = PyBytes_AS_STRING(body), len(body)
            content.size, content.eagle = size, eagle
            content.lora, content.salt = <PyObject*>lora, <PyObject*>salt
            node = self.node_of(e, &content)
            if node != NONE:
                self.tie(e, &content, node, False)
                self.add_ready(child, ready)
        return 0

    cdef int add_ready(self, hash_, list ready) except -1:
        for child in self.waiting.pop(hash_, ()):
            content = self.contents.get(child)
            if content is not None:
                ready.append((child, content))
        return 0

    cdef uint32_t node_of(self, uint32_t e, const Content* content) except? 0xFFFFFFFE:
        """The content's node; NONE if its chain is unknown (the block then waits) or contradicts its parent's space."""
        cdef uint32_t above, parent = NONE
        cdef Space space
        cdef uint64_t local, key
        if content.root:
            space = self.tree.space(<object>content.lora, <object>content.salt)
        else:
            above = content.above if content.above != NONE else self.find(content.parent)
            if above == NONE or self.entries[above].node == NONE:
                self.wait(e, content)
                return NONE
            parent = self.entries[above].node
            space = self.tree.space_of(parent)
            if not same_text(<object>content.lora, space.lora) or not (
                <object>content.salt is None or same_text(<object>content.salt, space.salt)
            ):
                self.count("ambiguous_namespace")
                if self.entries[e].node != NONE:
                    self.reuse(e)
                self.untie(e)
                return NONE
        if content.hint != NULL and content.hint[2] == space.seed:
            local = content.hint[0]
            if parent == NONE or content.hint[3] == self.tree.at(parent).key:
                return self.tree.node(content.hint[1] if parent != NONE else local, local, parent, space)
        else:
            local = XXH3_64bits_withSeed(content.body, content.length, space.seed)
        key = local if parent == NONE else chained(self.tree.at(parent).key, local)
        return self.tree.node(key, local, parent, space)

    cdef int tie(self, uint32_t e, const Content* content, uint32_t node, bint later) except -1:
        if self.entries[e].node == node:
            return 0
        if self.entries[e].node != NONE or (self.entries[e].state & WAITING and self.differs(e, content)):
            self.reuse(e)
        if self.entries[e].node != NONE or self.entries[e].state & WAITING:
            self.tree.protected = node
            try:
                self.untie(e)
            finally:
                self.tree.protected = NONE
        return self.adopt(e, content.size, content.eagle, node, later)

    cdef bint differs(self, uint32_t e, const Content* content) except -1:
        """Whether the block waits with another content."""
        parent, body = self.contents[self.entries[e].hash][:2]
        return (
            content.root or <uint64_t>parent != content.parent or len(body) != content.length
            or memcmp(PyBytes_AS_STRING(body), content.body, content.length) != 0
        )

    cdef int wait(self, uint32_t e, const Content* content) except -1:
        cdef uint32_t node = self.entries[e].node
        cdef Space space
        if self.entries[e].state & WAITING and self.differs(e, content):
            self.reuse(e)
        elif node != NONE:
            space = self.tree.space_of(node)
            if self.tree.at(node).local != XXH3_64bits_withSeed(content.body, content.length, space.seed):
                self.reuse(e)
        self.untie(e)
        return self.adopt_waiting(
            e, (content.parent, PyBytes_FromStringAndSize(content.body, content.length), content.size,
                bool(content.eagle), <object>content.lora, <object>content.salt)
        )  # fmt: skip

    cdef int adopt_waiting(self, uint32_t e, tuple content) except -1:
        """Let a block that is tied to nothing wait for its parent; beyond the bound the oldest no longer waits."""
        cdef uint64_t hash_ = self.entries[e].hash
        self.contents[hash_] = content
        self.entries[e].state |= WAITING
        self.waiting.setdefault(content[0], []).append(hash_)
        if len(self.contents) > self.bounds.unlinked:
            self.count("unlinked_dropped")
            self.unwait(next(iter(self.contents)))
        return 0

    cdef int unwait(self, hash_) except -1:
        cdef tuple content = self.contents.pop(hash_)
        cdef uint32_t e = self.find(hash_)
        cdef list siblings
        self.entries[e].state &= ~<uint32_t>WAITING
        found = self.waiting.get(content[0])
        if found is not None:
            siblings = found
            if hash_ in siblings:
                siblings.remove(hash_)
                if not siblings:
                    del self.waiting[content[0]]
        return 0

    # --- coming and going ---

    cdef int retire(self, uint32_t e) except -1:
        """A block without copies is remembered for its content (a later placeholder names only the hash), bounded."""
        if self.entries[e].state >> 8 or self.entries[e].state & REMEMBERED:
            return 0
        if self.entries[e].node == NONE:
            return self.forget(e)
        self.remember(e)
        if self.remembered > self.most_remembered:
            self.forget(self.oldest_remembered())
        return 0

    cdef int forget(self, uint32_t e) except -1:
        """Undo a block. O(1), plus what coverage changes below."""
        self.untie(e)
        if self.entries[e].state & REMEMBERED:
            self.unremember(e)
        else:
            self.no_copies(e)
        if self.entries[e].state & CHUNKED:
            self.unchunk(e)
        self.budget.used -= 1
        return self.delete(e)

    cdef int unchunk(self, uint32_t e) except -1:
        del self.chunks[self.entries[e].hash]
        self.entries[e].state &= ~<uint32_t>CHUNKED
        return 0

    cdef bint dismantle(self, uint32_t limit) except -1:
        """Undo up to ``limit`` blocks, newest first; True once nothing is left."""
        while limit and self.used:
            limit -= 1
            self.forget(self.used - 1)
        self.shrink()
        return not self.used

    cdef uint32_t forget_remembered(self, uint32_t limit) except? 0xFFFFFFFF:
        """Forget up to ``limit`` blocks that have no copies, oldest first; how many there were."""
        cdef uint32_t count = min(limit, self.remembered), i
        for i in range(count):
            self.forget(self.oldest_remembered())
        self.shrink()
        return count

    cdef uint32_t forget_unlinked(self, uint32_t limit) except? 0xFFFFFFFF:
        """Give up at most ``limit`` blocks that wait for a parent never announced, oldest first; how many."""
        cdef uint32_t count = min(limit, <uint32_t>len(self.contents)), i
        for i in range(count):
            self.count("unlinked_dropped")
            self.forget(self.find(next(iter(self.contents))))
        self.shrink()
        return count

    cdef Py_ssize_t empty(self, tuple tiers) except -1:
        """Take all copies off these tiers; how many blocks had any. O(blocks of the rank)."""
        cdef uint32_t e = 0, state, mask = 0, farther = 0xFFFFC000
        cdef Py_ssize_t touched = 0
        cdef int tier
        for tier in tiers:
            mask |= <uint32_t>COUNT << (8 + 6 * tier)
        while e < self.used:
            state = self.entries[e].state
            if self.entries[e].node == HOLE or state & REMEMBERED or not state & mask:
                e += 1
                continue
            touched += 1
            if state & mask & farther:
                self.count("unconfirmed")
            for tier in tiers:
                self.set_copies(e, tier, 0)
            if state & CHUNKED:
                self.unchunk(e)
            self.hold(e)
            self.retire(e)
            e += 1
        for group in self.groups.tracked.values():
            touched += group.clear(tiers)
        self.shrink()
        return touched

    # --- questions ---

    cdef Py_ssize_t usable(self, list path) except -1:
        """How many of the blocks of ``path``, all of which this rank covers, a hybrid model can reuse."""
        cdef list names
        if not path:
            return 0
        names = [self.hashes_of(node) for node in path]
        return self.groups.usable(names, self.window_of(self.find(names[0][0]))[0], LEVELS[0])

    cdef Py_ssize_t whole(self, list path, Py_ssize_t device) except -1:
        """How many of the blocks of ``path`` can be loaded, the first ``device`` of them being on the device already.

        A block in the middle of an offloaded chunk counts only if the chunk's end is reached too. O(path).
        """
        cdef set ends = set()
        cdef Py_ssize_t reach = len(path)
        for node in path:
            ends.update(self.hashes_of(node))
        while reach > device and not self.loadable(path[reach - 1], ends):
            reach -= 1
        return reach

    cdef bint loadable(self, uint32_t node, set ends) except -1:
        cdef uint32_t e, state
        for hash_ in self.hashes_of(node):
            e = self.find(hash_)
            state = self.entries[e].state
            if state & REMEMBERED or not state >> 8:
                continue
            if state >> 8 & COUNT or not state & CHUNKED or not ends.isdisjoint(self.chunks[hash_]):
                return True
        return False

    # --- soundness ---

    cdef list faults(self):
        """Every invariant that is broken, in words. O(blocks of the rank)."""
        cdef uint32_t e, said, i, mask, slot
        cdef int tier
        cdef list faults = []
        cdef dict nearest = {}, hashes = {}, windows = {}
        cdef uint32_t[4] uncovered
        cdef uint32_t live = 0, filled = 0, queued = 0
        for e in range(self.used):
            if self.entries[e].node == HOLE:
                continue
            live += 1
            faults += self.entry_faults(e)
            if self.entries[e].node != NONE:
                node = self.entries[e].node
                nearest[node] = min(nearest.get(node, NOWHERE), nearest_of(self.entries[e].state))
                hashes.setdefault(node, []).append(self.entries[e].hash)
                windows[self.window_of(e)] = windows.get(self.window_of(e), 0) + 1
        uncovered[0] = uncovered[1] = uncovered[2] = uncovered[3] = 0
        for node, tier in nearest.items():
            said = self.tree.bits(node, self.slot)
            if self.tree.find(self.tree.at(node).key) != node:
                faults.append(f"tied to node {node}, which is gone")
            if said & 0xF != (0xF << tier) & 0xF or not said >> NAMED & 1:
                faults.append(f"holds {self.tree.at(node).key:#x} as {said:#x} by the tree, on {tier} by its blocks")
            for i in range(4):
                uncovered[i] += (said & ~(said >> 4)) >> i & 1
        for i in range(4):
            if uncovered[i] != self.uncovered[i]:
                faults.append(f"{self.uncovered[i]} uncovered at {i}, expected {uncovered[i]}")
        for node, known in hashes.items():
            if (len(known) > 1) != (node in self.shared):
                faults.append(f"node {node} is named by {known}, shared: {node in self.shared}")
            elif len(known) > 1 and sorted(known) != sorted(self.shared[node]):
                faults.append(f"node {node} is named by {known}, shared by {self.shared[node]}")
            elif len(known) == 1 and self.named != NULL and self.name_of(node) != self.find(known[0]):
                faults.append(f"node {node} is not found among the names")
        if not self.shared.keys() <= hashes.keys():
            faults.append("shares a node that it does not name")
        if windows != self.all_windows():
            faults.append(f"windows {self.all_windows()}, expected {windows}")
        if self.index != NULL:
            for i in range(<uint32_t>1 << self.bits):
                filled += self.index[i] != EMPTY
        if live != self.live or filled != self.filled or self.used > self.room:
            faults.append(f"{self.live} blocks in {self.filled} slots, expected {live} in {filled}")
        i = 0
        while self.oldest + i != self.newest:
            e = self.queue[<uint32_t>(self.oldest + i) & (self.queue_size - 1)]
            queued += e != NONE
            i += 1
        if queued != self.remembered:
            faults.append(f"{self.remembered} remembered, {queued} queued")
        if sum(map(len, self.waiting.values())) != len(self.contents):
            faults.append(f"{len(self.contents)} blocks wait, for {self.waiting}")
        for key in self.overflow:
            e = self.find(key >> 2)
            if e == NONE or self.entries[e].state & REMEMBERED or self.entries[e].state >> (8 + 6 * (key & 3)) & 63 != 63:
                faults.append(f"overflow of block {key >> 2:#x} on {key & 3} which has none")
        for table, flag in ((self.contents, WAITING), (self.chunks, CHUNKED)):
            for hash_ in table:
                e = self.find(hash_)
                if e == NONE or not self.entries[e].state & <uint32_t>flag:
                    faults.append(f"block {hash_:#x} is not flagged {flag}")
        return [f"slot {self.slot}: {fault}" for fault in faults]

    cdef list entry_faults(self, uint32_t e):
        cdef uint32_t state = self.entries[e].state, at
        cdef list faults = []
        if self.find(self.entries[e].hash) != e:
            faults.append("is not found under its hash")
        if self.entries[e].node != NONE and state & WAITING:
            faults.append("is both tied and waiting")
        if state & WAITING and self.entries[e].hash not in self.contents:
            faults.append("waits without content")
        if state & CHUNKED and self.entries[e].hash not in self.chunks:
            faults.append("is in no chunk")
        if state & SHARED and self.entries[e].node not in self.shared:
            faults.append("shares a node that is not shared")
        if state & REMEMBERED:
            at = state >> 8
            if at >= self.queue_size or self.queue[at] != e:
                faults.append("is remembered, but not in the queue")
        elif not state >> 8:
            faults.append("has no copies and is not remembered")
        for tier in range(4):
            if not state & REMEMBERED and state >> (8 + 6 * tier) & 63 == 63 and self.copies(e, tier) < 63:
                faults.append(f"has {self.copies(e, tier)} copies in overflow")
        return [f"block {self.entries[e].hash:#x} {fault}" for fault in faults]
