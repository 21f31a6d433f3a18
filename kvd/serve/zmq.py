"""The query socket: ROUTER, bursts in, replies out, every refusal an Error on a living connection.

What arrives is queued with its time of arrival and answered in order, at most a few milliseconds between two looks at
the loop. Queries are shed, events are not: a client that keeps more than its bound in the queue, or any client once the
whole queue is full, is told ``busy`` at once; a request that waited past its own timeout is told ``late`` instead of
being worked on for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket as posix
import stat
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from kvd.serve.service import Service
from kvd.sockets import Pump, receive
from protocols import query
from protocols.errors import ConfigError, WireError

log = logging.getLogger(__name__)

_HARD_CAP = 4
"""libzmq drops a connection whose frame exceeds its own cap, so that lies this many times above ours."""


class Waiting(msgspec.Struct, frozen=True):
    """One received request: who sent it, what it says, when it came."""

    envelope: list[bytes]
    payload: bytes
    arrived: float


class QueryServer:
    """A :class:`Service` behind one ZMQ endpoint."""

    def __init__(
        self, service: Service, endpoint: str, clock: Callable[[], float], *, budget: float = 0.002,
        high_water_mark: int = 10_000, socket_mode: int = 0o660,
    ) -> None:  # fmt: skip
        self.service = service
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._budget = budget
        self._high_water_mark = high_water_mark
        self._socket_mode = socket_mode
        self._queue: deque[Waiting] = deque()
        self._in_flight: Counter[bytes] = Counter()
        self._scheduled = False

    def open(self) -> None:
        """Bind. Raises :class:`ConfigError` when the endpoint cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pump = Pump(self._budget)
        socket = self._context.socket(zmq.ROUTER)
        settings = {
            zmq.LINGER: 0, zmq.ROUTER_MANDATORY: 1, zmq.RCVHWM: self._high_water_mark,
            zmq.SNDHWM: self._high_water_mark, zmq.IPV6: 1, zmq.TCP_KEEPALIVE: 1,
            zmq.MAXMSGSIZE: _HARD_CAP * self.service.limits.message_bytes, zmq.HEARTBEAT_IVL: 10_000,
        }  # fmt: skip
        for option, value in settings.items():
            socket.setsockopt(option, value)
        try:
            self._bind(socket)
        except (zmq.ZMQError, OSError) as error:
            socket.close(linger=0)
            self._pump.close()
            self._context.term()
            raise ConfigError("query.endpoint", self.endpoint, f"an endpoint that can be bound ({error})") from None
        self._source = self._pump.add(socket, self._take)

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        path = ipc_path(self.endpoint)
        if path is None:
            socket.bind(self.endpoint)
            self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_if_served(path)
        socket.bind(self.endpoint)
        path.chmod(self._socket_mode)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        frames = receive(self._source.socket)
        if frames is None:
            return False
        self._enqueue(Waiting(frames[:-1], frames[-1], self._clock()))
        return True

    def _enqueue(self, waiting: Waiting) -> None:
        client, limits = waiting.envelope[0], self.service.limits
        size = len(waiting.payload)
        if size > limits.message_bytes:
            said = f"{size} bytes, at most {limits.message_bytes}: split the request"
            self._refuse(waiting, "too_large", said, retriable=False)
        elif len(self._queue) >= limits.queued:
            said = f"{limits.queued} requests of all clients wait already: try again"
            self._refuse(waiting, "busy", said, retriable=True)
        elif self._in_flight[client] >= limits.in_flight_per_client:
            said = f"{limits.in_flight_per_client} requests in flight already: wait for replies"
            self._refuse(waiting, "busy", said, retriable=True)
        else:
            self._in_flight[client] += 1
            self._queue.append(waiting)
            self._schedule()

    def _refuse(self, waiting: Waiting, code: str, message: str, *, retriable: bool) -> None:
        request_id = query.request_id(waiting.payload) if code != "too_large" else _leading_id(waiting.payload)
        self._send(waiting, query.Error(id=request_id, code=code, message=message, retriable=retriable))

    # --- answering ---------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled and self._queue:
            self._scheduled = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        self._scheduled = False
        deadline = time.perf_counter() + self._budget
        while self._queue:
            waiting = self._queue.popleft()
            self._forget_in_flight(waiting.envelope[0])
            self._send(waiting, self._answer(waiting))
            if time.perf_counter() >= deadline:
                break
        self._schedule()
        self._source.poke()

    def _forget_in_flight(self, client: bytes) -> None:
        self._in_flight[client] -= 1
        if not self._in_flight[client]:
            del self._in_flight[client]

    def _answer(self, waiting: Waiting) -> query.AnyReply:
        try:
            request = query.decode_request(waiting.payload)
        except WireError as error:
            request_id = query.request_id(waiting.payload)
            return query.Error(id=request_id, code=error.code, message=error.detail)
        waited_ms = (self._clock() - waiting.arrived) * 1000
        if request.timeout_ms is not None and waited_ms > request.timeout_ms:
            said = f"waited {waited_ms:.0f} ms, the request allowed {request.timeout_ms}"
            return query.Error(id=request.id, code="late", message=said, retriable=True)
        return self.service.handle(request)

    def _send(self, waiting: Waiting, reply: query.AnyReply) -> None:
        name = reply.code if isinstance(reply, query.Error) else "answered"
        self.counters[name] += 1
        try:
            self._source.socket.send_multipart([*waiting.envelope, query.encode(reply)], zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:  # the client is gone, or does not read its replies: nobody else waits for it
            self.counters["replies_dropped"] += 1
            log.debug("reply dropped: %s", error)

    def close(self) -> None:
        """Stop answering and unbind."""
        self._queue.clear()
        self._pump.close()
        self._context.term()
        path = ipc_path(self.endpoint)
        if path is not None:
            path.unlink(missing_ok=True)


def _leading_id(payload: bytes) -> int:
    """The id of an oversized request, from its first bytes only: nothing more of it is looked at."""
    marker = payload.find(b"\xa2id", 0, 64)
    if marker < 0:
        return 0
    try:
        return int(msgspec.msgpack.decode(payload[marker + 3 : marker + 12][: _int_length(payload[marker + 3])]))
    except (msgspec.DecodeError, IndexError, ValueError, TypeError):
        return 0


def _int_length(first: int) -> int:
    return {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.get(first, 1)


def ipc_path(endpoint: str) -> Path | None:
    """The file of an ipc endpoint; None for other kinds and for Linux's abstract names."""
    if not endpoint.startswith("ipc://") or endpoint.startswith("ipc://@"):
        return None
    return Path(endpoint.removeprefix("ipc://"))


def _refuse_if_served(path: Path) -> None:
    """Binding an ipc path silently takes it over from a daemon that serves there: refuse that, remove a leftover."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(f"{path} is there and is not a socket")
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, TimeoutError):
            path.unlink()
            return
    raise OSError(f"another daemon serves at {path}")
