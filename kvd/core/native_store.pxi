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
    cdef Py_ssize_t* starts  # of bodies, in bytes
    cdef Py_ssize_t* lengths  # −1: no content
    cdef Py_ssize_t blocks
    cdef char* bodies
    cdef Py_ssize_t size

    def __dealloc__(self):
        free(self.hashes)
        free(self.expected)
        free(self.starts)
        free(self.lengths)
        free(self.bodies)

    cdef int room_for(self, Py_ssize_t blocks) except -1:
        if blocks > self.blocks or (blocks < 4096 < self.blocks):
            self.blocks = 0
            resized(<void**>&self.hashes, (blocks + 16) * sizeof(uint64_t))
            resized(<void**>&self.expected, (blocks + 16) * 4 * sizeof(uint64_t))
            resized(<void**>&self.starts, (blocks + 16) * sizeof(Py_ssize_t))
            resized(<void**>&self.lengths, (blocks + 16) * sizeof(Py_ssize_t))
            self.blocks = blocks + 16
        return 0

    cdef int bytes_for(self, Py_ssize_t size) except -1:
        if size > self.size or (size < 1 << 18 < self.size):
            resized(<void**>&self.bodies, size + 64)
            self.size = size + 64
        return 0


cdef int read_hashes(tuple hashes, Scratch scratch, Rank rank) except -1:
    cdef Py_ssize_t i, count = len(hashes)
    scratch.room_for(count)
    for i in range(count):
        kvd_u64(<PyObject*>hashes[i], &scratch.hashes[i])
        rank.expect(scratch.hashes[i])
    return 0


cdef uint64_t read_bodies(
    list tokens, Py_ssize_t count, Py_ssize_t size, Py_ssize_t eagle, Scratch scratch
) except? 0xFFFFFFFFFFFFFFFF:
    """Pack the tokens, and lay out what is hashed of each block: u32 words, or u64 where one needs them.

    Returns the highest token. O(tokens).
    """
    cdef Py_ssize_t total = len(tokens), i, j, start, end, at
    cdef uint32_t narrow
    cdef uint64_t highest = 0, word
    cdef char* out
    cdef uint64_t* words
    size = min(size, total + 1)
    scratch.bytes_for(total * 4)
    if kvd_pack_u32(PySequence_Fast_ITEMS(tokens), total, <uint32_t*>scratch.bodies, &narrow) == total:
        for i in range(count):
            start, end = min(i * size, total), min(i * size + size + eagle, total)
            scratch.starts[i], scratch.lengths[i] = start * 4, (end - start) * 4
        return narrow
    scratch.bytes_for(total * 8 + count * (min(size + eagle, total) + 1) * 8)
    words = <uint64_t*>scratch.bodies
    for i in range(total):
        kvd_u64(<PyObject*>tokens[i], &words[i])
        highest = max(highest, words[i])
    at = total * 8
    for i in range(count):
        start, end = min(i * size, total), min(i * size + size + eagle, total)
        word = 0
        for j in range(start, end):
            word = max(word, words[j])
        scratch.starts[i] = at
        if word > 0xFFFFFFFF:
            memcpy(scratch.bodies + at, words + start, (end - start) * 8)
            scratch.lengths[i] = (end - start) * 8
        else:
            out = scratch.bodies + at
            for j in range(start, end):
                (<uint32_t*>out)[j - start] = <uint32_t>words[j]
            scratch.lengths[i] = (end - start) * 4
        at += scratch.lengths[i] + 4 & ~<Py_ssize_t>7
    return highest


cdef int add_parts(object extras, Py_ssize_t count, Scratch scratch) except -1:
    """Put media and digests behind the words of the blocks that have any. O(bytes)."""
    cdef Py_ssize_t i, at, more
    cdef bytes part
    cdef list parts = [None] * count
    more = at = 0
    for i in range(count):
        at = max(at, scratch.starts[i] + scratch.lengths[i])
        extra = extras[i]
        if extra is not None and (extra.media or extra.digests):
            part = media_part(extra.media) + digest_part(extra.digests)
            parts[i] = part
            more += scratch.lengths[i] + len(part) + 8
    if more == 0:
        return 0
    at = at + 7 & ~<Py_ssize_t>7
    if at + more > scratch.size:
        resized(<void**>&scratch.bodies, at + more)
        scratch.size = at + more
    for i in range(count):
        if parts[i] is not None:
            part = parts[i]
            memcpy(scratch.bodies + at, scratch.bodies + scratch.starts[i], scratch.lengths[i])
            memcpy(scratch.bodies + at + scratch.lengths[i], PyBytes_AS_STRING(part), len(part))
            scratch.starts[i] = at
            scratch.lengths[i] += len(part)
            at = at + scratch.lengths[i] + 7 & ~<Py_ssize_t>7
    return 0


