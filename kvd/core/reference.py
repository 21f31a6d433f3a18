"""The index in plain Python: the definition of correct, the fallback without a compiler, and the oracle in tests.

One index holds one model. A *rank* is a handle for one worker-rank's residency; its slot in the tree's bit masks
changes with each lifetime, so that dropping a lifetime is instant: the old residency moves to the graveyard, invisible,
and is dismantled in bounded steps by :meth:`ReferenceIndex.sweep`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from kvd.core.image import Importer, Part, export
from kvd.core.residency import Bounds, Budget, Outcome, Residency
from kvd.core.tree import KeySequence, Tree, Window, place
from protocols.events import Event, Stored, Tier
from protocols.media import Scheme

DEFAULT_MAX_BLOCKS = 16_000_000


class Reach(msgspec.Struct, frozen=True, gc=False):
    """How far one rank holds a prompt, in blocks: ``device`` … ``external`` cumulative, ``usable`` on the device."""

    tiers: tuple[int, int, int, int]
    usable: int


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """``blocks``: engine hashes known; ``nodes``: distinct contents; ``buried``: blocks of dropped lifetimes that are
    not dismantled yet; ``ranks``: handles in use."""

    blocks: int
    nodes: int
    buried: int
    ranks: int


class ReferenceIndex:
    """All ranks of one model."""

    implementation = "reference"

    def __init__(self, *, max_blocks: int = DEFAULT_MAX_BLOCKS, budget: Budget | None = None) -> None:
        self._tree = Tree()
        self._private_budget = budget is None
        self._budget = budget or Budget(max_blocks)
        self._ranks: dict[int, Residency] = {}
        self._graveyard: deque[Residency] = deque()
        self._free: list[int] = []
        self._slots = 0
        self._handles = 0

    # --- ranks -------------------------------------------------------------------------------------------------------

    def add_rank(
        self,
        *,
        block_size: int | None = None,
        scheme: Scheme | None = None,
        bounds: Bounds | None = None,
        single_copies: bool = False,
    ) -> int:
        """A handle for a new, empty rank.

        ``block_size`` and ``scheme`` as registered, or learnt from events; ``single_copies`` for engines that announce
        hits again: a block then never counts twice.
        """
        self._handles += 1
        self._ranks[self._handles] = self._residency(block_size, scheme, bounds or Bounds(), single_copies)
        return self._handles

    def _residency(
        self, block_size: int | None, scheme: Scheme | None, bounds: Bounds, single_copies: bool
    ) -> Residency:
        slot = self._free.pop() if self._free else self._slots
        self._slots = max(self._slots, slot + 1)
        return Residency(
            self._tree, slot, self._budget, block_size=block_size, scheme=scheme, bounds=bounds,
            single_copies=single_copies,
        )  # fmt: skip

    def remove_rank(self, rank: int) -> None:
        """The rank and all it held are gone. O(1)."""
        self._graveyard.append(self._ranks.pop(rank))

    def clear_rank(self, rank: int) -> None:
        """A new lifetime: nothing of the old one is visible from now on. O(1)."""
        old = self._ranks[rank]
        new = self._residency(old.registered_size, old.registered_scheme, old.bounds, old.single_copies)
        new.counters = old.counters
        self._ranks[rank] = new
        self._graveyard.append(old)

    def sweep(self, limit: int = 2048) -> bool:
        """Dismantle up to ``limit`` blocks of dropped lifetimes; True if none are left."""
        while self._graveyard and limit > 0:
            oldest = self._graveyard[0]
            step = min(limit, len(oldest.blocks))
            limit -= max(step, 1)
            if oldest.dismantle(step):
                self._graveyard.popleft()
                self._free.append(oldest.slot)
        return not self._graveyard

    # --- images ------------------------------------------------------------------------------------------------------

    def export_rank(self, rank: int) -> Iterator[Part]:
        """The rank's residency in parts. It must not change until the last one is made."""
        return export(self._ranks[rank])

    def import_rank(self, rank: int) -> Importer:
        """Takes parts into a rank that is still empty."""
        return Importer(self._ranks[rank])

    # --- events and questions ----------------------------------------------------------------------------------------

    def apply(self, rank: int, event: Event) -> Outcome:
        """Apply one event of the rank. O(blocks in the event), plus what coverage it changes below them."""
        if isinstance(event, Stored):
            self._make_room(len(event.hashes))
        return self._ranks[rank].apply(event)

    def _make_room(self, wanted: int) -> None:
        """Before a store is refused, dropped lifetimes go and then blocks that are only remembered."""
        lacking = self._budget.used + wanted - self._budget.limit
        if lacking <= 0:
            return
        before = self._budget.used
        self.sweep(lacking)
        lacking -= before - self._budget.used
        for residency in self._ranks.values():
            if lacking <= 0:
                return
            lacking -= residency.forget_remembered(lacking)

    def forget_unlinked(self, limit: int) -> dict[int, int]:
        """Give up at most ``limit`` blocks whose parent was never announced, oldest first; how many by rank.

        They are in nobody's answer yet, but a parent may still come: their streams are no longer complete.
        """
        given_up: dict[int, int] = {}
        for rank, residency in self._ranks.items():
            if count := residency.forget_unlinked(limit):
                given_up[rank] = count
                limit -= count
        return given_up

    def windows(self, rank: int) -> dict[Window, int]:
        """How the rank cuts tokens into blocks, with how many blocks of each kind it knows."""
        return dict(self._ranks[rank].windows)

    def scheme(self, rank: int) -> Scheme | None:
        """How the rank tells media apart, if that is known."""
        return self._ranks[rank].scheme

    def counters(self, rank: int) -> dict[str, int]:
        """What was skipped or was odd, by reason, over all lifetimes."""
        return {name: count for name, count in self._ranks[rank].counters.items() if count}

    def block_count(self, rank: int) -> int:
        """Blocks with at least one copy on any tier."""
        residency = self._ranks[rank]
        return len(residency.blocks) - len(residency.remembered)

    def match(self, keys: KeySequence, ranks: Iterable[int]) -> dict[int, Reach]:
        """The reach of each of these ranks; ranks that hold not even the first block anywhere are left out.

        Cost: distinct reaches × log(blocks) probes per tier in use, and one pass over the reach for hybrid ranks.
        """
        by_place = {place(self._ranks[rank].slot): rank for rank in ranks}
        among = sum(by_place)
        reached: dict[int, list[int]] = {}
        for level in Tier:
            for blocks, mask in self._tree.match(keys, level, among):
                while mask:
                    bit = mask & -mask
                    mask ^= bit
                    reached.setdefault(by_place[bit], [0, 0, 0, 0])[level] = blocks
        reaches = {rank: self._reach(rank, keys, blocks) for rank, blocks in reached.items()}
        return {rank: reach for rank, reach in reaches.items() if any(reach.tiers)}

    def _reach(self, rank: int, keys: KeySequence, blocks: list[int]) -> Reach:
        device, host, disk, external = blocks
        residency = self._ranks[rank]
        if residency.chunked:
            host, disk, external = (residency.whole(residency.path(keys, n), device) for n in (host, disk, external))
        usable = device
        if residency.groups.tracked:
            usable = residency.usable(residency.path(keys, device), Tier.DEVICE)
        return Reach((device, host, disk, external), usable)

    def statistics(self) -> Statistics:
        """Sizes, for metrics."""
        return Statistics(
            blocks=sum(map(self.block_count, self._ranks)), nodes=len(self._tree.nodes),
            buried=sum(len(residency.blocks) for residency in self._graveyard), ranks=len(self._ranks),
        )  # fmt: skip

    def check(self) -> list[str]:
        """Every invariant that is broken, in words; empty when sound. O(everything)."""
        everyone = [*self._ranks.values(), *self._graveyard]
        faults = self._tree.check()
        faults += [fault for residency in everyone for fault in residency.check()]
        pins: dict[int, int] = {}
        for residency in everyone:
            for node, blocks in residency.names.items():
                pins[node.key] = pins.get(node.key, 0) + len(blocks)
        faults += [
            f"node {node.key:#x} has {node.pins} pins, its blocks say {pins.get(node.key, 0)}"
            for node in self._tree.nodes.values()
            if node.pins != pins.get(node.key, 0)
        ]
        slots = [residency.slot for residency in everyone] + self._free
        if sorted(slots) != list(range(self._slots)):
            faults.append(f"slots {sorted(slots)}, expected each of {self._slots} once")
        if self._private_budget and self._budget.used != sum(len(residency.blocks) for residency in everyone):
            faults.append(f"budget counts {self._budget.used} blocks, the ranks have another number")
        return faults
