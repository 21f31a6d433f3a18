"""What ``kvd plan`` prints, as plain values; the command line itself is elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from planner.checkpoint import open_checkpoint
from planner.errors import PlanningError
from planner.families import ImageFamily, family_for
from planner.plan import Planned
from planner.prompt import Codec
from protocols.keys import plan_keys
from protocols.media import Scheme
from protocols.plan import ExactPlan, TextPlan, basis_of, token_count

_SIZE = re.compile(r"(-?\d{1,12})[xX×](-?\d{1,12})")


def image_tokens(model: str | Path, sizes: Iterable[str], *, revision: str | None = None) -> dict[str, int | str]:
    """Tokens of images of these sizes (``WIDTHxHEIGHT``): a count each, or the text of why there is none.

    Raises :class:`PlanningError` where the checkpoint itself has no counts.
    """
    checkpoint = open_checkpoint(model, revision)
    family = family_for(checkpoint, Codec.load(checkpoint.directory).encode)
    return {size: _count(family, size) for size in sizes}


def _count(family: ImageFamily, size: str) -> int | str:
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        return f"{size!r:.40} is not WIDTHxHEIGHT"
    try:
        return family.count_images([(int(found[1]), int(found[2]))])[0]
    except PlanningError as error:
        return error.detail


def describe_plan(planned: Planned, keys_for: Sequence[tuple[int, Scheme]] = ()) -> dict[str, Any]:
    """A plan as JSON-able values: basis, reason, tokens, images, segments, and the keys for (block size, scheme) pairs.

    Keys are 16 hex digits; a text plan has none.
    """
    plan = planned.plan
    out: dict[str, Any] = {
        "basis": basis_of(plan), "model": plan.model, "lora": plan.lora_name, "cache_salt": plan.cache_salt,
        "reason": None, "detail": planned.detail or None, "prompt_tokens": token_count(plan),
        "counts": list(planned.counts), "images": _images(planned),
        "segments": [_segment(segment) for segment in planned.segments],
    }  # fmt: skip
    if planned.reason is not None:
        out |= {"reason": planned.reason.value, "explanation": planned.reason.sentence}
    if isinstance(plan, TextPlan):
        return out | {"text_bytes": len(plan.text.encode())}
    if planned.engine_extras is not None:
        extras = planned.engine_extras
        out["engine_extras"] = {"uuids": list(extras.uuids), "mm_hashes": list(extras.mm_hashes)}
    if keys_for:
        out["keys"] = [
            {"block_size": size, "scheme": scheme, "keys": [f"{key:016x}" for key in plan_keys(plan, size, scheme)]}
            for size, scheme in keys_for
        ]
    return out


def _images(planned: Planned) -> list[dict[str, Any]]:
    if not isinstance(planned.plan, ExactPlan):
        return []
    return [
        {"start": run.start, "tokens": count, "width": width, "height": height, "identifier": run.identifier,
         "hash": None if run.hash64 is None else f"{run.hash64:016x}"}
        for run, count, (width, height) in zip(planned.plan.media, planned.counts, planned.sizes, strict=True)
    ]  # fmt: skip


def _segment(segment: Any) -> dict[str, Any]:
    return {"start": segment.start, "message": segment.message, "kind": segment.kind}
