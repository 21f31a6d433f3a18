"""The polling source against a real loopback server: drained once, per rank, with gaps, restarts, errors and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvd.client import EmbeddedKvd, StreamInfo, WorkerSpec, exact_plan
from kvd.config import Config, IngestSettings
from kvd.core.signals import Apply, Connected, Disconnected, Message, Reset
from kvd.core.stream import Policy, Stream
from protocols.events import Batch
from tests.kit.http import HttpEngine, TrtllmEngine, created, moved, removed_blocks, stored_prompt
from tests.kit.waiting import eventually_async

PROMPT = list(range(100, 116))
QUICK = IngestSettings(poll_interval=0.01, poll_timeout=0.5, poll_backoff=0.05, connect_timeout=0.3)


class Watched:
    """A daemon in this process that polls one engine."""

    def __init__(self, kvd: EmbeddedKvd) -> None:
        self.kvd = kvd

    async def stream(self, rank: int = 0) -> StreamInfo:
        return next(info for info in await self.kvd.streams() if info.rank == rank)

    async def until(self, condition: Callable[[StreamInfo], bool], rank: int = 0) -> StreamInfo:
        async def holds() -> StreamInfo | None:
            info = await self.stream(rank)
            return info if condition(info) else None

        found = await eventually_async(holds)
        assert found is not None
        return found

    async def at(self, seq: int, rank: int = 0) -> StreamInfo:
        return await self.until(lambda info: info.last_seq == seq, rank)

    async def matched(self, tokens: list[int], rank: int = 0) -> int:
        answer = await self.kvd.score(exact_plan("m", tokens))
        return next(score.matched_tokens for score in answer.workers if score.rank == rank)


@contextlib.asynccontextmanager
async def watching(engine: HttpEngine, settings: IngestSettings = QUICK, **fields: Any) -> AsyncIterator[Watched]:
    spec = WorkerSpec(name="t", model="m", endpoint=engine.url, source="trtllm-http", **fields)
    async with EmbeddedKvd(workers=[spec], config=Config(ingest=settings)) as kvd:
        yield Watched(kvd)


async def test_events_are_drained_and_scored() -> None:
    with TrtllmEngine() as engine:
        engine.emit(created())
        engine.emit(stored_prompt(PROMPT))
        async with watching(engine) as watched:
            info = await watched.at(1)
            assert (info.state, info.trust.state, info.block_sizes) == ("live", "exact", [4])
            assert await watched.matched(PROMPT) == 16
            await watched.at(engine.emit(removed_blocks(4)))
            assert await watched.matched(PROMPT) == 12
            await watched.at(engine.emit(moved(3, 0, 1)))
            answer = (await watched.kvd.score(exact_plan("m", PROMPT))).workers[0]
            assert (answer.matched_tokens, answer.tier_tokens["host"]) == (8, 12)
            assert [diagnosis.findings for diagnosis in await watched.kvd.diagnose("t")] == [[]]


async def test_one_url_serves_all_ranks() -> None:
    with TrtllmEngine() as engine:
        for rank in (0, 1):
            engine.emit(created(), rank=rank)
        engine.emit(stored_prompt(PROMPT), rank=1)
        engine.emit(stored_prompt(PROMPT[:8]), rank=0)
        engine.emit(stored_prompt(PROMPT), rank=7)  # nobody registered it
        async with watching(engine, ranks=2) as watched:
            await watched.at(1, rank=0)
            await watched.at(1, rank=1)
            assert (await watched.matched(PROMPT, 0), await watched.matched(PROMPT, 1)) == (8, 16)
            await watched.until(lambda info: info.counters.get("rank_mismatch") == 1)
            engine.emit(created())  # without a rank, where there are two
            await watched.until(lambda info: info.counters.get("rank_missing") == 1)


async def test_a_gap_in_the_ids_drops_what_that_rank_held() -> None:
    with TrtllmEngine() as engine:
        for rank in (0, 1):
            engine.emit(created(), rank=rank)
            engine.emit(stored_prompt(PROMPT), rank=rank)
        async with watching(engine, ranks=2) as watched:
            await watched.at(1, rank=1)
            engine._ids[0] += 3  # the buffer overflowed; a removal may have been among the lost
            last = engine.emit(stored_prompt(PROMPT[:4], first=50), rank=0)
            info = await watched.at(last)
            assert (info.state, info.trust.state, info.trust.reason) == ("incomplete", "incomplete", "buffer_overflow")
            assert (info.trust.missing, info.trust.since_seq) == (3, 2)
            assert (await watched.matched(PROMPT, 0), await watched.matched(PROMPT, 1)) == (4, 16)


async def test_the_engine_s_buffer_before_kvd_came_is_said_to_be_missing() -> None:
    with TrtllmEngine(buffer=2) as engine:
        for _ in range(5):
            engine.emit(created())
        engine.emit(stored_prompt(PROMPT))
        async with watching(engine) as watched:
            info = await watched.at(5)
            assert (info.trust.state, info.trust.missing) == ("incomplete", 4)
            assert await watched.matched(PROMPT) == 16


async def test_ids_that_go_down_are_another_lifetime() -> None:
    with TrtllmEngine() as engine:
        engine.emit(created())
        engine.emit(stored_prompt(PROMPT))
        async with watching(engine) as watched:
            await watched.at(1)
            engine.restart()
            engine.emit(created())  # byte for byte what the first process began with
            info = await watched.until(lambda info: info.lifetime == 1)
            assert (info.last_seq, info.trust.state) == (0, "exact")
            assert await watched.matched(PROMPT) == 0
            await watched.at(engine.emit(stored_prompt(PROMPT[:8])))
            assert await watched.matched(PROMPT) == 8


async def test_an_engine_that_goes_and_comes_back_is_the_same_if_its_ids_go_on() -> None:
    with TrtllmEngine() as engine:
        engine.emit(created())
        engine.emit(stored_prompt(PROMPT))
        async with watching(engine) as watched:
            await watched.at(1)
            engine.stop()
            info = await watched.until(lambda info: info.state == "silent")
            assert info.trust.state == "stale"
            engine.emit(removed_blocks(4))
            engine.start()
            info = await watched.at(2)
            assert (info.trust.state, info.lifetime) == ("exact", 0)
            assert await watched.matched(PROMPT) == 12


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, {"detail": "no"}), (404, {}), (307, {}), (200, {"no": "list"}), (200, b"[{"), (200, b"[" * 4000),
        (200, b"x" * 70_000), (204, b""),
    ],
)  # fmt: skip
async def test_answers_that_are_no_events_are_survived(status: int, body: Any) -> None:
    with TrtllmEngine() as engine:
        engine.emit(created())
        settings = IngestSettings(poll_interval=0.01, poll_timeout=0.5, poll_backoff=0.02, max_message_bytes=65_536)
        async with watching(engine, settings) as watched:
            await watched.at(0)
            engine.failing = (status, body)
            info = await watched.until(lambda info: info.counters.get("polls_failed", 0) > 1)
            assert info.state in ("connecting", "silent")
            engine.failing = None
            info = await watched.at(engine.emit(stored_prompt(PROMPT)))
            assert info.trust.state == "exact"
            assert await watched.matched(PROMPT) == 16


async def test_one_bad_event_costs_one_event_and_trust() -> None:
    with TrtllmEngine() as engine:
        engine.emit(created())
        engine.emit({"type": "stored", "blocks": "none"})
        engine.emit(stored_prompt(PROMPT))
        async with watching(engine) as watched:
            info = await watched.at(2)
            assert (info.trust.state, info.trust.reason, info.trust.missing) == ("incomplete", "field", 1)
            assert await watched.matched(PROMPT) == 16
            engine.failing = (200, [{"no": "id"}, 7])
            await watched.until(lambda info: info.counters.get("events_event_decode", 0) >= 2)


async def test_an_engine_that_does_not_answer_in_time_is_lost() -> None:
    release = threading.Event()

    def hang(body: bytes) -> tuple[int, Any]:
        del body
        release.wait(10)
        return 200, []

    with HttpEngine({"POST /kv_cache_events": hang}) as engine:
        settings = IngestSettings(poll_timeout=0.1, poll_interval=0.01, poll_backoff=0.02)
        try:
            async with watching(engine, settings) as watched:
                await watched.until(lambda info: info.counters.get("polls_failed", 0) > 0)
        finally:
            release.set()


async def test_compressed_answers_are_refused_unread() -> None:
    answers = {"POST /kv_cache_events": (200, b"\x1f\x8b")}
    with HttpEngine(answers, headers={"content-encoding": "gzip"}) as engine:  # type: ignore[arg-type]
        async with watching(engine) as watched:
            await watched.until(lambda info: info.counters.get("polls_failed", 0) > 0)


async def test_a_removed_worker_is_no_longer_polled() -> None:
    with TrtllmEngine() as engine:
        engine.emit(created())
        async with watching(engine, ranks=2) as watched:
            await watched.until(lambda info: info.state == "live")
            await watched.kvd.remove_worker("t")
            polls = [task for task in asyncio.all_tasks() if task.get_name().startswith("poll ")]
            if polls:
                await asyncio.wait(polls, timeout=5)
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("poll ")]
            await watched.kvd.add_worker(
                WorkerSpec(name="t", model="m", endpoint=engine.url + "/", source="trtllm-http")
            )
            await watched.at(engine.emit(created()))


# --- the policy ------------------------------------------------------------------------------------------------------


def _drained() -> Stream:
    stream = Stream(0.0, replayable=False, policy=Policy(drained=True))
    stream.handle(Connected(), 0.0)
    return stream


def _message(seq: int, digest: int = 0) -> Message:
    batch = Batch(seq=seq, topic=None, ts=None, rank=None, events=())
    return Message(seq=seq, digest=digest, batch=batch)


def test_a_drained_stream_takes_no_message_for_a_repeat() -> None:
    stream = _drained()
    assert stream.handle(_message(0), 0.0) == [Apply(_message(0))]
    effects = stream.handle(_message(0), 0.0)
    assert [type(effect) for effect in effects] == [Reset, Apply]
    assert stream.lifetime == 1


def test_a_drained_stream_drops_what_is_older_than_a_hole() -> None:
    stream = _drained()
    stream.handle(_message(0), 0.0)
    effects = stream.handle(_message(4), 0.0)
    assert effects == [Reset("buffer overflow"), Apply(_message(4))]
    assert stream.trust(0.0).missing == 3


def test_a_drained_stream_is_proven_by_the_sequence_that_goes_on() -> None:
    stream = _drained()
    stream.handle(_message(0), 0.0)
    stream.handle(Disconnected(), 1.0)
    assert stream.trust(1.0).state == "stale"
    stream.handle(Connected(), 2.0)
    stream.handle(_message(1), 2.0)
    assert stream.trust(2.0).state == "exact"
