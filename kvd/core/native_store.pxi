# Events: the counterpart of residency.py's other half. One pass reads hashes and tokens, a second hashes blocks as if
# the chain went on undisturbed and asks the caches for what will be looked at, a third changes the index.

cdef enum:
    MAX_CACHED_TIERS = 64

cdef dict _TIERS = {}
cdef list _APPLIED = [Applied(i) for i in range(257)]


cdef int tier_number(object medium) except -2:
    """The tier of a medium, −1 for one that nobody documented."""
    cdef object found
    if medium is None:
        return 0
    found = _TIERS.get(medium)
    if found is None:
        tier = tier_of(medium)
        found = -1 if tier is None else int(tier)
        if len(_TIERS) < MAX_CACHED_TIERS:
            _TIERS[medium] = found
    return found


cdef inline object applied(Py_ssize_t blocks):
    return _APPLIED[blocks] if blocks <= 256 else Applied(blocks)


@cython.final
cdef class Scratch:
    """Memory that events are read into; kept between events, up to a bound."""

    cdef uint64_t* hashes
    cdef uint64_t* expected  # four words a block, see Content.hint
    cdef const char** starts  # of bodies, here or in a message
    cdef Py_ssize_t* lengths  # in bytes; −1: no content
    cdef Py_ssize_t blocks
    cdef char* bodies
    cdef Py_ssize_t size
    cdef list parts  # bodies that lie elsewhere
    cdef Told told

    def __cinit__(self):
        self.parts = []
        self.told = Told()

    def __dealloc__(self):
        free(self.hashes)
        free(self.expected)
        free(<void*>self.starts)
        free(self.lengths)
        free(self.bodies)

    cdef int room_for(self, Py_ssize_t blocks) except -1:
        if blocks > self.blocks or (blocks < 4096 < self.blocks):
            self.blocks = 0
            resized(<void**>&self.hashes, (blocks + 16) * sizeof(uint64_t))
            resized(<void**>&self.expected, (blocks + 16) * 4 * sizeof(uint64_t))
            resized(<void**>&self.starts, (blocks + 16) * sizeof(char*))
            resized(<void**>&self.lengths, (blocks + 16) * sizeof(Py_ssize_t))
            self.blocks = blocks + 16
        return 0

    cdef int bytes_for(self, Py_ssize_t size) except -1:
        if size > self.size or (size < 1 << 18 < self.size):
            resized(<void**>&self.bodies, size + 64)
            self.size = size + 64
        return 0


@cython.final
cdef class Told:
    """What a store or a removal says, whoever read it: a message in C, or a decoded event."""

    cdef const uint64_t* hashes
    cdef Py_ssize_t count
    cdef bint root  # no parent is told
    cdef uint64_t parent
    cdef list tokens  # as decoded; else None, and they are in one of the next two
    cdef const uint32_t* narrow
    cdef const uint64_t* wide
    cdef Py_ssize_t total  # tokens
    cdef uint64_t highest
    cdef Py_ssize_t block_size
    cdef bint eagle, dense, strings, foreign, unreadable
    cdef object medium, group, spec_kind, sliding_window, lora_id, lora_name, salt, locality, extras

    cdef int take_holder(self, object event, Scratch scratch) except -1:
        """What stores and removals have in common. O(hashes)."""
        cdef tuple hashes = event.hashes
        cdef Py_ssize_t i
        self.count = len(hashes)
        scratch.room_for(self.count)
        for i in range(self.count):
            kvd_u64(<PyObject*>hashes[i], &scratch.hashes[i])
        self.hashes = scratch.hashes
        self.medium, self.group, self.locality = event.medium, event.group, event.locality
        self.foreign = event.backend_id is not None
        return 0

    cdef int take_store(self, object event, Scratch scratch) except -1:
        cdef object parent = event.parent, tokens = event.tokens
        self.take_holder(event, scratch)
        self.root = parent is None
        self.parent = 0 if parent is None else parent
        self.tokens = tokens if type(tokens) is list else list(tokens)
        self.total, self.narrow, self.wide, self.highest = len(tokens), NULL, NULL, 0
        self.block_size, self.eagle, self.dense = event.block_size, event.eagle, event.dense
        self.strings = not self.dense and "string_token" in event.warn
        self.spec_kind, self.sliding_window = event.spec_kind, event.sliding_window
        self.lora_id, self.lora_name, self.salt = event.lora_id, event.lora_name, event.cache_salt
        self.extras, self.unreadable = event.extra, bool(event.block_mm_infos)
        if self.block_size < 0:
            raise ValueError(f"block size {self.block_size}: expected 0 or more")
        return 0

    cdef int pack(self, Scratch scratch) except -1:
        """Tokens as words: u32, or u64 if one needs them. Raises OverflowError, TypeError. O(tokens)."""
        cdef Py_ssize_t i
        cdef uint32_t highest
        cdef uint64_t* words
        if self.tokens is None:
            return 0
        scratch.bytes_for(self.total * 4)
        if kvd_pack_u32(
            PySequence_Fast_ITEMS(self.tokens), self.total, <uint32_t*>scratch.bodies, &highest
        ) == self.total:
            self.narrow, self.highest = <uint32_t*>scratch.bodies, highest
            return 0
        scratch.bytes_for(self.total * 8)
        words = <uint64_t*>scratch.bodies
        for i in range(self.total):
            kvd_u64(<PyObject*>self.tokens[i], &words[i])
            self.highest = max(self.highest, words[i])
        self.wide = words
        return 0


