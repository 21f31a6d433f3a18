"""How late the loop is: what a query or an engine's message had to wait for beyond its turn."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0


class LoopLag:
    """The lateness of something due at regular times, over the last minute."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()

    def note(self, now: float, due: float) -> None:
        """Something due at ``due`` ran at ``now``. Only falling maxima are kept. O(1) on average."""
        late = max(0.0, now - due)
        while self._late and self._late[-1][1] <= late:
            self._late.pop()
        self._late.append((now, late))
        self._forget(now)

    def worst(self, now: float) -> float:
        """The greatest lateness of the last minute, in seconds."""
        self._forget(now)
        return self._late[0][1] if self._late else 0.0

    def _forget(self, now: float) -> None:
        while self._late and self._late[0][0] < now - WINDOW_SECONDS:
            self._late.popleft()
