"""Ratios of two ways to do the same, measured in turn so that a noisy machine disturbs both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """``ratio``: median of the pairs; ``low``, ``high``: their quartiles; ``must``: the bound, in words."""

    name: str
    ratio: float
    low: float
    high: float
    must: str
    meets_must: bool


def ratios(one: Callable[[], object], other: Callable[[], object], *, pairs: int) -> list[float]:
    """``one``'s time over ``other``'s, pair by pair, after one unmeasured run of each."""
    one()
    other()
    return sorted(_seconds(one) / _seconds(other) for _ in range(pairs))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def row(name: str, measured: list[float], *, at_most: float) -> Row:
    """A row of ratios that must not exceed a bound."""
    low, ratio, high = statistics.quantiles(measured, n=4)
    return Row(name=name, ratio=ratio, low=low, high=high, must=f"at most {at_most:g}", meets_must=ratio <= at_most)
