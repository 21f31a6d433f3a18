# Questions: the keys of a prompt, hashed only as far as somebody looks, and the jump search over covered sets.

cdef enum:
    LAZY = 0  # packed tokens and media, hashed here
    LISTED = 1  # a list or tuple of integers
    INDEXED = 2  # anything else with len() and []


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
    cdef uint64_t* among
    cdef uint64_t* ranks  # still covered
    cdef uint64_t* spread
    cdef uint32_t words
    cdef uint32_t same  # bit l: wherever this search looked, levels l and l + 1 were covered by the same ranks
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
        cdef PyObject* item
        if self.kind == LAZY:
            if i >= self.hashed:
                self.hash_to(i)
            key[0] = self.keys[i]
            return True
        if self.kind == LISTED:
            item = PySequence_Fast_ITEMS(self.sequence)[i]
            try:
                kvd_u64(item, key)
            except (OverflowError, TypeError):
                return False
            return True
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
        node = self.tree.find(key)
        if node == NONE:
            return 0
        p = self.tree.sets.profile(self.tree.at(node).profile)
        if not p.level:
            for j in range(3):
                if p.sets[4 + j] != p.sets[5 + j]:
                    self.same &= ~(<uint32_t>1 << j)
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
        if set_ == 0:
            return False
        words = self.bitmap(set_)
        for i in range(self.words):
            if self.ranks[i] & ~words[i]:
                return False
        return True

    cdef int run(self, int level) except -1:
        """Find the reach at one level of the ranks in ``among``. Cost: distinct reaches × log(blocks) probes."""
        cdef Py_ssize_t index = 0, last
        cdef uint32_t here, next_, i, slot
        cdef uint64_t gone
        cdef const uint64_t* words
        cdef bint left = False
        here = self.covered(0, level)
        words = self.bitmap(here)
        for i in range(self.words):
            self.ranks[i] = self.among[i] & words[i]
            left = left or self.ranks[i] != 0
        while left:
            last = self.same_until(level, index, &here)
            next_ = self.covered(last + 1, level) if last + 1 < self.end else 0
            words = self.bitmap(next_)
            left = False
            for i in range(self.words):
                gone = self.ranks[i] & ~words[i]
                self.ranks[i] &= words[i]
                left = left or self.ranks[i] != 0
                while gone:
                    slot = i * 64 + trailing_zeros(gone)
                    self.reached[4 * slot + level] = <int32_t>(last + 1)
                    gone &= gone - 1
            index, here = last + 1, next_
        return 0

    cdef Py_ssize_t same_until(self, int level, Py_ssize_t index, uint32_t* here) except -1:
        """The last position whose covered set still has all of ``ranks``, which ``index`` has."""
        cdef Py_ssize_t low = index, step = 1, high, middle
        cdef uint32_t there
        while low + step < self.end:
            there = self.covered(low + step, level)
            if there != here[0] and not self.has_all(there):
                break
            here[0] = there
            low += step
            step *= 2
        high = min(low + step, self.end)
        while high - low > 1:
            middle = (low + high) // 2
            there = self.covered(middle, level)
            if there == here[0] or self.has_all(there):
                here[0] = there
                low = middle
            else:
                high = middle
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

    cdef dict match(self, object keys, object asked, dict ranks, uint32_t slots):
        """The reach of each rank in ``asked``; those that hold not even the first block anywhere are left out."""
        cdef list handles = list(asked)
        cdef Py_ssize_t count = len(handles), i
        cdef uint32_t slot, done
        cdef int level = 0
        self.room_for(slots, count)
        for i in range(count):
            slot = self.slot_of[i] = (<Rank>ranks[handles[i]]).slot
            self.among[slot >> 6] |= <uint64_t>1 << (slot & 63)
            memset(&self.reached[slot * 4], 0, 4 * sizeof(int32_t))
        self.open(keys)
        try:
            if self.end == 0 or count == 0:
                return {}
            while level < 4:
                self.same = 7
                self.run(level)
                done = self.same
                level += 1
                while level < 4 and done >> (level - 1) & 1:
                    for i in range(count):
                        slot = self.slot_of[i]
                        self.reached[slot * 4 + level] = self.reached[slot * 4 + level - 1]
                    level += 1
            return self.reaches(handles, ranks)
        finally:
            self.close()

    cdef dict reaches(self, list handles, dict ranks):
        cdef dict found = {}
        cdef Py_ssize_t i
        cdef const int32_t* blocks
        cdef const int32_t* last = NULL
        cdef object reach = None
        for i in range(len(handles)):
            blocks = &self.reached[self.slot_of[i] * 4]
            if not (blocks[0] | blocks[1] | blocks[2] | blocks[3]):
                continue
            if self.special and (<Rank>ranks[handles[i]]).special:
                found[handles[i]] = self.reach_of(<Rank>ranks[handles[i]], blocks)
                continue
            if last == NULL or memcmp(last, blocks, 16) != 0:
                reach = Reach((blocks[0], blocks[1], blocks[2], blocks[3]), blocks[0])
                last = blocks
            found[handles[i]] = reach
        return found

    cdef object reach_of(self, Rank rank, const int32_t* blocks):
        """The reach of a rank whose offloaded chunks or further groups have a say."""
        cdef Py_ssize_t device = blocks[0], host = blocks[1], disk = blocks[2], external = blocks[3], usable = device
        cdef list path
        if rank.chunked:
            host = rank.whole(self.path(rank, host), device)
            disk = rank.whole(self.path(rank, disk), device)
            external = rank.whole(self.path(rank, external), device)
        if rank.groups.tracked:
            path = self.path(rank, device)
            usable = rank.usable(path)
        return Reach((device, host, disk, external), usable)

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
