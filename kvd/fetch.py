"""One HTTP exchange with an engine, within bounds: so many bytes, so many seconds, no redirects, nothing compressed.

An engine's HTTP port is not trusted further than its event stream: the body is counted while it comes and refused
before it is decoded, because a few compressed or endless bytes could otherwise take the process's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx2
import msgspec

from protocols.errors import EngineError

USER_AGENT = "kvd"
_SAID = 200
"""Bytes of an error's body that are repeated."""

_any = msgspec.json.Decoder()


def http_client() -> httpx2.AsyncClient:
    """A client that goes nowhere but where it is told: no redirects, no proxies from the environment."""
    headers = {"user-agent": USER_AGENT, "accept-encoding": "identity"}
    return httpx2.AsyncClient(headers=headers, follow_redirects=False, trust_env=False, timeout=None)


async def fetch(
    client: httpx2.AsyncClient, method: str, url: str, *, limit: int, seconds: float,
    body: Mapping[str, Any] | None = None,
) -> bytes:  # fmt: skip
    """The body of a 2xx answer. Raises :class:`EngineError` for anything else; ``seconds`` bounds all of it."""
    try:
        async with asyncio.timeout(seconds):
            return await _exchange(client, method, url, limit, body)
    except TimeoutError:
        raise EngineError(url, f"no whole answer within {seconds:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError, ValueError) as error:
        raise EngineError(url, f"cannot be asked: {str(error) or type(error).__name__}") from None
    finally:
        client.cookies.clear()  # kvd has no use for them, and an engine could set them without end


async def _exchange(
    client: httpx2.AsyncClient, method: str, url: str, limit: int, body: Mapping[str, Any] | None
) -> bytes:
    async with client.stream(method, url, json=None if body is None else dict(body)) as response:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise EngineError(url, f"sent {response.headers['content-encoding']!r} although plain bytes were asked for")
        if response.is_success:
            return await _limited(response, limit, url)
        said = await _beginning(response)
        raise EngineError(url, _refusal(response, said), status=response.status_code)


async def _limited(response: httpx2.Response, limit: int, url: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > limit:
            raise EngineError(url, f"sent more than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


async def _beginning(response: httpx2.Response) -> str:
    async for part in response.aiter_raw():
        return part[:_SAID].decode(errors="replace").strip()
    return ""


def _refusal(response: httpx2.Response, said: str) -> str:
    if response.is_redirect:
        return f"redirects to {response.headers.get('location', '?')!r:.200}: give that URL if it is the engine's"
    return f"answered {response.status_code}" + (f" ({said})" if said else "")


async def fetch_json(
    client: httpx2.AsyncClient, method: str, url: str, *, limit: int, seconds: float,
    body: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """The same, decoded; integers stay exact. Raises :class:`EngineError`."""
    answer = await fetch(client, method, url, limit=limit, seconds=seconds, body=body)
    try:
        return _any.decode(answer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise EngineError(url, f"did not answer with JSON ({error})") from None
