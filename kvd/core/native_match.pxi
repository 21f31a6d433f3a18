# Questions: the keys of a prompt, hashed only as far as somebody looks, and the jump search over covered sets.

cdef enum:
    LAZY = 0  # packed tokens and media, hashed here
    LISTED = 1  # a list or tuple of integers
    INDEXED = 2  # anything else with len() and []


cdef inline uint32_t slot_of_handle(const Table* slots, PyObject* handle) except? 0xFFFFFFFF:
    """KeyError for a handle that is not there. O(1)."""
    cdef uint64_t wanted
    cdef uint32_t at
    if slots.slots != NULL and kvd_is_u64(handle, &wanted):
        at = <uint32_t>wanted & slots.mask
        while slots.slots[at] != VACANT:
            if slots.slots[at] >> 32 == wanted:
                return <uint32_t>slots.slots[at]
            at = (at + 1) & slots.mask
    raise KeyError(<object>handle)


@cython.final
cdef class Reaches:
    """What a match found: handle → :class:`Reach`, for those that hold at least the first block somewhere.

    A mapping whose values are made as they are asked for; ``packed`` hands all out at once.
    """

    cdef list handles
    cdef Py_ssize_t count
    cdef int32_t* rows  # of five: blocks by tier, usable ones
    cdef dict places

    def __cinit__(self, list handles):
        self.handles = handles
        self.count = len(handles)
        self.rows = <int32_t*>calloc(self.count or 1, 5 * sizeof(int32_t))
        if self.rows == NULL:
            raise MemoryError("no memory for an answer")

    def __dealloc__(self):
        free(self.rows)

    cdef bint is_found(self, Py_ssize_t i) noexcept nogil:
        cdef const int32_t* row = &self.rows[5 * i]
        return (row[0] | row[1] | row[2] | row[3]) != 0

    cdef object reach(self, Py_ssize_t i):
        cdef const int32_t* row = &self.rows[5 * i]
        return Reach((row[0], row[1], row[2], row[3]), row[4])

    cdef Py_ssize_t place(self, object handle) except -2:
        if self.places is None:
            self.places = {each: i for i, each in enumerate(self.handles)}
        cdef object found = self.places.get(handle)
        return -1 if found is None or not self.is_found(found) else found

    def __len__(self):
        return sum(1 for _ in self)

    def __iter__(self):
        return iter(dict.fromkeys([self.handles[i] for i in range(self.count) if self.is_found(i)]))

    def __contains__(self, handle):
        return self.place(handle) >= 0

    def __getitem__(self, handle):
        cdef Py_ssize_t i = self.place(handle)
        if i < 0:
            raise KeyError(handle)
        return self.reach(i)

    def get(self, handle, default=None):
        cdef Py_ssize_t i = self.place(handle)
        return default if i < 0 else self.reach(i)

    def keys(self):
        return KeysView(self)

    def items(self):
        return ItemsView(self)

    def values(self):
        return ValuesView(self)

    def __eq__(self, other):
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self):
        return f"Reaches({dict(self)!r})"

    def packed(self):
        """Five int32 a rank asked about, in the order of the question: blocks by tier, cumulative, and usable ones."""
        return PyBytes_FromStringAndSize(<char*>self.rows, self.count * 5 * sizeof(int32_t))


Mapping.register(Reaches)


