"""One row of a comparison: both sides' cost, and how much less kvd's is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """``ratio``: the other side's cost over kvd's, the median of pairs measured in turn; ``low``, ``high``: quartiles.

    ``own``, ``other``: medians in ``unit``. ``must``, ``aim``: the ratio that is asked for; None where none is.
    """

    name: str
    ratio: float
    low: float
    high: float
    own: float
    other: float
    unit: str
    must: float | None = None
    aim: float | None = None
    meets_must: bool | None = None


def figure(
    name: str, both: Sequence[tuple[float, float]], unit: str, *, must: float | None = None, aim: float | None = None
) -> Figure:
    """A row from pairs of (own, other) costs."""
    found = sorted(other / own for own, other in both)
    low, ratio, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return Figure(
        name=name, ratio=ratio, low=low, high=high, unit=unit, own=statistics.median(own for own, _ in both),
        other=statistics.median(other for _, other in both), must=must, aim=aim,
        meets_must=None if must is None else ratio >= must,
    )  # fmt: skip


def text(rows: Sequence[Figure]) -> str:
    """Rows as lines."""
    lines = []
    for row in rows:
        asked = "" if row.must is None or row.aim is None else f"; must {row.must:g}, aim {row.aim:g}"
        missed = ": MISSED" if row.meets_must is False else ""
        lines.append(
            f"{row.name}: {row.ratio:.1f}x ({row.low:.1f}–{row.high:.1f}), "
            f"{row.own:.3g} against {row.other:.3g} {row.unit}{asked}{missed}\n"
        )
    return "".join(lines)
