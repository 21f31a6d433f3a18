"""The planner: one request in, one plan out, exact or not at all.

A single failure, before or after any number of good images, leaves nothing of the exact plan: no counts, no runs, no
identities. What is left is the text before the first media item, or the rendered text, and the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from planner import fallback
from planner.checkpoint import Checkpoint, open_checkpoint
from planner.errors import CheckpointError, ImageError, LayoutError, PlanningError, Reason
from planner.families import ContextBudget, ImageFamily, family_for
from planner.families.family import Size
from planner.identity import EngineExtras, Identity, extras_of, from_hash
from planner.images import Image, ImagePolicy, read_image
from planner.layout import Expansion
from planner.prompt import Codec
from planner.reading import Reading, read_tokens
from planner.request import Engine, Head, Prompt, read_head, read_prompt
from protocols.media import MediaRun
from protocols.plan import ExactPlan, Plan, PrefixPlan, Segment, TextPlan, prefix_plan, validate
from protocols.tokens import pack_tokens

_log = logging.getLogger(__name__)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and what belongs to it.

    ``counts`` and ``sizes`` (width, height) are per image, in the request's order, of an exact plan only.
    ``engine_extras`` must travel to the engine with the request for the plan's images to be found in its cache; None
    where there is nothing to say. ``reason`` is None for an exact plan.
    """

    plan: Plan
    counts: tuple[int, ...] = ()
    sizes: tuple[Size, ...] = ()
    engine_extras: EngineExtras | None = None
    reason: Reason | None = None
    detail: str = ""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return () if isinstance(self.plan, TextPlan) else self.plan.segments


class Planner:
    """Plans requests for one checkpoint.

    ``engine`` settles what vLLM and SGLang do differently with a JPEG's orientation; without it, a JPEG whose count
    depends on that is not planned exactly. ``loras`` are adapter names a request may give as its ``model``.
    """

    def __init__(
        self,
        model: str,
        codec: Codec | PlanningError,
        family: ImageFamily | PlanningError,
        *,
        policy: ImagePolicy | None = None,
        engine: Engine | None = None,
        context_length: int | None = None,
        loras: Collection[str] = (),
    ) -> None:
        if not model:
            raise ValueError("model is empty: name it as the workers are registered with it")
        self.model = model
        self.codec = codec
        self.family = family
        self.policy = policy or ImagePolicy()
        self.engine = engine
        self.context_length = context_length
        self.loras = frozenset(loras)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        revision: str | None = None,
        *,
        model: str | None = None,
        policy: ImagePolicy | None = None,
        engine: Engine | None = None,
        engine_overrides: Mapping[str, Any] | None = None,
        context_length: int | None = None,
        loras: Collection[str] = (),
    ) -> Self:
        """A planner from a local directory or a cached ``repo`` / ``repo@revision``, offline.

        ``model``: plans' model where a request names none (default: the source). ``engine_overrides``: image settings
        the engine was started with (``--mm-processor-kwargs`` and the like); any refuses image plans.
        Raises :class:`CheckpointError` where there is no checkpoint, :class:`MissingExtra` where packages are missing.
        What is wrong *inside* a checkpoint does not raise: it is the reason of the plans that it makes inexact.
        """
        checkpoint = open_checkpoint(source, revision)
        codec = _codec(checkpoint)
        family = _family(checkpoint, codec, engine_overrides)
        return cls(
            model or checkpoint.name, codec, family, policy=policy, engine=engine, context_length=context_length,
            loras=loras,
        )  # fmt: skip

    def plan(self, request: object) -> ExactPlan | PrefixPlan | TextPlan:
        """The plan alone; see :meth:`prepare`."""
        return self.prepare(request).plan

    def prepare(self, request: object) -> Planned:
        """Plan a request body. Never raises for what a request holds, and never changes it."""
        head = Head(model=self.model)
        try:
            head = read_head(request, self.model, self.loras)
            assert isinstance(request, Mapping)  # read_head has refused anything else
            return self._prepare(read_prompt(request), head)
        except PlanningError as error:
            return _text_plan(head, "", error)
        except Exception as error:
            _log.exception("planning failed; the request is routed without a plan")
            return _text_plan(head, "", PlanningError(Reason.INTERNAL, f"{type(error).__name__}: {error!s:.120}"))

    def _prepare(self, prompt: Prompt, head: Head) -> Planned:
        try:
            reading = read_tokens(prompt, self.codec)
        except PlanningError as error:
            return _text_plan(head, fallback.text_of(prompt, self.codec), error)
        try:
            return self._exact(prompt, reading, head)
        except PlanningError as error:
            return self._prefix(prompt, reading, head, error)

    def _exact(self, prompt: Prompt, reading: Reading, head: Head) -> Planned:
        if prompt.defect:
            raise prompt.defect
        if not prompt.images:
            return Planned(plan=_exact_plan(head, reading.tokens, (), reading.segments()))
        family = self._image_family()
        _check_reading(prompt, reading)
        self._check_number(len(prompt.images))
        family.validate_layout(reading.tokens, len(prompt.images))
        images = [read_image(part.source, self.policy) for part in prompt.images]
        sizes, counts = self._count(family, images, prompt.engine or self.engine, len(reading.tokens))
        identities = [
            part.identity or from_hash(image.hash64) for part, image in zip(prompt.images, images, strict=True)
        ]
        expansion = family.expand(reading.tokens, counts, context_length=self.context_length)
        runs = _runs(expansion, counts, identities)
        return Planned(
            plan=_exact_plan(head, expansion.tokens, runs, reading.segments(runs, prompt.images)),
            counts=counts, sizes=sizes, engine_extras=extras_of(identities),
        )  # fmt: skip

    def _prefix(self, prompt: Prompt, reading: Reading, head: Head, error: PlanningError) -> Planned:
        cut = fallback.text_tokens(prompt, reading, self.codec, self.family, error)
        segments = [segment for segment in reading.segments() if segment.start < cut]
        plan = prefix_plan(
            head.model, reading.tokens[:cut], error.reason.value, detail=error.detail, lora_name=head.lora_name,
            cache_salt=head.cache_salt, segments=segments,
        )  # fmt: skip
        return Planned(plan=plan, reason=error.reason, detail=error.detail)

    def _image_family(self) -> ImageFamily:
        if isinstance(self.family, PlanningError):
            raise self.family
        return self.family

    def _check_number(self, images: int) -> None:
        if images > self.policy.max_images:
            raise ImageError(Reason.TOO_MANY_IMAGES, f"{images} images, at most {self.policy.max_images}")

    def _count(
        self, family: ImageFamily, images: Sequence[Image], engine: Engine | None, text_tokens: int
    ) -> tuple[tuple[Size, ...], tuple[int, ...]]:
        """Sizes and counts; both ways round where engines may disagree about a turn, which must then not matter."""
        context = self.context_length or family.context_length
        budget = ContextBudget(context, text_tokens) if family.uses_context_budget and context else None
        sizes = tuple(_sizes(image, engine)[0] for image in images)
        others = tuple(_sizes(image, engine)[-1] for image in images)
        counts = family.count_images(sizes, budget)
        if others != sizes and family.count_images(others, budget) != counts:
            raise ImageError(Reason.IMAGE_ORIENTATION, "say Planner(engine=…) where all workers run one engine")
        return sizes, counts


