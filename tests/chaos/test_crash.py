"""``kill -9`` at any moment of snapshotting and ingest: the next daemon is never wrong while it says ``exact``, and
then it knows all. ``KVDTEST_CRASHES`` is the number of kills (default 12), ``KVDTEST_SEED`` their seed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvd.client import WorkerSpec
from kvd.config import Config, SnapshotSettings
from kvd.daemon import runtime
from kvd.snapshot import SnapshotWriter, read
from tests.chaos.world import claim, prompts
from tests.kit.daemon import Daemon
from tests.kit.engine import Dialect, Engine, Space, Tokens, Truth
from tests.kit.faults import FullDisk
from tests.kit.publisher import Publisher
from tests.kit.waiting import eventually

CRASHES = int(os.environ.get("KVDTEST_CRASHES", "12"))
SEED = int(os.environ.get("KVDTEST_SEED", "1").split(",")[0])


class Live:
    """A simulated engine on real sockets, that serves prompts as fast as it can while somebody lets it."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.name = f"w{number}"
        self.engine = Engine(
            list(Dialect)[number], blocks=200, block_size=4, hybrid=number == 1, host=30 * (number == 3)
        )
        self.publisher = Publisher(buffer=100_000)
        self.random = rng
        self.prompts = prompts(rng)

    def serve(self) -> None:
        self.engine.serve(
            *self.random.choice(self.prompts),
        )
        if len(self.engine.running) > 4:
            self.engine.finish(self.random.randrange(4))
        if self.random.random() < 0.01:
            while self.engine.running:
                self.engine.finish()
            self.engine.reset()
        sent = self.engine.step()
        if sent is not None:
            self.publisher.publish_payload(sent)

    def restart(self) -> None:
        self.engine.restart()
        self.publisher.restart()

    def truth(self, seq: int | None, prompt: tuple[Tokens, Space]) -> Truth:
        return self.engine.truth_at(self.engine.life, -1 if seq is None else seq, *prompt)


@contextmanager
def _traffic(engines: list[Live]) -> Iterator[None]:
    """All engines serve, from a thread of their own, until the context ends."""
    stop = threading.Event()

    def serve() -> None:
        while not stop.wait(0.002):
            for live in engines:
                live.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_killed_at_any_moment_the_next_daemon_is_right(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    path = tmp_path / "kvd.snapshot"
    settings = {"snapshot.path": path, "snapshot.interval": 0.05}
    engines = [Live(number, random.Random(SEED + number)) for number in range(len(Dialect))]
    restored = 0
    with Daemon(tmp_path, **settings) as daemon:
        try:
            for live in engines:
                live.publisher.start()
                daemon.add(live.name, live.publisher)
            for crash in range(CRASHES):
                with _traffic(engines):
                    threading.Event().wait(rng.uniform(0.02, 0.4))
                    daemon.stop(signal.SIGKILL)
                daemon.client.close()
                if rng.random() < 0.3:
                    rng.choice(engines).restart()
                if path.exists():
                    read(path, max_bytes=1 << 30)
                daemon.start()
                restored += _compare(daemon, engines, f"seed {SEED}, crash {crash}")
        finally:
            for live in engines:
                live.publisher.stop()
    assert restored > CRASHES / 2, f"only {restored} streams were restored from a snapshot"


def _compare(daemon: Daemon, engines: list[Live], story: str) -> int:
    """Ask until every stream is exact at the newest message, checking each answer; how many came from the snapshot."""
    known = {info.worker.name for info in daemon.client.workers()}
    for live in engines:
        if live.name not in known:  # killed before the first snapshot: nobody remembers the worker
            daemon.add(live.name, live.publisher)
        eventually(lambda live=live: _is_current(daemon, live, story))
        for prompt in live.prompts:
            found = daemon.score(prompt[0], live.name, lora_name=prompt[1].lora, cache_salt=prompt[1].salt)
            truth = live.truth(live.engine.seq - 1, prompt)
            assert (found.trust.state, claim(found)) == ("exact", truth), f"{story}: {live.name}, {prompt}"
    assert daemon.client.check().ok
    return sum("restored" in daemon.stream(live.name).counters for live in engines)


def _is_current(daemon: Daemon, live: Live, story: str) -> bool:
    prompt = live.random.choice(live.prompts)
    before = daemon.stream(live.name)
    found = daemon.score(prompt[0], live.name, lora_name=prompt[1].lora, cache_salt=prompt[1].salt)
    after = daemon.stream(live.name)
    if found.trust.state == after.trust.state == "exact" and before.last_seq == after.last_seq:
        truth = live.truth(after.last_seq, prompt)
        assert all(c <= t for c, t in zip(claim(found), truth, strict=True)), f"{story}: {live.name}, {prompt}, {after}"
    return after.trust.state == "exact" and after.last_seq == (live.engine.seq - 1 if live.engine.seq else None)


async def test_a_full_disk_costs_a_snapshot_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kvd.snapshot"
    async with runtime(Config(snapshot=SnapshotSettings(path=str(path), interval=3_600))) as parts:
        parts.supervisor.add(WorkerSpec(name="w", model="m", endpoint="inproc://w"))
        engine = Engine(Dialect.VLLM_MAP)
        engine.serve(range(40))
        sent = engine.step()
        assert sent is not None
        parts.supervisor.feeds["w", 0].message(sent.frames)
        writer = SnapshotWriter(path, parts.supervisor, "i")
        assert await writer.write() is not None
        before = path.read_bytes()
        with FullDisk(path):
            assert await writer.write() is None
        assert (writer.failures, path.read_bytes()) == (1, before)
        assert set(read(path, max_bytes=1 << 20)) == {("w", 0)}
        assert await writer.write() is not None
        assert [entry.name for entry in tmp_path.iterdir()] == ["kvd.snapshot"]
