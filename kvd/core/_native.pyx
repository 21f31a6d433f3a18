# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: embedsignature=False, auto_pickle=False
"""The index over flat arrays and open-addressing tables; :mod:`kvd.core.reference` says what it must do.

Parts, each the counterpart of a module in Python:

- ``native_memory.pxi``: pools and tables;
- ``native_sets.pxi``: sets of ranks, each distinct one once, and what a node stores of them;
- ``native_tree.pxi``: nodes by key, who holds and who covers them (:mod:`kvd.core.tree`);
- ``native_rank.pxi`` and ``native_store.pxi``: one rank's blocks, and its events (:mod:`kvd.core.residency`);
- ``native_match.pxi``: keys hashed as they are looked at, and the jump search;
- ``native_image.pxi``: a rank in parts and back (:mod:`kvd.core.image`).

No Python object is made per token or per block of device residency. Bounds beyond the reference's, all far above what
is configured: 65,536 ranks whose blocks are not swept yet, 2^27 nodes, 2^29 blocks a rank, 2^22 remembered ones.
"""

cimport cython

from collections import deque
from collections.abc import ItemsView, KeysView, Mapping, ValuesView

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

import os

from kvd.core.groups import Group, Groups
from kvd.core.image import (
    PART,
    BlockImage,
    Blocks,
    GroupImage,
    Head,
    NodeImage,
    Nodes,
    Tracked,
    WaitingImage,
)
from kvd.core.reference import DEFAULT_MAX_BLOCKS, Reach, Statistics
from kvd.core.residency import _CHUNKED_MEDIA, DOUBTS, ROOT_PARENTS, Applied, Bounds, Budget, Skipped
from protocols.events import Cleared, Removed, Stored, Tier, Unknown, tier_of
from protocols.keys import Keys, digest_part, media_part, namespace_seed
from protocols.media import PAD_BASE


cdef extern from *:
    """
    #define XXH_INLINE_ALL
    #include "vendor/xxhash/xxhash.h"
    #include "native_ints.h"
    #define kvd_popcount(x) ((uint32_t)__builtin_popcountll(x))
    #define kvd_trailing(x) ((uint32_t)__builtin_ctzll(x))
    #define kvd_prefetch(p) __builtin_prefetch(p)
    """
    uint64_t XXH3_64bits_withSeed(const void* data, size_t length, uint64_t seed) noexcept nogil
    int kvd_u64(PyObject* value, uint64_t* out) except -1
    bint kvd_is_u64(PyObject* value, uint64_t* out) noexcept
    Py_ssize_t kvd_pack_u32(PyObject** tokens, Py_ssize_t count, uint32_t* out, uint32_t* highest) noexcept
    uint32_t popcount "kvd_popcount"(uint64_t x) noexcept nogil
    uint32_t trailing_zeros "kvd_trailing"(uint64_t x) noexcept nogil
    void prefetch "kvd_prefetch"(const void* at) noexcept nogil
    PyObject** PySequence_Fast_ITEMS(object sequence) noexcept

cdef uint64_t SEED = int.from_bytes(os.urandom(8), "little")  # tables and sets are laid out in another way each run
cdef uint64_t CHAIN_SEED = 1337
cdef tuple LEVELS = tuple(Tier)


cdef inline uint64_t chained(uint64_t parent, uint64_t local) noexcept nogil:
    """The key of a block that is not the first."""
    cdef uint64_t[2] pair
    pair[0], pair[1] = parent, local
    return XXH3_64bits_withSeed(pair, 16, CHAIN_SEED)


cdef inline bint same_text(object one, object other) except -1:
    return one is other or (one is not None and other is not None and one == other)


cdef inline bint any_of(const uint32_t* counts, uint32_t levels) noexcept nogil:
    cdef uint32_t i
    for i in range(4):
        if levels >> i & 1 and counts[i]:
            return True
    return False


cdef class Rank
cdef class Tree
cdef class Search

include "native_memory.pxi"
include "native_sets.pxi"
include "native_tree.pxi"
include "native_rank.pxi"
include "native_store.pxi"
include "native_match.pxi"
include "native_image.pxi"


