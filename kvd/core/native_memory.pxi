# Memory: pools of equal items with 32-bit ids, and an open-addressing table from hashes to ids.

cdef uint32_t NONE = 0xFFFFFFFF
cdef enum:
    CHUNK_BITS = 10
    CHUNK = 1 << CHUNK_BITS
    SMALLEST = 8


cdef inline uint64_t mixed(uint64_t x) noexcept nogil:
    """Spread over 64 bits, so that any engine's hashes, sequential ones too, fill a table evenly."""
    x ^= SEED
    x ^= x >> 32
    x *= <uint64_t>0xD6E8FEB86659FD93
    x ^= x >> 32
    x *= <uint64_t>0xD6E8FEB86659FD93
    return x ^ (x >> 32)


cdef int resized(void** memory, size_t size) except -1:
    """realloc that raises MemoryError. A size of 0 frees."""
    cdef void* moved
    if size == 0:
        free(memory[0])
        memory[0] = NULL
        return 0
    moved = realloc(memory[0], size)
    if moved == NULL:
        raise MemoryError(f"no {size} bytes for the index")
    memory[0] = moved
    return 0


# --- pools -----------------------------------------------------------------------------------------------------------

cdef struct Chunk:
    char* items
    uint32_t live
    uint32_t free  # first free item, linked through the items' first four bytes
    uint32_t fresh  # items from here on were never used
    uint32_t before  # list of chunks that have room
    uint32_t after

cdef struct Pool:
    Chunk* chunks
    uint32_t count
    uint32_t room  # first chunk that has room
    uint32_t vacant  # first chunk number without memory, linked through ``after``
    uint32_t item  # bytes
    uint32_t resident  # chunks with memory
    uint64_t live


cdef void pool_begin(Pool* pool, uint32_t item) noexcept nogil:
    pool.chunks = NULL
    pool.count = pool.resident = 0
    pool.room = pool.vacant = NONE
    pool.item = item
    pool.live = 0


cdef void pool_end(Pool* pool) noexcept nogil:
    cdef uint32_t i
    for i in range(pool.count):
        free(pool.chunks[i].items)
    free(pool.chunks)
    pool.chunks = NULL
    pool.count = 0


cdef inline void* pool_at(const Pool* pool, uint32_t id_) noexcept nogil:
    return pool.chunks[id_ >> CHUNK_BITS].items + <size_t>(id_ & (CHUNK - 1)) * pool.item


cdef int pool_grow(Pool* pool) except -1:
    """One more chunk, at the head of those that have room."""
    cdef uint32_t number = pool.vacant, after, i, wider
    cdef Chunk* chunk
    cdef char* items = <char*>malloc(<size_t>CHUNK * pool.item)
    if items == NULL:
        raise MemoryError("no memory for the index")
    if number == NONE:
        if (pool.count & (pool.count - 1)) == 0:
            wider = 2 * pool.count if pool.count else 1
            resized(<void**>&pool.chunks, wider * sizeof(Chunk))
        number = pool.count
        pool.count += 1
    else:
        pool.vacant = pool.chunks[number].after
    chunk = &pool.chunks[number]
    chunk.items = items
    chunk.live = chunk.fresh = 0
    chunk.free = NONE
    chunk.before = NONE
    chunk.after = pool.room
    if pool.room != NONE:
        pool.chunks[pool.room].before = number
    pool.room = number
    pool.resident += 1
    return 0


cdef uint32_t pool_take(Pool* pool) except? 0xFFFFFFFF:
    """The id of an item nobody uses; its content is undefined. O(1)."""
    cdef Chunk* chunk
    cdef uint32_t number, local
    if pool.room == NONE:
        pool_grow(pool)
    number = pool.room
    chunk = &pool.chunks[number]
    if chunk.free != NONE:
        local = chunk.free
        chunk.free = (<uint32_t*>(chunk.items + <size_t>local * pool.item))[0]
    else:
        local = chunk.fresh
        chunk.fresh += 1
    chunk.live += 1
    pool.live += 1
    if chunk.free == NONE and chunk.fresh == CHUNK:
        pool_unroom(pool, number)
    return number << CHUNK_BITS | local


cdef void pool_unroom(Pool* pool, uint32_t number) noexcept nogil:
    cdef Chunk* chunk = &pool.chunks[number]
    if chunk.before == NONE:
        pool.room = chunk.after
    else:
        pool.chunks[chunk.before].after = chunk.after
    if chunk.after != NONE:
        pool.chunks[chunk.after].before = chunk.before


