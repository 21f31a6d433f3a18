"""All workers kvd watches: which stream and which rank of which model's index belong together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from kvd.core import Index, open_index
from kvd.core.residency import Outcome
from kvd.core.routed import RoutedTable
from kvd.core.signals import Refused, Remembered
from kvd.core.stream import Policy, Stream
from protocols.events import Event
from protocols.query import ModelInfo, StreamInfo, WorkerSpec


class Member:
    """One worker-rank: its stream, and its handle in its model's index."""

    __slots__ = ("endpoint", "fleet", "handle", "index", "pool", "rank", "replay", "shadow", "spec", "stream")

    def __init__(self, fleet: Fleet, spec: WorkerSpec, rank: int, index: Index, stream: Stream) -> None:
        self.fleet = fleet
        self.spec = spec
        self.rank = rank
        self.index = index
        self.stream = stream
        self.handle = self.new_handle()
        self.shadow: int | None = None
        self.pool: str | None = None
        """The pool whose holder this is: it shares the pool's stream."""
        self.endpoint = spec.endpoint
        self.replay = spec.replay

    @property
    def owner(self) -> tuple[str, int]:
        return self.spec.name, self.rank

    def new_handle(self) -> int:
        """A further, empty rank of the index, registered as this member is."""
        spec = self.spec
        return self.index.add_rank(
            block_size=spec.block_size, scheme=spec.scheme, single_copies=spec.copies == "single"
        )

    def apply(self, event: Event) -> Outcome:
        """Apply one event of this rank."""
        return self.index.apply(self.handle, event)

    def reset(self) -> None:
        """A new lifetime: drop what the old one stored, and what a snapshot kept of it."""
        self.index.clear_rank(self.handle)
        if self.shadow is not None:
            self.index.remove_rank(self.shadow)
            self.shadow = None

    def restore(self) -> None:
        """The snapshot's lifetime is proven: what it kept, invisible until now, takes the place of the empty rank."""
        if self.shadow is not None:
            self.index.remove_rank(self.handle)
            self.handle, self.shadow = self.shadow, None

    def info(self, now: float) -> StreamInfo:
        """What is known of the stream, for people."""
        stream = self.stream
        return StreamInfo(
            worker=self.spec.name, rank=self.rank, model=self.spec.model, endpoint=self.endpoint, replay=self.replay,
            state=stream.state.value, trust=stream.trust(now), lifetime=stream.lifetime, last_seq=stream.last,
            quiet_seconds=None if stream.heard_at is None else max(0.0, now - stream.heard_at),
            blocks=self.index.block_count(self.handle),
            block_sizes=sorted({size for size, _ in self.index.windows(self.handle)}),
            scheme=self.index.scheme(self.handle), counters=stream.counters | self.index.counters(self.handle),
        )  # fmt: skip


EVICTION = 4096
"""Blocks that are given up at a time while a full index makes room."""


class FleetError(ValueError):
    """A worker that cannot be added or is not there."""


