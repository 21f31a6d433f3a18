"""Nothing stays behind: workers that came and went, content that came and went; and nothing holds up the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvd.client import AsyncClient, Client, WorkerSpec, exact_plan
from kvd.config import Config, SnapshotSettings
from kvd.core.fleet import totals
from kvd.core.residency import Bounds
from kvd.daemon import Runtime, runtime
from kvd.ingest.feed import Feed
from kvd.ingest.zmq import ZmqTransport
from kvd.serve.zmq import QueryServer
from kvd.sockets import Source
from protocols import query
from tests.chaos.loopwatch import LoopWatch, busy_loop
from tests.kit.engine import Dialect, Engine, Sent
from tests.kit.faults import SlowClient
from tests.kit.memory import Line
from tests.kit.publisher import Publisher, chain_of, removed, stored
from tests.kit.waiting import eventually_async

JOINS = 2_000
PROMPT = list(range(100, 116))


# --- workers that come and go ----------------------------------------------------------------------------------------


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _living() -> Counter[str]:
    gc.collect()
    kinds = (Feed, ZmqTransport, Source)
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


async def _come_and_go(parts: Runtime, count: int, engine: Publisher) -> None:
    for number in range(count):
        endpoint = engine.endpoint if number % 10 == 0 else "tcp://127.0.0.1:1"
        replay = engine.replay if number % 10 == 0 else "tcp://127.0.0.1:1"
        spec = WorkerSpec(name=f"w{number}", model=f"m{number % 3}", endpoint=endpoint, replay=replay)
        parts.supervisor.add(spec)
        if number % 100 == 0:  # some stay long enough to hold blocks
            member = parts.fleet.members[spec.name, 0]
            await eventually_async(_async(lambda member=member: member.stream.state == "live"))
        parts.supervisor.remove(spec.name)
        if number % 20 == 0:
            await anyio.lowlevel.checkpoint()
    await eventually_async(_async(lambda: parts.fleet.sweep(1 << 20) and not parts.fleet.indexes))


def _async(condition: Callable[[], object]) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        return bool(condition())

    return ask


async def test_workers_that_left_leave_nothing_behind(loop_watch: LoopWatch) -> None:
    with Publisher() as engine:
        engine.publish(chain_of(PROMPT))
        async with runtime(Config()) as parts:
            await _come_and_go(parts, 200, engine)  # what is made once is made
            fds = await _closed()
            before = _living(), fds, threading.active_count(), len(asyncio.all_tasks())
            tracemalloc.start()
            start, _ = tracemalloc.get_traced_memory()
            await _come_and_go(parts, JOINS, engine)
            await _closed(fds)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - start
            tracemalloc.stop()
            assert (_living(), _open_fds(), threading.active_count(), len(asyncio.all_tasks())) == before
            assert totals(parts.fleet).blocks == totals(parts.fleet).nodes == 0
            assert not [*parts.supervisor.feeds, *parts.fleet.members, *parts.fleet.workers]
            assert not len(parts.fleet.routed)
            assert not parts.service.observed
            assert grown < 100 * JOINS, f"{grown} bytes stayed, {grown / JOINS:.0f} a worker"
    loop_watch.assert_free()


async def _closed(fds: int | None = None) -> int:
    """libzmq closes sockets on a thread of its own: wait until its descriptors are gone; how many are left."""
    seen = [-1]

    async def settled() -> bool:
        seen.append(_open_fds())
        await anyio.sleep(0.1)
        return seen[-1] == seen[-2] if fds is None else seen[-1] <= fds

    await eventually_async(settled)
    return seen[-1]


async def test_a_closed_runtime_leaves_no_descriptor_thread_or_task() -> None:
    async with runtime(Config()):
        pass  # imports and the loop's own resources
    before = _open_fds(), threading.active_count(), len(asyncio.all_tasks())
    with Publisher() as engine:
        for _ in range(5):
            async with runtime(Config()) as parts:
                parts.supervisor.add(WorkerSpec(name="w", model="m", endpoint=engine.endpoint, replay=engine.replay))
                await anyio.lowlevel.checkpoint()
    await eventually_async(_async(lambda: (_open_fds(), threading.active_count(), len(asyncio.all_tasks())) == before))


# --- content that comes and goes -------------------------------------------------------------------------------------


def _sizes(line: Line) -> tuple[int, int]:
    sizes = totals(line.fleet)
    return sizes.blocks, sizes.nodes


def test_suffixes_under_a_living_prefix_leave_nothing_behind() -> None:
    """A long prefix lives on while a hundred times as much comes and goes below it."""
    line = Line().connect()
    line.member.handle = line.member.index.add_rank(bounds=Bounds(remembered=50))
    prefix = list(range(400))
    line.publish(chain_of(prefix))
    for number in range(10_000):
        name = 1_000 + 2 * number
        line.publish(stored([name, name + 1], [number, 1, 2, 3, 4, 5, 6, 7], parent=100), removed([name + 1, name]))
        if number % 1_000 == 0:
            assert _sizes(line)[0] == 100
    blocks, nodes = _sizes(line)
    assert blocks == 100
    assert nodes <= 100 + 50, f"{nodes} nodes for 100 blocks and 50 remembered ones"
    assert line.score(prefix).matched_blocks == 100
    assert line.fleet.check() == []


def test_what_is_only_remembered_stops_growing() -> None:
    """Evicted content is remembered, for placeholders that name only a hash: up to its bound, and no further."""
    line = Line().connect()
    line.member.handle = line.member.index.add_rank(bounds=Bounds(remembered=4_096))
    bound, width, peak = 4_096, 512, 0
    for start in range(0, 3 * bound, width):
        hashes = range(start + 1, start + width + 1)
        tokens = [start + i // 4 for i in range(4 * width)]
        line.publish(stored(hashes, tokens), removed(hashes))
        peak = max(peak, _sizes(line)[1])
    assert _sizes(line)[0] == 0
    assert peak <= bound + width


def test_a_new_lifetime_leaves_nothing_of_the_old_one() -> None:
    line = Line().connect()
    for _ in range(50):
        line.publish(chain_of(PROMPT * 20), seq=0)
        line.publish(chain_of([7, *PROMPT] * 20, first_hash=5_000))
    while not line.fleet.sweep(100):
        assert line.fleet.check() == []
    blocks, nodes = _sizes(line)
    line.publish(chain_of(PROMPT * 20), seq=0)
    line.publish(chain_of([7, *PROMPT] * 20, first_hash=5_000))
    line.fleet.sweep(1 << 20)
    assert _sizes(line) == (blocks, nodes)


# --- the loop --------------------------------------------------------------------------------------------------------


async def test_the_detector_sees_work_and_waiting(loop_watch: LoopWatch) -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: [busy_loop() for _ in range(200)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "worked longer" in loop_watch.faults()[0]
    loop.call_soon(time.sleep, 2 * loop_watch.bounds()[1])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert any("waited longer" in fault for fault in loop_watch.faults())


@pytest.fixture
def traffic() -> list[tuple[list[int], Sent]]:
    """Prompts, and what an engine announces after each. Made before the watch begins: its heap is not the daemon's."""
    engine = Engine(Dialect.VLLM_MAP, blocks=3_000, block_size=16)
    traffic = []
    for number in range(300):
        prompt = [number % 7, *range(2_000), *range(number, number + 500)]
        engine.serve(prompt)
        engine.finish()
        sent = engine.step()
        assert sent is not None
        traffic.append((prompt, sent))
    return traffic


