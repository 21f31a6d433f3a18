"""One tiny prompt of random token ids through an engine: do the announced keys equal the predicted ones?

Token ids are sent, so neither template nor tokenizer takes part. A probe that agrees, with real prompts that never
match, points at those two.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from kvd.client import Client, StreamInfo, exact_plan
from kvd.fetch import fetch, http_client
from kvd.ingest.discovery import engine_url
from protocols.errors import EngineError, RequestError
from protocols.query import Finding, WorkerInfo, WorkerScore

ANSWER_SECONDS = 60.0
EVENT_SECONDS = 10.0
_MAX_ANSWER_BYTES = 4 << 20
_MAX_PROMPT = 131_072
_UNKNOWN_SIZE_PROMPT = 1025
"""Tokens to send while the block size is not known: a few blocks of every ordinary size."""
_TOKENS = range(10, 250)
"""Every vocabulary has these; 2 blocks of them are new to any cache."""
_PAUSE = 0.05


def probe(
    client: Client, worker: str, url: str | None, *, event_seconds: float = EVENT_SECONDS,
    answer_seconds: float = ANSWER_SECONDS,
) -> Finding:  # fmt: skip
    """Send one prompt and wait for its events. Raises :class:`EngineError` if the engine does not take it."""
    info = _worker(client, worker)
    where = url or (info.worker.endpoint if info.worker.source == "trtllm-http" else None)
    if where is None:
        raise EngineError("--url", "is needed for a probe: the engine's http://host:port")
    base, _ = engine_url(where)
    size = max((size for stream in info.streams for size in stream.block_sizes), default=info.worker.block_size or 0)
    length = 2 * size + 1 if size else _UNKNOWN_SIZE_PROMPT
    if length > _MAX_PROMPT:
        said = f"a prompt of two blocks of {size} tokens is no tiny one: nothing was sent"
        return Finding(code="too_large", says=said, never=False)
    tokens = random.Random().choices(_TOKENS, k=length)
    before = {stream.rank: stream.last_seq for stream in info.streams}
    asyncio.run(_complete(base, info.worker.model, tokens, answer_seconds))
    return _outcome(client, info, tokens, before, event_seconds)


def _worker(client: Client, worker: str) -> WorkerInfo:
    for info in client.workers():
        if info.worker.name == worker:
            return info
    raise RequestError("unknown_worker", f"no worker {worker!r}: `kvd workers` lists them")


async def _complete(base: str, model: str, tokens: list[int], seconds: float) -> None:
    """One generated token; the OpenAI route first, then SGLang's own."""
    completion = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    generation = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    async with http_client() as http:
        try:
            await fetch(
                http, "POST", f"{base}/v1/completions", limit=_MAX_ANSWER_BYTES, seconds=seconds, body=completion
            )
        except EngineError as error:
            if error.status not in (404, 405):
                raise
            await fetch(http, "POST", f"{base}/generate", limit=_MAX_ANSWER_BYTES, seconds=seconds, body=generation)


def _outcome(
    client: Client, info: WorkerInfo, tokens: list[int], before: dict[int, int | None], seconds: float
) -> Finding:
    plan = exact_plan(info.worker.model, tokens)

    def best() -> WorkerScore | None:
        scores = client.score(plan, workers=[info.worker.name]).workers
        row = max(scores, key=lambda score: score.matched_tokens)
        whole = row.block_size is not None and row.matched_tokens >= len(tokens) // row.block_size * row.block_size
        return row if row.matched_tokens and whole else None

    row = _wait(best, seconds)
    if row is not None:
        said = f"{row.matched_blocks} blocks of {row.block_size} tokens were announced at rank {row.rank} as predicted"
        return Finding(code="agrees", says=said, never=False)
    streams = _worker(client, info.worker.name).streams
    moved = [stream for stream in streams if stream.last_seq != before.get(stream.rank)]
    return _disagreement(tokens, moved, client.score(plan, workers=[info.worker.name]).workers, seconds)


def _wait(condition: Callable[[], WorkerScore | None], seconds: float) -> WorkerScore | None:
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(_PAUSE)


def _disagreement(
    tokens: list[int], moved: list[StreamInfo], scores: list[WorkerScore], seconds: float
) -> Finding:  # fmt: skip
    if not moved:
        said = (
            f"the engine computed {len(tokens)} tokens, and no event came within {seconds:g} s: its KV events are off, "
            "its blocks are larger than that, or the URL and the event endpoint are not of one engine"
        )
        return Finding(code="no_event", says=said, never=True)
    sizes = sorted({size for stream in moved for size in stream.block_sizes})
    matched = max((score.matched_tokens for score in scores), default=0)
    if matched:
        said = f"only {matched} of {len(tokens)} tokens were announced within {seconds:g} s: events lag, or blocks went"
        return Finding(code="partial", says=said, never=False)
    if sizes and min(sizes) > len(tokens):
        said = f"its blocks hold {min(sizes)} tokens, more than the {len(tokens)} that were sent"
        return Finding(code="block_size_beyond_probe", says=said, never=False)
    said = (
        f"events came (blocks of {sizes or 'no known'} tokens), none with a predicted key: the engine puts something "
        "before the prompt, or keys it with an adapter or salt; `kvd check --worker` may name it"
    )
    return Finding(code="keys_differ", says=said, never=True)
