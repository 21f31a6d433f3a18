"""Asks a running engine what it publishes, so that nobody has to copy ports, ranks and versions by hand.

Runs on the caller's side, not in the daemon. Every request has a deadline and a bound, and goes nowhere but to the host
that was named. What TensorRT-LLM publishes cannot be asked: reading its events takes them away.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx2

from kvd.fetch import fetch_json, http_client
from kvd.ingest.advertised import Learnt, describes_sglang, sglang_learnt, vllm_learnt
from protocols.errors import EngineError

MAX_ANSWER_BYTES = 4 << 20
_MISSING = (404, 405, 501)
_INFO_PATHS = ("/server_info", "/get_server_info")
"""SGLang's, new and old."""


def engine_url(text: str) -> tuple[str, str]:
    """The engine's base URL and its host. Raises :class:`EngineError`."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise EngineError(text, f"is no URL ({error})") from None
    if parts.scheme not in ("http", "https") or not host or port == 0 or "@" in parts.netloc:
        raise EngineError(text, "is not http://host:port of an engine")
    if parts.query or parts.fragment:
        raise EngineError(text, "has a query or fragment: give the engine's base URL")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}", host


async def discover(url: str, *, model: str | None = None, seconds: float = 5.0) -> Learnt:
    """What the engine at ``url`` publishes; each request takes at most ``seconds``. Raises :class:`EngineError`."""
    base, host = engine_url(url)
    async with http_client() as client:
        asked = _Asked(client, base, seconds)
        sources = await asked.maybe("/kv_event_sources")
        if sources is not None:
            models = None if model else await asked.get("/v1/models")
            version = await asked.maybe("/version")
            return vllm_learnt(sources, models, version, host=host, url=base, model=model)
        for path in _INFO_PATHS:
            info = await asked.maybe(path)
            if describes_sglang(info):
                return sglang_learnt(info, host=host, url=base, model=model)
        raise EngineError(f"{base}/kv_event_sources", await _silence(asked, host))


class _Asked:
    """One engine's answers."""

    def __init__(self, client: httpx2.AsyncClient, base: str, seconds: float) -> None:
        self._client = client
        self._base = base
        self._seconds = seconds

    async def get(self, path: str) -> Any:
        return await fetch_json(
            self._client, "GET", self._base + path, limit=MAX_ANSWER_BYTES, seconds=self._seconds
        )  # fmt: skip

    async def maybe(self, path: str) -> Any | None:
        """The answer, or None where the engine does not know the path."""
        try:
            return await self.get(path)
        except EngineError as error:
            if error.status in _MISSING:
                return None
            raise


async def _silence(asked: _Asked, host: str) -> str:
    """Why nothing can be learnt, and how to say it by hand."""
    version = await asked.maybe("/version")
    release = version.get("version") if isinstance(version, dict) else None
    which = f"an engine of version {release!s:.40}" if release else "this engine"
    return (
        f"{which} does not tell where it publishes (vLLM does from 0.31 on, SGLang by kv_events in /server_info): add "
        f"it by hand: kvd workers add NAME tcp://{host}:5557 --replay tcp://{host}:5558 --model MODEL, or, for "
        "TensorRT-LLM, kvd workers add NAME URL --source trtllm-http --model MODEL"
    )
