"""A file read again: what it put there it may take away; what cannot be added is tried again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from kvd.config import Config
from kvd.daemon import Runtime
from kvd.reload import Changes, Reloader
from protocols.errors import ConfigError
from protocols.query import WorkerSpec


def spec(name: str, **fields: object) -> WorkerSpec:
    return WorkerSpec(name=name, model="m", **({"endpoint": f"inproc://{name}", "mode": "bind"} | fields))


class File:
    """What the configuration says now."""

    def __init__(self) -> None:
        self.parts = Runtime(Config())
        self.workers: tuple[WorkerSpec, ...] = ()
        self.error: Exception | None = None
        self.reloader = Reloader(self.parts.supervisor, Config(), self.read)

    def read(self) -> Config:
        if self.error is not None:
            raise self.error
        return Config(workers=self.workers)

    async def says(self, *workers: WorkerSpec) -> Changes | None:
        self.workers = workers
        return await self.reloader.reload()

    @property
    def watched(self) -> list[str]:
        return list(self.parts.fleet.workers)


@pytest.fixture
async def file() -> AsyncIterator[File]:
    made = File()
    yield made
    made.parts.service.handout.close()
    made.parts.supervisor.close()
    await made.parts.supervisor.finished()


def changes(**named: list[str]) -> Changes:
    return Changes(**({"added": [], "removed": [], "changed": [], "failed": []} | named))


async def test_workers_come_change_and_go(file: File) -> None:
    assert await file.says(spec("a"), spec("b")) == changes(added=["a", "b"])
    assert await file.says(spec("a"), spec("b", rank=1), spec("c")) == changes(added=["c"], changed=["b"])
    assert file.parts.fleet.workers["b"].rank == 1
    assert await file.says(spec("c")) == changes(removed=["a", "b"])
    assert await file.says(spec("c")) == changes()
    assert file.watched == ["c"]


@pytest.mark.parametrize("error", [ConfigError("workers", 3, "tables"), OSError("gone")])
async def test_a_file_that_cannot_be_used_changes_nothing(file: File, error: Exception) -> None:
    await file.says(spec("a"))
    file.error = error
    assert await file.says() is None
    assert file.watched == ["a"]


async def test_what_cannot_be_added_is_tried_again_and_a_failed_change_undone(file: File, tmp_path: Path) -> None:
    taken = f"ipc://{tmp_path}/taken"
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind("tcp://127.0.0.1:*")
        taken = other.getsockopt_string(zmq.LAST_ENDPOINT)
        assert await file.says(spec("a"), spec("b", endpoint=taken)) == changes(added=["a"], failed=["b"])
        assert await file.says(spec("a", endpoint=taken)) == changes(failed=["a"])
        assert file.parts.fleet.workers["a"] == spec("a")
        other.unbind(taken)
        assert await file.says(spec("a", endpoint=taken)) == changes(changed=["a"])


async def test_what_requests_added_or_took_is_not_the_file_s(file: File) -> None:
    await file.says(spec("a"), spec("b"))
    supervisor = file.parts.supervisor
    supervisor.add(spec("r"), dynamic=True)
    supervisor.remove("a")
    supervisor.remove("b")
    supervisor.add(spec("b", rank=7, endpoint="inproc://another"), dynamic=True)
    assert await file.says() == changes()
    assert file.watched == ["r", "b"]
    assert await file.says(spec("b")) == changes(failed=["b"])
    assert file.parts.fleet.workers["b"].rank == 7