@cython.final
cdef class Search:
    """The state of one match; its memory is kept between matches."""

    cdef Tree tree
    cdef int kind
    cdef Py_ssize_t end
    cdef object sequence
    # LAZY
    cdef bytes packed
    cdef uint64_t seed
    cdef Py_ssize_t width, window, stride, size
    cdef list items, ends
    cdef uint64_t* keys
    cdef Py_ssize_t hashed, room
    cdef char* block
    cdef Py_ssize_t block_room
    # the search
    cdef Py_ssize_t looked  # where it looked last, and at which node
    cdef uint32_t node
    cdef uint64_t* among
    cdef uint64_t* ranks  # still covered
    cdef uint64_t* spread
    cdef uint32_t words, left  # how many are in ``ranks``
    cdef uint32_t alike  # bit l: wherever this search looked, levels l and l + 1 were covered by the same ranks
    cdef int32_t* reached  # by slot and level
    cdef uint32_t slots
    cdef uint32_t* slot_of  # by position among the ranks asked about
    cdef Py_ssize_t asked
    cdef bint special  # some rank of the index is

    def __cinit__(self, Tree tree):
        self.tree = tree

    def __dealloc__(self):
        free(self.keys)
        free(self.block)
        free(self.among)
        free(self.reached)
        free(self.slot_of)

    # --- keys ---

    cdef int open(self, object keys) except -1:
        self.sequence = keys
        self.end = len(keys)
        if type(keys) is Keys:
            blocks = keys._blocks
            self.kind, self.hashed = LAZY, 0
            self.packed, self.seed, self.size = blocks._packed, keys._seed, blocks.size
            self.width, self.window, self.stride = blocks._width, blocks._window, blocks._stride
            self.items, self.ends = blocks._items, blocks._ends
        elif type(keys) is list or type(keys) is tuple:
            self.kind = LISTED
        else:
            self.kind = INDEXED
        return 0

    cdef int close(self) except -1:
        self.sequence = self.packed = self.items = self.ends = None
        if self.room > 1 << 16:
            free(self.keys)
            self.keys, self.room = NULL, 0
        return 0

    cdef bint key_at(self, Py_ssize_t i, uint64_t* key) except -1:
        """The i-th key; False if it is no 64-bit number, which then no node has. O(1), or O(blocks not hashed yet)."""
        if self.kind == LAZY:
            if i >= self.hashed:
                self.hash_to(i)
            key[0] = self.keys[i]
            return True
        if self.kind == LISTED:
            return kvd_is_u64(PySequence_Fast_ITEMS(self.sequence)[i], key)
        try:
            key[0] = self.sequence[i]
        except OverflowError:
            return False
        return True

    cdef int hash_to(self, Py_ssize_t last) except -1:
        cdef const char* packed = PyBytes_AS_STRING(self.packed)
        cdef const char* body
        cdef Py_ssize_t i, length, wider
        cdef uint64_t local
        if last >= self.room:
            wider = min(max(2 * self.room, last + 1, 64), self.end)
            resized(<void**>&self.keys, wider * 8)
            self.room = wider
        for i in range(self.hashed, last + 1):
            body, length = packed + i * self.stride, self.window
            if self.width == 8 or self.items:
                length = self.laid_out(i, body)
                body = self.block
            local = XXH3_64bits_withSeed(body, length, self.seed)
            self.keys[i] = local if i == 0 else chained(self.keys[i - 1], local)
        self.hashed = last + 1
        return 0

    cdef Py_ssize_t laid_out(self, Py_ssize_t i, const char* words) except -1:
        """Write the bytes of a block that is not hashed as it lies; how many there are."""
        cdef Py_ssize_t length = self.window, count = self.window // 8, j, start = i * self.size, begin, low, high, item
        cdef const uint64_t* wide = <const uint64_t*>words
        cdef bint fits = self.width == 8
        cdef uint64_t* out
        if self.block_room < length + 16:
            resized(<void**>&self.block, length + 1024)
            self.block_room = length + 1024
        memcpy(self.block, words, length)
        if fits:
            wide = <const uint64_t*>self.block
            for j in range(count):
                fits = fits and wide[j] <= 0xFFFFFFFF
            if fits:
                for j in range(count):
                    (<uint32_t*>self.block)[j] = <uint32_t>wide[j]
                length = count * 4
        low, high = 0, len(self.items)
        while low < high:  # the first item that ends behind the block's start
            item = (low + high) // 2
            if <Py_ssize_t>self.ends[item] > start:
                high = item
            else:
                low = item + 1
        for item in range(low, len(self.items)):
            begin, identity = self.items[item]
            if begin >= start + self.size:
                break
            if self.block_room < length + 16:
                resized(<void**>&self.block, 2 * length + 16)
                self.block_room = 2 * length + 16
            local = <uint64_t>identity
            memcpy(self.block + length, &local, 8)
            offset = <int64_t>(begin - start)
            memcpy(self.block + length + 8, &offset, 8)
            length += 16
        return length

    # --- nodes ---

    cdef uint32_t covered(self, Py_ssize_t i, int level) except? 0xFFFFFFFF:
        """The set of ranks that hold the i-th block and every block before it. O(1)."""
        cdef uint64_t key
        cdef uint32_t node
        cdef Profile* p
        cdef int j
        if not self.key_at(i, &key):
            return 0
        node = NONE
        if i == self.looked + 1 and self.node != NONE:  # mostly the only child of what was looked at last
            node = self.tree.at(self.node).child
            if node != NONE and self.tree.at(node).key != key:
                node = NONE
        if node == NONE:
            node = self.tree.find(key)
        self.looked, self.node = i, node
        if node == NONE:
            return 0
        p = self.tree.sets.profile(self.tree.at(node).profile)
        if not p.level:
            for j in range(3):
                if p.sets[4 + j] != p.sets[5 + j]:
                    self.alike &= ~(<uint32_t>1 << j)
        return p.sets[4 + level]

    cdef const uint64_t* bitmap(self, uint32_t set_) noexcept nogil:
        """The set's words, ``words`` of them."""
        cdef SlotSet* s = self.tree.sets.at(set_)
        cdef uint32_t i, slot
        if s.words >= self.words:
            return bitmap_of(s)
        memset(self.spread, 0, <size_t>self.words * 8)
        if s.words:
            memcpy(self.spread, bitmap_of(s), <size_t>s.words * 8)
        else:
            for i in range(s.count):
                slot = members_of(s)[i]
                if slot >> 6 < self.words:
                    self.spread[slot >> 6] |= <uint64_t>1 << (slot & 63)
        return self.spread

    cdef bint has_all(self, uint32_t set_) noexcept nogil:
        """Whether the set has all of ``ranks``."""
        cdef const uint64_t* words
        cdef uint32_t i
        if self.tree.sets.at(set_).count < self.left:
            return False
        words = self.bitmap(set_)
        for i in range(self.words):
            if self.ranks[i] & ~words[i]:
                return False
        return True

    cdef int run(self, int level) except -1:
        """Find the reach at one level of the ranks in ``among``. Cost: distinct reaches × log(blocks) probes."""
        cdef Py_ssize_t index = 0, last, length = 0
        cdef uint32_t here, beyond, i, first = 0, end = self.words
        cdef uint64_t gone
        cdef uint64_t* ranks = self.ranks
        cdef int32_t* reached = self.reached + level
        cdef const uint64_t* words
        self.looked, self.node = -2, NONE
        here = self.covered(0, level)
        words = self.bitmap(here)
        self.left = 0
        for i in range(end):
            ranks[i] = self.among[i] & words[i]
            self.left += popcount(ranks[i])
        while self.left:
            last = self.same_until(level, index, length, &here, &beyond)
            words = self.bitmap(beyond)
            while ranks[first] == 0:  # words without ranks at both ends are not looked at again
                first += 1
            while ranks[end - 1] == 0:
                end -= 1
            for i in range(first, end):
                gone = ranks[i] & ~words[i]
                if gone:
                    ranks[i] ^= gone
                    self.left -= popcount(gone)
                while gone:
                    reached[4 * (i * 64 + trailing_zeros(gone))] = <int32_t>(last + 1)
                    gone &= gone - 1
            length = last + 1 - index
            index, here = last + 1, beyond
        return 0

    cdef bint same(self, uint32_t here, uint32_t there) noexcept nogil:
        return there == here or self.has_all(there)

    cdef Py_ssize_t same_until(
        self, int level, Py_ssize_t index, Py_ssize_t guess, uint32_t* here, uint32_t* beyond
    ) except -1:
        """The last position whose covered set still has all of ``ranks``, which ``index`` has; ``here`` is that set
        then, and ``beyond`` the next position's.

        ``guess``: how many positions that may be: reaches often lie evenly, and then two probes find one.
        """
        cdef Py_ssize_t low = index, high = self.end, step = 1, middle
        cdef uint32_t there
        beyond[0] = 0
        if guess > 1 and index + guess <= high:
            middle = index + guess - 1
            there = self.covered(middle, level)
            if self.same(here[0], there):
                here[0], low = there, middle
            else:
                beyond[0], high = there, middle
        if high == self.end:
            while low + step < self.end:
                there = self.covered(low + step, level)
                if not self.same(here[0], there):
                    beyond[0], high = there, low + step
                    break
                here[0] = there
                low += step
                step *= 2
        while high - low > 1:
            middle = (low + high) // 2
            there = self.covered(middle, level)
            if self.same(here[0], there):
                here[0], low = there, middle
            else:
                beyond[0], high = there, middle
        return low

    # --- the match ---

    cdef int room_for(self, uint32_t slots, Py_ssize_t asked) except -1:
        cdef uint32_t words = (slots + 63) // 64
        if words * 64 > self.slots:
            self.slots = 0
            resized(<void**>&self.among, <size_t>words * 3 * 8)
            resized(<void**>&self.reached, <size_t>words * 64 * 4 * sizeof(int32_t))
            self.slots = words * 64
        if asked > self.asked:
            self.asked = 0
            resized(<void**>&self.slot_of, asked * sizeof(uint32_t))
            self.asked = asked
        self.words = words
        self.ranks, self.spread = self.among + words, self.among + 2 * words
        memset(self.among, 0, <size_t>words * 8)
        return 0

    cdef Reaches match(self, object keys, object asked, dict ranks, Table* slots, uint32_t count_of_slots):
        """The reach of each rank in ``asked``. ``slots``: handles to slots."""
        cdef Reaches found = Reaches(list(asked))
        cdef Py_ssize_t count = found.count, i
        cdef uint32_t slot
        cdef int[4] source  # by level: the one whose search found it as well
        cdef uint32_t* slot_of
        cdef int32_t* reached
        cdef int level = 0, searched
        self.room_for(count_of_slots, count)
        slot_of = self.slot_of
        for i in range(count):
            slot = slot_of_handle(slots, PySequence_Fast_ITEMS(found.handles)[i])
            slot_of[i] = slot
            self.among[slot >> 6] |= <uint64_t>1 << (slot & 63)
            reached = self.reached + 4 * slot
            reached[0] = reached[1] = reached[2] = reached[3] = 0
        self.open(keys)
        try:
            if self.end == 0 or count == 0:
                return found
            while level < 4:
                self.alike = 7
                self.run(level)
                source[level] = searched = level
                level += 1
                while level < 4 and self.alike >> (level - 1) & 1:
                    source[level] = searched
                    level += 1
            self.fill(found, ranks, source)
            return found
        finally:
            self.close()

    cdef int fill(self, Reaches found, dict ranks, const int* source) except -1:
        cdef Py_ssize_t i
        cdef const int32_t* blocks
        cdef int32_t* row = found.rows
        cdef Rank rank
        for i in range(found.count):
            blocks = &self.reached[self.slot_of[i] * 4]
            row[0], row[1], row[2], row[3] = blocks[0], blocks[source[1]], blocks[source[2]], blocks[source[3]]
            row[4] = row[0]
            if self.special and row[0] | row[1] | row[2] | row[3]:
                rank = ranks[found.handles[i]]
                if rank.special:
                    self.judge(rank, row)
            row += 5
        return 0

    cdef int judge(self, Rank rank, int32_t* row) except -1:
        """Offloaded chunks or further groups have a say in what the rank can use."""
        cdef Py_ssize_t device = row[0]
        cdef int level
        if rank.chunked:
            for level in range(1, 4):
                row[level] = <int32_t>rank.whole(self.path(rank, row[level]), device)
        if rank.groups.tracked:
            row[4] = <int32_t>rank.usable(self.path(rank, device))
        return 0

    cdef list path(self, Rank rank, Py_ssize_t length):
        """The nodes of the first keys, up to one that the rank does not name: then they are no chain. O(length)."""
        cdef list path = []
        cdef Py_ssize_t i
        cdef uint64_t key
        cdef uint32_t node
        for i in range(length):
            node = self.tree.find(key) if self.key_at(i, &key) else NONE
            if node == NONE or not self.tree.bits(node, rank.slot) >> NAMED & 1:
                break
            path.append(node)
        return path


def packed_keys(keys):
    """All keys of a :class:`protocols.keys.Keys` as packed u64 words. O(tokens)."""
    cdef Search search = Search(None)
    search.open(keys)
    if search.kind != LAZY:
        raise TypeError(f"{type(keys).__name__}, expected Keys")
    if search.end:
        search.hash_to(search.end - 1)
    return PyBytes_FromStringAndSize(<char*>search.keys, search.end * 8)
