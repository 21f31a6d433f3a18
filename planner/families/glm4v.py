"""GLM-4.1V, 4.5V and 4.6V (``glm4v``, ``glm4v_moe``, ``glm46v``): budgets in pixels, sides rounded to the nearest.

The rule is transformers' ``smart_resize`` of these models (f = patch_size · merge_size, t = temporal_patch_size)::

    a side below f:  scale both up until neither is;  aspect ratio above 200: error
    h', w' = round(h / f) · f, round(w / f) · f                       half to even
    t · h' · w' > longest_edge:   b = sqrt(t · h · w / longest_edge);   h' = max(f, floor(h / b / f) · f), w' likewise
    t · h' · w' < shortest_edge:  b = sqrt(shortest_edge / (t · h · w)); h' = ceil(h · b / f) · f, w' likewise
    tokens = h' · w' / f²
"""

from __future__ import annotations

import math
from typing import Self

from planner.checkpoint import Checkpoint, ImageSettings
from planner.errors import CountError, Reason
from planner.families.family import Encode, ImageFamily, Size
from planner.families.metadata import (
    Patches,
    check_architectures,
    check_budget,
    check_untouched,
    read_context_length,
    read_patches,
    read_placeholder,
)
from planner.fields import integer, invalid, name_among, section
from planner.layout import Placeholder

_LINES = ("Glm4v", "Glm4vMoe", "Glm46V")
_TYPES = frozenset(f"{line}ImageProcessor{kind}" for line in ("Glm4v", "Glm46V") for kind in ("", "Fast", "Pil"))
_PROCESSORS = frozenset(f"{line}Processor" for line in _LINES)
_ARCHITECTURES = frozenset(f"{line}ForConditionalGeneration" for line in _LINES)
_USED = ("patch_size", "merge_size", "temporal_patch_size", "size")
_MAX_ASPECT = 200
_MAX_EDGE = (1 << 53) - 1


class Glm4v(ImageFamily):
    """Counts and placeholders of the GLM-4 vision models."""

    model_types = frozenset({"glm4v", "glm4v_moe", "glm46v"})

    def __init__(
        self, patches: Patches, min_pixels: int, max_pixels: int, placeholder: Placeholder, context_length: int | None
    ) -> None:
        self.patches = patches
        self.min_pixels = min_pixels
        self.max_pixels = max_pixels
        self.placeholder = placeholder
        self.context_length = context_length

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, encode: Encode) -> Self:
        config = checkpoint.config()
        check_architectures(config, _ARCHITECTURES)
        settings = checkpoint.image_settings()
        named = {"processor_class": settings.processor_class}
        name_among(settings.values, "image_processor_type", settings.origin, _TYPES, required=True)
        name_among(named, "processor_class", settings.origin, _PROCESSORS, required=False)
        check_untouched(settings, _USED)
        patches = read_patches(settings, config)
        low, high = _read_edges(settings, patches)
        return cls(patches, low, high, read_placeholder(config, encode), read_context_length(config))

    def count_image(self, size: Size) -> int:
        rows, columns = self.canvas(size)
        return rows * columns

    def canvas(self, size: Size) -> tuple[int, int]:
        """Rows and columns of tokens. Raises :class:`CountError`."""
        width, height = size
        if width < 1 or height < 1:
            raise CountError(Reason.COUNT_FAILED, f"{width}x{height}: an image has at least one pixel")
        height, width = self._at_least_one_cell(height, width)
        if max(height, width) / min(height, width) > _MAX_ASPECT:
            raise CountError(Reason.COUNT_FAILED, f"{size[0]}x{size[1]}: sides differ by more than {_MAX_ASPECT} times")
        return self._fitted(height, width)

    def _at_least_one_cell(self, height: int, width: int) -> tuple[int, int]:
        factor = self.patches.factor
        if height >= factor and width >= factor:
            return height, width
        scale = max(factor / height, factor / width)
        return int(height * scale), int(width * scale)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        factor, frames = self.patches.factor, self.patches.temporal_patch_size
        rows, columns = round(height / factor), round(width / factor)
        pixels = frames * rows * columns * factor**2
        if pixels > self.max_pixels:
            shrink = math.sqrt((frames * height * width) / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
        elif pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
        return rows, columns


def _read_edges(settings: ImageSettings, patches: Patches) -> tuple[int, int]:
    origin = f"{settings.origin} size"
    size = section(settings.values, "size", settings.origin)
    low = integer(size, "shortest_edge", origin, high=_MAX_EDGE)
    high = integer(size, "longest_edge", origin, high=_MAX_EDGE)
    check_budget(settings, patches, ("shortest_edge", low), ("longest_edge", high))
    others = {name for name, value in size.items() if value is not None} - {"shortest_edge", "longest_edge"}
    if others:
        raise invalid(origin, sorted(others)[0], size[sorted(others)[0]], "only shortest_edge and longest_edge")
    return low, high
