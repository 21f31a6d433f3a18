"""Block keys: one chained 64-bit hash per block, the same function for a plan and for an engine's event.

::

    seed  = 1337 + XXH3_64(lora_name, 0) [if any] + XXH3_64(cache_salt, 1) [if any]      mod 2^64
    local = XXH3_64(words ‖ media, seed)
    key_0 = local_0;  key_i = XXH3_64(LE64 key_{i-1} ‖ LE64 local_i, 1337)

``words`` are the block's tokens as u32 little-endian, or all of them as u64 if one does not fit. ``media`` is, for each
item that touches the block in order, XXH3_64(identifier, 0) as LE64 and the item's offset from the block's start as LE
i64. Text, adapter, salt and EAGLE keys equal Dynamo's public scheme.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

from protocols.events import MASK64
from protocols.media import MediaRun, Scheme, pads
from protocols.plan import ExactPlan, PrefixPlan
from protocols.tokens import pack_tokens, unpack_tokens

CHAIN_SEED = 1337
_pair = struct.Struct("<QQ").pack
_item = struct.Struct("<Qq").pack


def namespace_seed(lora_name: str | None, cache_salt: str | None) -> int:
    """The seed of a namespace. An empty name or salt is no name or salt."""
    seed = CHAIN_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed & MASK64


def chain(parent: int | None, local: int) -> int:
    """The key of a block from its parent's key (None for the first block) and its own local hash."""
    return local if parent is None else xxh3_64_intdigest(_pair(parent, local), CHAIN_SEED)


def media_part(items: Iterable[tuple[str, int]]) -> bytes:
    """The media bytes of one block from (identifier, offset relative to the block's start), in order."""
    return b"".join(_item(xxh3_64_intdigest(identifier.encode(), 0), offset) for identifier, offset in items)


def digest_part(digests: Iterable[str]) -> bytes:
    """Prompt-embedding digests (hex) as further items: their bytes as identifier, offset 0."""
    return b"".join(_item(xxh3_64_intdigest(bytes.fromhex(digest), 0), 0) for digest in digests)


def local_hash(content: bytes, seed: int) -> int:
    """The local hash of one block from its words and media bytes."""
    return xxh3_64_intdigest(content, seed)


class Keys:
    """The chained keys of a prompt, hashed only as far as somebody looks.

    ``len(keys)`` is the number of whole blocks; ``keys[i]`` hashes blocks up to i once. A search that misses at the
    first block therefore costs one block, not the prompt.
    """

    __slots__ = ("_blocks", "_keys", "_length", "_seed")

    def __init__(self, blocks: BlockContent, seed: int) -> None:
        self._blocks = blocks
        self._seed = seed
        self._length = len(blocks)
        self._keys: list[int] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(index)
        keys = self._keys
        while len(keys) <= index:
            local = xxh3_64_intdigest(self._blocks.content(len(keys)), self._seed)
            keys.append(chain(keys[-1] if keys else None, local))
        return keys[index]

    def __iter__(self) -> Iterator[int]:
        return (self[i] for i in range(self._length))


class BlockContent:
    """The bytes to hash for each block of a token sequence; windows overlap by one token on EAGLE streams.

    ``runs`` are media items to hash beside the tokens, ordered and disjoint, each with an identifier.
    """

    __slots__ = ("_ends", "_items", "_packed", "_stride", "_width", "_window", "blocks", "size")

    def __init__(
        self, packed: bytes, *, wide: bool, block_size: int, eagle: bool = False, runs: Sequence[MediaRun] = ()
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block size {block_size}: expected 1 or more")
        self._packed = packed
        self._width = 8 if wide else 4
        self._window = (block_size + eagle) * self._width
        self._stride = block_size * self._width
        self._items = [(run.start, xxh3_64_intdigest((run.identifier or "").encode(), 0)) for run in runs]
        self._ends = [run.end for run in runs]
        self.size = block_size
        self.blocks = max(0, (len(packed) // self._width - eagle) // block_size)

    def __len__(self) -> int:
        return self.blocks

    def content(self, index: int) -> bytes:
        start = index * self._stride
        words = self._packed[start : start + self._window]
        if self._width == 8:
            words = _narrowed(words)
        return words + self._media(index) if self._items else words

    def _media(self, index: int) -> bytes:
        start = index * self.size
        part = b""
        for i in range(bisect_right(self._ends, start), len(self._items)):
            item_start, identity = self._items[i]
            if item_start >= start + self.size:
                break
            part += _item(identity, item_start - start)
        return part


def _narrowed(words: bytes) -> bytes:
    """u64 words back to u32 where all of them fit, as the key's definition asks for."""
    tokens = unpack_tokens(words, wide=True)
    return words if max(tokens, default=0) > 0xFFFFFFFF else pack_tokens(tokens)


def token_keys(
    tokens: Sequence[int],
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    eagle: bool = False,
    media: Sequence[MediaRun] = (),
) -> list[int]:
    """All keys of a token sequence at once; media as in the ``media_keys`` scheme."""
    wide = bool(tokens) and max(tokens) > 0xFFFFFFFF
    blocks = BlockContent(pack_tokens(tokens, wide=wide), wide=wide, block_size=block_size, eagle=eagle, runs=media)
    return list(Keys(blocks, namespace_seed(lora_name, cache_salt)))


def plan_keys(plan: ExactPlan | PrefixPlan, block_size: int, scheme: Scheme | None, *, eagle: bool = False) -> Keys:
    """The keys under which a worker of this block size and scheme would hold the plan's prompt.

    Where the scheme is unknown (None), or an item lacks the identity the scheme needs, only the blocks before that
    item are keyed: a shorter truth, never a guess.
    """
    runs = plan.media if isinstance(plan, ExactPlan) else ()
    known = _identified(runs, scheme)
    packed, wide = plan.tokens, plan.wide
    if len(known) < len(runs):
        packed = packed[: runs[len(known)].start * (8 if wide else 4)]
    if known and scheme != "media_keys":
        packed, wide = _padded(packed, wide, known, scheme or "pad30"), True
    beside = known if scheme == "media_keys" else ()
    blocks = BlockContent(packed, wide=wide, block_size=block_size, eagle=eagle, runs=beside)
    return Keys(blocks, namespace_seed(plan.lora_name, plan.cache_salt))


def _identified(runs: Sequence[MediaRun], scheme: Scheme | None) -> Sequence[MediaRun]:
    """The leading runs whose identity this scheme can express."""
    if scheme is None:
        return ()
    by_name = scheme == "media_keys"
    for i, run in enumerate(runs):
        if (run.identifier if by_name else run.hash64) is None:
            return runs[:i]
    return runs


def _padded(packed: bytes, wide: bool, runs: Sequence[MediaRun], scheme: Scheme) -> bytes:
    tokens = array("Q", unpack_tokens(packed, wide=wide))
    for run in runs:
        tokens[run.start : run.end] = array("Q", pads(run, scheme))
    return pack_tokens(tokens, wide=True)