cdef int lay_out(Told told, Scratch scratch) except -1:
    """Say where each block's words are: u32 as they lie, or narrowed where wide ones are not needed. O(tokens)."""
    cdef Py_ssize_t total = told.total, size = min(told.block_size, total + 1), i, j, start, end, at, needed
    cdef bint ours
    cdef uint64_t word
    cdef uint32_t* out
    if told.narrow != NULL:
        for i in range(told.count):
            start, end = min(i * size, total), min(i * size + size + told.eagle, total)
            scratch.starts[i], scratch.lengths[i] = <const char*>(told.narrow + start), (end - start) * 4
        return 0
    ours = <const char*>told.wide == scratch.bodies
    at = total * 8 if ours else 0
    scratch.bytes_for(at + (total + told.count * 3) * 4)
    if ours:
        told.wide = <const uint64_t*>scratch.bodies
    for i in range(told.count):
        start, end = min(i * size, total), min(i * size + size + told.eagle, total)
        word = 0
        for j in range(start, end):
            word = max(word, told.wide[j])
        scratch.starts[i], scratch.lengths[i] = <const char*>(told.wide + start), (end - start) * 8
        if word <= 0xFFFFFFFF:
            out = <uint32_t*>(scratch.bodies + at)
            for j in range(start, end):
                out[j - start] = <uint32_t>told.wide[j]
            scratch.starts[i], scratch.lengths[i] = <const char*>out, (end - start) * 4
            at = at + scratch.lengths[i] + 7 & ~<Py_ssize_t>7
    return 0


cdef int add_parts(object extras, Py_ssize_t count, Scratch scratch) except -1:
    """Put media and digests behind the words of the blocks that have any. O(bytes)."""
    cdef Py_ssize_t i
    cdef bytes part
    for i in range(count):
        extra = extras[i]
        if extra is None or not (extra.media or extra.digests):
            continue
        part = media_part(extra.media) + digest_part(extra.digests)
        part = scratch.starts[i][:scratch.lengths[i]] + part
        scratch.parts.append(part)
        scratch.starts[i], scratch.lengths[i] = PyBytes_AS_STRING(part), len(part)
    return 0


cdef object refusal_of(Told told):
    """Why a store or removal does not concern this index, or None."""
    if told.foreign:
        return "foreign_holder"
    if told.locality is not None and told.locality.casefold() != "local":
        return "not_local"
    return "unknown_medium" if tier_number(told.medium) < 0 else None


cdef object store(Rank rank, Told told, Scratch scratch):
    cdef object refusal = refusal_of(told), group = told.group, budget = rank.budget, tracked
    cdef Py_ssize_t count = told.count, i
    cdef int tier
    if refusal is not None:
        return Skipped(refusal)
    tier = tier_number(told.medium)
    if rank.groups.indexed is None or not (group is None or group == rank.groups.indexed):
        place = rank.groups.of_store(group, told.spec_kind, told.sliding_window)
        if isinstance(place, str):
            return Skipped(place)
        if place[0] == "tracked":
            rank.make_special()
            tracked = rank.groups.tracked[place[1]]
            if len(tracked.copies) + count > budget.limit:
                return Skipped("index_full")
            for i in range(count):
                tracked.add(told.hashes[i], LEVELS[tier], single=rank.single_copies)
            return applied(count)
    if budget.used + count > budget.limit:
        return Skipped("index_full")
    for i in range(count):
        rank.expect(told.hashes[i])
    scratch.room_for(count)
    rank.reserve(count)
    rank.doubts = 0
    cdef object reason = read_contents(rank, told, scratch)
    if reason is not None:
        if reason == "block_size_mismatch":
            return Skipped(reason)
        rank.count(reason)
        for i in range(count):
            scratch.lengths[i] = -1
    store_blocks(rank, told, tier, scratch)
    scratch.parts.clear()
    if tier == 0:
        return Applied(count, DOUBTS[trailing_zeros(rank.doubts)]) if rank.doubts else applied(count)
    if told.medium in _CHUNKED_MEDIA and told.dense:
        mark_chunk(rank, told)
    return applied(count)