async def test_nothing_holds_up_the_loop_of_a_busy_daemon(
    traffic: list[tuple[list[int], Sent]], loop_watch: LoopWatch, tmp_path: Path
) -> None:
    """Full streams, big queries, snapshots, a worker with much to forget, a client that never reads: all at once."""
    config = Config(snapshot=SnapshotSettings(path=str(tmp_path / "kvd.snapshot"), interval=0.2))
    with Publisher() as publisher:
        async with runtime(config) as parts, Served(parts, tmp_path) as endpoint:
            spec = WorkerSpec(name="w", model="m", endpoint=publisher.endpoint, replay=publisher.replay)
            parts.supervisor.add(spec)
            with SlowClient(endpoint) as slow:
                slow.send(query.encode(query.ListWorkers(id=1)), 2_000)
                await anyio.to_thread.run_sync(_be_busy, endpoint, publisher, traffic)
                stream = parts.fleet.members["w", 0].stream
                await eventually_async(_async(lambda: stream.lifetime == 1))
            parts.supervisor.remove("w")
    loop_watch.assert_free()


class Served:
    """A query server for the runtime."""

    def __init__(self, parts: Runtime, directory: Path) -> None:
        self.server = QueryServer(parts.service, f"ipc://{directory}/kvd.sock", parts.clock)

    async def __aenter__(self) -> str:
        self.server.open()
        return self.server.endpoint

    async def __aexit__(self, *_: object) -> None:
        self.server.close()


def _be_busy(endpoint: str, publisher: Publisher, traffic: list[tuple[list[int], Sent]]) -> None:
    """Fill the cache and ask, from another thread: only the daemon's own work is on the loop."""
    with Client(endpoint) as client:
        for number, (prompt, sent) in enumerate(traffic):
            publisher.publish_payload(sent)
            if number % 3 == 0:
                assert client.score(exact_plan("m", prompt)).workers[0].worker == "w"
    publisher.restart()
    publisher.publish()


@pytest.mark.parametrize("times", [5_000])
async def test_a_client_that_never_reads_costs_nobody_else(tmp_path: Path, times: int) -> None:
    with Publisher() as engine:
        engine.publish(chain_of(PROMPT))
        async with runtime(Config()) as parts, Served(parts, tmp_path) as endpoint:
            parts.supervisor.add(WorkerSpec(name="w", model="m", endpoint=engine.endpoint, replay=engine.replay))
            with SlowClient(endpoint) as slow:
                slow.send(query.encode(query.ListStreams(id=1)), times)
                async with AsyncClient(endpoint) as client:
                    member = parts.fleet.members["w", 0]
                    await eventually_async(_async(lambda: member.stream.trust(parts.clock()).state == "exact"))
                    answers = [await client.score(exact_plan("m", PROMPT)) for _ in range(50)]
                    assert {answer.workers[0].matched_tokens for answer in answers} == {16}
                    await eventually_async(_async(lambda: bool(slow.received())))
