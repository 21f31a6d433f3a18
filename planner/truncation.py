"""Does an image file stop before its data does? Told from its structure, without decoding pixels.

Where this is stricter than an engine's reader, only a plan's exactness is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.encoded import Encoded

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GIF_EXTENSION, _GIF_IMAGE = 0x21, 0x2C


def ends_early(kind: str | None, file: Encoded) -> bool:
    """Does the file stop before its format says it ends? Where this is stricter than an engine, only exactness goes."""
    size = len(file)
    if kind == "PNG":
        return not any(name == b"IEND" for name, _, _ in png_chunks(file))
    if kind in ("JPEG", "MPO"):
        return b"\xff\xd9" not in file.part(max(size - 64, 0), size) and _jpeg_ends_early(file.whole())
    if kind == "WEBP":
        return int.from_bytes(file.part(4, 8), "little") + 8 > size
    if kind == "GIF":
        return _gif_ends_early(file.whole())
    if kind == "BMP":
        return _bmp_ends_early(file.part(0, 34), size)
    return False


def _jpeg_ends_early(data: bytes) -> bool:
    """No end marker after the last scan begins: neither marker can occur within entropy-coded data."""
    return data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda")


def _bmp_ends_early(head: bytes, size: int) -> bool:
    """Only uncompressed bitmaps have a length known beforehand: rows of whole 4-byte words."""
    if len(head) < 34 or int.from_bytes(head[14:18], "little") < 40 or int.from_bytes(head[30:34], "little"):
        return False
    width, bits = int.from_bytes(head[18:22], "little"), int.from_bytes(head[28:30], "little")
    height = abs(int.from_bytes(head[22:26], "little", signed=True))
    return int.from_bytes(head[10:14], "little") + (width * bits + 31) // 32 * 4 * height > size


def png_chunks(file: Encoded) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of each complete chunk, up to IEND."""
    at, size = len(PNG_SIGNATURE), len(file)
    while at + 12 <= size:
        head = file.part(at, at + 8)
        end = at + 12 + int.from_bytes(head[:4], "big")
        if end > size:
            return
        yield head[4:], at, end
        if head[4:] == b"IEND":
            return
        at = end


def _gif_ends_early(data: bytes) -> bool:
    """Is the first frame, all that engines read, not closed by an empty sub-block?"""
    at = 13 + _gif_colours(data, 10)
    while data[at : at + 1] == bytes([_GIF_EXTENSION]):
        at = _gif_sub_blocks(data, at + 2)
    if data[at : at + 1] != bytes([_GIF_IMAGE]):
        return True
    return _gif_sub_blocks(data, at + 11 + _gif_colours(data, at + 9)) > len(data)


def _gif_colours(data: bytes, at: int) -> int:
    """Bytes of the colour table that the flags at ``at`` announce."""
    flags = data[at] if at < len(data) else 0
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _gif_sub_blocks(data: bytes, at: int) -> int:
    """Where the blocks after ``at`` have ended; beyond the data if they have not."""
    while at < len(data) and data[at]:
        at += data[at] + 1
    return at + 1
