"""The index and the per-stream state machine. Synchronous and sans-IO: events in, effects out; time is an argument."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from kvd.core.index import Index
from kvd.core.reference import DEFAULT_MAX_BLOCKS, ReferenceIndex

__all__ = ["IMPLEMENTATIONS", "Index", "ReferenceIndex", "open_index"]

CORE_VARIABLE = "KVD_CORE"
"""Environment variable that asks for an implementation; not a setting of the daemon's configuration."""

IMPLEMENTATIONS: dict[str, Callable[..., Index]] = {"reference": ReferenceIndex}
"""Name → an index from ``max_blocks=``, as far as this installation has them."""

with suppress(ImportError):  # built without a compiler
    from kvd.core._native import NativeIndex

    IMPLEMENTATIONS["native"] = NativeIndex


def open_index(*, max_blocks: int | None = None) -> Index:
    """The best index this installation has; ``index.implementation`` says which.

    ``KVD_CORE=reference`` or ``native`` in the environment asks for one of them. ImportError if it is not there.
    """
    name = os.environ.get(CORE_VARIABLE) or ("native" if "native" in IMPLEMENTATIONS else "reference")
    if name not in IMPLEMENTATIONS:
        raise ImportError(f"KVD_CORE={name}: this installation has {' and '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](max_blocks=DEFAULT_MAX_BLOCKS if max_blocks is None else max_blocks)
