"""Bounds on what a decoder accepts, so that a hostile or broken peer costs one message and no more."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds; a message beyond one is refused by name."""

    payload_bytes: int = 64 << 20
    events: int = 262_144
    hashes: int = 1 << 20
    tokens: int = 8 << 20
    block_size: int = (1 << 31) - 1
    rank: int = (1 << 31) - 1


DEFAULT_LIMITS = Limits()
