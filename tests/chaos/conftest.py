"""Fixtures of the chaos tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.loopwatch import LoopWatch


@pytest.fixture
def loop_watch() -> Iterator[LoopWatch]:
    """Measures every callback of the loops that run in the test; ``assert_free`` judges them."""
    with LoopWatch() as watch:
        yield watch
