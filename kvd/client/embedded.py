"""kvd in the caller's own process: the same calls, the same index and streams, no daemon and no query socket."""

from __future__ import annotations

import importlib
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from kvd.client.calls import AsyncCalls
from protocols import query


class EmbeddedKvd(AsyncCalls):
    """``async with EmbeddedKvd(workers=[WorkerSpec(...)]) as kvd: answer = await kvd.score(plan)``.

    ``config``: a :class:`kvd.config.Config`; defaults where absent. The daemon's modules are loaded when it is entered,
    so that a process which only talks to a daemon does not load them.
    """

    def __init__(self, *, workers: list[query.WorkerSpec] | None = None, config: Any = None) -> None:
        self._workers = workers or []
        self._config = config
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        daemon = importlib.import_module("kvd.daemon")
        self._runtime = await self._stack.enter_async_context(daemon.runtime(self._config))
        try:
            for spec in self._workers:
                self._runtime.supervisor.add(spec)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def request(self, request: query.AnyRequest, timeout: float | None = None) -> query.AnyReply:
        """Answer one request in place; ``timeout`` has nothing to wait for."""
        del timeout
        reply: query.AnyReply = self._runtime.service.handle(request)
        return reply
