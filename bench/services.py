"""The two services side by side, each a process of its own: kvd's daemon, and the peer's indexer over HTTP.

CPU time is that of all threads, by the scheduler's own count in nanoseconds, and read from outside: asking costs the
service nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from kvd.client import Client, Unreachable, WorkerSpec
from protocols import query
from protocols.plan import exact_plan

MODEL = "m"
BLOCK = 16
_START_SECONDS = 60.0


class Exchange(Protocol):
    """A connection over which one prepared request is sent and one whole reply is read, undecoded."""

    def send(self, request: bytes) -> None: ...
    def receive(self) -> bytes: ...
    def close(self) -> None: ...


class Service(Protocol):
    """One side. Workers are numbered; each holds what its publisher at ``endpoint`` announced."""

    name: str

    def watch(self, worker: int, endpoint: str) -> None: ...
    def forget(self, worker: int) -> None: ...
    def scores(self, tokens: Sequence[int]) -> dict[int, int]: ...
    def request(self, tokens: Sequence[int]) -> bytes: ...
    def connect(self) -> Exchange: ...
    def cpu(self) -> float: ...
    def resident(self) -> int: ...
    def close(self) -> None: ...


class Watched:
    """A child process and what it costs."""

    def __init__(self, command: Sequence[str | Path], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            list(command), env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu(self) -> float:
        """Seconds of CPU time of all threads so far, those that ended included (Linux: the clock of a process)."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def resident(self) -> int:
        """Bytes of memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def until(self, answers: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._process.args!r} does not answer (exit code {self._process.poll()})")
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


def settle(service: Service, quiet: float = 0.15) -> float:
    """Wait until the service has nothing left to do; its CPU seconds at that time, and without what came after."""
    before = service.cpu()
    while True:
        time.sleep(quiet)
        now = service.cpu()
        if now - before < 0.02 * quiet:  # ticks and timers of an idle service stay below this
            return before
        before = now


# --- kvd -------------------------------------------------------------------------------------------------------------


class Kvd:
    """``kvd serve``, asked over its query socket."""

    name = "kvd"

    def __init__(self, directory: Path) -> None:
        self._endpoint = f"ipc://{directory}/kvd.sock"
        command = [
            sys.executable,
            "-m",
            "kvd",
            "serve",
            "--endpoint",
            self._endpoint,
            "--set=ingest.probe_interval=3600",
        ]
        self._watched = Watched(command, {})
        self._client = Client(self._endpoint, timeout=30.0)
        self._watched.until(self._answers)
        self.cpu, self.resident = self._watched.cpu, self._watched.resident

    def _answers(self) -> bool:
        try:
            return bool(self._client.request(query.Hello(id=0), timeout=0.5))
        except Unreachable:
            return False

    def watch(self, worker: int, endpoint: str) -> None:
        self._client.add_worker(WorkerSpec(name=str(worker), model=MODEL, endpoint=endpoint))

    def forget(self, worker: int) -> None:
        self._client.remove_worker(str(worker))

    def scores(self, tokens: Sequence[int]) -> dict[int, int]:
        """Tokens each worker holds; all of them must be trusted."""
        answer = self._client.score(exact_plan(MODEL, tokens))
        assert all(score.trust.state in ("exact", "unknown") for score in answer.workers), answer
        return {int(score.worker): score.matched_tokens for score in answer.workers if score.matched_tokens}

    def request(self, tokens: Sequence[int]) -> bytes:
        return query.encode(query.Score(id=1, plans=[exact_plan(MODEL, tokens)]))

    def connect(self) -> Exchange:
        return _Dealer(self._endpoint)

    def close(self) -> None:
        self._client.close()
        self._watched.stop()


class _Dealer:
    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    def send(self, request: bytes) -> None:
        self._socket.send(request)

    def receive(self) -> bytes:
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


# --- the peer --------------------------------------------------------------------------------------------------------


class Indexer:
    """``python -m dynamo.indexer``, its standalone service, with its default number of threads, logging nothing."""

    name = "peer"

    def __init__(self, python: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [python, "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(self._port)]
        self._watched = Watched(command, {"DYN_LOG": "off"})
        self._watched.until(self._answers)
        self._http = _Http(self._port)
        self.cpu, self.resident = self._watched.cpu, self._watched.resident

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), 0.5).close()
        except OSError:
            return False
        return True

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        self._http.send(_post(path, body))
        return json.loads(self._http.receive())

    def watch(self, worker: int, endpoint: str) -> None:
        name = {"instance_id": worker, "endpoint": endpoint, "model_name": MODEL, "block_size": BLOCK}
        said = self._call("/register", name)
        assert said == {"status": "ok"}, said

    def forget(self, worker: int) -> None:
        self._call("/unregister", {"instance_id": worker, "model_name": MODEL})

    def scores(self, tokens: Sequence[int]) -> dict[int, int]:
        said = self._call("/query", {"token_ids": list(tokens), "model_name": MODEL})
        return {int(worker): ranks["0"] for worker, ranks in said["scores"].items()}

    def request(self, tokens: Sequence[int]) -> bytes:
        return _post("/query", {"token_ids": list(tokens), "model_name": MODEL})

    def connect(self) -> Exchange:
        return _Http(self._port)

    def close(self) -> None:
        self._http.close()
        self._watched.stop()


def _post(path: str, body: dict[str, Any]) -> bytes:
    encoded = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


class _Http:
    """HTTP/1.1 on a kept connection, as little of it as the peer's replies need, so that its client is no burden."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 30.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def receive(self) -> bytes:
        data = self._socket.recv(1 << 16)
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        while len(body) < length:
            body += self._more()
        return body

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the peer closed the connection")
        return data

    def close(self) -> None:
        self._socket.close()
