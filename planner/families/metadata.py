"""What GLM's image families read alike: placeholder ids, patch numbers, and settings that must not change a count."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import msgspec

from planner.checkpoint import ImageSettings
from planner.errors import CheckpointError, Reason, shown
from planner.families.family import Encode
from planner.fields import Object, boolean, integer, invalid, number_or_list, optional_integer, section, unsupported
from planner.layout import Placeholder

CONFIG = "config.json"
_TOKENS = {"image": "<|image|>", "image_start": "<|begin_of_image|>", "image_end": "<|end_of_image|>"}
_VIDEO = {"video": "<|video|>", "video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>"}
_MAX_PIXELS = (1 << 63) - 1

_IGNORED = frozenset({
    "image_processor_type", "processor_class", "feature_extractor_type", "data_format", "input_data_format", "device",
    "return_tensors", "disable_grouping", "default_to_square", "auto_map", "transformers_version", "video_processor",
})  # fmt: skip
_TYPED_BOOLEANS = ("do_rescale", "do_normalize", "do_convert_rgb")
_TYPED_NUMBERS = ("image_mean", "image_std", "rescale_factor")
_MUST_BE_OFF = ("do_center_crop", "do_pad")
_MUST_BE_ABSENT = ("crop_size", "pad_size", "min_pixels", "max_pixels")
_GEOMETRY = re.compile(
    r"size|pixel|patch|resiz|crop|pad|token|scale|merge|grid|tile|height|width|edge|factor|aspect|ratio|max|min"
    r"|resolution|frame|dim|limit|budget|shape|pinpoint|stride|window"
)


class Patches(msgspec.Struct, frozen=True):
    """Patch side in pixels, patches merged per side, frames per patch."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def factor(self) -> int:
        """Pixels per token and side."""
        return self.patch_size * self.merge_size


def read_patches(settings: ImageSettings, config: Object) -> Patches:
    """The three numbers, checked against ``vision_config``, which some engines read instead."""
    values, origin = settings.values, settings.origin
    patches = Patches(
        integer(values, "patch_size", origin), integer(values, "merge_size", origin),
        integer(values, "temporal_patch_size", origin),
    )  # fmt: skip
    if patches.temporal_patch_size * patches.factor**2 > _MAX_PIXELS:
        raise invalid(origin, "patch_size", patches.patch_size, "patches whose pixels fit 63 bits")
    vision = section(config, "vision_config", CONFIG)
    pairs = {"patch_size": patches.patch_size, "spatial_merge_size": patches.merge_size,
             "temporal_patch_size": patches.temporal_patch_size}  # fmt: skip
    for name, value in pairs.items():
        other = optional_integer(vision, name, f"{CONFIG} vision_config")
        if other not in (None, value):
            text = f"{CONFIG} vision_config: {name} = {other}, but {origin} has {value}"
            raise CheckpointError(Reason.CONFIG_CONFLICT, text)
    return patches


def check_budget(settings: ImageSettings, patches: Patches, low: tuple[str, int], high: tuple[str, int]) -> None:
    """A lower and an upper bound, named for the error text, with low not above high."""
    if low[1] > high[1]:
        text = f"{settings.origin}: {low[0]} = {low[1]} is more than {high[0]} = {high[1]}"
        raise CheckpointError(Reason.CONFIG_CONFLICT, text)
    if high[1] * patches.temporal_patch_size * patches.factor**2 > _MAX_PIXELS:
        raise invalid(settings.origin, high[0], high[1], "a budget whose pixels fit 63 bits")


def check_architectures(config: Object, known: Collection[str]) -> None:
    """``architectures``, where given, must all be of the family."""
    value = config.get("architectures")
    if value is None:
        return
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name in known for name in value):
        raise CheckpointError(
            Reason.CONFIG_CONFLICT, f"{CONFIG}: architectures = {value!r:.80}: expected {' or '.join(sorted(known))}"
        )


def check_untouched(settings: ImageSettings, used: Iterable[str]) -> None:
    """Settings beyond ``used``: harmless, type-checked, or refused because they could change a count."""
    values, origin = settings.values, settings.origin
    if boolean(values, "do_resize", origin) is False:
        raise unsupported(origin, "do_resize", False, "true")
    for name in _MUST_BE_OFF:
        if boolean(values, name, origin):
            raise unsupported(origin, name, True, "false or absent")
    for name in _MUST_BE_ABSENT:
        if values.get(name) is not None:
            raise unsupported(origin, name, values[name], "it to be absent")
    if values.get("resize_mode") not in (None, "pad"):
        raise unsupported(origin, "resize_mode", values["resize_mode"], "pad or absent")
    _check_types(values, origin)
    known = {*used, *_IGNORED, *_TYPED_BOOLEANS, *_TYPED_NUMBERS, *_MUST_BE_OFF, *_MUST_BE_ABSENT}
    for name in values.keys() - known - {"do_resize", "resize_mode", "resample"}:
        _check_unknown(name, values[name], origin)


def _check_types(values: Object, origin: str) -> None:
    for name in _TYPED_BOOLEANS:
        boolean(values, name, origin)
    for name in _TYPED_NUMBERS:
        number_or_list(values, name, origin)
    optional_integer(values, "resample", origin, low=0, high=5)


def _check_unknown(name: str, value: object, origin: str) -> None:
    """Notes pass (private names, plain strings); a knob nobody documented does not, least of all a geometric one."""
    if value is None or (name.startswith("_") and not _GEOMETRY.search(name)):
        return
    if not isinstance(value, str) or _GEOMETRY.search(name):
        raise unsupported(origin, name, value, "no setting of an unknown meaning")


def read_placeholder(config: Object, encode: Encode) -> Placeholder:
    """The six ids: required for images, optional for video; distinct, and each one token of the tokenizer."""
    image = {part: integer(config, f"{part}_token_id", CONFIG, low=0) for part in _TOKENS}
    video = {part: optional_integer(config, f"{part}_token_id", CONFIG, low=0) for part in _VIDEO}
    given = [*image.values(), *(id for id in video.values() if id is not None)]
    if len(set(given)) != len(given):
        raise CheckpointError(
            Reason.CONFIG_CONFLICT, f"{CONFIG}: two of the image and video token ids are equal: {given}"
        )
    for part, text in _TOKENS.items():
        _check_token(encode, text, image[part])
    for part, text in _VIDEO.items():
        video[part] = _single(encode, text) if video[part] is None else video[part]
    return Placeholder(
        image=image["image"], image_start=image["image_start"], image_end=image["image_end"],
        video=video["video"], video_start=video["video_start"], video_end=video["video_end"],
    )  # fmt: skip


def read_context_length(config: Object) -> int | None:
    """``max_position_embeddings`` in tokens; None where the checkpoint names none."""
    text = section(config, "text_config", CONFIG)
    return optional_integer(text, "max_position_embeddings", f"{CONFIG} text_config")


def _check_token(encode: Encode, text: str, expected: int) -> None:
    ids = encode(text)
    if ids != [expected]:
        raise CheckpointError(
            Reason.PLACEHOLDER_SPLIT, f"the tokenizer reads {text} as {shown(str(ids))}, config.json says {expected}"
        )


def _single(encode: Encode, text: str) -> int | None:
    ids = encode(text)
    return ids[0] if len(ids) == 1 else None