cdef object read_contents(Rank rank, Told told, Scratch scratch):
    """Say what each block holds, as far as that is beyond doubt; else why it is not."""
    cdef object extras = told.extras, registered = rank.registered_size
    if not told.total:
        return "without_tokens"
    if not told.dense:
        return "string_tokens" if told.strings else "not_dense"
    if registered is not None and told.block_size != registered:
        return "block_size_mismatch"
    if not rank.knows_window(told.block_size, told.eagle) and rank.window_count() >= rank.bounds.block_sizes:
        return "block_size_varies"
    if (extras and len(extras) != told.count) or told.unreadable:
        return "media_unreadable"
    told.pack(scratch)
    lay_out(told, scratch)
    if rank.learnt_scheme is None:
        if extras and any([extra is not None and extra.media for extra in extras]):
            rank.learnt_scheme = "media_keys"
        elif told.highest > 0xFFFFFFFF:
            rank.learnt_scheme = "pad62"
        elif PAD_BASE <= told.highest < PAD_BASE + (1 << 30):
            rank.learnt_scheme = "dynamo" if rank.registered_scheme == "dynamo" else "pad30"  # the same pads
        if rank.learnt_scheme is not None and (rank.registered_scheme or rank.learnt_scheme) != rank.learnt_scheme:
            rank.count("scheme_mismatch")
    if extras:
        add_parts(extras, told.count, scratch)
    return None


cdef int store_blocks(Rank rank, Told told, int tier, Scratch scratch) except -1:
    """Store the blocks whose contents the scratch has."""
    cdef object lora = told.lora_name, salt = told.salt or None, first_salt = salt
    cdef Content content
    cdef Py_ssize_t i, added = 0, count = told.count
    cdef uint32_t e, above = NONE, node
    cdef int before
    if not lora:
        lora = None if told.lora_id is None else f"\0lora_id={told.lora_id}"
    content.root, content.parent = told.root, told.parent
    if not told.root and told.parent in ROOT_PARENTS and rank.find(content.parent) == NONE:
        content.root = True
    if told.extras:
        first_salt = sort_strings(rank, told.extras, count, content.root, salt, scratch)
    content.size, content.eagle = told.block_size, told.eagle
    content.lora, content.salt = <PyObject*>lora, <PyObject*>first_salt
    expect_chain(rank, &content, count, scratch)
    for i in range(count):
        e = rank.find(told.hashes[i])
        if e == NONE:
            e = rank.insert(told.hashes[i])
            added += 1
        node = rank.entries[e].node
        if scratch.lengths[i] >= 0:
            content.body, content.length = scratch.starts[i], scratch.lengths[i]
            content.above = above
            content.hint = &scratch.expected[4 * i]
            rank.announce(e, &content, True)
        # A node just tied must hear of it in any case.
        before = nearest_of(rank.entries[e].state) if rank.entries[e].node == node else -1
        add_copy(rank, e, tier)
        if before != nearest_of(rank.entries[e].state):
            rank.hold(e)
        content.root, content.parent, content.salt = False, told.hashes[i], <PyObject*>salt
        above = e
    if added:
        rank.budget.used += added
    return 0


cdef inline int add_copy(Rank rank, uint32_t e, int tier) except -1:
    cdef uint64_t copies
    if rank.entries[e].state & REMEMBERED:
        rank.unremember(e)
    copies = rank.copies(e, tier)
    return rank.set_copies(e, tier, 1 if rank.single_copies else copies + 1)


cdef object sort_strings(Rank rank, object extras, Py_ssize_t count, bint root, object salt, Scratch scratch):
    """Strings among extra keys: the first block's salt, or not understood. Returns the first block's salt."""
    cdef Py_ssize_t i
    cdef object first_salt = salt
    for i in range(count):
        extra = extras[i]
        if extra is None or not extra.strings or scratch.lengths[i] < 0:
            continue
        if i == 0 and root and len(extra.strings) == 1:
            first_salt = extra.strings[0] or None
        else:
            rank.count("ambiguous_extra_keys")
            scratch.lengths[i] = -1
    return first_salt


