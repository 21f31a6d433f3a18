"""An image file's bytes, plain or behind base64, read in parts.

A header needs some hundred bytes, and decoding base64 costs more than everything else in a plan (6.5 ms a megabyte), so
only the looked-at parts are decoded. The text is still checked as a whole: engines refuse what is not base64.
"""

from __future__ import annotations

import binascii
from abc import ABC, abstractmethod

from planner.errors import ImageError, Reason

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


class Encoded(ABC):
    """``len()`` bytes of which any slice can be had."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def part(self, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)``, fewer at the end."""

    def whole(self) -> bytes:
        return self.part(0, len(self))


class PlainBytes(Encoded):
    """A file at hand."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]


class Base64Bytes(Encoded):
    """A file as base64 text, strict: alphabet, padding, no white space. Raises :class:`ImageError`."""

    def __init__(self, text: bytes) -> None:
        padding = text.translate(None, _ALPHABET)
        if padding not in (b"", b"=", b"==") or not text.endswith(padding) or len(text) % 4:
            raise ImageError(Reason.IMAGE_ENCODING, f"{len(text)} characters that are not base64")
        self._text = text
        self._length = len(text) // 4 * 3 - len(padding)

    def __len__(self) -> int:
        return self._length

    def part(self, start: int, stop: int) -> bytes:
        first = start // 3
        decoded = binascii.a2b_base64(self._text[first * 4 : -(-stop // 3) * 4])
        return decoded[start - first * 3 : stop - first * 3]
