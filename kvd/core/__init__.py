"""The index and the per-stream state machine. Synchronous and sans-IO: events in, effects out; time is an argument."""

from __future__ import annotations

from kvd.core.reference import ReferenceIndex

__all__ = ["ReferenceIndex", "open_index"]


def open_index(*, max_blocks: int | None = None) -> ReferenceIndex:
    """The best index this installation has; ``index.implementation`` says which."""
    return ReferenceIndex() if max_blocks is None else ReferenceIndex(max_blocks=max_blocks)
