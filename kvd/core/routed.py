"""What callers reported as routed: keys that a worker will probably hold soon, each with a time to live.

Two uses of one table. Block keys of exact and prefix plans, for the moment before the engine's events arrive; chunk
keys of rendered text, for requests that could not be tokenized and for workers without events. Both are predictions
and are reported apart from what is held.
"""

from __future__ import annotations

from collections.abc import Iterable

from sortedcontainers import SortedDict
from xxhash import xxh3_64_intdigest

from protocols.keys import chain

TEXT_CHUNK_BYTES = 256
"""Text is cut into chunks of this many UTF-8 bytes; a partial last chunk has no key."""

Owner = tuple[str, int]
"""Worker name and rank."""


def text_keys(model: str, text: str, lora_name: str | None, cache_salt: str | None) -> list[int]:
    """Chained keys over the text's whole chunks; model, adapter and salt seed the chain."""
    seed = xxh3_64_intdigest("\0".join((model, lora_name or "", cache_salt or "")).encode())
    raw = text.encode()
    keys: list[int] = []
    for start in range(0, len(raw) - TEXT_CHUNK_BYTES + 1, TEXT_CHUNK_BYTES):
        local = xxh3_64_intdigest(raw[start : start + TEXT_CHUNK_BYTES], seed)
        keys.append(chain(keys[-1] if keys else seed, local))
    return keys


class RoutedTable:
    """Entries (owner, key) with an expiry. Bounded: beyond ``limit`` the entries that expire first go."""

    def __init__(self, *, limit: int = 1_000_000) -> None:
        self.limit = limit
        self.evicted = 0
        self._expiry: dict[tuple[Owner, int], tuple[float, int]] = {}
        self._order: SortedDict[tuple[float, int], tuple[Owner, int]] = SortedDict()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._expiry)

    def insert(self, owner: Owner, keys: Iterable[int], now: float, ttl: float) -> None:
        """Remember the keys for ``ttl`` seconds. O(keys × log entries)."""
        self.expire(now)
        for key in keys:
            self._serial += 1
            old = self._expiry.get((owner, key))
            if old is not None:
                del self._order[old]
            rank = (now + ttl, self._serial)
            self._expiry[owner, key] = rank
            self._order[rank] = (owner, key)
        while len(self._order) > self.limit:
            self._drop_first()
            self.evicted += 1

    def expire(self, now: float) -> None:
        """Drop what is past its time. O(dropped × log entries)."""
        while self._order and self._order.peekitem(0)[0][0] <= now:
            self._drop_first()

    def reach(self, owner: Owner, keys: Iterable[int], now: float) -> int:
        """How many leading keys were routed to the owner and have not expired."""
        count = 0
        for key in keys:
            rank = self._expiry.get((owner, key))
            if rank is None or rank[0] <= now:
                break
            count += 1
        return count

    def forget(self, owner: Owner) -> None:
        """Drop all of an owner. O(entries)."""
        for entry in [entry for entry in self._expiry if entry[0] == owner]:
            del self._order[self._expiry.pop(entry)]

    def _drop_first(self) -> None:
        _, entry = self._order.popitem(0)
        del self._expiry[entry]
