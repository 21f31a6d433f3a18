"""The prompt's tokens against the request's images, before anything is built; then the expansion.

Ten rules: (1) images need placeholders; (2) as many as images, counts and identities; (3) each directly between its
delimiters; (4) no other delimiters; (5) none adjacent; (6) no video tokens; (7) counts positive, the sum within the
context and 32 bits; (8) placeholder ids distinct and single tokens (checked when the checkpoint is read); (9) ids
below the pad values; (10) images rendered in the request's order (checked where the prompt is rendered).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from planner.errors import CountError, LayoutError, Reason, shown
from protocols.media import PAD_BASE
from protocols.tokens import UINT32_MAX


class Placeholder(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of an image's placeholder and delimiters, and of a video's where the model has them."""

    image: int
    image_start: int
    image_end: int
    video: int | None = None
    video_start: int | None = None
    video_end: int | None = None

    @property
    def video_ids(self) -> tuple[int, ...]:
        return tuple(id for id in (self.video, self.video_start, self.video_end) if id is not None)

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """Tokens at which text may cease to be text: the first of them ends a text prefix."""
        return (self.image, self.image_start, *self.video_ids)


class Expansion(msgspec.Struct, frozen=True):
    """Tokens with every placeholder repeated, and each image's first pad."""

    tokens: list[int]
    starts: tuple[int, ...]


def validate(tokens: Sequence[int], ids: Placeholder, images: int) -> None:
    """Rules 1 to 6 and 9 for an unexpanded prompt. Raises :class:`LayoutError`; no images, nothing to check."""
    if not images:
        return
    present = set(tokens)
    _check_range(max(present, default=0))
    for video in present.intersection(ids.video_ids):
        raise LayoutError(Reason.VIDEO_TOKENS, f"token {video} at {tokens.index(video)}")
    places = positions(tokens, ids.image)
    _check_places(places, images)
    _check_delimiters(tokens, ids, images)
    for i in places:
        before = tokens[i - 1] if i else None
        after = tokens[i + 1] if i + 1 < len(tokens) else None
        if (before, after) != (ids.image_start, ids.image_end):
            text = f"the placeholder at {i} stands between {before} and {after}"
            raise LayoutError(Reason.PLACEHOLDER_BARE, f"{text}, expected {ids.image_start} and {ids.image_end}")


def _check_range(high: int) -> None:
    if high >= PAD_BASE:
        raise LayoutError(Reason.TOKEN_RANGE, f"token id {high}: {PAD_BASE} and above stand for images in a cache")


def _check_places(places: list[int], images: int) -> None:
    if not places:
        raise LayoutError(Reason.PLACEHOLDER_MISSING, f"{images} images, no placeholder")
    if any(after - before == 1 for before, after in pairwise(places)):
        raise LayoutError(
            Reason.PLACEHOLDER_ADJACENT, f"{len(places)} placeholders, some side by side, {images} images"
        )
    if len(places) != images:
        raise LayoutError(Reason.PLACEHOLDER_COUNT, f"{len(places)} placeholders, {images} images")


def _check_delimiters(tokens: Sequence[int], ids: Placeholder, images: int) -> None:
    begins, ends = tokens.count(ids.image_start), tokens.count(ids.image_end)
    if (begins, ends) != (images, images):
        text = f"{begins} begin and {ends} end delimiters, {images} images"
        raise LayoutError(Reason.DELIMITER_STRAY, text)


def positions(tokens: Sequence[int], wanted: int) -> list[int]:
    """Every index of a token, ascending; a scan in C per hit."""
    found: list[int] = []
    for _ in range(tokens.count(wanted)):
        found.append(tokens.index(wanted, found[-1] + 1 if found else 0))
    return found


def expand(
    tokens: Sequence[int], ids: Placeholder, counts: Sequence[int], *, context_length: int | None = None
) -> Expansion:
    """Repeat the i-th placeholder ``counts[i]`` times; delimiters and the given tokens stay.

    Raises :class:`CountError` for counts that are not positive integers, :class:`LayoutError` where they do not fit.
    """
    places = positions(tokens, ids.image)
    _check_counts(counts, len(places))
    _check_length(len(tokens) - len(places) + sum(counts), context_length)
    expanded: list[int] = []
    starts: list[int] = []
    done = 0
    for place, count in zip(places, counts, strict=True):
        expanded += tokens[done:place]
        starts.append(len(expanded))
        expanded += [ids.image] * count
        done = place + 1
    expanded += tokens[done:]
    return Expansion(expanded, tuple(starts))


def _check_counts(counts: Sequence[int], images: int) -> None:
    if len(counts) != images:
        raise CountError(Reason.COUNT_INVALID, f"{len(counts)} counts for {images} placeholders")
    for count in counts:
        if type(count) is not int or not 1 <= count <= UINT32_MAX:
            raise CountError(Reason.COUNT_INVALID, f"{shown(count)} is not a token count of 1 or more")


def _check_length(length: int, context_length: int | None) -> None:
    limit = UINT32_MAX if context_length is None else min(context_length, UINT32_MAX)
    if length > limit:
        raise LayoutError(Reason.PROMPT_TOO_LONG, f"{length} tokens with images expanded, the context holds {limit}")
