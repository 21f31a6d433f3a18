"""The real daemon as a process, and waiting for what it will say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvd.client import Client, StreamInfo, Unreachable, WorkerScore, WorkerSpec, exact_plan
from kvd.core import CORE_VARIABLE
from protocols.query import Hello
from tests.kit.waiting import eventually

_HELLO = Hello(id=0)
QUICK = {
    "ingest.connect_timeout": 1.0, "ingest.replay_timeout": 0.4, "ingest.replay_total": 3.0,
    "ingest.replay_attempts": 2, "ingest.probe_interval": 0.6,
}  # fmt: skip
"""Deadlines short enough to be waited for in a test."""


class Daemon:
    """``kvd serve`` in a process of its own, and a client to it."""

    def __init__(self, directory: Path, *, config: str = "", **settings: Any) -> None:
        self.endpoint = f"ipc://{directory}/kvd.sock"
        self.log = directory / "kvd.log"
        self._config = directory / "kvd.toml"
        self._config.write_text(config)
        self._settings = QUICK | settings

    def __enter__(self) -> Daemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.stop()

    def start(self, timeout: float = 45.0) -> None:
        sets = [f"--set={name}={value}" for name, value in self._settings.items()]
        command = [sys.executable, "-m", "kvd", "serve", "--config", str(self._config), "--endpoint", self.endpoint]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, *sets], stderr=log, stdout=log, env=_environment())
        self.client = Client(self.endpoint, timeout=10.0)
        eventually(self._answers, timeout)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.client.request(_HELLO, timeout=0.2))
        except Unreachable:
            return False

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=20)

    def add(self, name: str, publisher: Any, **fields: Any) -> None:
        """Watch a publisher and wait until its stream listens."""
        fields = {"model": "m", "replay": publisher.replay, "endpoint": publisher.endpoint} | fields
        self.client.add_worker(WorkerSpec(name=name, **fields))

    def stream(self, name: str, rank: int = 0) -> StreamInfo:
        return next(info for info in self.client.streams(name) if info.rank == rank)

    def listening(self, name: str, rank: int = 0) -> StreamInfo:
        """Once the stream's transport is connected."""
        return eventually(lambda: _when(self.stream(name, rank), lambda s: s.state not in ("connecting", "silent")))

    def until(self, name: str, condition: Callable[[StreamInfo], bool], timeout: float = 45.0) -> StreamInfo:
        return eventually(lambda: _when(self.stream(name), condition), timeout)

    def trusted(self, name: str, last_seq: int) -> StreamInfo:
        """Once the stream is exact at this sequence."""
        return self.until(name, lambda s: s.trust.state == "exact" and s.last_seq == last_seq)

    def score(self, tokens: Sequence[int], name: str, *, model: str = "m", **fields: Any) -> WorkerScore:
        answer = self.client.score(exact_plan(model, tokens, **fields), workers=[name])
        return answer.workers[0]


def _when(info: StreamInfo, condition: Callable[[StreamInfo], bool]) -> StreamInfo | None:
    return info if condition(info) else None


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name == CORE_VARIABLE or not name.startswith("KVD_")}
