"""Engine-neutral events: what a worker's cache did, whatever engine said so.

Engines differ only inside their decoders. Hashes are unsigned 64-bit and opaque: they name a block *within one stream*.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec

MASK64 = (1 << 64) - 1
"""Any integer hash, of any width and sign, is folded by ``& MASK64``."""

Kind = Literal["attention", "recurrent", "window", "other"]


class Tier(IntEnum):
    """Where a block's bytes are, nearest first; a match at a tier counts everything nearer as well."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


_MEDIA: dict[str, Tier] = {
    "": Tier.DEVICE, "gpu": Tier.DEVICE, "device": Tier.DEVICE,
    "cpu": Tier.HOST, "cpu_pinned": Tier.HOST, "cpu_tier1": Tier.HOST, "host": Tier.HOST, "host_pinned": Tier.HOST,
    "cpu_tier2": Tier.DISK, "disk": Tier.DISK, "nvme": Tier.DISK, "storage": Tier.DISK, "fs": Tier.DISK,
    "obj": Tier.EXTERNAL, "external": Tier.EXTERNAL, "network": Tier.EXTERNAL, "remote": Tier.EXTERNAL,
    "shared": Tier.EXTERNAL,
}  # fmt: skip

_KINDS: dict[str, Kind] = {
    "full_attention": "attention", "mla_attention": "attention", "sink_full_attention": "attention",
    "mamba": "recurrent",
    "sliding_window": "window", "sliding_window_mla": "window", "chunked_local_attention": "window",
}  # fmt: skip


def tier_of(medium: str | None) -> Tier | None:
    """The tier an engine's medium names (case folded; absent means device), or None for a medium nobody documented."""
    return _MEDIA.get((medium or "").casefold())


def kind_of(spec_kind: str | None) -> Kind | None:
    """How a KV-cache group must be held for a prefix to be usable; None when the engine did not say."""
    return None if spec_kind is None else _KINDS.get(spec_kind, "other")


class BlockExtra(msgspec.Struct, frozen=True, gc=False):
    """One block's ``extra_keys`` entry, sorted by meaning.

    ``media``: (identifier, item start minus block start); ``strings``: what is left once the adapter's name is taken
    out, a cache salt or, before vLLM 0.19, a bare media identifier; ``digests``: prompt-embedding digests, hex.
    """

    media: tuple[tuple[str, int], ...] = ()
    strings: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    lora: str | None = None


class Stored(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Blocks became resident.

    ``tokens`` spans all blocks of the event (flattened when the engine sent pairs, then one longer); it may hold
    strings where an engine puts media identifiers among token ids. ``dense`` says that token chunk i is block i.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: list[int] | list[int | str]
    block_size: int
    medium: str | None = None
    dense: bool = False
    eagle: bool = False
    group: int | None = None
    spec_kind: str | None = None
    sliding_window: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra: tuple[BlockExtra | None, ...] | None = None
    locality: str | None = None
    session_id: str | None = None
    lookahead: list[list[int]] | None = None
    mm_keys: object = None
    block_mm_infos: object = None
    tenant_id: str | None = None
    backend_id: str | None = None
    object_key: str | None = None
    model_name: str | None = None
    warn: tuple[str, ...] = ()


class Removed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One copy of each hash left a tier."""

    hashes: tuple[int, ...]
    medium: str | None = None
    group: int | None = None
    locality: str | None = None
    tenant_id: str | None = None
    backend_id: str | None = None
    object_key: str | None = None
    warn: tuple[str, ...] = ()


class Cleared(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The cache was emptied: all of the device tier, or just ``medium`` where the engine names one."""

    medium: str | None = None
    tenant_id: str | None = None
    backend_id: str | None = None
    warn: tuple[str, ...] = ()


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """A tag nobody documented; skipped, unless it contains "Cleared": then residency is in doubt."""

    tag: str
    medium: str | None = None


class Bad(msgspec.Struct, frozen=True, gc=False):
    """One event that cannot be read. Its neighbours are unharmed; the stream is incomplete from here."""

    error: str
    detail: str = ""


Event = Stored | Removed | Cleared | Unknown | Bad


class Batch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a stream: what happened in one engine step.

    ``seq`` counts messages of one publisher from 0; ``ts`` is the engine's clock in seconds (never used for ordering,
    None if not finite); ``rank`` is the data-parallel rank if the engine names one.
    """

    seq: int
    topic: bytes | None
    ts: float | None
    rank: int | None
    events: tuple[Event, ...]
    warn: tuple[str, ...] = ()


class ReplayEnd(msgspec.Struct, frozen=True, gc=False):
    """The publisher has no further messages to replay."""
