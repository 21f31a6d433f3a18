"""All workers kvd watches: which stream and which rank of which model's index belong together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvd.core import open_index
from kvd.core.reference import ReferenceIndex
from kvd.core.residency import Outcome
from kvd.core.routed import RoutedTable
from kvd.core.stream import Policy, Stream
from protocols.events import Event
from protocols.query import ModelInfo, StreamInfo, WorkerSpec


class Member:
    """One worker-rank: its stream, and its handle in its model's index."""

    __slots__ = ("endpoint", "handle", "index", "rank", "replay", "spec", "stream")

    def __init__(self, spec: WorkerSpec, rank: int, index: ReferenceIndex, stream: Stream) -> None:
        self.spec = spec
        self.rank = rank
        self.index = index
        self.stream = stream
        self.handle = index.add_rank(
            block_size=spec.block_size, scheme=spec.scheme, single_copies=spec.copies == "single"
        )
        self.endpoint = spec.endpoint
        self.replay = spec.replay

    @property
    def owner(self) -> tuple[str, int]:
        return self.spec.name, self.rank

    def apply(self, event: Event) -> Outcome:
        """Apply one event of this rank."""
        return self.index.apply(self.handle, event)

    def reset(self) -> None:
        """A new lifetime: drop what the old one stored."""
        self.index.clear_rank(self.handle)

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


class FleetError(ValueError):
    """A worker that cannot be added or is not there."""


class Fleet:
    """Workers by name, members by (name, rank), one index per model."""

    def __init__(self, *, max_blocks: int, max_workers: int = 4096, routed_entries: int = 1_000_000) -> None:
        self._max_blocks = max_blocks
        self._max_workers = max_workers
        self.indexes: dict[str, ReferenceIndex] = {}
        self.workers: dict[str, WorkerSpec] = {}
        self.members: dict[tuple[str, int], Member] = {}
        self.routed = RoutedTable(limit=routed_entries)

    def add(self, spec: WorkerSpec, now: float, policy: Policy) -> list[Member]:
        """Add a worker with all its ranks. Raises :class:`FleetError`."""
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
            stream = Stream(now, replayable=spec.replay is not None, policy=policy)
            member = self.members[spec.name, rank] = Member(spec, rank, index, stream)
            members.append(member)
        return members

    def remove(self, name: str) -> list[Member]:
        """Remove a worker; its blocks are gone at once. Raises :class:`FleetError`."""
        if name not in self.workers:
            known = ", ".join(sorted(self.workers)[:8]) or "none"
            raise FleetError(f"no worker {name!r}; there are: {known}")
        spec = self.workers.pop(name)
        members = [self.members.pop((name, rank)) for rank in range(spec.rank, spec.rank + spec.ranks)]
        for member in members:
            member.index.remove_rank(member.handle)
            self.routed.forget(member.owner)
        return members

    def of_model(self, model: str, workers: Iterable[str] | None) -> list[Member]:
        """The members that serve a model, optionally only the named workers, in the order they were added."""
        wanted = None if workers is None else set(workers)
        return [
            member
            for member in self.members.values()
            if member.spec.model == model and (wanted is None or member.spec.name in wanted)
        ]

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