cdef void pool_give(Pool* pool, uint32_t id_) noexcept nogil:
    """The item is free again; a chunk without items gives its memory back. O(1)."""
    cdef uint32_t number = id_ >> CHUNK_BITS, local = id_ & (CHUNK - 1)
    cdef Chunk* chunk = &pool.chunks[number]
    cdef bint full = chunk.free == NONE and chunk.fresh == CHUNK
    (<uint32_t*>(chunk.items + <size_t>local * pool.item))[0] = chunk.free
    chunk.free = local
    chunk.live -= 1
    pool.live -= 1
    if full:
        chunk.before = NONE
        chunk.after = pool.room
        if pool.room != NONE:
            pool.chunks[pool.room].before = number
        pool.room = number
    if chunk.live == 0 and pool.resident > 1:
        pool_unroom(pool, number)
        free(chunk.items)
        chunk.items = NULL
        chunk.after = pool.vacant
        pool.vacant = number
        pool.resident -= 1


cdef list pool_faults(const Pool* pool, str name):
    """Chunks against the counts, and free lists against chunks. O(chunks × items)."""
    cdef uint32_t i, steps, local
    cdef uint64_t live = 0
    cdef list faults = []
    for i in range(pool.count):
        if pool.chunks[i].items == NULL:
            continue
        live += pool.chunks[i].live
        steps, local = 0, pool.chunks[i].free
        while local != NONE and steps <= CHUNK:
            steps += 1
            local = (<uint32_t*>(pool.chunks[i].items + <size_t>local * pool.item))[0]
        if steps + pool.chunks[i].live != pool.chunks[i].fresh:
            faults.append(f"{name} chunk {i}: {steps} free, {pool.chunks[i].live} live, {pool.chunks[i].fresh} used")
    if live != pool.live:
        faults.append(f"{name}: {pool.live} live, the chunks say {live}")
    return faults


# --- tables ----------------------------------------------------------------------------------------------------------
# A slot is hash << 32 | id. Linear probing; what is taken out lets its followers move up, so there are no tombstones.

cdef struct Table:
    uint64_t* slots
    uint32_t mask
    uint32_t count

cdef uint64_t VACANT = 0xFFFFFFFFFFFFFFFF


cdef void table_begin(Table* table) noexcept nogil:
    table.slots = NULL
    table.mask = table.count = 0


cdef int table_size(Table* table, uint32_t size) except -1:
    """Rebuild with this many slots, a power of two."""
    cdef uint64_t* old = table.slots
    cdef uint32_t before = table.mask + 1 if old != NULL else 0, i, at
    cdef uint64_t* slots = <uint64_t*>malloc(<size_t>size * 8)
    if slots == NULL:
        raise MemoryError("no memory for the index")
    memset(slots, 0xFF, <size_t>size * 8)
    for i in range(before):
        if old[i] != VACANT:
            at = <uint32_t>(old[i] >> 32) & (size - 1)
            while slots[at] != VACANT:
                at = (at + 1) & (size - 1)
            slots[at] = old[i]
    free(old)
    table.slots = slots
    table.mask = size - 1
    return 0


cdef int table_room(Table* table) except -1:
    """Room for one more."""
    if table.slots == NULL:
        return table_size(table, SMALLEST)
    if <uint64_t>(table.count + 1) * 3 > <uint64_t>(table.mask + 1) * 2:
        return table_size(table, (table.mask + 1) * 2)
    return 0


cdef int table_put(Table* table, uint32_t hash_, uint32_t id_) except -1:
    """Add an id that is not there. O(1), amortised."""
    cdef uint32_t at
    table_room(table)
    at = hash_ & table.mask
    while table.slots[at] != VACANT:
        at = (at + 1) & table.mask
    table.slots[at] = <uint64_t>hash_ << 32 | id_
    table.count += 1
    return 0


cdef int table_drop(Table* table, uint32_t hash_, uint32_t id_) except -1:
    """Take out an id that is there. O(1), amortised."""
    cdef uint32_t at = hash_ & table.mask, then, home
    cdef uint64_t wanted = <uint64_t>hash_ << 32 | id_
    while table.slots[at] != wanted:
        at = (at + 1) & table.mask
    then = at
    while True:
        then = (then + 1) & table.mask
        if table.slots[then] == VACANT:
            break
        home = <uint32_t>(table.slots[then] >> 32) & table.mask
        if ((then - home) & table.mask) >= ((then - at) & table.mask):
            table.slots[at] = table.slots[then]
            at = then
    table.slots[at] = VACANT
    table.count -= 1
    if table.mask >= 64 and <uint64_t>table.count * 8 < table.mask:
        table_size(table, (table.mask + 1) // 4)
    return 0
