"""The interface of an image family. Every method may fail with a typed error; none answers with an estimate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Self

import msgspec

from planner import layout
from planner.checkpoint import Checkpoint
from planner.layout import Expansion, Placeholder
from protocols.media import Scheme

Size = tuple[int, int]
"""Width, height in pixels, as displayed (after orientation)."""
PromptKind = Literal["repeated_pad"]
"""How an image enters the prompt; ``repeated_pad``: its one placeholder token becomes ``count`` copies."""
Encode = Callable[[str], list[int]]
"""A text to token ids, special tokens read as such and none added."""


class ContextBudget(msgspec.Struct, frozen=True):
    """For families whose counts depend on what the prompt leaves of the context, in tokens."""

    context_length: int
    text_tokens: int


class ImageFamily(ABC):
    """One model line's treatment of images."""

    model_types: ClassVar[frozenset[str]]
    prompt_kind: ClassVar[PromptKind] = "repeated_pad"
    uses_context_budget: ClassVar[bool] = False
    key_schemes: ClassVar[frozenset[Scheme]] = frozenset({"media_keys", "pad30", "pad62", "dynamo"})

    placeholder: Placeholder
    context_length: int | None

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, encode: Encode) -> Self:
        """Read and check everything counts and placeholders rest on. Raises :class:`CheckpointError`."""

    @abstractmethod
    def count_image(self, size: Size) -> int:
        """Tokens of one image. Raises :class:`CountError`."""

    def count_images(self, sizes: Sequence[Size], budget: ContextBudget | None = None) -> tuple[int, ...]:  # noqa: ARG002
        """Tokens of each image of a request, in order; the first failure fails all. Raises :class:`CountError`."""
        return tuple(self.count_image(size) for size in sizes)

    def validate_layout(self, tokens: Sequence[int], images: int) -> None:
        """Are these the tokens of an unexpanded prompt with so many images? Raises :class:`LayoutError`."""
        layout.validate(tokens, self.placeholder, images)

    def expand(self, tokens: Sequence[int], counts: Sequence[int], *, context_length: int | None = None) -> Expansion:
        """Every placeholder replaced by its count of pads. Raises :class:`LayoutError` or :class:`CountError`."""
        limits = [limit for limit in (context_length, self.context_length) if limit is not None]
        return layout.expand(tokens, self.placeholder, counts, context_length=min(limits, default=None))