cdef object refusal_of(object event):
    """Why a store or removal does not concern this index, or None."""
    cdef object locality
    if event.backend_id is not None:
        return "foreign_holder"
    locality = event.locality
    if locality is not None and locality.casefold() != "local":
        return "not_local"
    return "unknown_medium" if tier_number(event.medium) < 0 else None


cdef object store(Rank rank, object event, Scratch scratch):
    cdef object refusal = refusal_of(event), group = event.group, budget = rank.budget, tracked
    cdef tuple hashes = event.hashes
    cdef Py_ssize_t count = len(hashes)
    cdef int tier
    if refusal is not None:
        return Skipped(refusal)
    tier = tier_number(event.medium)
    if rank.groups.indexed is None or not (group is None or group == rank.groups.indexed):
        place = rank.groups.of_store(group, event.spec_kind, event.sliding_window)
        if isinstance(place, str):
            return Skipped(place)
        if place[0] == "tracked":
            rank.make_special()
            tracked = rank.groups.tracked[place[1]]
            if len(tracked.copies) + count > budget.limit:
                return Skipped("index_full")
            for hash_ in hashes:
                tracked.add(hash_, LEVELS[tier], single=rank.single_copies)
            return applied(count)
    if budget.used + count > budget.limit:
        return Skipped("index_full")
    read_hashes(hashes, scratch, rank)
    rank.reserve(count)
    rank.doubts = 0
    cdef object reason = read_contents(rank, event, count, scratch)
    if reason is not None:
        if reason == "block_size_mismatch":
            return Skipped(reason)
        rank.count(reason)
        for i in range(count):
            scratch.lengths[i] = -1
    store_blocks(rank, event, count, tier, scratch)
    if tier == 0:
        return Applied(count, DOUBTS[trailing_zeros(rank.doubts)]) if rank.doubts else applied(count)
    if event.medium in _CHUNKED_MEDIA and event.dense:
        mark_chunk(rank, hashes)
    return applied(count)


cdef object read_contents(Rank rank, object event, Py_ssize_t count, Scratch scratch):
    """Read each block's content, as far as the event says it beyond doubt; else why it does not."""
    cdef object extras = event.extra, tokens = event.tokens, registered = rank.registered_size
    cdef Py_ssize_t i, size
    cdef uint64_t highest
    if not tokens:
        return "without_tokens"
    if not event.dense:
        return "string_tokens" if "string_token" in event.warn else "not_dense"
    size = event.block_size
    if size < 0:
        raise ValueError(f"block size {size}: expected 0 or more")
    if registered is not None and size != registered:
        return "block_size_mismatch"
    if not rank.knows_window(size, event.eagle) and rank.window_count() >= rank.bounds.block_sizes:
        return "block_size_varies"
    if (extras and len(extras) != count) or event.block_mm_infos:
        return "media_unreadable"
    highest = read_bodies(tokens if type(tokens) is list else list(tokens), count, size, event.eagle, scratch)
    if rank.learnt_scheme is None:
        if extras and any([extra is not None and extra.media for extra in extras]):
            rank.learnt_scheme = "media_keys"
        elif highest > 0xFFFFFFFF:
            rank.learnt_scheme = "pad62"
        elif PAD_BASE <= highest < PAD_BASE + (1 << 30):
            rank.learnt_scheme = "dynamo" if rank.registered_scheme == "dynamo" else "pad30"  # the same pads
        if rank.learnt_scheme is not None and (rank.registered_scheme or rank.learnt_scheme) != rank.learnt_scheme:
            rank.count("scheme_mismatch")
    if extras:
        add_parts(extras, count, scratch)
    return None


