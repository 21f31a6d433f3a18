"""An image file's size and orientation from its header, by Pillow, never decoding pixels of untrusted files.

Engines turn an image by its EXIF orientation before sizing it: vLLM always (``exif_transpose``), SGLang unless a JPEG
is decoded on the GPU. So each header says whether it is turned for certain or only by some.
"""

from __future__ import annotations

import io
import sys
import threading
import warnings
from contextlib import suppress
from typing import Any, Literal

import msgspec

from planner.encoded import Encoded
from planner.errors import ImageError, Reason
from planner.extras import require
from planner.identity import hash_pixels
from planner.truncation import PNG_SIGNATURE, ends_early, png_chunks

MAX_PIXELS = 178_956_970
"""vLLM's ``VLLM_MAX_IMAGE_PIXELS`` and Pillow's own decompression-bomb error, in pixels."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
Turn = Literal["none", "turned", "jpeg", "unsure"]
"""Do width and height change places: no; yes in every engine; in engines that read a JPEG's EXIF; nobody knows."""
_ORIENTATION = 0x0112
_SWAPPING = frozenset({5, 6, 7, 8})
_STARTS = (1 << 12, 1 << 16)
_WHOLE = (b"RIFF", b"II", b"MM")
"""WebP's and TIFF's readers want the whole file."""
_PNG_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
_warning_filters = threading.Lock()


class Header(msgspec.Struct, frozen=True):
    """Width and height as stored, in pixels."""

    width: int
    height: int
    turn: Turn


def read_header(file: Encoded, *, complete: bool = True) -> Header:
    """Size and orientation. ``complete`` is False where only a file's start is known. Raises :class:`ImageError`."""
    image = _open_start(file)
    if complete and ends_early(image.format, file):
        raise ImageError(Reason.IMAGE_TRUNCATED, f"{image.format} of {len(file)} bytes")
    width, height = image.size
    return Header(width, height, _turn(image, file, complete))


def _open_start(file: Encoded) -> Any:
    """From the file's start where its format allows that and it suffices, else from more, else from all of it."""
    for size in () if file.part(0, 4).startswith(_WHOLE) else _STARTS:
        if size >= len(file):
            break
        with suppress(ImageError):
            return _open(file.part(0, size))
    return _open(file.whole())


def _open(data: bytes) -> Any:
    pillow = require("PIL.Image")
    try:
        # Pillow warns from half the limit on. Filters are process-wide, so no two threads may change them at once.
        with _warning_filters, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pillow.open(io.BytesIO(data), formats=FORMATS)
    except pillow.DecompressionBombError as error:
        raise ImageError(Reason.IMAGE_TOO_LARGE, f"{error!s:.120}") from None
    except pillow.UnidentifiedImageError:
        raise ImageError(
            Reason.IMAGE_FORMAT, f"{data[:8].hex() or 'no bytes'}…: expected {', '.join(FORMATS)}"
        ) from None
    except Exception as error:  # format plugins raise whatever their parser met
        raise ImageError(Reason.IMAGE_UNREADABLE, f"{type(error).__name__}: {error!s:.120}") from None


def _turn(image: Any, file: Encoded, complete: bool) -> Turn:
    if image.format == "TIFF":  # Pillow's TIFF reader has turned the size already
        return "none"
    if image.format == "PNG":
        return _turn_png(image, file, complete)
    if _orientation(image) not in _SWAPPING:
        return "none"
    return "jpeg" if image.format in ("JPEG", "MPO") else "turned"


def _turn_png(image: Any, file: Encoded, complete: bool) -> Turn:
    """A PNG may carry its EXIF after the pixels, where Pillow looks only once it has decoded them."""
    if not complete and "exif" not in image.info:
        return "unsure"
    late = complete and any(name in _PNG_METADATA for name, _, _ in png_chunks(file))
    reread = _open(_png_metadata_first(file)) if late else image
    base = require("PIL.Image").Image
    return "turned" if _orientation(reread, base.getexif) in _SWAPPING else "none"


def _orientation(image: Any, getexif: Any = None) -> object:
    """The orientation tag; 1 where EXIF cannot be read, as engines suppress that error too."""
    try:
        exif = getexif(image) if getexif else image.getexif()
        return exif.get(_ORIENTATION, 1)
    except Exception:
        return 1


def _png_metadata_first(file: Encoded) -> bytes:
    """The same PNG without pixels: header, metadata, then an IDAT for the reader to stop at."""
    chunks = list(png_chunks(file))
    head = [file.part(start, end) for name, start, end in chunks if name == b"IHDR"]
    metadata = [file.part(start, end) for name, start, end in chunks if name in _PNG_METADATA]
    pixels = [file.part(start, end) for name, start, end in chunks if name == b"IDAT"]
    return b"".join([PNG_SIGNATURE, *head, *metadata, *pixels[:1]])


# --- Pillow images ---------------------------------------------------------------------------------------------------


def is_pillow_image(value: object) -> bool:
    """Without importing Pillow: who holds an image of it has imported it."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def read_pillow(image: Any, max_pixels: int) -> tuple[Header, int]:
    """Size and pixel identity of a Pillow image; whether an engine still turns it depends on how it is handed over."""
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(Reason.IMAGE_TOO_LARGE, f"{width}x{height}: more than {max_pixels} pixels")
    turn: Turn = "unsure" if _orientation(image) in _SWAPPING else "none"
    try:
        return Header(width, height, turn), _hash_pillow(image)
    except Exception as error:
        raise ImageError(Reason.IMAGE_UNREADABLE, f"{type(error).__name__}: {error!s:.120}") from None


def _hash_pillow(image: Any) -> int:
    """RGB as its pixels; other modes as RGBA where nothing is lost by that, else mode and raw bytes."""
    width, height = image.size
    turned = str(_orientation(image)).encode()
    if image.mode == "RGB":
        pixels, depth, mark = image.tobytes(), 3, b""
    elif image.mode in ("1", "L", "LA", "La", "P", "PA", "RGBA", "RGBa", "RGBX"):
        pixels, depth, mark = image.convert("RGBA").tobytes(), 4, b""
    else:
        pixels, depth, mark = image.tobytes(), 1, image.mode.encode()
    return hash_pixels((height, width, depth), pixels + mark + (turned if turned != b"1" else b""))
