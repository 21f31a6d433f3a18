"""TensorRT-LLM's polled events, engine-neutral: whole blocks only, windows as groups, media at their offsets.

What no event tells: which adapter a block belongs to (the engine hashes it, but does not serialise it), so requests
with adapters look like requests of the base model.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from protocols import events as neutral
from protocols.events import BlockExtra
from protocols.trtllm import Event, Removed, Stored, StoredBlock, Updated

MAX_PARTIAL = 65_536
"""Partial blocks remembered for their removal; an older one's removal is counted as unknown, no more."""

_GLOBAL, _WINDOW = "full_attention", "sliding_window"
_Name = tuple[int | None, int]
"""A block: its window and its hash. The same hash is in every window that holds the content."""


def medium(level: int) -> str:
    """The medium a cache level stands for; a level nobody documented gets a name that no tier has."""
    return {0: "GPU", 1: "CPU"}.get(level, f"level{level}")


class Translator:
    """One rank's events of one lifetime, engine-neutral.

    ``tokens_per_block`` is as registered, else the largest block seen: until a block is followed by another one, it may
    be a partial one, so smaller blocks are taken back as soon as a larger one appears. Windows are the KV-cache groups,
    each numbered by its size: the largest is the one of global attention and indexed, the others limit what is usable.

    Media: TensorRT-LLM gives the offset *within the item* at which a block goes on with it, and 0 for the block in
    which it begins, wherever that is. An item's start relative to the block is therefore minus the offset where that
    is above 0, and for its first block follows from the next block's offset. Where neither tells, the block's content
    is left out rather than guessed: it is resident, and nothing behind it is credited. (Items of several runs make
    offsets that skip the gaps. Such keys can only miss: identity and tokens are part of them.)
    """

    def __init__(self, tokens_per_block: int | None = None, counters: Counter[str] | None = None) -> None:
        self.tokens_per_block = tokens_per_block or 0
        self.last: int | None = None
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._certain = tokens_per_block is not None
        self._largest = 0
        self._tentative: dict[_Name, int] = {}
        self._partial: OrderedDict[_Name, None] = OrderedDict()
        self._offloads = False

    def translate(self, event: Event) -> tuple[neutral.Event, ...]:
        """What the event means. O(blocks in the event)."""
        self.last = event.event_id
        self._largest = max(self._largest, event.window or 0)
        if isinstance(event, Stored):
            return tuple(self._stored(event))
        if isinstance(event, Removed):
            return tuple(self._removed(event.hashes, event.window))
        if isinstance(event, Updated):
            return tuple(self._updated(event))
        return ()

    def _kind(self, window: int | None) -> tuple[str | None, int | None]:
        """The KV-cache kind of a window, and the window in tokens where it is a sliding one."""
        if window is None:
            return None, None
        if window <= 0:  # no number of tokens: a pool of another kind, which nobody documented
            return "unknown", None
        return (_GLOBAL, None) if window >= self._largest else (_WINDOW, window)

    # --- stores ------------------------------------------------------------------------------------------------------

    def _stored(self, event: Stored) -> Iterator[neutral.Event]:
        yield from self._learn_size(event)
        size = self._size_of(event)
        parent = event.parent
        for run in _runs(event.blocks, size):
            blocks = [block for block, _ in run]
            if len(blocks[0].tokens) == size:
                if not self._certain:
                    self._tentative |= {(event.window, block.hash): block.level for block in blocks}
                yield self._store(event, run, parent, size)
            else:
                self.counters["partial_blocks"] += len(blocks)
                for block in blocks:
                    self._forget_until_removed((event.window, block.hash))
            parent = blocks[-1].hash

    def _learn_size(self, event: Stored) -> Iterator[neutral.Event]:
        """Take a larger block size in, and back what a smaller one had let in."""
        largest = max((len(block.tokens) for block in event.blocks), default=0)
        if largest > self.tokens_per_block and not self._certain:
            self.tokens_per_block = largest
            for name, level in self._tentative.items():
                yield neutral.Removed(hashes=(name[1],), medium=medium(level), group=name[0])
                self._forget_until_removed(name)
            self._tentative.clear()
        if len(event.blocks) > 1 or len(self._tentative) >= MAX_PARTIAL:  # only the last block of a prompt is partial
            self._certain = True
            self._tentative.clear()

    def _size_of(self, event: Stored) -> int:
        """The event's own block size: another one than registered is passed on, for the index to refuse by name."""
        first = len(event.blocks[0].tokens) if event.blocks else 0
        return first if len(event.blocks) > 1 or first > self.tokens_per_block else self.tokens_per_block

    def _forget_until_removed(self, name: _Name) -> None:
        self._partial[name] = None
        if len(self._partial) > MAX_PARTIAL:
            self._partial.popitem(last=False)

    def _store(self, event: Stored, run: Sequence[_Placed], parent: int | None, size: int) -> neutral.Stored:
        first, extra = run[0]
        kind, window = self._kind(event.window)
        self._offloads = self._offloads or first.level != 0
        readable = extra is not None
        if not readable:
            self.counters["media_unreadable"] += len(run)
        extras = tuple(extra for _, extra in run) if readable and any(block.media for block, _ in run) else None
        return neutral.Stored(
            hashes=tuple(block.hash for block, _ in run), parent=parent,
            tokens=[token for block, _ in run for token in block.tokens] if readable else [],
            block_size=size if readable else 0, medium=medium(first.level), dense=readable,
            group=event.window, spec_kind=kind, sliding_window=window, lora_id=first.lora_id,
            cache_salt=first.salt, extra=extras, warn=() if readable else ("placeholder",),
        )  # fmt: skip

    # --- removals and moves ------------------------------------------------------------------------------------------

    def _removed(self, hashes: Iterable[int], window: int | None) -> Iterator[neutral.Event]:
        """A removal does not say from which level: the engine holds a block on one, so both are told once one moved."""
        known = tuple(hash_ for hash_ in hashes if not self._was_partial((window, hash_)))
        for hash_ in known:
            self._tentative.pop((window, hash_), None)
        if known:
            for level in (0, 1) if self._offloads else (0,):
                yield neutral.Removed(hashes=known, medium=medium(level), group=window)

    def _was_partial(self, name: _Name) -> bool:
        if name not in self._partial:
            return False
        del self._partial[name]
        return True

    def _updated(self, event: Updated) -> Iterator[neutral.Event]:
        name = event.window, event.hash
        if event.level is None or event.level[0] == event.level[1] or name in self._partial:
            return
        self._offloads = True
        old, new = event.level
        if name in self._tentative:
            self._tentative[name] = new
        kind, window = self._kind(event.window)
        yield neutral.Stored(
            hashes=(event.hash,), parent=None, tokens=[], block_size=0, medium=medium(new), group=event.window,
            spec_kind=kind, sliding_window=window, warn=("placeholder",),
        )  # fmt: skip
        yield neutral.Removed(hashes=(event.hash,), medium=medium(old), group=event.window)


