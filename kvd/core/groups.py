"""KV-cache groups of one rank: which one is indexed, and what the others must hold for a prefix to be usable.

vLLM's hybrid models announce every block once per group. Kinds come with stores only and are remembered for removals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from protocols.events import Kind, Tier, kind_of

Role = Literal["indexed", "tracked"]
MAX_GROUPS = 64
"""A stream that names more groups than any engine has is refused the rest."""

Copies = list[int]
"""Copies of one hash per tier, nearest first."""


def no_copies() -> Copies:
    return [0] * len(Tier)


class Group:
    """A tracked group: its kind, its window in tokens (None: all), and the copies it holds of each hash."""

    __slots__ = ("copies", "kind", "window")

    def __init__(self, kind: Kind, window: int | None) -> None:
        self.kind = kind
        self.window = window
        self.copies: dict[int, Copies] = {}

    def add(self, hash_: int, tier: Tier, *, single: bool = False) -> None:
        """One more copy; never more than one where the engine announces hits as if they were stores."""
        copies = self.copies.setdefault(hash_, no_copies())
        copies[tier] = 1 if single else copies[tier] + 1

    def remove(self, hash_: int, tier: Tier) -> bool:
        """Take one copy away; False if there was none."""
        copies = self.copies.get(hash_)
        if copies is None or not copies[tier]:
            return False
        copies[tier] -= 1
        if not any(copies):
            del self.copies[hash_]
        return True

    def clear(self, tiers: Sequence[Tier]) -> int:
        """Forget all copies on these tiers; how many hashes had any."""
        touched = [(h, copies) for h, copies in self.copies.items() if any(copies[tier] for tier in tiers)]
        for hash_, copies in touched:
            for tier in tiers:
                copies[tier] = 0
            if not any(copies):
                del self.copies[hash_]
        return len(touched)

    def holds(self, hashes: Sequence[int], level: Tier) -> bool:
        """Whether one of the hashes (names of one block) is here on this tier or a nearer one."""
        return any(sum(self.copies.get(h, ())[: level + 1]) for h in hashes)

    def needs(self, block_size: int) -> int | None:
        """How many blocks before a boundary must be held for it: None for all of them.

        Recurrent state: the one block that ends there. A sliding window: ceil((window − 1) / block).
        """
        if self.kind == "recurrent":
            return 1
        if self.window is None:
            return None
        return -(-(self.window - 1) // block_size)


class Groups:
    """The groups of one rank, learnt from its events."""

    def __init__(self) -> None:
        self.indexed: int | None = None
        self.tracked: dict[int, Group] = {}
        self.ignored: set[int] = set()

    def of_store(self, group: int | None, spec_kind: str | None, window: int | None) -> tuple[Role, int] | str:
        """The role and number of a store's group, learning it; or the reason it is skipped."""
        number = self._number(group)
        kind = kind_of(spec_kind)
        if number == self.indexed or number in self.tracked:
            return self._role(number)
        if number in self.ignored:
            return "group_kind"
        if kind is None and number != 0:
            return "unlearned_group"
        return self._learn(number, kind or "attention", window)

    def of_removal(self, group: int | None) -> tuple[Role, int] | str:
        """The role and number of a removal's group, or the reason it is skipped."""
        number = self._number(group)
        if number == self.indexed or number in self.tracked:
            return self._role(number)
        return "group_kind" if number in self.ignored else "unlearned_group"

    def _number(self, group: int | None) -> int:
        if group is not None:
            return group
        return 0 if self.indexed is None else self.indexed

    def _role(self, number: int) -> tuple[Role, int]:
        return ("indexed" if number == self.indexed else "tracked"), number

    def _learn(self, number: int, kind: Kind, window: int | None) -> tuple[Role, int] | str:
        if len(self.tracked) + len(self.ignored) >= MAX_GROUPS:
            return "too_many_groups"
        if kind == "other":
            self.ignored.add(number)
            return "group_kind"
        if kind == "attention" and self.indexed is None:
            self.indexed = number
        else:  # a second attention group constrains like a window over everything
            self.tracked[number] = Group(kind, window if kind == "window" else None)
        return self._role(number)

    def usable(self, names: Sequence[Sequence[int]], block_size: int, level: Tier) -> int:
        """The largest n for which every tracked group holds what a prefix of n blocks needs.

        ``names[i]``: the hashes this rank calls block i by. One pass, O(blocks × groups).
        """
        best = 0
        for n, ready in enumerate(self._ready(names, block_size, level), start=1):
            if ready:
                best = n
        return best

    def _ready(self, names: Sequence[Sequence[int]], block_size: int, level: Tier) -> Iterator[bool]:
        groups = [(group, group.needs(block_size)) for group in self.tracked.values()]
        streaks = [0] * len(groups)
        for n, hashes in enumerate(names, start=1):
            ready = True
            for i, (group, needs) in enumerate(groups):
                streaks[i] = streaks[i] + 1 if group.holds(hashes, level) else 0
                ready = ready and streaks[i] >= (n if needs is None else min(needs, n))
            yield ready
