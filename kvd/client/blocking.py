"""The blocking client, for scripts, threads and the command line."""

from __future__ import annotations

import itertools
import threading
import time
from types import TracebackType
from typing import Self

import zmq

from kvd.client.calls import BlockingCalls
from kvd.client.dealer import DEFAULT_TIMEOUT, dealer, send, stamped, unreachable
from protocols import query
from protocols.errors import Unreachable, WireError


class Client(BlockingCalls):
    """``with Client(endpoint) as kvd: answer = kvd.score(plan)``. One request at a time; threads may share it."""

    def __init__(self, endpoint: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = dealer(self._context, endpoint)
        except Unreachable:
            self._context.term()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
        self._context.term()

    def request(self, request: query.AnyRequest, timeout: float | None = None) -> query.AnyReply:
        """Send one request and wait for its reply. Raises Unreachable after ``timeout`` seconds."""
        wait = self.timeout if timeout is None else timeout
        with self._lock:
            request_id = next(self._ids)
            send(self._socket, stamped(request, request_id, wait))
            return self._reply(request_id, time.monotonic() + wait, wait)

    def _reply(self, request_id: int, deadline: float, wait: float) -> query.AnyReply:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(max(1, int(left * 1000))):
                raise unreachable(self.endpoint, wait)
            try:
                reply = query.decode_reply(self._socket.recv_multipart()[-1])
            except WireError as error:
                raise Unreachable(f"{self.endpoint} does not speak this protocol: {error}") from None
            if reply.id == request_id:  # others answer requests whose caller gave up
                return reply
