"""How often an engine is asked that does not publish by itself."""

from __future__ import annotations

import msgspec


class PollOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between two polls, for one whole poll, and the longest wait after failures."""

    poll_interval: float = 0.25
    poll_timeout: float = 10.0
    poll_backoff: float = 10.0
