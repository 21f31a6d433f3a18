"""One image's displayed size and content identity, from whatever form the caller has it in, without decoding pixels.

Accepted: bytes, ``BytesIO``, data URIs, base64 text, paths, Pillow images, and http(s) URLs where the
policy allows them. Sizes come from Pillow's header readers behind a format allow-list and byte and pixel limits.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from planner import identity, remote
from planner.encoded import Base64Bytes, Encoded, PlainBytes
from planner.errors import ImageError, Reason, shown
from planner.header import MAX_PIXELS, Header, Turn, is_pillow_image, read_header, read_pillow
from planner.remote import RemotePolicy

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class ImagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner may read. A service that plans strangers' requests should set ``local_roots`` to ``()``.

    ``local_roots``: directories that image files may lie in, None for anywhere, ``()`` for nowhere. ``remote``: None
    refuses http(s) URLs. ``max_bytes``: of one encoded image. ``max_pixels``: width times height.
    """

    local_roots: tuple[Path, ...] | None = None
    remote: RemotePolicy | None = None
    max_bytes: int = 64 << 20
    max_pixels: int = MAX_PIXELS
    max_images: int = 999


class Image(msgspec.Struct, frozen=True):
    """Width and height as stored, what turns them, and the 64-bit content identity."""

    width: int
    height: int
    turn: Turn
    hash64: int

    @property
    def displayed(self) -> tuple[int, int]:
        """Width and height once turned."""
        return (self.width, self.height) if self.turn == "none" else (self.height, self.width)

    @property
    def stored(self) -> tuple[int, int]:
        return self.width, self.height


def read_image(source: object, policy: ImagePolicy) -> Image:
    """Size and identity of an image in any accepted form. Raises :class:`ImageError`."""
    if isinstance(source, bytes | bytearray | memoryview):
        return _of_bytes(bytes(source), policy)
    if isinstance(source, str):
        return _of_text(source, policy)
    if isinstance(source, os.PathLike):
        return _of_file(Path(source), policy)
    if is_pillow_image(source):
        return _checked(read_pillow(source, policy.max_pixels), policy)
    if isinstance(source, io.BytesIO):
        return _of_bytes(source.getvalue(), policy)
    if source is None:
        raise ImageError(Reason.IMAGE_MISSING)
    raise ImageError(Reason.IMAGE_SOURCE, f"{type(source).__name__}: expected bytes, text, a path or a Pillow image")


def _of_bytes(data: bytes, policy: ImagePolicy) -> Image:
    return _of_encoded(PlainBytes(data), identity.hash_bytes(data), policy)


def _of_encoded(file: Encoded, hash64: int, policy: ImagePolicy) -> Image:
    if len(file) > policy.max_bytes:
        raise ImageError(Reason.IMAGE_TOO_LARGE, f"{len(file)} bytes, at most {policy.max_bytes}")
    return _checked((read_header(file), hash64), policy)


def _checked(read: tuple[Header, int], policy: ImagePolicy) -> Image:
    header, hash64 = read
    if header.width < 1 or header.height < 1:
        raise ImageError(Reason.IMAGE_SIZE, f"{header.width}x{header.height}")
    if header.width * header.height > policy.max_pixels:
        text = f"{header.width}x{header.height}: more than {policy.max_pixels} pixels"
        raise ImageError(Reason.IMAGE_TOO_LARGE, text)
    return Image(header.width, header.height, header.turn, hash64)


def _of_text(text: str, policy: ImagePolicy) -> Image:
    scheme = text[:8].partition(":")[0].lower()
    if scheme == "data":
        return _of_base64(text, _data_start(text), policy)
    if scheme in ("http", "https"):
        return _of_url(text, policy)
    if scheme == "file":
        return _of_file(Path(unquote(urlsplit(text).path)), policy)
    if text.lower().endswith(_SUFFIXES):
        return _of_file(Path(text), policy)
    return _of_base64(text, 0, policy)


def _data_start(uri: str) -> int:
    """Where the data of ``data:TYPE;base64,DATA`` begins; engines read no other form."""
    comma = uri.find(",", 0, 256)
    if comma < 0 or uri[5:comma].partition(";")[2] != "base64":
        start = shown(uri[: comma + 1] if comma >= 0 else "data:")
        raise ImageError(Reason.IMAGE_ENCODING, f"{start}: expected data:TYPE;base64,DATA")
    return comma + 1


def _of_base64(text: str, start: int, policy: ImagePolicy) -> Image:
    """The identity is that of the whole text: a data URI is its own content."""
    if len(text) == start:
        raise ImageError(Reason.IMAGE_MISSING, "no data in the text")
    if (len(text) - start) // 4 * 3 > policy.max_bytes + 3:
        raise ImageError(Reason.IMAGE_TOO_LARGE, f"{len(text)} characters of base64, at most {policy.max_bytes} bytes")
    raw = text.encode("utf-8", "replace")
    return _of_encoded(Base64Bytes(raw[start:]), identity.hash_bytes(raw), policy)


def _of_file(path: Path, policy: ImagePolicy) -> Image:
    try:
        return _of_bytes(_read_file(path, policy), policy)
    except (OSError, ValueError) as error:
        raise ImageError(Reason.IMAGE_FILE, f"{shown(str(path))}: {error!s:.120}") from None


def _read_file(path: Path, policy: ImagePolicy) -> bytes:
    """A regular file within the allowed roots, links resolved; devices and pipes are not opened."""
    resolved = path.resolve(strict=True)
    roots = policy.local_roots
    if roots is not None and not any(resolved.is_relative_to(root.resolve()) for root in roots):
        raise ValueError("outside ImagePolicy.local_roots")
    if not stat.S_ISREG(resolved.stat().st_mode):
        raise ValueError("not a regular file")
    with resolved.open("rb") as file:
        return file.read(policy.max_bytes + 1)


def _of_url(url: str, policy: ImagePolicy) -> Image:
    """The size from the first bytes of the file; the identity is the URL's, as nothing more is fetched."""
    if policy.remote is None:
        raise ImageError(Reason.REMOTE_REFUSED, f"{shown(url)}: ImagePolicy.remote is not set")
    failure: ImageError | None = None
    for size in policy.remote.ranges:
        start = remote.fetch_start(url, size, policy.remote)
        try:
            header = read_header(PlainBytes(start.data), complete=start.complete)
        except ImageError as error:
            failure = error
            if start.complete:
                break
        else:
            return _checked((header, identity.hash_url(url)), policy)
    raise failure or ImageError(Reason.REMOTE_FAILED, "RemotePolicy.ranges is empty")


def source_of(part: Any) -> object:
    """The image inside a content part or an ``image_data`` entry, whatever the field is called."""
    for name in ("image_url", "image", "image_pil", "url", "path", "base64"):
        value = part.get(name)
        if value is not None:
            return value.get("url") if isinstance(value, dict) else value
    return None
