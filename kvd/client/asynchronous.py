"""The asyncio client: pipelined over one socket, with deadlines; reconnects by itself."""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import Self

import zmq

from kvd.client.calls import AsyncCalls
from kvd.client.dealer import DEFAULT_TIMEOUT, dealer, send, stamped, unreachable
from kvd.sockets import Monitor, Pump, receive
from protocols import query
from protocols.errors import KvdError, Unreachable, WireError


class AsyncClient(AsyncCalls):
    """``async with AsyncClient(endpoint) as kvd: answer = await kvd.score(plan)``.

    Any number of tasks may call at once. A lost connection fails what is in flight with Unreachable at once; later
    calls wait for the daemon to be back, within their deadline.
    """

    def __init__(self, endpoint: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[query.AnyReply]] = {}
        self._was_connected = False

    async def __aenter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pump = Pump()
        try:
            socket = dealer(self._context, self.endpoint)
        except KvdError:
            self._pump.close()
            self._context.term()
            raise
        self._monitor = Monitor(self._pump, socket, self._changed)
        self._source = self._pump.add(socket, self._take)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fail(Unreachable("the client was closed"))
        self._monitor.close()
        self._pump.close()
        self._context.term()

    async def request(self, request: query.AnyRequest, timeout: float | None = None) -> query.AnyReply:
        """Send one request and await its reply. Raises Unreachable after ``timeout`` seconds."""
        wait = self.timeout if timeout is None else timeout
        request_id = next(self._ids)
        reply: asyncio.Future[query.AnyReply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = reply
        try:
            send(self._source.socket, stamped(request, request_id, wait))
            self._source.poke()
            async with asyncio.timeout(wait):
                return await reply
        except TimeoutError as error:
            raise error if isinstance(error, Unreachable) else unreachable(self.endpoint, wait) from None
        finally:
            self._waiting.pop(request_id, None)

    def _take(self) -> bool:
        frames = receive(self._source.socket)
        if frames is None:
            return False
        try:
            reply = query.decode_reply(frames[-1])
        except WireError as error:
            self._fail(Unreachable(f"{self.endpoint} does not speak this protocol: {error}"))
            return True
        waiting = self._waiting.pop(reply.id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
        return True

    def _changed(self, connected: bool) -> None:
        if not connected and self._was_connected:
            self._fail(Unreachable(f"{self.endpoint} closed the connection"))
        self._was_connected = connected

    def _fail(self, error: KvdError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()