class Fleet:
    """Workers by name, members by (name, rank), one index per model."""

    def __init__(self, *, max_blocks: int, max_workers: int = 4096, routed_entries: int = 1_000_000) -> None:
        self._max_blocks = max_blocks
        self._max_workers = max_workers
        self.indexes: dict[str, Index] = {}
        self.workers: dict[str, WorkerSpec] = {}
        self.members: dict[tuple[str, int], Member] = {}
        self.routed = RoutedTable(limit=routed_entries)

    def add(
        self, spec: WorkerSpec, now: float, policy: Policy, remembered: Mapping[int, Remembered] | None = None
    ) -> list[Member]:
        """Add a worker with all its ranks; ``remembered``: a snapshot's positions by rank. Raises FleetError."""
        if spec.name in self.workers:
            raise FleetError(f"worker {spec.name!r} is there already: remove it first, or choose another name")
        if len(self.members) + spec.ranks > self._max_workers:
            raise FleetError(f"{len(self.members) + spec.ranks} worker-ranks, at most {self._max_workers}")
        index = self.indexes.get(spec.model)
        if index is None:
            index = self.indexes[spec.model] = open_index(max_blocks=self._max_blocks)
        self.workers[spec.name] = spec
        members = []
        for rank in range(spec.rank, spec.rank + spec.ranks):
            position = None if remembered is None else remembered.get(rank)
            stream = Stream(now, replayable=spec.replay is not None, policy=policy, remembered=position)
            member = self.members[spec.name, rank] = Member(self, spec, rank, index, stream)
            members.append(member)
        return members

    def remove(self, name: str) -> list[Member]:
        """Remove a worker; its blocks are gone at once. Raises :class:`FleetError`."""
        if name not in self.workers:
            known = ", ".join(sorted(self.workers)[:8]) or "none"
            raise FleetError(f"no worker {name!r}; there are: {known}")
        owners = [owner for owner, member in self.members.items() if name in (member.spec.name, member.pool)]
        members = [self.members.pop(owner) for owner in owners]
        for gone in {member.spec.name for member in members}:
            del self.workers[gone]
        for member in members:
            member.reset()
            member.index.remove_rank(member.handle)
            self.routed.forget(member.owner)
        return members

    def add_holder(self, pool: Member, name: str) -> Member:
        """A row of its own for a holder of a pool; it goes with the pool. Raises :class:`FleetError`."""
        spec = msgspec.structs.replace(pool.spec, name=f"{pool.spec.name}/{name}", rank=0)
        if spec.name in self.workers:
            raise FleetError(f"worker {spec.name!r} is there already")
        if len(self.members) >= self._max_workers:
            raise FleetError(f"{len(self.members) + 1} worker-ranks, at most {self._max_workers}")
        self.workers[spec.name] = spec
        member = self.members[spec.name, 0] = Member(self, spec, 0, pool.index, pool.stream)
        member.pool = pool.spec.name
        return member

    def of_model(self, model: str, workers: Iterable[str] | None) -> list[Member]:
        """The members that serve a model, optionally only the named workers, in the order they were added.

        A pool has no blocks of its own: naming it names its holders.
        """
        wanted = None if workers is None else set(workers)
        return [
            member
            for member in self.members.values()
            if member.spec.model == model
            and (member.spec.source != "pool" or member.pool is not None)
            and (wanted is None or member.spec.name in wanted or member.pool in wanted)
        ]

    def evict(self, besides: Member, now: float) -> bool:
        """Make room in a full index, and have whoever gives way say so; False if there is nobody.

        Blocks that nothing links to go first, then whole streams, the least recently heard one first.
        """
        sharing = [member for member in self.members.values() if member.index is besides.index]
        given_up = besides.index.forget_unlinked(EVICTION)
        for member in sharing:
            if member.handle in given_up or member.shadow in given_up:
                member.stream.handle(Refused("unlinked_dropped"), now)
        return bool(given_up) or self._evict_stream([member for member in sharing if member is not besides], now)

    def _evict_stream(self, members: list[Member], now: float) -> bool:
        """The least recently heard of these streams that hold anything gives up all it holds."""
        holding = [member for member in members if member.index.block_count(member.handle)]
        if holding:
            oldest = min(holding, key=lambda member: member.stream.heard_at or 0.0)
            oldest.reset()
            oldest.stream.handle(Refused("evicted"), now)
        return bool(holding)

    def sweep(self, limit: int) -> bool:
        """Dismantle dropped lifetimes, up to ``limit`` blocks an index; True if none are left."""
        done = [index.sweep(limit) for index in self.indexes.values()]
        used = {spec.model for spec in self.workers.values()}
        for model in [m for m, i in self.indexes.items() if m not in used and not i.statistics().buried]:
            del self.indexes[model]
        return all(done)

    def models(self) -> Iterator[ModelInfo]:
        """Each model with what its workers' streams have shown."""
        for model, index in self.indexes.items():
            members = self.of_model(model, None)
            sizes = {size for member in members for size, _ in index.windows(member.handle)}
            schemes = {index.scheme(member.handle) or "unknown" for member in members}
            yield ModelInfo(model=model, block_sizes=sorted(sizes), schemes=sorted(schemes), workers=len(members))

    def check(self) -> list[str]:
        """Every broken invariant of every index, in words."""
        return [f"{model}: {fault}" for model, index in self.indexes.items() for fault in index.check()]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes over all models, for replies and metrics."""

    blocks: int
    nodes: int


def totals(fleet: Fleet) -> Totals:
    """Count blocks and nodes of every model."""
    statistics = [index.statistics() for index in fleet.indexes.values()]
    return Totals(blocks=sum(s.blocks for s in statistics), nodes=sum(s.nodes for s in statistics))
