"""Which callback blocked the loop, judged against this machine at this moment.

Two ways to block: working too long, measured as the thread's CPU time, which no other process can lengthen; and
waiting in a system call, measured as time on the clock beyond what a thread that only sleeps was late by in the same
run. The unit of both is a busy loop timed in the run, so that no bound is absolute.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from types import TracebackType
from typing import NamedTuple, Self


class Slowest(NamedTuple):
    """A callback's cost in seconds: CPU of its thread, and time on the clock."""

    cpu: float
    wall: float
    name: str

    @property
    def wait(self) -> float:
        """Seconds on the clock in which its thread did nothing."""
        return self.wall - self.cpu


def busy_loop() -> int:
    """A fixed piece of work in plain Python, about a millisecond on today's machines."""
    total = 0
    for number in range(20_000):
        total ^= number * 7
    return total


def calibrate() -> float:
    """CPU seconds of the busy loop: the best of several, so that nothing else is in it."""
    times = []
    for _ in range(9):
        began = time.thread_time()
        busy_loop()
        times.append(time.thread_time() - began)
    return min(times)


class LoopWatch:
    """Wraps every callback of asyncio while it is entered."""

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()  # as the daemon does: the tests' own heap is not walked in the middle of a callback
        self.unit = calibrate()
        self.callbacks = 0
        self.lateness = 0.0
        self.by_cpu = self.by_wait = Slowest(0.0, 0.0, "none")
        self._run = asyncio.events.Handle._run
        self._thread = threading.get_ident()
        self._stop = threading.Event()
        self._sleeper = threading.Thread(target=self._sleep, daemon=True)
        self._sleeper.start()
        watch, run = self, self._run

        def timed(handle: asyncio.Handle) -> None:
            cpu, wall = time.thread_time(), time.perf_counter()
            run(handle)
            watch._note(handle, time.thread_time() - cpu, time.perf_counter() - wall)

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.events.Handle._run = self._run  # type: ignore[method-assign]
        gc.unfreeze()
        self._stop.set()
        self._sleeper.join()

    def _sleep(self) -> None:
        """How late a thread is that does nothing: what the machine takes from everybody."""
        while not self._stop.is_set():
            began = time.perf_counter()
            self._stop.wait(0.002)
            self.lateness = max(self.lateness, time.perf_counter() - began - 0.002)

    def _note(self, handle: asyncio.Handle, cpu: float, wall: float) -> None:
        if threading.get_ident() != self._thread:
            return
        self.callbacks += 1
        if cpu > self.by_cpu.cpu:
            self.by_cpu = Slowest(cpu, wall, repr(handle))
        if wall - cpu > self.by_wait.wait:
            self.by_wait = Slowest(cpu, wall, repr(handle))

    def bounds(self, units: float = 60.0) -> tuple[float, float]:
        """Seconds a callback may work, and may wait. ``units``: how many busy loops one callback may take."""
        work = units * max(self.unit, calibrate())
        return work, work + 3 * self.lateness

    def faults(self, units: float = 60.0) -> list[str]:
        """The callbacks that blocked, in words. ``units``: how many busy loops one callback may take."""
        work, wait = self.bounds(units)
        found = []
        if self.by_cpu.cpu > work:
            found.append(f"{self.by_cpu} worked longer than {work:.4f} s")
        if self.by_wait.wait > wait:
            found.append(f"{self.by_wait} waited longer than {wait:.4f} s, the machine being late by {self.lateness}")
        return found

    def assert_free(self, units: float = 60.0) -> None:
        """No callback blocked the loop."""
        assert self.callbacks, "nothing ran on a loop"
        found = self.faults(units)
        assert not found, "\n".join(found)