@cython.final
cdef class NativeIndex:
    """All ranks of one model; the interface of :class:`kvd.core.reference.ReferenceIndex`."""

    implementation = "native"

    cdef Tree tree
    cdef Scratch scratch
    cdef Search search
    cdef bint private_budget
    cdef object budget
    cdef dict ranks
    cdef object graveyard
    cdef list free_slots
    cdef uint32_t slots
    cdef uint64_t handles
    cdef Table slot_of  # handle → slot

    def __cinit__(self):
        table_begin(&self.slot_of)

    def __dealloc__(self):
        free(self.slot_of.slots)

    def __init__(self, *, max_blocks=DEFAULT_MAX_BLOCKS, budget=None):
        self.tree = Tree()
        self.scratch = Scratch()
        self.search = Search(self.tree)
        self.private_budget = budget is None
        self.budget = budget or Budget(max_blocks)
        self.ranks = {}
        self.graveyard = deque()
        self.free_slots = []
        self.slots = 0
        self.handles = 0

    # --- ranks ---

    def add_rank(self, *, block_size=None, scheme=None, bounds=None, single_copies=False):
        if self.handles == 0xFFFFFFFE:
            raise OverflowError(f"{self.handles} ranks were added to this index: no handles are left")
        cdef Rank rank = self._rank(block_size, scheme, bounds or Bounds(), single_copies)
        self.handles += 1
        table_put(&self.slot_of, <uint32_t>self.handles, rank.slot)
        self.ranks[self.handles] = rank
        return self.handles

    cdef Rank _rank(self, object block_size, object scheme, object bounds, bint single_copies):
        cdef Rank rank = Rank()
        if self.free_slots:
            rank.slot = self.free_slots.pop()
        elif self.slots == MAX_SLOTS:
            raise OverflowError(f"{self.slots} ranks and dropped lifetimes: sweep before adding more")
        else:
            rank.slot = self.slots
            self.slots += 1
        rank.tree, rank.budget, rank.bounds, rank.single_copies = self.tree, self.budget, bounds, single_copies
        rank.search = self.search
        rank.registered_size, rank.registered_scheme = block_size, scheme
        rank.most_remembered = min(bounds.remembered, QUEUE_MAX)
        return rank

    def remove_rank(self, rank):
        cdef Rank old = self.ranks.pop(rank)
        table_drop(&self.slot_of, rank, old.slot)
        self.graveyard.append(old)

    def clear_rank(self, rank):
        cdef Rank old = self.ranks[rank]
        cdef Rank new = self._rank(old.registered_size, old.registered_scheme, old.bounds, old.single_copies)
        new.counters = old.counters
        table_drop(&self.slot_of, rank, old.slot)
        table_put(&self.slot_of, rank, new.slot)
        self.ranks[rank] = new
        self.graveyard.append(old)

    def sweep(self, limit=2048):
        cdef Rank oldest
        cdef Py_ssize_t step
        while self.graveyard and limit > 0:
            oldest = self.graveyard[0]
            step = min(limit, oldest.live)
            limit -= max(step, 1)
            if oldest.dismantle(step):
                self.graveyard.popleft()
                self.free_slots.append(oldest.slot)
        return not self.graveyard

    # --- images ---

    def export_rank(self, rank):
        return export(self.tree, self.ranks[rank])

    def import_rank(self, rank):
        return NativeImporter(self.tree, self.ranks[rank])

    # --- events and questions ---

    def apply(self, rank, event):
        cdef Rank own = self.ranks[rank]
        if type(event) is Stored and self.budget.used + len(event.hashes) > self.budget.limit:
            self._make_room(self.budget.used + len(event.hashes) - self.budget.limit)
        return apply_event(own, event, self.scratch)

    cdef int _make_room(self, object lacking) except -1:
        """Before a store is refused, dropped lifetimes go and then blocks that are only remembered."""
        cdef object before = self.budget.used
        cdef Rank rank
        self.sweep(lacking)
        lacking -= before - self.budget.used
        for each in self.ranks.values():
            if lacking <= 0:
                return 0
            rank = each
            lacking -= rank.forget_remembered(min(lacking, 0xFFFFFFF0))
        return 0

    def forget_unlinked(self, limit):
        cdef Rank rank
        cdef dict given_up = {}
        for handle, each in self.ranks.items():
            rank = each
            count = rank.forget_unlinked(min(limit, 0xFFFFFFF0))
            if count:
                given_up[handle] = count
                limit -= count
        return given_up

    def windows(self, rank):
        return (<Rank>self.ranks[rank]).all_windows()

    def scheme(self, rank):
        cdef Rank own = self.ranks[rank]
        return own.registered_scheme or own.learnt_scheme

    def counters(self, rank):
        return {name: count for name, count in (<Rank>self.ranks[rank]).counters.items() if count}

    def block_count(self, rank):
        cdef Rank own = self.ranks[rank]
        return own.live - own.remembered

    def match(self, keys, ranks):
        return self.search.match(keys, ranks, self.ranks, &self.slot_of, self.slots)

    def statistics(self):
        cdef Rank rank
        cdef object blocks = 0, buried = 0
        for each in self.ranks.values():
            rank = each
            blocks += rank.live - rank.remembered
        for each in self.graveyard:
            rank = each
            buried += rank.live
        return Statistics(blocks=blocks, nodes=self.tree.nodes.live, buried=buried, ranks=len(self.ranks))

    def check(self):
        cdef Rank rank
        cdef list faults = self.tree.faults(), everyone = [*self.ranks.values(), *self.graveyard], slots = []
        cdef object blocks = 0
        cdef dict names = {}
        cdef uint32_t e
        for each in everyone:
            rank = each
            faults += rank.faults()
            blocks += rank.live
            slots.append(rank.slot)
            for e in range(rank.used):
                if rank.entries[e].node < HOLE:
                    names[rank.entries[e].node] = names.get(rank.entries[e].node, 0) | 1 << <object>rank.slot
        for node in self.tree.ids():
            said = self.tree.sets.members(self.tree.sets.profile(self.tree.at(node).profile).sets[NAMED])
            if said != names.get(node, 0):
                key = self.tree.at(node).key
                faults.append(f"node {key:#x} is named by {said:#x}, the blocks say {names.get(node, 0):#x}")
        if sorted(slots + self.free_slots) != list(range(self.slots)):
            faults.append(f"slots {sorted(slots + self.free_slots)}, expected each of {self.slots} once")
        if self.private_budget and self.budget.used != blocks:
            faults.append(f"budget counts {self.budget.used} blocks, the ranks have {blocks}")
        return faults
