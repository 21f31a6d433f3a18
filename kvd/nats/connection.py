"""The one NATS connection of a process: made, lost and made again for ever, each of its states a name and a counter.

The client library's own reconnecting is not used. It keeps old subscriptions and buffered messages over a break, and
gives up for good when credentials are refused. Here every connection is a new :class:`Session`; whoever needs NATS
hands in work that is begun anew with each of them (:meth:`Connection.attend`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from kvd.nats.options import NatsOptions, secrets, validate
from kvd.nats.problems import FAULTS, NatsProblem, connection_problem, problem_of
from protocols.errors import ConfigError

log = logging.getLogger(__name__)

MAX_DENIALS = 256
MAX_DISCOVERED = 32
_DENIED = re.compile(r"permissions violation for (?:publish|subscription) to \"([^\"]*)\"")

Handler = Callable[[Msg], Awaitable[None]]
Work = Callable[["Session"], Awaitable[None]]


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: connected, or why not; ``server``: host and port; ``since_seconds``: in this state."""

    state: str
    server: str
    since_seconds: float
    counters: dict[str, int]


class Session:
    """One connection from its making to its loss. ``lost`` is set then, and never cleared."""

    def __init__(self, owner: Connection, client: Client) -> None:
        self.client = client
        self.lost = asyncio.Event()
        self.js: JetStreamContext = client.jetstream(timeout=owner.options.request_timeout)
        self._owner = owner

    @property
    def max_payload(self) -> int:
        """Largest message the server takes, in bytes."""
        return self.client.max_payload

    async def request(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> bytes:
        """Ask, and wait for the one answer. Raises what :data:`FAULTS` names, ``denied`` instead of a bare timeout."""
        seconds = self._owner.options.request_timeout
        async with self._owner.limiter:
            try:
                reply = await self.client.request(subject, payload, timeout=seconds, headers=headers)
            except TimeoutError:
                self._owner.complain(subject)
                raise
        return bytes(reply.data)

    async def call(self, asked: Callable[[JetStreamContext], Awaitable[Any]]) -> Any:
        """Ask JetStream through the library, as one of a bounded number at a time."""
        async with self._owner.limiter:
            try:
                return await asked(self.js)
            except TimeoutError:
                self._owner.complain("$js.api.")
                raise

    async def subscribe(
        self, subject: str, handler: Handler, *, overflowed: Callable[[], None] | None = None
    ) -> Subscription:
        """Listen to a subject; ``overflowed`` is called when messages had to be dropped because nobody took them."""
        options = self._owner.options
        subscription = await self.client.subscribe(
            subject, cb=handler, pending_msgs_limit=options.pending_messages, pending_bytes_limit=options.pending_bytes
        )
        if overflowed is not None:
            self._owner.overflows[subscription] = overflowed
        return subscription


class Connection:
    """Run :meth:`run` in a task of its own; everybody else uses :meth:`attend`. Raises ConfigError when made."""

    def __init__(self, options: NatsOptions, *, name: str) -> None:
        self.options = validate(options)
        self.state = "off"
        self.counters: Counter[str] = Counter()
        self.limiter = asyncio.Semaphore(options.concurrent_requests)
        self.overflows: WeakKeyDictionary[Subscription, Callable[[], None]] = WeakKeyDictionary()
        self._name = name
        self._server = ""
        self._since = time.monotonic()
        self._session: Session | None = None
        self._made = asyncio.Event()
        self._denials: OrderedDict[str, None] = OrderedDict()
        self._servers = list(options.servers)
        if options.servers:
            secrets(options)

    def statistics(self) -> Statistics:
        """What is known of the connection, for people and metrics."""
        since = time.monotonic() - self._since
        return Statistics(state=self.state, server=self._server, since_seconds=since, counters=dict(self.counters))

    # --- the owner ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        wait = self.options.reconnect_wait
        number = 0
        while self._servers:
            server = self._servers[number % len(self._servers)]
            session = await self._open(server)
            if session is None:
                number += 1
                await anyio.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(2 * wait, self.options.reconnect_max)
                continue
            wait = self.options.reconnect_wait
            try:
                await self._hold(session)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._closed(session)

    async def _open(self, server: str) -> Session | None:
        """A new session, or None: the state then says why."""
        client, failed = Client(), list[Exception]()
        lost = asyncio.Event()
        try:
            with anyio.fail_after(self.options.connect_timeout):
                await client.connect(**self._arguments(server, failed, lost))
        except (*FAULTS, ConfigError) as error:
            cause = failed[-1] if failed and isinstance(error, nats.errors.NoServersError) else error
            self._enter(connection_problem(cause), server)
            await self._close(client)
            return None
        self._discover(client)
        session = Session(self, client)
        session.lost = lost
        return session

    def _arguments(self, server: str, failed: list[Exception], lost: asyncio.Event) -> dict[str, Any]:
        async def on_error(error: Exception) -> None:
            failed[:] = [error]
            self._note(error)

        async def on_loss() -> None:
            lost.set()

        async def on_lame_duck() -> None:
            self.counters["lame_duck"] += 1
            log.info("the NATS server is about to stop: connecting anew")
            lost.set()

        options = self.options
        return {
            "servers": [server], "name": self._name, "error_cb": on_error, "disconnected_cb": on_loss,
            "closed_cb": on_loss, "lame_duck_mode_cb": on_lame_duck, "allow_reconnect": False,
            "max_reconnect_attempts": 1, "reconnect_time_wait": 0, "connect_timeout": options.connect_timeout,
            "ping_interval": options.ping_interval, "max_outstanding_pings": 2, "inbox_prefix": options.inbox_prefix,
            "pending_size": options.pending_bytes, "flush_timeout": options.request_timeout, **secrets(options),
        }  # fmt: skip

    async def _hold(self, session: Session) -> None:
        self.counters["connects"] += 1
        self._denials.clear()
        url = session.client.connected_url
        self._enter("connected", "" if url is None else f"nats://{url.hostname}:{url.port}")
        self._session = session
        self._made.set()
        await session.lost.wait()

    async def _closed(self, session: Session) -> None:
        self._session = None
        self._made.clear()
        session.lost.set()
        self._enter("disconnected", self._server)
        await self._close(session.client)

    async def _close(self, client: Client) -> None:
        with anyio.move_on_after(self.options.request_timeout), suppress(*FAULTS, AssertionError):
            await client.close()

    def _enter(self, state: str, server: str) -> None:
        self.counters[f"state_{state}"] += 1
        if (state, server) != (self.state, self._server):
            log.log(logging.INFO if state == "connected" else logging.WARNING, "NATS %s: %s", server, state)
            self.state, self._server, self._since = state, server, time.monotonic()

    def _discover(self, client: Client) -> None:
        """Servers of the cluster that the connected one names are tried too, after the configured ones."""
        scheme = "tls" if any(server.startswith("tls://") for server in self.options.servers) else "nats"
        for url in client.discovered_servers:
            server = f"{scheme}://{url.hostname}:{url.port}"
            if server not in self._servers and len(self._servers) < len(self.options.servers) + MAX_DISCOVERED:
                self._servers.append(server)

    # --- errors that come by themselves ------------------------------------------------------------------------------

    def _note(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters["slow_consumer"] += 1
            overflowed = self.overflows.get(error.sub)
            if overflowed is not None:
                overflowed()
            return
        found = _DENIED.search(str(error).lower())
        if found is None:
            self.counters["errors"] += 1
            log.debug("NATS: %s", type(error).__name__)
            return
        self.counters["denied"] += 1
        self._denials[found[1]] = None
        if len(self._denials) > MAX_DENIALS:
            self._denials.popitem(last=False)

    def denied(self, subject: str) -> bool:
        """Whether the server has refused something to do with this subject, or with one that begins so."""
        wanted = subject.lower()
        return any(known.startswith(wanted) for known in self._denials)

    def complain(self, subject: str) -> None:
        """Raise ``denied`` if that explains why nothing came back: what was asked, or where the answer was to come."""
        if self.denied(subject) or self.denied(self.options.inbox_prefix):
            self._denials.clear()  # a server may be told otherwise while it runs
            raise NatsProblem("denied", f"the user may not use {subject}, or not listen to {self.options.inbox_prefix}")

    # --- those who need it -------------------------------------------------------------------------------------------

    async def attend(self, work: Work, told: Callable[[str], None]) -> None:
        """Do ``work`` with every session, for ever: it is cancelled with its loss, and begun anew after failures.

        ``told`` hears each time why it is not being done.
        """
        wait = self.options.reconnect_wait
        while True:
            if not self._made.is_set():
                told(self.state)
                await self._made.wait()
            session = self._session
            assert session is not None
            began = time.monotonic()
            problem = await self._attempt(session, work)
            if session.lost.is_set():
                problem, wait = "disconnected", self.options.reconnect_wait
            told(problem)
            wait = self.options.reconnect_wait if time.monotonic() - began > 2 * self.options.reconnect_max else wait
            await anyio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, self.options.reconnect_max)

    async def _attempt(self, session: Session, work: Work) -> str:
        problem = "ended"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_lost, session, tasks.cancel_scope)
            try:
                await work(session)
            except FAULTS as error:
                problem = problem_of(error)
                log.debug("%s: %s", problem, error)
            tasks.cancel_scope.cancel()
        return problem


async def _cancel_when_lost(session: Session, scope: anyio.CancelScope) -> None:
    await session.lost.wait()
    scope.cancel()
