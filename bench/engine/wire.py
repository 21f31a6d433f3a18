"""What engines send, byte for byte in the shapes of four releases: events first as values, then as one batch a step.

A batch is ``[ts, events, rank]`` in all of them; an event is an array up to vLLM 0.23 and SGLang 0.5.19, a tagged map
from 0.24 and 0.5.20 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from bench.engine.content import Block, Extra
from protocols.media import Scheme

Form = Literal["array", "map"]
Kind = Literal["full_attention", "mamba"]


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One release's forms. ``topic_in_replay``: replies to a replay carry the topic, as in vLLM 0.26, SGLang 0.5.22."""

    engine: Literal["vllm", "sglang"]
    version: str
    form: Form
    scheme: Scheme
    topic_in_replay: bool = True
    byte_hashes: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.version}" + ("-bytes" if self.byte_hashes else "")


_ALL = [
    Release(engine="vllm", version="0.22.0", form="array", scheme="media_keys", topic_in_replay=False),
    Release(engine="vllm", version="0.32.0", form="map", scheme="media_keys"),
    Release(engine="vllm", version="0.32.0", form="map", scheme="media_keys", byte_hashes=True),
    Release(engine="sglang", version="0.5.19", form="array", scheme="pad30", topic_in_replay=False),
    Release(engine="sglang", version="0.5.23", form="map", scheme="pad62"),
]
RELEASES = {release.name: release for release in _ALL}
NEWEST = {"vllm": RELEASES["vllm-0.32.0"], "sglang": RELEASES["sglang-0.5.23"]}


class Wire:
    """The events of one rank since its last batch, in its release's form.

    ``lose_every``: a mutation; each n-th store or removal happens in the cache and is never said.
    """

    def __init__(self, release: Release, block_size: int, *, lose_every: int = 0) -> None:
        self.release = release
        self.block_size = block_size
        self.events: list[Any] = []
        self._lose_every = lose_every
        self._said = 0

    def take(self) -> list[Any]:
        """What is to be sent, once."""
        events, self.events = self.events, []
        return events

    def stored(
        self, blocks: Sequence[Block], *, named: Sequence[Block] | None = None, group: int = 0,
        kind: Kind = "full_attention", medium: str = "GPU", session: str | None = None,
    ) -> None:  # fmt: skip
        """A run of blocks, one after another. ``named``: those of them the group keeps; the tokens are of all."""
        first = blocks[0]
        kept = blocks if named is None else named
        fields: dict[str, Any] = {
            "block_hashes": [self.hash(block.digest) for block in kept],
            "parent_block_hash": self.hash(first.parent),
            "token_ids": [token for block in blocks for token in block.tokens],
            "block_size": self.block_size,
            "lora_id": 1 if first.space.lora and self.release.engine == "vllm" else None,
            "medium": medium,
        }
        if self.release.engine == "sglang":
            self._say(self._sglang_stored(fields, first, session))
        else:
            self._say(self._vllm_stored(fields, first, kept, group, kind, session))

    def offloaded(self, block: Block, group: int = 0) -> None:
        """A block that another tier took: vLLM's connector says its hash alone, SGLang all of it."""
        if self.release.engine == "sglang":
            self.stored([block], medium=self.host_medium)
            return
        fields = {
            "block_hashes": [self.hash(block.digest)], "parent_block_hash": None, "token_ids": [], "block_size": 0,
            "lora_id": None, "medium": self.host_medium, "lora_name": None,
        }  # fmt: skip
        if self.release.form == "array":
            self._say(["BlockStored", *fields.values(), None, group, None, None])
        else:
            self._say({"type": "BlockStored", **fields, "group_idx": group})

    @property
    def host_medium(self) -> str:
        return "CPU_PINNED" if self.release.engine == "sglang" else "CPU"

    def removed(self, blocks: Iterable[Block], *, group: int = 0, medium: str = "GPU") -> None:
        names = [self.hash(block.digest) for block in blocks]
        if self.release.form == "array":
            numbered = [group] if self.release.engine == "vllm" else []
            self._say(["BlockRemoved", names, medium, *numbered])
            return
        fields = {"type": "BlockRemoved", "block_hashes": names, "medium": medium}
        self._say(fields if self.release.engine == "sglang" else fields | {"group_idx": group})

    def cleared(self) -> None:
        self.events.append(
            ["AllBlocksCleared"] if self.release.form == "array" else {"type": "AllBlocksCleared"}
        )  # fmt: skip

    def hash(self, digest: bytes | None) -> int | bytes | None:
        """A digest as it is sent: vLLM its last 8 bytes (or all), SGLang its first 8, signed."""
        if digest is None or self.release.byte_hashes:
            return digest
        if self.release.engine == "sglang":
            return int.from_bytes(digest[:8], "big", signed=True)
        return int.from_bytes(digest[-8:], "big")

    def _say(self, event: Any) -> None:
        self._said += 1
        if not self._lose_every or self._said % self._lose_every:
            self.events.append(event)

    def _vllm_stored(
        self, fields: dict[str, Any], first: Block, kept: Sequence[Block], group: int, kind: Kind, session: str | None
    ) -> Any:
        extra = [_untagged(block.extra) for block in kept]
        fields |= {
            "lora_name": first.space.lora, "extra_keys": extra or None, "group_idx": group, "kv_cache_spec_kind": kind,
        }  # fmt: skip
        if self.release.form == "array":
            return ["BlockStored", *fields.values(), None]
        return {"type": "BlockStored"} | _present(fields, "extra_keys") | ({"session_id": session} if session else {})

    def _sglang_stored(self, fields: dict[str, Any], first: Block, session: str | None) -> Any:
        if self.release.form == "array":
            salted = [{"cache_salt": first.space.salt}] if first.space.salt else []
            return ["BlockStored", *fields.values(), *salted]
        names = {"cache_salt": first.space.salt, "session_id": session, "lora_name": first.space.lora}
        return {"type": "BlockStored", **fields} | {name: value for name, value in names.items() if value}


def _untagged(extra: Extra) -> list[Any] | None:
    return [item if isinstance(item, str) else list(item) for item in extra] or None


def _present(fields: dict[str, Any], *optional: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in optional or value is not None}


def batch(ts: float, events: Sequence[Any], rank: int | None) -> bytes:
    """One step's message."""
    return msgspec.msgpack.encode([ts, list(events), rank])
