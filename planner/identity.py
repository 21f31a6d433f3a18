"""Who an image is: a 64-bit identity for pads (SGLang) and an identifier string (vLLM), and what the engine is told.

An engine's own identity cannot be known outside (vLLM hashes its ``--model`` string in, SGLang the processed pixels),
so the planner gives each image one and hands it to the engine beside the request. A caller's identity always wins.
Formulas are those of Dynamo: XXH3-64 over the URL (a data URI is one), or over the decoded pixels with their shape. An
encoded file, which Dynamo has no form for, is hashed as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from planner.errors import ImageError, Reason, shown
from protocols.events import MASK64
from protocols.plan import MAX_IDENTIFIER

IDENTIFIER_DIGITS = 64
"""Length of the identifiers that consumers take for media in vLLM's events: 16 hex digits, zero-padded on the right."""
_U8 = 0


class Identity(msgspec.Struct, frozen=True):
    """One image's names: ``identifier`` beside the tokens, ``hash64`` inside them."""

    identifier: str
    hash64: int


class EngineExtras(msgspec.Struct, frozen=True):
    """What must travel with the request so that the engine uses the plan's identities; one entry per image, in order.

    ``uuids`` for vLLM (``uuid`` of each image part, or ``multi_modal_uuids``), ``mm_hashes`` for SGLang's
    ``/generate``.
    """

    uuids: tuple[str, ...]
    mm_hashes: tuple[str, ...]

    def vllm(self) -> dict[str, Any]:
        """Fields to merge into a request for vLLM's token-level interface."""
        return {"multi_modal_uuids": {"image": list(self.uuids)}}

    def sglang(self) -> dict[str, Any]:
        """Fields to merge into an SGLang ``/generate`` body."""
        return {"mm_hashes": list(self.mm_hashes)}

    def vllm_chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a chat request whose image parts carry their ``uuid``; the given one is left as it is."""
        uuids = iter(self.uuids)
        return {**request, "messages": [_named(message, uuids) for message in request["messages"]]}


def _named(message: Mapping[str, Any], uuids: Any) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [{**part, "uuid": next(uuids)} if is_image(part) else part for part in content]
    return {**message, "content": parts}


def is_image(part: object) -> bool:
    """Is this content part an image?"""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


IMAGE_TYPES = ("image", "image_url", "image_pil")


def extras_of(identities: Sequence[Identity]) -> EngineExtras:
    return EngineExtras(
        tuple(identity.identifier for identity in identities), tuple(f"{i.hash64:016x}" for i in identities)
    )


def hash_bytes(encoded: bytes) -> int:
    """Identity of an encoded file."""
    return xxh3_64_intdigest(encoded)


def hash_url(url: str) -> int:
    """Identity of a URL: of the raw string, query and all."""
    return xxh3_64_intdigest(url.encode("utf-8", "surrogatepass"))


def hash_pixels(shape: Sequence[int], pixels: bytes) -> int:
    """Identity of decoded u8 pixels: rank, each dimension (u64 LE), the dtype byte, the contiguous bytes."""
    digest = xxh3_64(struct.pack(f"<{len(shape) + 1}Q", len(shape), *shape))
    digest.update(bytes([_U8]))
    digest.update(pixels)
    return digest.intdigest()


def from_hash(hash64: int) -> Identity:
    """The identity made of 64 bits; zero-padded because vLLM's consumers read the first 16 digits."""
    return Identity(f"{hash64:016x}".ljust(IDENTIFIER_DIGITS, "0"), hash64)


def from_caller(uuid: str | None, hash64: int | None) -> Identity | None:
    """The caller's identity, completed from itself; None where the caller gave none.

    A uuid of 64 hex digits stands for its first 16 (as consumers read it), any other for its XXH3-64.
    """
    if uuid is None:
        return None if hash64 is None else from_hash(hash64)
    return Identity(uuid, _hash_uuid(uuid) if hash64 is None else hash64)


def _hash_uuid(uuid: str) -> int:
    if len(uuid) == IDENTIFIER_DIGITS and all(digit in "0123456789abcdef" for digit in uuid):
        return int(uuid[:16], 16)
    return xxh3_64_intdigest(uuid.encode())


def read_uuid(value: object) -> str | None:
    """A caller's uuid as vLLM takes it. Raises :class:`ImageError`."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_IDENTIFIER or not _encodable(value):
        expected = f"a text of 1..{MAX_IDENTIFIER} characters"
        raise ImageError(Reason.IDENTITY_INVALID, f"uuid {shown(value)}: expected {expected}")
    return value


def read_mm_hash(value: object) -> int:
    """One entry of ``mm_hashes`` as SGLang reads it: hex, masked to 64 bits. Raises :class:`ImageError`."""
    try:
        if isinstance(value, str):
            return int(value, 16) & MASK64
    except ValueError:
        pass
    raise ImageError(Reason.IDENTITY_INVALID, f"mm_hashes entry {shown(value)}: expected a text of hex digits")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
