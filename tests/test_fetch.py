"""One bounded HTTP exchange: what an engine can do wrong ends in an EngineError that names the URL."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.fetch import fetch, fetch_json, http_client
from protocols.errors import EngineError
from tests.kit.http import HttpEngine


async def got(url: str, *, limit: int = 1000, seconds: float = 5.0) -> bytes:
    async with http_client() as client:
        return await fetch(client, "GET", url, limit=limit, seconds=seconds)


@contextlib.contextmanager
def raw_server(*parts: bytes, drip: bytes = b"") -> Iterator[str]:
    """Answers one request with these bytes, and then one ``drip`` after another until nobody listens."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                for part in parts:
                    connection.sendall(part)
                while drip and not done.wait(0.01):
                    connection.sendall(drip)

    done = threading.Event()
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
    finally:
        done.set()
        listener.close()
        thread.join(5)


@pytest.mark.parametrize(("size", "fits"), [(0, True), (1000, True), (1001, False)])
async def test_a_body_may_have_so_many_bytes(size: int, fits: bool) -> None:
    with HttpEngine({"GET /x": (200, b"a" * size)}) as engine:
        if fits:
            assert await got(f"{engine.url}/x") == b"a" * size
            return
        with pytest.raises(EngineError, match="sent more than 1000 bytes"):
            await got(f"{engine.url}/x")


async def test_integers_of_64_bits_stay_exact() -> None:
    with HttpEngine({"GET /x": (200, b"[18446744073709551615, -9223372036854775808]")}) as engine:
        async with http_client() as client:
            value = await fetch_json(client, "GET", f"{engine.url}/x", limit=100, seconds=5)
    assert value == [(1 << 64) - 1, -(1 << 63)]


async def test_an_error_repeats_the_beginning_of_what_was_said_and_its_status() -> None:
    with (
        HttpEngine({"GET /x": (503, b"busy " * 1000)}) as engine,
        pytest.raises(EngineError, match=r"answered 503 \(busy busy") as caught,
    ):
        await got(f"{engine.url}/x")
    assert (caught.value.status, len(str(caught.value)) < 300) == (503, True)


async def test_a_redirect_is_no_answer() -> None:
    with (
        HttpEngine({"GET /x": (301, b"")}, headers={"location": "http://elsewhere/"}) as engine,
        pytest.raises(EngineError, match="redirects to 'http://elsewhere/'"),
    ):
        await got(f"{engine.url}/x")


async def test_cookies_are_not_kept() -> None:
    with HttpEngine({"GET /x": (200, b"")}, headers={"set-cookie": "a=b"}) as engine:
        async with http_client() as client:
            await fetch(client, "GET", f"{engine.url}/x", limit=10, seconds=5)
            assert not client.cookies


_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"parts": [b""], "drip": b""}, "cannot be asked"),
        ({"parts": [b"not http at all\r\n\r\n"]}, "cannot be asked"),
        ({"parts": [b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort"]}, "cannot be asked"),
        ({"parts": [b"HTTP/1.1 200 OK\r\n"], "drip": b"x: y\r\n"}, "within 0.3 s"),
        ({"parts": [_HEAD], "drip": b"1\r\na\r\n"}, "within 0.3 s"),
        ({"parts": [_HEAD], "drip": b"3e8\r\n" + b"a" * 1000 + b"\r\n"}, "more than 1000 bytes"),
    ],
)
async def test_servers_that_never_finish_or_talk_nonsense(server: dict[str, Any], said: str) -> None:
    with (
        raw_server(*server["parts"], drip=server.get("drip", b"")) as url,
        pytest.raises(EngineError, match=said) as caught,
    ):
        await got(url, seconds=0.3)
    assert str(caught.value).startswith(url)
