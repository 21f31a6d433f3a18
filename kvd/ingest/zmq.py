"""A publisher's stream over ZMQ: SUB for live messages, a monitor for the connection, DEALER for replays.

One SUB per rank, because each rank counts its own sequence. SUB connects, or binds for engines whose publisher connects
(vLLM connects unless the endpoint has ``*`` or ``::``, or is ipc).
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import msgspec
import zmq

from kvd.ingest.transport import Sink
from kvd.sockets import Monitor, Pump, Source, receive

_FRAME_SLACK = 4096


class ZmqOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Socket options of the engine side; times in milliseconds."""

    receive_high_water_mark: int = 100_000
    max_message_bytes: int = 64 << 20
    reconnect_ms: int = 100
    reconnect_max_ms: int = 2_000
    heartbeat_ms: int = 5_000
    heartbeat_timeout_ms: int = 15_000


class ZmqTransport:
    """One rank's sockets, on the loop's pump."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], pump: Pump, *, endpoint: str, replay: str | None, bind: bool,
        topic: bytes, options: ZmqOptions,
    ) -> None:  # fmt: skip
        self._context = context
        self._pump = pump
        self._endpoint = endpoint
        self._replay_endpoint = replay
        self._bind = bind
        self._topic = topic
        self._options = options
        self._sink: Sink | None = None
        self._live: Source | None = None
        self._monitor: Monitor | None = None
        self._replay: Source | None = None

    def open(self, sink: Sink) -> None:
        """Begin to listen. Raises OSError (zmq.ZMQError) when the endpoint cannot be bound or is malformed."""
        self._sink = sink
        socket = self._socket(zmq.SUB)
        monitor = Monitor(self._pump, socket, self._changed)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            (socket.bind if self._bind else socket.connect)(self._endpoint)
        except zmq.ZMQError:
            monitor.close()
            socket.close(linger=0)
            raise
        self._monitor = monitor
        self._live = self._pump.add(socket, self._take_live)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        options = self._options
        socket = self._context.socket(kind)
        settings = {
            zmq.LINGER: 0, zmq.RCVHWM: options.receive_high_water_mark, zmq.IPV6: 1, zmq.TCP_KEEPALIVE: 1,
            zmq.MAXMSGSIZE: options.max_message_bytes + _FRAME_SLACK, zmq.RECONNECT_IVL: options.reconnect_ms,
            zmq.RECONNECT_IVL_MAX: options.reconnect_max_ms, zmq.HEARTBEAT_IVL: options.heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: options.heartbeat_timeout_ms,
        }  # fmt: skip
        for option, value in settings.items():
            socket.setsockopt(option, value)
        return socket

    def _changed(self, connected: bool) -> None:
        assert self._sink is not None
        (self._sink.connected if connected else self._sink.disconnected)()

    def _take_live(self) -> bool:
        assert self._live is not None
        assert self._monitor is not None
        assert self._sink is not None
        while self._monitor.take():  # a lost connection explains what the next message means
            pass
        return self._take(self._live, self._sink.message)

    def _take_replay(self) -> bool:
        if self._replay is None or self._sink is None:
            return False
        return self._take(self._replay, self._sink.replayed)

    @staticmethod
    def _take(source: Source, deliver: Callable[[list[bytes]], None]) -> bool:
        frames = receive(source.socket)
        if frames is None:
            return False
        deliver(frames)
        return True

    def replay(self, start: int) -> None:
        """Ask for every message from ``start`` on, on a fresh socket, so that no reply of an earlier one mixes in."""
        self.stop_replay()
        assert self._replay_endpoint is not None
        assert self._sink is not None
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 0)  # a publisher drops replies to a slow reader, the end marker with them
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._sink.replay_failed(f"replay_{errno.errorcode.get(error.errno or 0, 'error').lower()}")
            return
        self._replay = self._pump.add(socket, self._take_replay)

    def stop_replay(self) -> None:
        """Close the replay socket."""
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def close(self) -> None:
        """Close everything; nothing is delivered afterwards."""
        self.stop_replay()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._live is not None:
            self._live.close()
            self._live = None