cdef int store_blocks(Rank rank, object event, Py_ssize_t count, int tier, Scratch scratch) except -1:
    """Store the blocks whose hashes and contents the scratch has."""
    cdef object lora = event.lora_name, salt = event.cache_salt or None, first_salt = salt
    cdef object told = event.parent, extras = event.extra
    cdef Content content
    cdef Py_ssize_t i, added = 0
    cdef uint32_t e, above = NONE, node
    cdef int before
    if not lora:
        lora = None if event.lora_id is None else f"\0lora_id={event.lora_id}"
    content.root = told is None
    content.parent = 0 if told is None else told
    if told is not None and told in ROOT_PARENTS and rank.find(content.parent) == NONE:
        content.root = True
    if extras:
        first_salt = sort_strings(rank, extras, count, content.root, salt, scratch)
    content.size, content.eagle = event.block_size, event.eagle
    content.lora, content.salt = <PyObject*>lora, <PyObject*>first_salt
    expect_chain(rank, &content, count, scratch)
    for i in range(count):
        e = rank.find(scratch.hashes[i])
        if e == NONE:
            e = rank.insert(scratch.hashes[i])
            added += 1
        node = rank.entries[e].node
        if scratch.lengths[i] >= 0:
            content.body, content.length = scratch.bodies + scratch.starts[i], scratch.lengths[i]
            content.above = above
            content.hint = &scratch.expected[4 * i]
            rank.announce(e, &content, True)
        # A node just tied must hear of it in any case.
        before = nearest_of(rank.entries[e].state) if rank.entries[e].node == node else -1
        add_copy(rank, e, tier)
        if before != nearest_of(rank.entries[e].state):
            rank.hold(e)
        content.root, content.parent, content.salt = False, scratch.hashes[i], <PyObject*>salt
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
        local = XXH3_64bits_withSeed(scratch.bodies + scratch.starts[i], scratch.lengths[i], seed)
        out[0], out[2], out[3] = local, seed, key
        key = local if root else chained(key, local)
        root = False
        out[1] = key
        rank.tree.expect(key)
    return 0


cdef int mark_chunk(Rank rank, tuple hashes) except -1:
    """vLLM's offloading announces a chunk's blocks in one event and loads them together; SGLang's pages do not."""
    cdef uint32_t e
    cdef Py_ssize_t inner = len(hashes) - 1
    last = hashes[inner]
    for hash_ in hashes[:inner]:
        rank.chunked = True
        rank.make_special()
        e = rank.find(hash_)
        rank.entries[e].state |= CHUNKED
        rank.chunks[hash_] = rank.chunks.get(hash_, set()) | {last}
    return 0


cdef object remove(Rank rank, object event, Scratch scratch):
    cdef object refusal = refusal_of(event), group = event.group
    cdef tuple hashes = event.hashes
    cdef Py_ssize_t count = len(hashes), known = 0, i
    cdef int tier
    if refusal is not None:
        return Skipped(refusal)
    tier = tier_number(event.medium)
    if rank.groups.indexed is None or not (group is None or group == rank.groups.indexed):
        place = rank.groups.of_removal(group)
        if isinstance(place, str):
            return Skipped(place)
        if place[0] == "tracked":
            tracked = rank.groups.tracked[place[1]]
            known = sum([tracked.remove(hash_, LEVELS[tier]) for hash_ in hashes])
            if known < count:
                rank.count("unknown_removals", count - known)
            return applied(known)
    read_hashes(hashes, scratch, rank)
    for i in range(count):
        rank.approach(scratch.hashes[i])
    for i in range(count):
        known += remove_copy(rank, scratch.hashes[i], tier)
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


cdef object apply_event(Rank rank, object event, Scratch scratch):
    """Apply one event and count its outcome."""
    cdef object outcome
    cdef object kind = type(event)
    if kind is Stored:
        outcome = store(rank, event, scratch)
    elif kind is Removed:
        outcome = remove(rank, event, scratch)
    elif kind is Cleared:
        outcome = clear(rank, event)
    elif kind is Unknown:
        outcome = unknown(rank, event)
    else:
        outcome = Skipped("bad_event")
    if type(outcome) is Skipped:
        rank.count(f"skipped_{outcome.reason}")
    return outcome
