"""The calls of every client, over one primitive: send a request, get its reply.

Each call exists twice, awaited and blocking, and both are one line over the same request and the same reading of the
reply, so that no client can drift from another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from protocols import query
from protocols.errors import RequestError
from protocols.plan import Plan
from protocols.query import Answer, Checked, Diagnosis, StreamInfo, Welcome, WorkerInfo, WorkerSpec

R = TypeVar("R", bound=query.Reply)


def read(reply: query.AnyReply, kind: type[R]) -> R:
    """The reply if it is what was asked for. Raises :class:`RequestError` for an Error."""
    if isinstance(reply, query.Error):
        raise RequestError(reply.code, reply.message, retriable=reply.retriable)
    if not isinstance(reply, kind):
        raise RequestError("unexpected_reply", f"{type(reply).__name__} where {kind.__name__} was expected")
    return reply


class AsyncCalls:
    """Calls to await. ``timeout`` is in seconds; every call raises RequestError, Unreachable or PlanError."""

    @abstractmethod
    async def request(self, request: query.AnyRequest, timeout: float | None = None) -> query.AnyReply:
        """Send one request (its id is assigned here) and wait for its reply."""

    async def hello(self) -> Welcome:
        """Who answers, its limits, its models."""
        return read(await self.request(query.Hello(id=0, client="kvd")), Welcome)

    async def score(self, plan: Plan, *, workers: Sequence[str] | None = None, timeout: float | None = None) -> Answer:
        """One plan against every worker of its model, or the named ones."""
        return (await self.score_many([plan], workers=workers, timeout=timeout))[0]

    async def score_many(
        self, plans: Sequence[Plan], *, workers: Sequence[str] | None = None, timeout: float | None = None
    ) -> list[Answer]:
        """Several plans in one message."""
        return read(await self.request(_score(plans, workers), timeout), query.Scores).answers

    async def score_keys(
        self, model: str, keys: bytes, block_size: int, *, workers: Sequence[str] | None = None
    ) -> Answer:
        """Block keys computed elsewhere: packed u64 little-endian."""
        return read(await self.request(_score_keys(model, keys, block_size, workers)), query.Scores).answers[0]

    async def routed(self, plan: Plan, worker: str, *, rank: int = 0, ttl_ms: int | None = None) -> None:
        """Report where a request was sent."""
        read(await self.request(query.Routed(id=0, plan=plan, worker=worker, rank=rank, ttl_ms=ttl_ms)), query.Ok)

    async def observed(self, worker: str, predicted_tokens: int, cached_tokens: int) -> None:
        """Report what the engine then said it had cached."""
        read(await self.request(_observed(worker, predicted_tokens, cached_tokens)), query.Ok)

    async def add_worker(self, spec: WorkerSpec) -> None:
        """Watch a worker."""
        read(await self.request(query.AddWorker(id=0, worker=spec)), query.Ok)

    async def remove_worker(self, name: str) -> None:
        """Stop watching a worker and forget what it held."""
        read(await self.request(query.RemoveWorker(id=0, name=name)), query.Ok)

    async def workers(self) -> list[WorkerInfo]:
        """All workers with their streams."""
        return read(await self.request(query.ListWorkers(id=0)), query.Workers).workers

    async def streams(self, worker: str | None = None) -> list[StreamInfo]:
        """All streams, or one worker's."""
        return read(await self.request(query.ListStreams(id=0, worker=worker)), query.Streams).streams

    async def diagnose(self, worker: str) -> list[Diagnosis]:
        """What is known to be wrong with a worker, for each of its ranks."""
        return read(await self.request(query.Diagnose(id=0, worker=worker)), query.Diagnosed).diagnoses

    async def check(self) -> Checked:
        """Assert every invariant of the live index."""
        return read(await self.request(query.Check(id=0)), Checked)


class BlockingCalls:
    """The same calls, blocking."""

    @abstractmethod
    def request(self, request: query.AnyRequest, timeout: float | None = None) -> query.AnyReply:
        """Send one request (its id is assigned here) and wait for its reply."""

    def hello(self) -> Welcome:
        """Who answers, its limits, its models."""
        return read(self.request(query.Hello(id=0, client="kvd")), Welcome)

    def score(self, plan: Plan, *, workers: Sequence[str] | None = None, timeout: float | None = None) -> Answer:
        """One plan against every worker of its model, or the named ones."""
        return self.score_many([plan], workers=workers, timeout=timeout)[0]

    def score_many(
        self, plans: Sequence[Plan], *, workers: Sequence[str] | None = None, timeout: float | None = None
    ) -> list[Answer]:
        """Several plans in one message."""
        return read(self.request(_score(plans, workers), timeout), query.Scores).answers

    def score_keys(self, model: str, keys: bytes, block_size: int, *, workers: Sequence[str] | None = None) -> Answer:
        """Block keys computed elsewhere: packed u64 little-endian."""
        return read(self.request(_score_keys(model, keys, block_size, workers)), query.Scores).answers[0]

    def routed(self, plan: Plan, worker: str, *, rank: int = 0, ttl_ms: int | None = None) -> None:
        """Report where a request was sent."""
        read(self.request(query.Routed(id=0, plan=plan, worker=worker, rank=rank, ttl_ms=ttl_ms)), query.Ok)

    def observed(self, worker: str, predicted_tokens: int, cached_tokens: int) -> None:
        """Report what the engine then said it had cached."""
        read(self.request(_observed(worker, predicted_tokens, cached_tokens)), query.Ok)

    def add_worker(self, spec: WorkerSpec) -> None:
        """Watch a worker."""
        read(self.request(query.AddWorker(id=0, worker=spec)), query.Ok)

    def remove_worker(self, name: str) -> None:
        """Stop watching a worker and forget what it held."""
        read(self.request(query.RemoveWorker(id=0, name=name)), query.Ok)

    def workers(self) -> list[WorkerInfo]:
        """All workers with their streams."""
        return read(self.request(query.ListWorkers(id=0)), query.Workers).workers

    def streams(self, worker: str | None = None) -> list[StreamInfo]:
        """All streams, or one worker's."""
        return read(self.request(query.ListStreams(id=0, worker=worker)), query.Streams).streams

    def diagnose(self, worker: str) -> list[Diagnosis]:
        """What is known to be wrong with a worker, for each of its ranks."""
        return read(self.request(query.Diagnose(id=0, worker=worker)), query.Diagnosed).diagnoses

    def check(self) -> Checked:
        """Assert every invariant of the live index."""
        return read(self.request(query.Check(id=0)), Checked)


def _score(plans: Sequence[Plan], workers: Sequence[str] | None) -> query.Score:
    return query.Score(id=0, plans=list(plans), workers=None if workers is None else list(workers))


def _score_keys(model: str, keys: bytes, block_size: int, workers: Sequence[str] | None) -> query.ScoreKeys:
    names = None if workers is None else list(workers)
    return query.ScoreKeys(id=0, model=model, keys=keys, block_size=block_size, workers=names)


def _observed(worker: str, predicted_tokens: int, cached_tokens: int) -> query.Observed:
    return query.Observed(id=0, worker=worker, predicted_tokens=predicted_tokens, cached_tokens=cached_tokens)
