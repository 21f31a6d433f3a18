"""The loop's lateness: the greatest of the last minute."""

from __future__ import annotations

from kvd.serve.lag import LoopLag


def test_the_greatest_lateness_of_the_last_minute_is_told() -> None:
    lag = LoopLag()
    assert lag.worst(0.0) == 0.0
    for now, late in ((1.0, 0.5), (2.0, 0.25), (3.0, 0.125), (50.0, 0.25)):
        lag.note(now, now - late)
    assert lag.worst(60.0) == 0.5
    assert lag.worst(61.5) == 0.25
    assert lag.worst(109.0) == 0.25
    assert lag.worst(111.0) == 0.0


def test_being_early_is_not_late() -> None:
    lag = LoopLag()
    lag.note(1.0, 2.0)
    assert lag.worst(1.0) == 0.0


def test_what_is_kept_is_bounded_by_falling_maxima() -> None:
    lag = LoopLag()
    for tick in range(1000):
        lag.note(tick * 0.01, tick * 0.01 - tick * 1e-6)
    assert len(lag._late) == 1