def _codec(checkpoint: Checkpoint) -> Codec | PlanningError:
    try:
        return Codec.load(checkpoint.directory)
    except ImportError:
        raise
    except PlanningError as error:
        return error


def _family(
    checkpoint: Checkpoint, codec: Codec | PlanningError, overrides: Mapping[str, Any] | None
) -> ImageFamily | PlanningError:
    if isinstance(codec, PlanningError):
        return codec
    try:
        family = family_for(checkpoint, codec.encode)
    except PlanningError as error:
        return error
    return CheckpointError(Reason.ENGINE_OVERRIDE, f"{dict(overrides)!r:.120}") if overrides else family


def _check_reading(prompt: Prompt, reading: Reading) -> None:
    """Rule 10, and the NUL that some frontends strip. Raises :class:`LayoutError`."""
    if reading.in_order is False:
        raise LayoutError(Reason.ORDER_CHANGED, "tool results are rendered in the order of the calls")
    if reading.in_order is None and len(prompt.images) > 1 and _has_tool_results(prompt):
        raise LayoutError(Reason.ORDER_UNKNOWN, "tool results with several images, and a template that hides places")
    if reading.text and "\0" in reading.text:
        raise LayoutError(Reason.NUL_IN_PROMPT, f"at character {reading.text.index(chr(0))}")


def _has_tool_results(prompt: Prompt) -> bool:
    return prompt.messages is not None and any(entry.fields["role"] == "tool" for entry in prompt.messages.entries)


def _sizes(image: Image, engine: Engine | None) -> tuple[Size, ...]:
    if image.turn in ("none", "turned") or (image.turn == "jpeg" and engine == "vllm"):
        return (image.displayed,)
    return (image.displayed, image.stored)


def _runs(expansion: Expansion, counts: Sequence[int], identities: Sequence[Identity]) -> tuple[MediaRun, ...]:
    return tuple(
        MediaRun(start, count, identity.identifier, identity.hash64)
        for start, count, identity in zip(expansion.starts, counts, identities, strict=True)
    )


def _exact_plan(head: Head, tokens: list[int], runs: Sequence[MediaRun], segments: Sequence[Segment]) -> ExactPlan:
    """Token ids are below 2^32 here: a tokenizer's, or checked when the request was read."""
    plan = ExactPlan(
        model=head.model, tokens=pack_tokens(tokens), media=tuple(runs), lora_name=head.lora_name,
        cache_salt=head.cache_salt, segments=tuple(segments),
    )  # fmt: skip
    validate(plan)
    return plan


def _text_plan(head: Head, text: str, error: PlanningError) -> Planned:
    plan = TextPlan(
        model=head.model, text=text, reason=error.reason.value, detail=error.detail, lora_name=head.lora_name,
        cache_salt=head.cache_salt,
    )  # fmt: skip
    return Planned(plan=plan, reason=error.reason, detail=error.detail)
