"""Waiting for what another process or socket will show: asked again until true, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], timeout: float = 45.0) -> T:
    """The first true value of the condition."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s; last: {value!r}"
        time.sleep(0.01)
    return value


async def eventually_async(condition: Callable[[], Awaitable[T]], timeout: float = 45.0) -> T:
    """The same, while the loop runs on."""
    deadline = time.monotonic() + timeout
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s; last: {value!r}"
        await asyncio.sleep(0.01)
    return value
