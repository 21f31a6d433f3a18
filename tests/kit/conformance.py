"""What every implementation of the index is tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvd.core import IMPLEMENTATIONS, Index
from kvd.core.residency import Bounds
from protocols.events import BlockExtra, Cleared, Removed, Stored
from protocols.keys import Keys, plan_keys, token_keys
from protocols.media import MediaRun
from protocols.plan import exact_plan

AnyIndex = Index
IndexFactory = Callable[..., AnyIndex]

FACTORIES: dict[str, IndexFactory] = IMPLEMENTATIONS
"""Name → an index from ``max_blocks=``; an implementation added here is driven by every test of the contract."""

TIGHT = Bounds(unlinked=3, remembered=3)


def stored(hashes: Sequence[int], tokens: Sequence[int], parent: int | None = None, **fields: object) -> Stored:
    """A store of ``len(tokens) / len(hashes)`` tokens a block."""
    eagle = bool(fields.get("eagle"))
    size = (len(tokens) - eagle) // len(hashes) if tokens else 0
    dense = bool(tokens) and len(tokens) - eagle == size * len(hashes)
    values = {"block_size": size, "dense": dense} | fields
    return Stored(hashes=tuple(hashes), parent=parent, tokens=list(tokens), **values)


def placeholder(hashes: Sequence[int], medium: str = "CPU", **fields: object) -> Stored:
    """What an offloading connector announces: hashes without tokens."""
    return stored(hashes, (), medium=medium, **fields)


def removed(*hashes: int, **fields: object) -> Removed:
    return Removed(hashes=hashes, **fields)


def cleared(medium: str | None = None) -> Cleared:
    return Cleared(medium=medium)


def images(*per_block: Iterable[tuple[str, int]] | None) -> tuple[BlockExtra | None, ...]:
    """Extra keys: for each block the (identifier, offset) of the items that touch it."""
    return tuple(None if items is None else BlockExtra(media=tuple(items)) for items in per_block)


def keys_of(tokens: Sequence[int], block_size: int = 2, **namespace: str | None) -> list[int]:
    return token_keys(tokens, block_size, **namespace)


def lazy_keys(tokens: Sequence[int], block_size: int = 2, media: Sequence[MediaRun] = ()) -> Keys:
    """The same, hashed as far as somebody looks."""
    return plan_keys(exact_plan("m", tokens, media=media), block_size, "media_keys")


def reach(index: AnyIndex, rank: int, tokens: Sequence[int], block_size: int = 2, **namespace: str | None) -> list[int]:
    """One rank's reach per tier, zeros where it has none."""
    found = index.match(keys_of(tokens, block_size, **namespace), [rank]).get(rank)
    return [0, 0, 0, 0] if found is None else list(found.tiers)


def device(index: AnyIndex, rank: int, tokens: Sequence[int], block_size: int = 2, **namespace: str | None) -> int:
    """One rank's reach on its device, in blocks; the index must be sound."""
    assert index.check() == []
    return reach(index, rank, tokens, block_size, **namespace)[0]
