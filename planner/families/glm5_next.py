"""GLM-5.3-Flash (``glm5_next``): budgets in tokens, sides rounded up, content fitted and padded to the canvas.

The rule is that of transformers' ``Glm5NextImageProcessor``; only the canvas decides the count::

    f  = patch_size · merge_size          a token's side in pixels (28)
    up(v) = ceil(v / f) · f
    1. canvas = up(h), up(w)
    2. fewer tokens than min:  s = sqrt(min · f² / (h · w));  canvas = up(ceil(h · s)), up(ceil(w · s))
    3. more tokens than max:   the tallest content height in 1..h, found by bisection, whose canvas fits
    tokens = canvas area / f²

There is no limit to the aspect ratio. Width and height are not interchangeable in step 3.
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
from planner.fields import integer, name_among, unsupported
from planner.layout import Placeholder

_TYPES = frozenset({"Glm5NextImageProcessor", "Glm5NextImageProcessorFast", "Glm5NextImageProcessorPil"})
_USED = (
    "patch_size", "merge_size", "temporal_patch_size", "min_image_tokens", "max_image_tokens", "patch_expand_factor",
    "size",
)  # fmt: skip


class Glm5Next(ImageFamily):
    """Counts and placeholders of ``glm5_next``."""

    model_types = frozenset({"glm5_next"})

    def __init__(
        self, patches: Patches, min_tokens: int, max_tokens: int, placeholder: Placeholder, context_length: int | None
    ) -> None:
        self.patches = patches
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.placeholder = placeholder
        self.context_length = context_length

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, encode: Encode) -> Self:
        config = checkpoint.config()
        check_architectures(config, {"Glm5NextForConditionalGeneration"})
        settings = checkpoint.image_settings()
        _check_settings(settings)
        patches = read_patches(settings, config)
        low = integer(settings.values, "min_image_tokens", settings.origin)
        high = integer(settings.values, "max_image_tokens", settings.origin)
        check_budget(settings, patches, ("min_image_tokens", low), ("max_image_tokens", high))
        return cls(patches, low, high, read_placeholder(config, encode), read_context_length(config))

    def count_image(self, size: Size) -> int:
        rows, columns = self.canvas(size)
        return rows * columns

    def canvas(self, size: Size) -> tuple[int, int]:
        """Rows and columns of tokens. Raises :class:`CountError` unless both sides are positive."""
        width, height = size
        if width < 1 or height < 1:
            raise CountError(Reason.COUNT_FAILED, f"{width}x{height}: an image has at least one pixel")
        rows, columns = self._cells(height), self._cells(width)
        if rows * columns < self.min_tokens:
            rows, columns = self._enlarged(height, width)
        if rows * columns > self.max_tokens:
            rows, columns = self._reduced(height, width)
        return rows, columns

    def _cells(self, side: int) -> int:
        return -(-side // self.patches.factor)

    def _enlarged(self, height: int, width: int) -> tuple[int, int]:
        """Step 2, in floating point with the upstream order of operands: its rounding decides counts."""
        frames = self.patches.temporal_patch_size
        low = self.min_tokens * frames * self.patches.factor**2
        scale = math.sqrt(low / (frames * height * width))
        return self._cells(max(1, math.ceil(height * scale))), self._cells(max(1, math.ceil(width * scale)))

    def _reduced(self, height: int, width: int) -> tuple[int, int]:
        """Step 3. The kept pair starts at one cell, which is what images wider than max · f end with."""
        best = (1, 1)
        low, high = 1, height
        while low <= high:
            middle = (low + high) // 2
            rows, columns = self._cells(middle), self._cells(max(1, width * middle // height))
            if rows * columns <= self.max_tokens:
                best = (rows, columns)
                low = middle + 1
            else:
                high = middle - 1
        return best


def _check_settings(settings: ImageSettings) -> None:
    values, origin = settings.values, settings.origin
    name_among(values, "image_processor_type", origin, _TYPES, required=True)
    name_among(
        {"processor_class": settings.processor_class}, "processor_class", origin, {"Glm5NextProcessor"}, required=False
    )
    # The slow and the fast class disagree about any other factor (414 against 432 tokens for 640x480 at 2).
    if "patch_expand_factor" in values:
        integer(values, "patch_expand_factor", origin, low=1)
        if values["patch_expand_factor"] != 1:
            raise unsupported(origin, "patch_expand_factor", values["patch_expand_factor"], "1")
    # Elsewhere ``size`` is a pixel budget: the older form of this model, with other counts.
    if values.get("size") not in (None, {"longest_edge": 1}):
        raise unsupported(origin, "size", str(values["size"]), 'absent or {"longest_edge": 1}')
    check_untouched(settings, _USED)
