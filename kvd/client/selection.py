"""A small helper over a reply: tier credits applied, nothing more. Choosing a worker remains the caller's policy."""

from __future__ import annotations

import msgspec

from protocols.query import TIER_NAMES, Answer, WorkerScore


class TierCredits(msgspec.Struct, frozen=True, kw_only=True):
    """What a matched token is worth by where it is, relative to the device."""

    device: float = 1.0
    host: float = 0.75
    disk: float = 0.25
    external: float = 0.25


class Choice(msgspec.Struct, frozen=True):
    """A worker and its credit in device tokens."""

    worker: str
    rank: int
    credit: float


def credit(score: WorkerScore, credits: TierCredits) -> float:
    """Tokens weighted by tier: each tier's own share of the cumulative counts; of the device, what is usable."""
    total, below = score.usable_tokens * credits.device, score.tier_tokens["device"]
    for name in TIER_NAMES[1:]:
        tokens = score.tier_tokens[name]
        total += (tokens - below) * getattr(credits, name)
        below = tokens
    return total


def select(answer: Answer, credits: TierCredits | None = None) -> Choice | None:
    """The worker with the most credit, the first added among equals; None if nobody has any."""
    weights = credits or TierCredits()
    choices = [Choice(score.worker, score.rank, credit(score, weights)) for score in answer.workers]
    best = max(choices, key=lambda choice: choice.credit, default=None)
    return best if best is not None and best.credit > 0 else None
