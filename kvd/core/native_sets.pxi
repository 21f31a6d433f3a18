# Sets of rank slots, and profiles of nodes: each distinct one exists once, so that a comparison compares two ids.
#
# A set is a sorted array of slots or a bitmap, whichever is smaller. A profile is what a node stores: nine sets, namely
# the ranks that hold it at each level, the ranks that cover it at each level, and the ranks that name it (have a block
# tied to it, with copies or not). Where ranks hold on the device only all nine are one set. Both are counted by who
# refers to them, and freed when nobody does. Set 0 and profile 0 are empty and stay.

cdef enum:
    MAX_SLOTS = 65536
    NAMED = 8
    MEMO = 8192

cdef struct SlotSet:
    uint32_t refs
    uint32_t hash
    uint32_t count
    uint16_t words  # of the bitmap; 0: a sorted array of ``count`` slots
    uint16_t unused

cdef struct Profile:
    uint32_t free  # see Pool
    uint32_t refs
    uint32_t sets[9]
    uint32_t hash
    uint32_t born  # unique among the living and the dead; 0 once it is dead
    uint8_t simple  # all nine are one set
    uint8_t level  # all four covered sets are one

cdef struct Memo:  # of profile_with
    uint32_t profile
    uint32_t born
    uint32_t result
    uint32_t result_born
    uint16_t slot
    uint16_t bits
    uint16_t before


cdef inline uint16_t* members_of(SlotSet* s) noexcept nogil:
    return <uint16_t*>(<char*>s + sizeof(SlotSet))


cdef inline uint64_t* bitmap_of(SlotSet* s) noexcept nogil:
    return <uint64_t*>(<char*>s + sizeof(SlotSet))


cdef inline bint has_slot(SlotSet* s, uint32_t slot) noexcept nogil:
    """O(1) for a bitmap, O(log) for an array."""
    cdef uint32_t low, high, middle
    cdef uint16_t* members
    if s.words:
        return slot >> 6 < s.words and (bitmap_of(s)[slot >> 6] >> (slot & 63)) & 1
    members = members_of(s)
    low, high = 0, s.count
    while low < high:
        middle = (low + high) >> 1
        if members[middle] < slot:
            low = middle + 1
        else:
            high = middle
    return low < s.count and members[low] == slot


