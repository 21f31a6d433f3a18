"""What planning costs beside tokenizing, which any client of an engine does anyway."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image

from bench.ratio import Row, ratios, row
from planner.checkpoint import open_checkpoint
from planner.plan import Planner
from planner.prompt import Codec
from protocols.plan import ExactPlan, token_count

CHECKPOINTS = Path(__file__).parents[1] / "tests" / "fixtures" / "glm"
TOKENS = 8192


def measure(pairs: int = 15) -> list[Row]:
    """Planning a prompt of 8,192 tokens with 4 images against rendering nothing and tokenizing its text alone."""
    rows = []
    for name, checkpoint in (("byte-level tokenizer", CHECKPOINTS), ("BPE", CHECKPOINTS / "models" / "tiny-glm5")):
        planner = Planner.from_pretrained(checkpoint)
        codec = Codec.load(open_checkpoint(checkpoint).directory)
        text, body = _request(planner)
        measured = ratios(lambda: planner.prepare(body), lambda: codec.encode(text), pairs=pairs)  # noqa: B023
        rows.append(row(f"plan 8,192 tokens with 4 images / tokenize, {name}", measured, at_most=3))
    return rows


def _request(planner: Planner) -> tuple[str, dict[str, Any]]:
    """Text and request whose exact plan has about 8,192 tokens, a fifth of them images."""
    words = "the quick brown fox jumps over the lazy dog and then some "
    images = [_picture(seed) for seed in range(4)]
    text = words
    while True:
        parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]}
        plan = planner.plan(body)
        assert isinstance(plan, ExactPlan), plan.reason
        missing = TOKENS - token_count(plan)
        if missing <= len(words):
            return text, body
        text += words * (missing // len(words))


def _picture(seed: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (560, 560), (seed * 60, 80, 120)).save(file, "PNG")
    return file.getvalue()
