"""Token ids as packed little-endian words: u32, or u64 where one of them is wider."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

UINT32_MAX = (1 << 32) - 1
_LITTLE = sys.byteorder == "little"


def pack_tokens(tokens: Iterable[int], *, wide: bool = False) -> bytes:
    """Tokens as u32 (or u64 when ``wide``). Raises OverflowError for a token that does not fit."""
    words = array("Q" if wide else "I", tokens)
    if not _LITTLE:
        words.byteswap()
    return words.tobytes()


def unpack_tokens(packed: bytes, *, wide: bool) -> array[int]:
    """The reverse of :func:`pack_tokens`."""
    words = array("Q" if wide else "I")
    words.frombytes(packed)
    if not _LITTLE:
        words.byteswap()
    return words


def block_words(tokens: Sequence[int]) -> bytes:
    """One block's tokens as the bytes that are hashed: u32, or u64 for all of them if one is wider."""
    try:
        return pack_tokens(tokens)
    except OverflowError:
        return pack_tokens(tokens, wide=True)
