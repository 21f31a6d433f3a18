"""Media in a prompt: which tokens an image stands for, and the values that stand for it in each engine's cache.

Pads: SGLang 0.5.9–0.5.22 repeats one value, SGLang 0.5.23 cycles four 62-bit sentinels that restart at each item.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Scheme = Literal["media_keys", "pad30", "pad62", "dynamo"]
"""How a worker's cache tells two images apart; ``media_keys``: beside the tokens (vLLM); ``pad30``/``pad62``: in the
token ids (SGLang up to 0.5.22, from 0.5.23); ``dynamo``: keys made by Dynamo's publisher, narrow pads."""

PAD_BASE = 1_000_000
_NARROW = (1 << 30) - 1
_WIDE = (1 << 62) - 1
_WIDE_TAG = b"sglang-mm-wide-pad-v1"


class MediaRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One media item's tokens in the expanded prompt: ``[start, start + count)``.

    ``identifier`` is the engine's name for the content (vLLM: the hash or uuid, whole); ``hash64`` is the 64-bit
    identity that pads are made from (SGLang: ``mm_hashes``). Either may be missing; the schemes that need it then
    cannot be scored past the item.
    """

    start: int
    count: int
    identifier: str | None = None
    hash64: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.count


def narrow_pad(hash64: int) -> int:
    """SGLang 0.5.9–0.5.22 and Dynamo: 1,000,000 plus the low 30 bits."""
    return PAD_BASE + (hash64 & _NARROW)


def wide_pads(hash64: int) -> tuple[int, int, int, int]:
    """SGLang 0.5.23: four sentinels from SHA-256 over the tag and the identity as 8 big-endian bytes."""
    digest = hashlib.sha256(_WIDE_TAG + hash64.to_bytes(8, "big")).digest()
    a, b, c, d = (PAD_BASE + (int.from_bytes(digest[i : i + 8], "big") & _WIDE) for i in range(0, 32, 8))
    return a, b, c, d


def pads(run: MediaRun, scheme: Scheme) -> list[int]:
    """The token ids that stand for the run in a cache of this scheme. The run must have a ``hash64``."""
    if run.hash64 is None:
        raise ValueError(f"media run at {run.start} has no hash64: scheme {scheme} cannot be expanded")
    if scheme == "pad62":
        cycle = wide_pads(run.hash64)
        return [cycle[i & 3] for i in range(run.count)]
    return [narrow_pad(run.hash64)] * run.count
