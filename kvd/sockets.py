"""Plain ZMQ sockets drained by the running asyncio loop, in bursts with a time budget.

zmq.asyncio's futures cost 75–120 µs a message here; readiness plus non-blocking ``recv`` costs 1.6 µs. Two traps shape
this module: a ZMQ file descriptor is edge-triggered (a send or a partial drain can swallow the edge, so sockets are
looked at again from time to time), and ``recv_multipart`` costs six times three plain ``recv`` calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

RECHECK_SECONDS = 0.05
_CONNECTION_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """One whole message without waiting; None if there is none."""
    try:
        frames = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames


def _fd(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


class Source:
    """One socket on a pump. ``take`` handles what can be had now, one message a call; False when there is none."""

    __slots__ = ("_pump", "queued", "socket", "take")

    def __init__(self, pump: Pump, socket: zmq.Socket[bytes], take: Callable[[], bool]) -> None:
        self._pump = pump
        self.socket = socket
        self.take = take
        self.queued = False

    def poke(self) -> None:
        """Look at the socket soon: after a send, its readiness may have been swallowed."""
        self._pump.enqueue(self)

    def detach(self) -> None:
        """Stop watching; the socket stays open."""
        self._pump.remove(self)

    def close(self) -> None:
        """Stop watching and close the socket."""
        self.detach()
        self.socket.close(linger=0)


class Pump:
    """Drains its sockets fairly: never longer than ``budget`` seconds before the loop gets a turn."""

    def __init__(self, budget: float = 0.002) -> None:
        self.budget = budget
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Source] = deque()
        self._sources: set[Source] = set()
        self._scheduled = False
        self._recheck: asyncio.TimerHandle | None = self._loop.call_later(RECHECK_SECONDS, self._look_again)

    def add(self, socket: zmq.Socket[bytes], take: Callable[[], bool]) -> Source:
        """Watch a socket. ``take`` must not raise for anything a peer can send."""
        source = Source(self, socket, take)
        self._sources.add(source)
        self._loop.add_reader(_fd(socket), self.enqueue, source)
        self.enqueue(source)
        return source

    def remove(self, source: Source) -> None:
        if source in self._sources:
            self._sources.discard(source)
            self._loop.remove_reader(_fd(source.socket))

    def enqueue(self, source: Source) -> None:
        if not source.queued and source in self._sources:
            source.queued = True
            self._ready.append(source)
        if self._ready and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        deadline = time.perf_counter() + self.budget
        while self._ready and time.perf_counter() < deadline:
            self._drain(self._ready.popleft(), deadline)
        if self._ready and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _drain(self, source: Source, deadline: float) -> None:
        """A burst from one socket; what is left goes to the end of the queue, so that nobody is starved."""
        source.queued = False
        for _ in range(256):
            if source not in self._sources or not source.take():
                return
            if time.perf_counter() >= deadline:
                break
        self.enqueue(source)

    def _look_again(self) -> None:
        for source in self._sources:
            if int(source.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self.enqueue(source)
        self._recheck = self._loop.call_later(RECHECK_SECONDS, self._look_again)

    def close(self) -> None:
        """Close every socket still watched."""
        if self._recheck is not None:
            self._recheck.cancel()
            self._recheck = None
        for source in list(self._sources):
            source.close()


class Monitor:
    """Connection events of a socket: handshakes and losses, in order."""

    def __init__(self, pump: Pump, socket: zmq.Socket[bytes], on_change: Callable[[bool], None]) -> None:
        self._watched = socket
        self._on_change = on_change
        self._socket: zmq.Socket[bytes] = socket.get_monitor_socket(_CONNECTION_EVENTS)
        self._source = pump.add(self._socket, self.take)

    def take(self) -> bool:
        """Report one event if there is one. Called before data is read, because a loss explains what follows."""
        if self._socket.closed:
            return False
        frames = receive(self._socket)
        if frames is None:
            return False
        event = parse_monitor_message(frames)["event"]
        if event in (zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED):
            self._on_change(event == zmq.Event.HANDSHAKE_SUCCEEDED)
        return True

    def close(self) -> None:
        """Events are ended before their receiver: one that finds none blocks libzmq's thread, and then us, for ever."""
        self._watched.disable_monitor()
        self._source.close()
