"""What a prompt is to an engine's cache: a chain of whole blocks, each named by a hash over everything before it.

The hashes are the engines' own. vLLM: SHA-256 over the pickled triple (parent digest, tokens, tagged extra keys).
SGLang: SHA-256 over the parent digest and the tokens as u32 (u64 behind a 0xff where one is wider), little-endian.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from protocols.media import MediaRun
from protocols.tokens import UINT32_MAX, pack_tokens

Tokens = tuple[int, ...]
Extra = tuple[str | tuple[str, int], ...]
"""What vLLM names beside a block's tokens: adapter, media with their offset from the block's start, salt."""
_NONE_HASH_SEED = "vllm-none-hash"
_SALT_TAG = b"sglang-cache-salt-v1\0"


class Space(NamedTuple):
    """A namespace: the same tokens under another adapter, salt or key are other blocks.

    ``key`` is SGLang's ``extra_key``: it keeps requests apart in the cache, but is neither hashed nor announced.
    """

    lora: str | None = None
    salt: str | None = None
    key: str | None = None


class Block(NamedTuple):
    """One whole block: its digest, its predecessor's, its tokens, what stands beside them, and where it is."""

    digest: bytes
    parent: bytes | None
    tokens: Tokens
    space: Space
    place: int
    extra: Extra = ()


Naming = Callable[[bytes | None, Tokens, Space, Extra], bytes]
"""Parent digest, tokens, namespace and extra keys to the digest."""


def vllm_naming(seed: str = _NONE_HASH_SEED, lora_paths: dict[str, str] | None = None) -> Naming:
    """vLLM's ``sha256`` (0.31 and later: tagged keys). ``seed`` differs per process where hashes are random."""
    none = hashlib.sha256(pickle.dumps(seed, protocol=5)).digest()
    paths = lora_paths or {}

    def name(parent: bytes | None, tokens: Tokens, space: Space, extra: Extra) -> bytes:
        keys: list[tuple[object, ...]] = [("lora", space.lora, paths.get(space.lora, ""))] if space.lora else []
        keys += [("mm", *item) for item in extra if not isinstance(item, str)]
        if space.salt and parent is None:
            keys.append(("cache_salt", space.salt))
        triple = (none if parent is None else parent, tokens, tuple(keys) or None)
        return hashlib.sha256(pickle.dumps(triple, protocol=5)).digest()

    return name


def sglang_naming(seed: str = "") -> Naming:
    """SGLang's page hash. An adapter's seed is the engine's own affair: here, one made from its name."""

    def name(parent: bytes | None, tokens: Tokens, space: Space, extra: Extra) -> bytes:
        del extra
        before = _sglang_seed(space, seed) if parent is None else parent
        wide = max(tokens) > UINT32_MAX
        return hashlib.sha256(before + (b"\xff" if wide else b"") + pack_tokens(tokens, wide=wide)).digest()

    return name


def _sglang_seed(space: Space, seed: str) -> bytes:
    salted = hashlib.sha256(_SALT_TAG + space.salt.encode()).digest() if space.salt else b""
    if not space.lora and not seed:
        return salted
    return hashlib.sha256(struct.pack("<I", len(salted)) + salted + f"{space.lora}\0{seed}".encode()).digest()


class Chain:
    """A growing sequence of tokens as whole blocks, named when they are asked for."""

    def __init__(
        self, tokens: Sequence[int], block_size: int, naming: Naming, space: Space, media: Sequence[MediaRun] = ()
    ) -> None:
        self.tokens = list(tokens)
        self.block_size = block_size
        self.space = space
        self._naming = naming
        self._media = media
        self._blocks: list[Block] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def upto(self, tokens: int) -> list[Block]:
        """The whole blocks within the first ``tokens`` tokens."""
        whole = tokens // self.block_size
        while len(self._blocks) < whole:
            self._blocks.append(self._next())
        return self._blocks[:whole]

    def whole(self) -> list[Block]:
        """All whole blocks."""
        return self.upto(len(self.tokens))

    def _next(self) -> Block:
        index, parent = len(self._blocks), self._blocks[-1].digest if self._blocks else None
        begin = index * self.block_size
        tokens = tuple(self.tokens[begin : begin + self.block_size])
        extra = self._extra(begin)
        return Block(self._naming(parent, tokens, self.space, extra), parent, tokens, self.space, index, extra)

    def _extra(self, begin: int) -> Extra:
        names: list[str | tuple[str, int]] = [self.space.lora] if self.space.lora else []
        names += [
            (run.identifier or "", run.start - begin)
            for run in self._media
            if run.start < begin + self.block_size and run.end > begin
        ]
        if self.space.salt and not begin:
            names.append(self.space.salt)
        return tuple(names)
