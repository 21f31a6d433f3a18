"""A prompt as tokens, with what is known of where its parts stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planner.errors import PlanningError
from planner.prompt import Codec, Place
from planner.request import ImagePart, Prompt
from protocols.media import MediaRun
from protocols.plan import Segment


def _nowhere(char: int) -> int | None:  # noqa: ARG001
    return None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` unexpanded; ``text`` None for prompts given as ids; ``in_order``: do media keep the request's order,
    None for not known."""

    tokens: list[int]
    text: str | None = None
    places: tuple[Place, ...] = ()
    in_order: bool | None = None
    token_at: Callable[[int], int | None] = _nowhere

    def segments(self, runs: Sequence[MediaRun] = (), images: Sequence[ImagePart] = ()) -> tuple[Segment, ...]:
        """Where each part begins among the tokens; with ``runs``, among the expanded ones."""
        found = [
            Segment(_shifted(token, runs), place.message, place.kind)
            for place in self.places
            if place.kind == "text" and (token := self.token_at(place.char)) is not None
        ]
        found += [Segment(run.start, part.message, "image") for run, part in zip(runs, images, strict=True)]
        return tuple(sorted(found, key=lambda segment: segment.start))


def _shifted(token: int, runs: Sequence[MediaRun]) -> int:
    """A token's place after expansion: each run before it took one place and takes ``count``."""
    for run in runs:
        if run.start >= token:
            break
        token += run.count - 1
    return token


def read_tokens(prompt: Prompt, codec: Codec | PlanningError) -> Reading:
    """Render and tokenize as far as the prompt needs it. Raises :class:`PlanningError`."""
    if prompt.token_ids is not None:
        return Reading(tokens=prompt.token_ids, in_order=True)
    if isinstance(codec, PlanningError):
        raise codec
    if prompt.messages is None:
        text = prompt.text or ""
        tokenized = codec.tokenize(text, add_special_tokens=prompt.add_special_tokens)
        return Reading(tokens=tokenized.ids, text=text, in_order=True, token_at=tokenized.token_at)
    rendered = codec.render(prompt.messages)
    tokenized = codec.tokenize(rendered.text, add_special_tokens=prompt.add_special_tokens)
    return Reading(
        tokens=tokenized.ids, text=rendered.text, places=rendered.places, in_order=rendered.in_order,
        token_at=tokenized.token_at,
    )  # fmt: skip
