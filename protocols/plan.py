"""A plan: what a client knows about a prompt before a worker has seen it.

Exactly one of three, never a mixture: :class:`ExactPlan` (the whole routing sequence), :class:`PrefixPlan` (the tokens
before the first media item, and why no more), :class:`TextPlan` (rendered text only, and why). Token ids travel packed,
little-endian, u32 unless ``wide``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from protocols.errors import PlanError
from protocols.media import MediaRun
from protocols.tokens import UINT32_MAX, pack_tokens

Basis = Literal["exact", "prefix", "text"]
MAX_IDENTIFIER = 4096
_UINT64_MAX = (1 << 64) - 1


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a part of the request begins in the prompt, for explanations: message ``message``, kind of part."""

    start: int
    message: int
    kind: str


class ExactPlan(msgspec.Struct, frozen=True, kw_only=True, tag="exact", forbid_unknown_fields=True):
    """The whole prompt as the engine will hold it: token ids with media runs expanded."""

    model: str
    tokens: bytes
    wide: bool = False
    media: tuple[MediaRun, ...] = ()
    lora_name: str | None = None
    cache_salt: str | None = None
    segments: tuple[Segment, ...] = ()


class PrefixPlan(msgspec.Struct, frozen=True, kw_only=True, tag="prefix", forbid_unknown_fields=True):
    """The text tokens before the first media item's opening delimiter; exact as far as it goes."""

    model: str
    tokens: bytes
    reason: str
    detail: str = ""
    wide: bool = False
    lora_name: str | None = None
    cache_salt: str | None = None
    segments: tuple[Segment, ...] = ()


class TextPlan(msgspec.Struct, frozen=True, kw_only=True, tag="text", forbid_unknown_fields=True):
    """Rendered text without tokens: matched only against what was reported as routed, approximate."""

    model: str
    text: str
    reason: str
    detail: str = ""
    lora_name: str | None = None
    cache_salt: str | None = None


Plan = ExactPlan | PrefixPlan | TextPlan


def basis_of(plan: Plan) -> Basis:
    """What kind of keys the plan has."""
    if isinstance(plan, ExactPlan):
        return "exact"
    return "prefix" if isinstance(plan, PrefixPlan) else "text"


def token_count(plan: Plan) -> int:
    """The number of tokens the plan carries; 0 for text."""
    if isinstance(plan, TextPlan):
        return 0
    return len(plan.tokens) // (8 if plan.wide else 4)


def exact_plan(
    model: str,
    token_ids: Iterable[int],
    *,
    media: Iterable[MediaRun] = (),
    lora_name: str | None = None,
    cache_salt: str | None = None,
    segments: Iterable[Segment] = (),
) -> ExactPlan:
    """A validated plan from token ids (media already expanded). Raises :class:`PlanError`."""
    packed, wide = _pack(token_ids)
    plan = ExactPlan(
        model=model, tokens=packed, wide=wide, media=tuple(media), lora_name=lora_name or None,
        cache_salt=cache_salt or None, segments=tuple(segments),
    )  # fmt: skip
    validate(plan)
    return plan


def prefix_plan(
    model: str,
    token_ids: Iterable[int],
    reason: str,
    *,
    detail: str = "",
    lora_name: str | None = None,
    cache_salt: str | None = None,
    segments: Iterable[Segment] = (),
) -> PrefixPlan:
    """A validated plan of the text before the first media item. Raises :class:`PlanError`."""
    packed, wide = _pack(token_ids)
    plan = PrefixPlan(
        model=model, tokens=packed, wide=wide, reason=reason, detail=detail, lora_name=lora_name or None,
        cache_salt=cache_salt or None, segments=tuple(segments),
    )  # fmt: skip
    validate(plan)
    return plan


def validate(plan: Plan) -> None:
    """Check a plan that came from elsewhere. Raises :class:`PlanError` naming the value and the bound."""
    if not plan.model:
        raise PlanError("model is empty: name the model as the workers were registered with it")
    _validate_text("lora_name", plan.lora_name)
    _validate_text("cache_salt", plan.cache_salt)
    if isinstance(plan, TextPlan):
        _validate_text("text", plan.text)
        return
    width = 8 if plan.wide else 4
    if len(plan.tokens) % width:
        raise PlanError(f"tokens are {len(plan.tokens)} bytes, not a multiple of {width}: pack them as u{width * 8} LE")
    if isinstance(plan, ExactPlan):
        _validate_media(plan.media, len(plan.tokens) // width)


def _pack(token_ids: Iterable[int]) -> tuple[bytes, bool]:
    tokens = list(token_ids)
    if not all(type(token) is int for token in tokens):
        wrong = next(token for token in tokens if type(token) is not int)
        raise PlanError(f"token id {wrong!r:.40} is {type(wrong).__name__}: expected an integer")
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high > _UINT64_MAX:
        raise PlanError(f"token id {low if low < 0 else high} outside 0..2^64-1")
    wide = high > UINT32_MAX
    return pack_tokens(tokens, wide=wide), wide


def _validate_text(name: str, text: str | None) -> None:
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"{name} is not valid Unicode at position {error.start}: keys are made from UTF-8") from None


def _validate_media(media: Sequence[MediaRun], tokens: int) -> None:
    end = 0
    for i, run in enumerate(media):
        if run.count < 1:
            raise PlanError(f"media run {i} has count {run.count}: an item stands for 1 token or more")
        if run.start < end or run.end > tokens:
            raise PlanError(
                f"media run {i} covers [{run.start}, {run.end}): expected it within [{end}, {tokens}), in prompt order"
            )
        if run.hash64 is not None and not 0 <= run.hash64 <= _UINT64_MAX:
            raise PlanError(f"media run {i} has hash64 {run.hash64}: expected 0..2^64-1")
        if run.identifier is not None and len(run.identifier) > MAX_IDENTIFIER:
            raise PlanError(
                f"media run {i} has an identifier of {len(run.identifier)} characters, at most {MAX_IDENTIFIER}"
            )
        _validate_text(f"media run {i}'s identifier", run.identifier)
        end = run.end
