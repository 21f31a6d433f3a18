"""The socket of a client, and what to say when nobody answers."""

from __future__ import annotations

import msgspec
import zmq

from protocols import query
from protocols.errors import RequestError, Unreachable

DEFAULT_TIMEOUT = 5.0
MAX_REPLY_BYTES = 1 << 30


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A DEALER that connects, and reconnects by itself."""
    socket = context.socket(zmq.DEALER)
    settings = {
        zmq.LINGER: 0, zmq.IPV6: 1, zmq.SNDHWM: 10_000, zmq.RCVHWM: 10_000, zmq.RECONNECT_IVL: 50,
        zmq.RECONNECT_IVL_MAX: 1_000, zmq.MAXMSGSIZE: MAX_REPLY_BYTES, zmq.HEARTBEAT_IVL: 10_000,
    }  # fmt: skip
    for option, value in settings.items():
        socket.setsockopt(option, value)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise Unreachable(f"{endpoint} is no endpoint to connect to: {error}") from None
    return socket


def stamped(request: query.AnyRequest, request_id: int, timeout: float) -> bytes:
    """The request as it travels, with its id and how long its sender will wait."""
    timeout_ms = request.timeout_ms if request.timeout_ms is not None else max(1, round(timeout * 1000))
    return query.encode(msgspec.structs.replace(request, id=request_id, timeout_ms=timeout_ms))


def send(socket: zmq.Socket[bytes], payload: bytes) -> None:
    """Send without waiting. Raises :class:`RequestError` ``busy`` if the local queue is full."""
    try:
        socket.send(payload, zmq.NOBLOCK)
    except zmq.Again:
        said = "10,000 requests wait to be sent: wait for replies"
        raise RequestError("busy", said, retriable=True) from None


def unreachable(endpoint: str, timeout: float) -> Unreachable:
    """The error for silence."""
    return Unreachable(f"no reply from {endpoint} within {timeout:g} s: is `kvd serve` running there?")
