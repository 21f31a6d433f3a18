"""An engine's HTTP side on a loopback port: what each path answers is the test's to say, and what was asked is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[bytes], tuple[int, Any]] | tuple[int, Any]
"""Status and body: bytes as they are, anything else as JSON; or a function of the request's body."""


class HttpEngine:
    """``answers`` maps "METHOD /path" to an answer; everything else is 404. Use as a context manager."""

    def __init__(self, answers: dict[str, Answer] | None = None, *, headers: dict[str, str] | None = None) -> None:
        self.answers: dict[str, Answer] = answers or {}
        self.asked: list[str] = []
        self.headers = headers or {}
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> HttpEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; on the same port as before after a stop."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                engine._handle(self)

            def do_POST(self) -> None:
                engine._handle(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        name = f"{request.command} {request.path}"
        self.asked.append(name)
        answer = self.answers.get(name, (404, {"detail": "Not Found"}))
        status, value = answer(body) if callable(answer) else answer
        payload = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers = {"content-type": "application/json", "content-length": str(len(payload)), "connection": "close"}
        request.close_connection = True
        try:
            request.send_response(status)
            for key, text in (headers | self.headers).items():
                request.send_header(key, text)
            request.end_headers()
            request.wfile.write(payload)
        except OSError:  # the asker has gone
            pass


class TrtllmEngine(HttpEngine):
    """``POST /kv_cache_events`` hands out what was queued, once; ids count per rank."""

    def __init__(self, *, buffer: int = 1024) -> None:
        super().__init__({"POST /kv_cache_events": self._drain})
        self._lock = threading.Lock()
        self._buffer = buffer
        self._queue: list[dict[str, Any]] = []
        self._ids: dict[int | None, int] = {}
        self.failing: tuple[int, Any] | None = None

    def emit(self, data: dict[str, Any], *, rank: int | None = None, window: int | None = 4096) -> int:
        """Queue one event; beyond the buffer the oldest is discarded, as the engine does."""
        with self._lock:
            event_id = self._ids.get(rank, 0)
            self._ids[rank] = event_id + 1
            event = {"event_id": event_id, "data": data, "window_size": window}
            self._queue.append(event if rank is None else event | {"attention_dp_rank": rank})
            del self._queue[: -self._buffer]
        return event_id

    def restart(self) -> None:
        """Another process at the same address."""
        with self._lock:
            self._queue.clear()
            self._ids.clear()

    def _drain(self, body: bytes) -> tuple[int, Any]:
        del body
        if self.failing is not None:
            return self.failing
        with self._lock:
            events, self._queue = self._queue, []
        return 200, events


def created(device: int = 100, host: int = 0) -> dict[str, Any]:
    return {"type": "created", "num_blocks_per_cache_level": [device, host]}


def block(hash_: int, tokens: list[int], *, level: int = 0, **fields: Any) -> dict[str, Any]:
    ids = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": hash_, "tokens": ids, "cache_level": level, "priority": 35, **fields}


def stored_blocks(*blocks: dict[str, Any], parent: int | None = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def stored_prompt(tokens: list[int], *, first: int = 1, size: int = 4, parent: int | None = None) -> dict[str, Any]:
    """A whole prompt, its partial last block included, as the engine announces it."""
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return stored_blocks(*(block(first + i, chunk) for i, chunk in enumerate(chunks)), parent=parent)


def removed_blocks(*hashes: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def moved(hash_: int, old: int, new: int) -> dict[str, Any]:
    diff = {"type": "event_diff", "new_value": new, "old_value": old}
    return {"type": "updated", "block_hash": hash_, "cache_level": diff, "priority": None}


def mm_key(identity: str, start_offset: int) -> dict[str, Any]:
    return {"type": "mm_key", "hash": identity, "start_offset": start_offset}
