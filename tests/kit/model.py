"""The naive model of the index: what the contract says, by brute force, one rank at a time, unbounded.

A *chain* is the content of a block and of everything before it: ``((adapter, salt), block, block, …)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from protocols.events import Cleared, Event, Removed, Stored, Tier, kind_of, tier_of

Chain = tuple[Hashable, ...]


class Rank:
    """What one worker-rank holds."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, Tier, int]] = Counter()
        self.chains: dict[int, Chain] = {}
        self.waiting: dict[int, tuple[int, Hashable]] = {}
        self.kinds: dict[int, tuple[str, int | None]] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            for hash_ in event.hashes:
                place = (self._group(event.group), tier_of(event.medium), hash_)
                self.copies[place] = max(0, self.copies[place] - 1)
        elif isinstance(event, Cleared):
            tiers = tuple(Tier) if event.medium is None else (tier_of(event.medium),)
            self.copies = Counter({place: n for place, n in self.copies.items() if place[1] not in tiers})
        held = {hash_ for (group, _, hash_), n in self.copies.items() if n and group == self._group(None)}
        self.waiting = {hash_: waits for hash_, waits in self.waiting.items() if hash_ in held}

    def _group(self, group: int | None) -> int:
        attention = [number for number, (kind, _) in self.kinds.items() if kind == "attention"]
        return group if group is not None else attention[0] if attention else 0

    def _store(self, event: Stored) -> None:
        group, tier, parent = self._group(event.group), tier_of(event.medium), event.parent
        self.kinds.setdefault(group, (kind_of(event.spec_kind) or "attention", event.sliding_window))
        for i, hash_ in enumerate(event.hashes):
            if event.dense and group == self._group(None):
                self._announce(hash_, parent, self._block(event, i), (event.lora_name, event.cache_salt))
            self.copies[group, tier, hash_] += 1
            parent = hash_

    @staticmethod
    def _block(event: Stored, i: int) -> Hashable:
        words = tuple(event.tokens[i * event.block_size : (i + 1) * event.block_size + event.eagle])
        extra = event.extra[i] if event.extra else None
        return words, extra.media if extra else (), extra.digests if extra else ()

    def _announce(self, hash_: int, parent: int | None, block: Hashable, space: tuple[str | None, str | None]) -> None:
        before = self.chains.pop(hash_, None)
        waited = self.waiting.pop(hash_, None)
        above = (space,) if parent is None else (before if parent == hash_ else self.chains.get(parent))
        other = waited is not None and waited != (parent, block)
        if above is None:
            self.waiting[hash_] = (parent, block)
            other = other or (before is not None and before[-1] != block)
        else:
            self.chains[hash_] = (*above, block)
            other = other or (before is not None and before != self.chains[hash_])
        if other:  # the hash names something else now: what it named is gone
            for tier in Tier:
                self.copies[self._group(None), tier, hash_] = 0
        if above is not None:
            for child in [child for child, (waits_for, _) in self.waiting.items() if waits_for == hash_]:
                self._announce(child, *self.waiting[child], space)

    def _holds(self, group: int, level: Tier, hashes: Sequence[int]) -> bool:
        return any(self.copies[group, tier, hash_] for tier in Tier if tier <= level for hash_ in hashes)

    def _names(self, chain: Chain) -> list[int]:
        return [hash_ for hash_, known in self.chains.items() if known == chain]

    def reach(self, prompt: Chain, level: Tier) -> int:
        """Leading blocks of the prompt held on this tier or a nearer one, without a hole."""
        length = 0
        while length + 1 < len(prompt) and self._holds(self._group(None), level, self._names(prompt[: length + 2])):
            length += 1
        return length

    def usable(self, prompt: Chain, block_size: int) -> int:
        """The largest prefix within the device reach at whose end every other group has what it needs."""
        return max(n for n in range(self.reach(prompt, Tier.DEVICE) + 1) if self._ready(prompt, n, block_size))

    def _ready(self, prompt: Chain, n: int, block_size: int) -> bool:
        for group, (kind, window) in self.kinds.items():
            needs = n if window is None or kind != "window" else -(-(window - 1) // block_size)
            first = n - 1 if kind == "recurrent" else max(0, n - needs)
            names = [self._names(prompt[: i + 2]) for i in range(max(0, first), n)]
            if group != self._group(None) and not all(self._holds(group, Tier.DEVICE, hashes) for hashes in names):
                return False
        return True