cdef int expect_chain(Rank rank, const Content* first, Py_ssize_t count, Scratch scratch) except -1:
    """Hash the event's blocks as if nothing disturbed its chain, and ask for what will be looked at."""
    cdef uint32_t above
    cdef uint64_t seed, key = 0, local
    cdef uint64_t* out
    cdef bint root = first.root
    cdef Py_ssize_t i
    if count == 0:
        return 0
    if first.root:
        seed = rank.tree.space(<object>first.lora, <object>first.salt).seed if scratch.lengths[0] >= 0 else CHAIN_SEED
    else:
        above = rank.find(first.parent)
        if above == NONE or rank.entries[above].node == NONE:
            seed = CHAIN_SEED  # likely; what is then expected of the chain is not used
        else:
            seed = rank.tree.space_of(rank.entries[above].node).seed
            key = rank.tree.at(rank.entries[above].node).key
    for i in range(count):
        out = &scratch.expected[4 * i]
        if scratch.lengths[i] < 0:
            out[2] = out[3] = 0
            key = 0
            root = False
            continue
        local = XXH3_64bits_withSeed(scratch.starts[i], scratch.lengths[i], seed)
        out[0], out[2], out[3] = local, seed, key
        key = local if root else chained(key, local)
        root = False
        out[1] = key
        rank.tree.expect(key)
    return 0


cdef int mark_chunk(Rank rank, Told told) except -1:
    """vLLM's offloading announces a chunk's blocks in one event and loads them together; SGLang's pages do not."""
    cdef Py_ssize_t i
    cdef object hash_, last = told.hashes[told.count - 1]
    for i in range(told.count - 1):
        hash_ = told.hashes[i]
        rank.chunked = True
        rank.make_special()
        rank.entries[rank.find(told.hashes[i])].state |= CHUNKED
        rank.chunks[hash_] = rank.chunks.get(hash_, set()) | {last}
    return 0


cdef object remove(Rank rank, Told told):
    cdef object refusal = refusal_of(told), group = told.group
    cdef Py_ssize_t count = told.count, known = 0, i
    cdef int tier
    if refusal is not None:
        return Skipped(refusal)
    tier = tier_number(told.medium)
    if rank.groups.indexed is None or not (group is None or group == rank.groups.indexed):
        place = rank.groups.of_removal(group)
        if isinstance(place, str):
            return Skipped(place)
        if place[0] == "tracked":
            tracked = rank.groups.tracked[place[1]]
            for i in range(count):
                known += tracked.remove(told.hashes[i], LEVELS[tier])
            if known < count:
                rank.count("unknown_removals", count - known)
            return applied(known)
    for i in range(count):
        rank.expect(told.hashes[i])
    for i in range(count):
        rank.approach(told.hashes[i])
    for i in range(count):
        known += remove_copy(rank, told.hashes[i], tier)
    if known < count:
        rank.count("unknown_removals", count - known)
    rank.shrink()
    return applied(known)


cdef int remove_copy(Rank rank, uint64_t hash_, int tier) except -1:
    cdef uint32_t e = rank.find(hash_), farther = 0xFFFFC000
    cdef uint64_t copies
    cdef int before
    if e == NONE:
        return 0
    copies = rank.copies(e, tier)
    if copies == 0:
        return 0
    before = nearest_of(rank.entries[e].state)
    rank.set_copies(e, tier, copies - 1)
    if rank.entries[e].state & CHUNKED and not rank.entries[e].state & farther:
        rank.unchunk(e)
    if before != nearest_of(rank.entries[e].state):
        rank.hold(e)
    rank.retire(e)
    return 1


cdef object clear(Rank rank, object event):
    cdef int tier
    if event.backend_id is not None or event.tenant_id is not None:
        return Skipped("foreign_holder")
    if event.medium is None:
        # The other tiers may or may not be empty now: their blocks stop counting until announced again.
        return applied(rank.empty((0, 1, 2, 3)))
    tier = tier_number(event.medium)
    return Skipped("unknown_medium") if tier < 0 else applied(rank.empty((tier,)))


cdef object unknown(Rank rank, object event):
    cdef int tier
    if "cleared" not in event.tag.casefold():
        return Skipped("unknown_tag")
    tier = tier_number(event.medium) if event.medium else -1
    if tier < 0:
        rank.empty((0, 1, 2, 3))
    else:
        rank.empty((tier,))
    return Skipped("unknown_clear")


cdef object counted(Rank rank, object outcome):
    """The outcome, counted if the event was left out."""
    if type(outcome) is Skipped:
        rank.count(f"skipped_{outcome.reason}")
    return outcome


cdef object apply_event(Rank rank, object event, Scratch scratch):
    """Apply one decoded event and count its outcome."""
    cdef object kind = type(event)
    if kind is Stored:
        scratch.told.take_store(event, scratch)
        return counted(rank, store(rank, scratch.told, scratch))
    if kind is Removed:
        scratch.told.take_holder(event, scratch)
        return counted(rank, remove(rank, scratch.told))
    if kind is Cleared:
        return counted(rank, clear(rank, event))
    return counted(rank, unknown(rank, event) if kind is Unknown else Skipped("bad_event"))
