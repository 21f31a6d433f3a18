"""Sizes, orientation and identity from every form an image can come in; and everything that is refused."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from glm_fixtures import png
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL import ImageOps, PngImagePlugin

from planner.encoded import Base64Bytes, PlainBytes
from planner.errors import ImageError, PlanningError, Reason
from planner.header import read_header
from planner.images import Image, ImagePolicy, read_image, source_of

POLICY = ImagePolicy()


def _uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _encoded(kind: str, orientation: int | None = None, size: tuple[int, int] = (30, 20)) -> bytes:
    options: dict[str, Any] = {}
    if orientation is not None:
        exif = Pillow.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    file = io.BytesIO()
    Pillow.new("RGB", size, (1, 2, 3)).save(file, kind, **options)
    return file.getvalue()


def _reason(source: object, policy: ImagePolicy = POLICY) -> Reason:
    with pytest.raises(ImageError) as caught:
        read_image(source, policy)
    return caught.value.reason


# --- sources ---------------------------------------------------------------------------------------------------------


def test_one_picture_in_every_form(tmp_path: Path) -> None:
    data = png(30, 20)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    sources = [data, bytearray(data), memoryview(data), io.BytesIO(data), _uri(data), text, path, str(path),
               path.as_uri(), Pillow.open(path)]  # fmt: skip
    for source in sources:
        assert read_image(source, POLICY).stored == (30, 20)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(kind: str) -> None:
    data = _encoded(kind, size=(301, 199))
    for source in (data, _uri(data)):
        assert read_image(source, POLICY).displayed == (301, 199)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F", "YCbCr"])
def test_the_mode_never_changes_the_size(mode: str) -> None:
    assert read_image(Pillow.new(mode, (31, 17)), POLICY).stored == (31, 17)


def test_an_animation_is_its_canvas() -> None:
    frames = [Pillow.new("RGB", (40, 30), (i, 0, 0)) for i in range(3)]
    for kind in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        assert read_image(file, POLICY).stored == (40, 30)


def test_large_files_are_read_from_their_start() -> None:
    noise = Pillow.frombytes("RGB", (400, 300), os.urandom(360_000))
    for kind in ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF"):
        file = io.BytesIO()
        noise.save(file, kind)
        assert read_image(_uri(file.getvalue()), POLICY).stored == (400, 300)


def test_a_header_behind_much_metadata() -> None:
    exif = Pillow.Exif()
    exif[0x010E] = "x" * 60_000
    exif[0x0112] = 6
    file = io.BytesIO()
    Pillow.new("RGB", (40, 30)).save(file, "JPEG", exif=exif, comment=b"c" * 60_000)
    assert read_image(_uri(file.getvalue()), POLICY) == read_image(_uri(file.getvalue()), POLICY)
    assert read_image(file.getvalue(), POLICY).displayed == (30, 40)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image_url", "image_url": {"url": "u"}}, "u"),
        ({"type": "image_url", "image_url": "u"}, "u"),
        ({"type": "image", "image": b"x"}, b"x"),
        ({"type": "image", "url": "u"}, "u"),
        ({"type": "image", "path": "p"}, "p"),
        ({"type": "image_url", "image_url": None, "uuid": "known"}, None),
        ({"type": "image_url", "image_url": {}}, None),
        ({"type": "image"}, None),
    ],
)
def test_where_a_part_keeps_its_image(part: dict[str, Any], source: object) -> None:
    assert source_of(part) == source


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, Reason.IMAGE_MISSING),
        ("", Reason.IMAGE_MISSING),
        ("data:image/png;base64,", Reason.IMAGE_MISSING),
        (b"", Reason.IMAGE_FORMAT),
        (3, Reason.IMAGE_SOURCE),
        ({"x": 1}, Reason.IMAGE_SOURCE),
        ([png(3, 3)], Reason.IMAGE_SOURCE),
        ("data:", Reason.IMAGE_ENCODING),
        ("data:image/png,%89PNG", Reason.IMAGE_ENCODING),
        ("data:image/png;charset=x;base64,AAAA", Reason.IMAGE_ENCODING),
        ("data:image/png;base64,AAA", Reason.IMAGE_ENCODING),
        ("data:image/png;base64,AA==AAAA", Reason.IMAGE_ENCODING),
        ("data:image/png;base64,AA AA", Reason.IMAGE_ENCODING),
        ("data:image/png;base64,AA\nA", Reason.IMAGE_ENCODING),
        ("data:image/png;base64,ÄÖÜ=", Reason.IMAGE_ENCODING),
        ("data:image/png;base64,AA-_", Reason.IMAGE_ENCODING),
        ("not base64 at all!", Reason.IMAGE_ENCODING),
        ("data:image/png;base64,AAAA", Reason.IMAGE_FORMAT),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Reason.IMAGE_FORMAT),
        (b"%PDF-1.7", Reason.IMAGE_FORMAT),
        (b"P6 3 3 255 " + bytes(27), Reason.IMAGE_FORMAT),
        ("/nowhere/at/all.png", Reason.IMAGE_FILE),
        ("file:///nowhere/at/all.png", Reason.IMAGE_FILE),
        (Path("/dev/zero"), Reason.IMAGE_FILE),
        (Path("/"), Reason.IMAGE_FILE),
        ("nul\0byte.png", Reason.IMAGE_FILE),
        ("http://example.com/a.png", Reason.REMOTE_REFUSED),
        ("https://example.com/a.png", Reason.REMOTE_REFUSED),
        ("ftp://example.com/a", Reason.IMAGE_ENCODING),
    ],
)
def test_what_is_not_an_image(source: object, reason: Reason) -> None:
    assert _reason(source) is reason


def test_a_format_that_is_not_on_the_list() -> None:
    file = io.BytesIO()
    Pillow.new("RGB", (32, 32)).save(file, "ICO")
    assert _reason(file) is Reason.IMAGE_FORMAT


def test_only_files_below_the_allowed_roots(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for directory in (inside, outside):
        directory.mkdir()
        (directory / "a.png").write_bytes(png(3, 3))
    (inside / "link.png").symlink_to(outside / "a.png")
    policy = ImagePolicy(local_roots=(inside,))
    assert read_image(inside / "a.png", policy).stored == (3, 3)
    for path in (outside / "a.png", inside / "link.png", inside / ".." / "out" / "a.png", (outside / "a.png").as_uri()):
        assert _reason(path, policy) is Reason.IMAGE_FILE
    assert _reason(inside / "a.png", ImagePolicy(local_roots=())) is Reason.IMAGE_FILE


def test_byte_and_pixel_limits() -> None:
    data = png(50, 40)
    assert _reason(data, ImagePolicy(max_bytes=len(data) - 1)) is Reason.IMAGE_TOO_LARGE
    assert _reason(_uri(data), ImagePolicy(max_bytes=len(data) - 1)) is Reason.IMAGE_TOO_LARGE
    assert read_image(_uri(data), ImagePolicy(max_bytes=len(data))).stored == (50, 40)
    for source in (data, Pillow.new("RGB", (50, 40))):
        assert _reason(source, ImagePolicy(max_pixels=1999)) is Reason.IMAGE_TOO_LARGE


def _png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size, with next to no pixels."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), _chunk(b"IDAT", zlib.compress(b"")),
         _chunk(b"IEND", b"")]
    )  # fmt: skip


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def test_decompression_bombs_cost_nothing_and_are_refused_where_engines_do() -> None:
    assert read_image(_png_of(178_956_970, 1), POLICY).stored == (178_956_970, 1)
    for width, height in ((178_956_971, 1), (100_000, 100_000), (60_000, 60_000)):
        assert _reason(_png_of(width, height)) is Reason.IMAGE_TOO_LARGE


def test_an_image_without_a_side() -> None:
    assert _reason(Pillow.new("RGB", (0, 7))) is Reason.IMAGE_SIZE


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_file_that_ends_early(kind: str, noisy: bool) -> None:
    file = io.BytesIO()
    pixels = os.urandom(120 * 90 * 3) if noisy else bytes(120 * 90 * 3)
    Pillow.frombytes("RGB", (120, 90), pixels).save(file, kind)
    data = file.getvalue()
    for kept in (len(data) // 2, len(data) * 3 // 4, len(data) - 40):
        with pytest.raises(ImageError):
            read_image(_uri(data[:kept]), POLICY)
        with pytest.raises(ImageError):
            read_image(data[:kept], POLICY)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_any_damage_is_an_image_error_or_a_size(kind: str) -> None:
    data = bytearray(_encoded(kind, 6 if kind in ("PNG", "JPEG", "WEBP", "TIFF") else None))
    for at in range(min(len(data), 400)):
        for value in (0, 255):
            broken = bytes(data[:at]) + bytes([value]) + bytes(data[at + 1 :])
            with suppress(ImageError):
                assert isinstance(read_image(broken, POLICY), Image)


@given(
    st.binary(max_size=300), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"RIFF"])
)
def test_arbitrary_bytes_never_raise_anything_else(data: bytes, start: bytes) -> None:
    for source in (start + data, _uri(start + data)):
        with suppress(PlanningError):
            read_image(source, POLICY)


# --- orientation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", [None, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_the_displayed_size_is_that_of_pillows_transposition(kind: str, orientation: int | None) -> None:
    data = _encoded(kind, orientation)
    with Pillow.open(io.BytesIO(data)) as opened:
        expected = ImageOps.exif_transpose(opened).size
    assert read_image(data, POLICY).displayed == expected


def test_who_turns_an_image() -> None:
    turns = {kind: read_image(_encoded(kind, 6), POLICY).turn for kind in ("PNG", "JPEG", "WEBP", "TIFF")}
    assert turns == {"PNG": "turned", "JPEG": "jpeg", "WEBP": "turned", "TIFF": "none"}
    with Pillow.open(io.BytesIO(_encoded("JPEG", 6))) as opened:
        assert read_image(opened, POLICY).turn == "unsure"


def test_a_png_may_say_it_after_the_pixels() -> None:
    data = png(30, 20)
    exif = Pillow.Exif()
    exif[0x0112] = 8
    end = data.rindex(b"IEND") - 4
    late = data[:end] + _chunk(b"eXIf", exif.tobytes()[6:]) + data[end:]
    with Pillow.open(io.BytesIO(late)) as opened:
        assert ImageOps.exif_transpose(opened).size == (20, 30)
    assert read_image(late, POLICY).displayed == (20, 30)
    assert read_header(PlainBytes(data[:60]), complete=False).turn == "unsure"


def test_a_png_may_say_it_in_xmp() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    data = png(30, 20, pnginfo=info)
    with Pillow.open(io.BytesIO(data)) as opened:
        assert ImageOps.exif_transpose(opened).size == (20, 30)
    assert read_image(data, POLICY).displayed == (20, 30)


def test_exif_that_cannot_be_read_turns_nothing() -> None:
    data = png(30, 20, format="JPEG", exif=b"Exif\0\0garbage")
    assert read_image(data, POLICY).displayed == (30, 20)


# --- identity --------------------------------------------------------------------------------------------------------


def test_identity_follows_the_content() -> None:
    red, blue = png(30, 20, (255, 0, 0)), png(30, 20, (0, 0, 255))
    for form in (bytes, _uri, lambda data: Pillow.open(io.BytesIO(data))):
        first, again, other = (read_image(form(data), POLICY).hash64 for data in (red, red, blue))
        assert first == again != other


def test_pillow_images_that_look_alike_and_are_not() -> None:
    rgb = Pillow.new("RGB", (8, 8), (9, 9, 9))
    clear = Pillow.new("RGBA", (8, 8), (9, 9, 9, 0))
    solid = Pillow.new("RGBA", (8, 8), (9, 9, 9, 255))
    turned = rgb.copy()
    turned.getexif()[0x0112] = 6
    shorter = Pillow.new("RGB", (4, 16), (9, 9, 9))
    hashes = {read_image(image, POLICY).hash64 for image in (rgb, clear, solid, turned, shorter)}
    assert len(hashes) == 5


@given(st.binary(min_size=1, max_size=200), st.integers(0, 220), st.integers(0, 220))
def test_base64_is_read_in_parts_as_the_whole(data: bytes, start: int, stop: int) -> None:
    file = Base64Bytes(base64.b64encode(data))
    assert len(file) == len(data)
    assert file.whole() == data
    assert file.part(start, stop) == data[start:stop]