@cython.final
cdef class Sets:
    """All sets and profiles of one index."""

    cdef Pool sets  # of SlotSet*
    cdef Table set_table
    cdef Pool profiles
    cdef Table profile_table
    cdef Memo* memo
    cdef uint64_t* bitmap  # scratch, MAX_SLOTS bits
    cdef uint32_t births

    def __cinit__(self):
        cdef uint32_t unused
        cdef Profile* empty
        pool_begin(&self.sets, sizeof(SlotSet*))
        pool_begin(&self.profiles, sizeof(Profile))
        table_begin(&self.set_table)
        table_begin(&self.profile_table)
        self.memo = <Memo*>calloc(MEMO, sizeof(Memo))
        self.bitmap = <uint64_t*>calloc(MAX_SLOTS // 64, 8)
        if self.memo == NULL or self.bitmap == NULL:
            raise MemoryError("no memory for the index")
        unused = self.intern(0)  # set 0
        unused = pool_take(&self.profiles)  # profile 0
        empty = self.profile(unused)
        memset(empty, 0, sizeof(Profile))
        self.at(0).refs = 9
        empty.refs = 1
        empty.simple = empty.level = True
        empty.hash = self.profile_hash(empty.sets)
        self.births = empty.born = 1
        table_put(&self.profile_table, empty.hash, 0)

    def __dealloc__(self):
        cdef uint32_t i
        if self.set_table.slots != NULL:
            for i in range(self.set_table.mask + 1):
                if self.set_table.slots[i] != VACANT:
                    free(self.at(<uint32_t>self.set_table.slots[i]))
        free(self.set_table.slots)
        free(self.profile_table.slots)
        pool_end(&self.sets)
        pool_end(&self.profiles)
        free(self.memo)
        free(self.bitmap)

    cdef inline SlotSet* at(self, uint32_t id_) noexcept nogil:
        return (<SlotSet**>pool_at(&self.sets, id_))[0]

    cdef inline Profile* profile(self, uint32_t id_) noexcept nogil:
        return <Profile*>pool_at(&self.profiles, id_)

    # --- sets ---

    cdef uint32_t intern(self, uint32_t words) except? 0xFFFFFFFF:
        """The set of the slots in the scratch bitmap, which is zeroed again. O(words)."""
        cdef uint64_t word
        cdef uint32_t i, count = 0, id_, hash_, at
        cdef size_t size
        cdef bint sparse
        cdef SlotSet* made
        cdef SlotSet* other
        cdef uint16_t* members
        while words and not self.bitmap[words - 1]:
            words -= 1
        for i in range(words):
            count += popcount(self.bitmap[i])
        sparse = count * 2 <= words * 8
        size = count * 2 if sparse else words * 8
        made = <SlotSet*>malloc(sizeof(SlotSet) + size)
        if made == NULL:
            memset(self.bitmap, 0, <size_t>words * 8)
            raise MemoryError("no memory for the index")
        made.refs, made.count, made.words, made.unused = 0, count, 0 if sparse else words, 0
        if sparse:
            members = members_of(made)
            at = 0
            for i in range(words):
                word = self.bitmap[i]
                while word:
                    members[at] = <uint16_t>(i * 64 + trailing_zeros(word))
                    word &= word - 1
                    at += 1
        else:
            memcpy(bitmap_of(made), self.bitmap, size)
        memset(self.bitmap, 0, <size_t>words * 8)
        hash_ = made.hash = <uint32_t>XXH3_64bits_withSeed(<char*>made + sizeof(SlotSet), size, SEED)
        if self.set_table.slots != NULL:
            at = hash_ & self.set_table.mask
            while self.set_table.slots[at] != VACANT:
                if <uint32_t>(self.set_table.slots[at] >> 32) == hash_:
                    id_ = <uint32_t>self.set_table.slots[at]
                    other = self.at(id_)
                    if (
                        other.count == count and other.words == made.words
                        and memcmp(bitmap_of(other), bitmap_of(made), size) == 0
                    ):
                        free(made)
                        return id_
                at = (at + 1) & self.set_table.mask
        id_ = pool_take(&self.sets)
        (<SlotSet**>pool_at(&self.sets, id_))[0] = made
        table_put(&self.set_table, hash_, id_)
        return id_

    cdef uint32_t toggled(self, uint32_t id_, uint32_t slot) except? 0xFFFFFFFF:
        """The set with the slot if it was without, and the other way round. O(words)."""
        cdef SlotSet* s = self.at(id_)
        cdef uint32_t words = self.spread(s)
        self.bitmap[slot >> 6] ^= <uint64_t>1 << (slot & 63)
        return self.intern(max(words, (slot >> 6) + 1))

    cdef uint32_t spread(self, SlotSet* s) noexcept nogil:
        """Write the set into the scratch bitmap; the words it takes."""
        cdef uint32_t i
        cdef uint16_t* members
        if s.words:
            memcpy(self.bitmap, bitmap_of(s), <size_t>s.words * 8)
            return s.words
        members = members_of(s)
        for i in range(s.count):
            self.bitmap[members[i] >> 6] |= <uint64_t>1 << (members[i] & 63)
        return (members[s.count - 1] >> 6) + 1 if s.count else 0

    cdef int drop_set(self, uint32_t id_) except -1:
        cdef SlotSet* s = self.at(id_)
        s.refs -= 1
        if s.refs == 0:
            table_drop(&self.set_table, s.hash, id_)
            pool_give(&self.sets, id_)
            free(s)
        return 0

    # --- profiles ---

    cdef inline uint32_t profile_hash(self, const uint32_t* sets) noexcept nogil:
        return <uint32_t>XXH3_64bits_withSeed(sets, 36, SEED)

    cdef inline uint32_t bits(self, uint32_t profile, uint32_t slot) noexcept nogil:
        """What the profile says of one rank: held (bits 0–3, a bit a level), covered (4–7), named (8)."""
        cdef Profile* p = self.profile(profile)
        cdef uint32_t i, said = 0
        if p.simple:
            return 0x1FF if has_slot(self.at(p.sets[0]), slot) else 0
        if not has_slot(self.at(p.sets[NAMED]), slot):
            return 0
        for i in range(8):
            if has_slot(self.at(p.sets[i]), slot):
                said |= 1 << i
        return said | 1 << NAMED

    cdef uint32_t profile_with(self, uint32_t profile, uint32_t slot, uint32_t bits, uint32_t* before) except? 0xFFFFFFFF:
        """The profile that says ``bits`` of the rank and otherwise the same; ``before``: what this one says.

        O(1) if the memo has it, else O(words). The caller takes over one reference.
        """
        cdef Profile* p = self.profile(profile)
        cdef Profile* found
        cdef uint32_t result
        cdef Memo* memo = &self.memo[mixed(<uint64_t>profile << 32 | slot << 9 | bits) & (MEMO - 1)]
        if memo.profile == profile and memo.born == p.born and memo.slot == slot and memo.bits == bits:
            before[0] = memo.before
            if (memo.result >> CHUNK_BITS) < self.profiles.count:
                if self.profiles.chunks[memo.result >> CHUNK_BITS].items != NULL:
                    found = self.profile(memo.result)
                    if found.born == memo.result_born:
                        found.refs += 1
                        return memo.result
        else:
            before[0] = self.bits(profile, slot)
        result = profile if before[0] == bits else self.changed(p, slot, before[0] ^ bits)
        found = self.profile(result)
        found.refs += 1
        memo.profile, memo.born, memo.slot, memo.bits = profile, self.profile(profile).born, slot, bits
        memo.before, memo.result, memo.result_born = before[0], result, found.born
        return result

    cdef uint32_t changed(self, Profile* p, uint32_t slot, uint32_t flips) except? 0xFFFFFFFF:
        """The profile with the slot toggled in the sets of ``flips``."""
        cdef uint32_t[9] sets
        cdef uint32_t i, j
        for i in range(9):
            sets[i] = p.sets[i]
            if flips >> i & 1:
                for j in range(i):
                    if p.sets[j] == p.sets[i] and flips >> j & 1:
                        sets[i] = sets[j]
                        break
                else:
                    sets[i] = self.toggled(p.sets[i], slot)
        return self.intern_profile(sets)

    cdef uint32_t intern_profile(self, uint32_t* sets) except? 0xFFFFFFFF:
        cdef uint32_t hash_ = self.profile_hash(sets), at = hash_ & self.profile_table.mask, id_, i
        cdef Profile* p
        while self.profile_table.slots[at] != VACANT:
            if <uint32_t>(self.profile_table.slots[at] >> 32) == hash_:
                id_ = <uint32_t>self.profile_table.slots[at]
                if memcmp(self.profile(id_).sets, sets, 36) == 0:
                    return id_  # every set was referred to before
            at = (at + 1) & self.profile_table.mask
        id_ = pool_take(&self.profiles)
        p = self.profile(id_)
        memcpy(p.sets, sets, 36)
        self.births += 1
        if self.births == 0:  # after 2^32: the memo must not take a new profile for an old one
            memset(self.memo, 0, MEMO * sizeof(Memo))
            self.births = 2
        p.refs, p.hash, p.born, p.simple = 0, hash_, self.births, True
        for i in range(9):
            self.at(sets[i]).refs += 1
            p.simple = p.simple and sets[i] == sets[0]
        p.level = sets[4] == sets[5] and sets[5] == sets[6] and sets[6] == sets[7]
        table_put(&self.profile_table, hash_, id_)
        return id_

    cdef int drop_profile(self, uint32_t id_) except -1:
        """One reference less."""
        cdef Profile* p = self.profile(id_)
        cdef uint32_t i
        p.refs -= 1
        if p.refs == 0:
            table_drop(&self.profile_table, p.hash, id_)
            for i in range(9):
                self.drop_set(p.sets[i])
            p.born = 0
            pool_give(&self.profiles, id_)
        return 0

    # --- soundness ---

    cdef object members(self, uint32_t id_):
        """The set's slots as an integer mask."""
        cdef SlotSet* s = self.at(id_)
        cdef uint32_t i
        cdef object mask = 0
        if s.words:
            return int.from_bytes((<char*>bitmap_of(s))[: s.words * 8], "little")
        for i in range(s.count):
            mask |= 1 << <object>members_of(s)[i]
        return mask

    cdef list faults(self, dict profile_refs):
        """Broken invariants in words; ``profile_refs``: how often nodes refer to each profile."""
        cdef uint32_t i, j, id_
        cdef Profile* p
        cdef SlotSet* s
        cdef dict seen = {}, refs = {}
        cdef list faults = pool_faults(&self.sets, "sets") + pool_faults(&self.profiles, "profiles")
        for i in range(self.profile_table.mask + 1):
            if self.profile_table.slots[i] == VACANT:
                continue
            id_ = <uint32_t>self.profile_table.slots[i]
            p = self.profile(id_)
            sets = tuple([p.sets[j] for j in range(9)])
            if sets in seen:
                faults.append(f"profiles {id_} and {seen[sets]} are the same")
            seen[sets] = id_
            for one in sets:
                refs[one] = refs.get(one, 0) + 1
            wanted = profile_refs.get(id_, 0) + (id_ == 0)
            if p.refs != wanted:
                faults.append(f"profile {id_} has {p.refs} references, expected {wanted}")
            if p.simple != (len(set(sets)) == 1) or p.level != (len(set(sets[4:8])) == 1):
                faults.append(f"profile {id_} is wrongly called simple or level")
        if len(seen) != self.profiles.live or len(seen) != self.profile_table.count:
            faults.append(f"{len(seen)} profiles are filed, {self.profiles.live} live")
        seen.clear()
        for i in range(self.set_table.mask + 1):
            if self.set_table.slots[i] == VACANT:
                continue
            id_ = <uint32_t>self.set_table.slots[i]
            s = self.at(id_)
            mask = self.members(id_)
            if mask in seen:
                faults.append(f"sets {id_} and {seen[mask]} are the same")
            seen[mask] = id_
            if s.refs != refs.get(id_, 0):
                faults.append(f"set {id_} has {s.refs} references, expected {refs.get(id_, 0)}")
            if s.count != mask.bit_count():
                faults.append(f"set {id_} counts {s.count} slots, has {mask.bit_count()}")
        if len(seen) != self.sets.live or len(seen) != self.set_table.count:
            faults.append(f"{len(seen)} sets are filed, {self.sets.live} live")
        if any(self.bitmap[i] for i in range(MAX_SLOTS // 64)):
            faults.append("the scratch bitmap is not empty")
        return faults