_Placed = tuple[StoredBlock, BlockExtra | None]
"""A block with its media; no extra where its content cannot be read."""


def _runs(blocks: Sequence[StoredBlock], size: int) -> Iterator[list[_Placed]]:
    """Neighbours that are told alike: whole or not, on one level, in one namespace, all readable or none."""
    run: list[_Placed] = []
    for block, extra in zip(blocks, _extras(blocks, size), strict=True):
        if run and _manner(block, extra, size) != _manner(*run[-1], size):
            yield run
            run = []
        run.append((block, extra))
    if run:
        yield run


def _manner(block: StoredBlock, extra: BlockExtra | None, size: int) -> tuple[object, ...]:
    return len(block.tokens) == size, block.level, block.salt, block.lora_id, extra is None


def _extras(blocks: Sequence[StoredBlock], size: int) -> Iterator[BlockExtra | None]:
    for i, block in enumerate(blocks):
        following = blocks[i + 1].media if i + 1 < len(blocks) else []
        starts = [_start(key, block.media, following, size) for key in block.media]
        if not block.plain or None in starts:
            yield None
        else:
            yield BlockExtra(media=tuple((key[0], start or 0) for key, start in zip(block.media, starts, strict=True)))


def _start(
    key: tuple[str, int | None], here: Sequence[tuple[str, int | None]], following: Sequence[tuple[str, int | None]],
    size: int,
) -> int | None:  # fmt: skip
    """Where the item starts relative to the block, if that is beyond doubt."""
    identity, offset = key
    if offset is None or offset < 0 or sum(name == identity for name, _ in here) > 1:
        return None
    if offset:
        return -offset
    onward = [at for name, at in following if name == identity]
    if len(onward) == 1 and onward[0] is not None and 0 < onward[0] <= size:
        return size - onward[0]
    return None
