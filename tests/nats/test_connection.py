"""Every state of the connection has its name, waits are bounded, and no secret is shown, with a real server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import nkeys
import pytest
from nats.aio.msg import Msg

from kvd.nats.connection import Connection, Session
from kvd.nats.options import NatsOptions
from kvd.nats.problems import NatsProblem
from protocols.errors import ConfigError
from tests.kit.nats import NatsServer
from tests.kit.waiting import eventually_async

USERS = """
authorization {{
  users = [
    {{ user: kvd, password: "{password}", permissions: {{
        publish: {publish}, subscribe: ["_INBOX.>", "open.>"] }} }}
  ]
}}
"""


@asynccontextmanager
async def running(options: NatsOptions) -> AsyncIterator[Connection]:
    connection = Connection(options, name="test")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.run)
        yield connection
        tasks.cancel_scope.cancel()


async def until(condition: Callable[[], object]) -> None:
    async def asked() -> object:
        return condition()

    await eventually_async(asked)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


async def test_work_begins_anew_with_every_connection(own_server: NatsServer) -> None:
    sessions: list[Session] = []
    told: list[str] = []

    async def work(session: Session) -> None:
        sessions.append(session)
        await anyio.sleep_forever()

    async with running(own_server.options()) as connection, anyio.create_task_group() as tasks:
        tasks.start_soon(connection.attend, work, told.append)
        await until(lambda: len(sessions) == 1)
        own_server.kill()
        await until(lambda: connection.state == "unreachable")
        own_server.start()
        await until(lambda: len(sessions) == 2)
        assert sessions[0].lost.is_set()
        assert not sessions[1].lost.is_set()
        assert connection.state == "connected"
        assert connection.counters["connects"] == 2
        assert connection.counters["state_disconnected"] == 1
        assert "disconnected" in told
        tasks.cancel_scope.cancel()


async def test_work_that_fails_is_begun_again_and_says_why(server: NatsServer) -> None:
    told: list[str] = []

    async def work(_: Session) -> None:
        raise NatsProblem("no_stream")

    async with running(server.options()) as connection, anyio.create_task_group() as tasks:
        tasks.start_soon(connection.attend, work, told.append)
        await until(lambda: told.count("no_stream") >= 3)
        tasks.cancel_scope.cancel()


async def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    async with running(NatsServer(tmp_path).options()) as connection:
        await until(lambda: connection.counters["state_unreachable"] >= 2)
        assert connection.statistics().state == "unreachable"


async def test_a_server_that_never_speaks_is_unreachable() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        options = NatsOptions(servers=(f"nats://127.0.0.1:{port}",), connect_timeout=0.3, reconnect_wait=0.02)
        async with running(options) as connection:
            await until(lambda: connection.counters["state_unreachable"] >= 2)


async def test_a_server_of_another_protocol_is_refused() -> None:
    async def smtp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(smtp, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        options = NatsOptions(servers=(f"nats://127.0.0.1:{port}",), connect_timeout=0.5, reconnect_wait=0.02)
        async with running(options) as connection:
            await until(lambda: connection.counters["state_refused"] >= 1)


async def test_the_next_server_is_tried(server: NatsServer, tmp_path: Path) -> None:
    nobody = NatsServer(tmp_path).url
    async with running(NatsOptions(servers=(nobody, server.url), reconnect_wait=0.02)) as connection:
        await until(lambda: connection.state == "connected")
        assert connection.statistics().server == server.url


async def test_a_stalled_server_is_given_up(own_server: NatsServer) -> None:
    async with running(own_server.options(ping_interval=0.2, connect_timeout=0.5)) as connection:
        await until(lambda: connection.state == "connected")
        own_server.stall()
        await until(lambda: connection.state == "unreachable")
        own_server.go_on()
        await until(lambda: connection.state == "connected")


async def test_a_server_about_to_stop_is_left_early(own_server: NatsServer) -> None:
    async with running(own_server.options()) as connection:
        await until(lambda: connection.state == "connected")
        assert own_server.process is not None
        own_server.process.send_signal(signal.SIGUSR2)
        await until(lambda: connection.counters["lame_duck"] == 1)
        await until(lambda: connection.state == "unreachable")


async def test_a_wrong_password_is_unauthorized_until_it_is_mended_and_never_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = write(tmp_path / "password", "not-the-pass\n")
    extra = USERS.format(password="right-pass", publish='["_INBOX.>", "open.>"]')
    with NatsServer(tmp_path, extra=extra) as server:
        async with running(server.options(user="kvd", password_file=secret)) as connection:
            await until(lambda: connection.counters["state_unauthorized"] >= 2)
            write(tmp_path / "password", "right-pass")
            await until(lambda: connection.state == "connected")
            shown = caplog.text + repr(connection.statistics())
            assert "not-the-pass" not in shown
            assert "right-pass" not in shown


async def test_an_nkey_proves_who_this_is(tmp_path: Path) -> None:
    seed = nkeys.encode_seed(b"k" * 32, nkeys.PREFIX_BYTE_USER).decode()
    public = nkeys.from_seed(bytearray(seed.encode())).public_key.decode()
    extra = f"authorization {{ users = [ {{ nkey: {public} }} ] }}"
    with NatsServer(tmp_path, extra=extra) as server:
        async with running(server.options(nkey=write(tmp_path / "seed", seed))) as connection:
            await until(lambda: connection.state == "connected")


async def test_what_the_user_may_not_do_is_denied_and_the_connection_lives_on(tmp_path: Path) -> None:
    password = write(tmp_path / "password", "p")
    with NatsServer(tmp_path, extra=USERS.format(password="p", publish='["_INBOX.>", "open.>"]')) as server:
        options = server.options(user="kvd", password_file=password, request_timeout=0.5)
        found: list[BaseException] = []

        async def work(session: Session) -> None:
            try:
                await session.request("closed.door", b"")
            except Exception as error:
                found.append(error)
            await session.subscribe("closed.too", _ignore)
            await anyio.sleep_forever()

        async with running(options) as connection, anyio.create_task_group() as tasks:
            tasks.start_soon(connection.attend, work, found.append)
            await until(lambda: any(isinstance(error, NatsProblem) for error in found))
            assert [error.name for error in found if isinstance(error, NatsProblem)] == ["denied"]
            await until(lambda: connection.denied("closed.too"))
            assert connection.state == "connected"
            assert connection.counters["denied"] == 2
            tasks.cancel_scope.cancel()


async def _ignore(_: Msg) -> None:
    """Nothing is sent there."""


async def test_a_slow_consumer_is_told_of_what_was_dropped(server: NatsServer) -> None:
    overflows: list[None] = []
    gate = asyncio.Event()

    async def slow(_: Msg) -> None:
        await gate.wait()

    async def work(session: Session) -> None:
        await session.subscribe("slow.here", slow, overflowed=lambda: overflows.append(None))
        for _ in range(50):
            await session.client.publish("slow.here", b"x" * 100)
        await anyio.sleep_forever()

    async with running(server.options(pending_messages=10)) as connection, anyio.create_task_group() as tasks:
        tasks.start_soon(connection.attend, work, lambda _: None)
        await until(lambda: len(overflows) >= 10)
        assert connection.counters["slow_consumer"] == len(overflows)
        gate.set()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"servers": ("nats://user:pw@host:4222",)}, "nats.servers"),
        ({"servers": ("http://host",)}, "nats.servers"),
        ({"prefix": "a b"}, "nats.prefix"),
        ({"stream": "a.b"}, "nats.stream"),
        ({"cluster": ""}, "nats.cluster"),
        ({"inbox_prefix": ">"}, "nats.inbox_prefix"),
        ({"user": "x"}, "nats.user"),
        ({"tls_key": "k"}, "nats.tls_key"),
        ({"nkey": "a", "credentials": "b"}, "nats"),
        ({"nkey": "/nowhere/seed"}, "nats.nkey"),
        ({"credentials": __file__}, "nats.credentials"),
        ({"nkey": __file__}, "nats.nkey"),
        ({"tls_ca": __file__}, "nats.tls_*"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(fields: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Connection(NatsOptions(**{"servers": ("nats://host:4222",), **fields}), name="test")  # type: ignore[arg-type]
    assert refused.value.key == key
    assert "pw" not in str(refused.value)
