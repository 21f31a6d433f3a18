"""The simulated engine against recordings of real ones: the same requests, in the same order, message for message.

What is compared is everything an engine says: which steps send a message, each event in it, hashes, parents, tokens,
extra keys, what is evicted and when; and the cached tokens that it reports. Every request that differs is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from bench.engine.cache import Cache
from bench.engine.cache import Sequence as Cached
from bench.engine.content import Space, sglang_naming, vllm_naming
from bench.engine.pool import BlockPool
from bench.engine.radix import RadixCache
from bench.engine.scheduler import Job, Scheduler
from bench.engine.wire import RELEASES, Wire
from kvd.evaluate import Recorded, read_requests
from kvd.ingest.recording import read_lines
from protocols.media import MediaRun

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "recordings"

OTHER_TOKENS = "its other answer's tokens are not recorded, and what they evict follows"
TOGETHER = "requests at once: which step each one joined is not recorded"
ABORTED = "the aborted request's prompt is not recorded, and what it leaves behind follows"

RUNS: dict[str, tuple[str, int, int, dict[str, str]]] = {
    "vllm-text": (
        "vllm-0.32.0", 0, 2048,
        {"concurrent-twins": TOGETHER, "n2": OTHER_TOKENS, "evict-0": OTHER_TOKENS, "evict-1": OTHER_TOKENS,
         "preempt": TOGETHER},
    ),
    "vllm-text-bytehash": (
        "vllm-0.32.0-bytes", 0, 256,
        {"concurrent-twins": TOGETHER, "n2": OTHER_TOKENS, "evict-0": OTHER_TOKENS, "evict-1": OTHER_TOKENS,
         "preempt": TOGETHER},
    ),
    "vllm-linear": (
        "vllm-0.32.0", 3, 2048,
        {"n2": OTHER_TOKENS, "evict-3": OTHER_TOKENS, "evict-prefix-of-3": OTHER_TOKENS,
         "old-two-blocks": OTHER_TOKENS, "preempt": TOGETHER},
    ),
    "vllm-mm": ("vllm-0.32.0", 0, 2048, {}),
    "vllm-mm5": ("vllm-0.32.0", 0, 2048, {}),
    "sgl-text": ("sglang-0.5.23", 0, 2048, {"after-abort-same-prompt": ABORTED, "retract": TOGETHER}),
}  # fmt: skip
"""Release, recurrent groups, tokens a step, and requests whose events differ, with the cause."""
MEDIA_UNTIL = "mm_processor_kwargs"
"""The recordings with images are compared up to their first overridden identity; videos come after it."""


class Compared(NamedTuple):
    name: str
    cached: list[int | None]
    reported: list[int | None]
    sent: list[list[Any]]
    recorded: list[list[Any]]


class Replay:
    """A recording's requests through a simulated engine of its shape."""

    def __init__(self, tag: str) -> None:
        release, recurrent, step_tokens, self.differing = RUNS[tag]
        meta = msgspec.json.decode((RECORDINGS / f"{tag}.meta.json").read_bytes())
        self.tag = tag
        self.wire = Wire(RELEASES[release], meta["block_size"])
        self.cache = self._cache(meta["num_blocks"], recurrent)
        self.scheduler = Scheduler(self.cache, max_running=4, step_tokens=step_tokens, max_waiting=100)
        self.wire.take()  # SGLang's first clear: nobody heard it
        self.lines = [msgspec.msgpack.decode(line.frames[2])[1] for line in read_lines(RECORDINGS / f"{tag}.jsonl")]

    def _cache(self, blocks: int, recurrent: int) -> Cache:
        if self.wire.release.engine == "sglang":
            return RadixCache(self.wire, sglang_naming(), pages=blocks)
        return BlockPool(self.wire, vllm_naming(), blocks=blocks - 1, recurrent=recurrent)  # one is the null block

    def compared(self) -> Iterator[Compared]:
        requests = [r for r in read_requests(RECORDINGS / f"{self.tag}.requests.jsonl") if r.status == 200]
        for at_once, group in groupby(requests, key=_at_once):
            if self.tag.startswith("vllm-mm") and at_once == MEDIA_UNTIL:
                return
            together = list(group)
            if together[0].path in ("/reset_prefix_cache", "/flush_cache"):
                if b'"success": false' not in bytes(together[0].line):
                    self.cache.clear()
                if self.wire.release.engine == "sglang":
                    self.wire.take()  # its own message, at once
                continue
            if together[0].cached_tokens is not None and together[0].token_ids is not None:
                yield self._serve(at_once, together)

    def _serve(self, name: str, together: Sequence[Recorded]) -> Compared:
        jobs = [self._job(request) for request in together]
        for job in jobs:
            self.scheduler.submit(job)
        sent = []
        while (step := self.scheduler.schedule()) is not None:
            self.scheduler.complete(step)
            if events := self.wire.take():
                sent.append([_comparable(event) for event in events])
        spans = [request.events_lines or (0, 0) for request in together]
        begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
        return Compared(
            name=name, cached=[job.seq.first_cached for job in jobs], sent=sent,
            reported=[request.cached_tokens for request in together],
            recorded=[[_comparable(event) for event in message] for message in self.lines[begin:end]],
        )  # fmt: skip

    def _job(self, request: Recorded) -> Job:
        body = request.body
        adapter = body.get("model") if body.get("model") not in (None, "tiny") else None
        space = Space(adapter, body.get("cache_salt"), body.get("extra_key"))
        runs = [
            MediaRun(start, count, image["identifier"])
            for (_, start, count), image in zip(request.placeholder_runs or [], request.images or [], strict=False)
        ]
        tokens = request.token_ids or []
        outputs = msgspec.json.decode(bytes(request.line)).get("output_token_ids") or []
        seq = Cached(
            self.cache.chain(tokens, space, runs), len(tokens),
            report_hits=(body.get("vllm_xargs") or {}).get("kv_cache_report_mode") == "full",
        )  # fmt: skip
        wanted = body.get("max_tokens") or (body.get("sampling_params") or {}).get("max_new_tokens") or 1
        return Job(seq, wanted, lambda n: outputs[n - 1] if n <= len(outputs) else 7)


def _at_once(request: Recorded) -> str:
    """Requests that were sent at the same time share a name and are numbered."""
    stem, _, number = request.name.rpartition("-")
    return stem if stem in ("concurrent-twins", "preempt", "retract") and number.isdigit() else request.name


def _comparable(event: Any) -> Any:
    """Without a session's name (one came in a header), and an adapter's hashes (its path is in them, not in events)."""
    event = {key: value for key, value in event.items() if key != "session_id"}
    if event.get("lora_name"):
        event |= {"block_hashes": len(event["block_hashes"]), "parent_block_hash": event["parent_block_hash"] is None}
    return event


@pytest.mark.parametrize("tag", RUNS)
def test_the_simulator_says_what_the_real_engine_said(tag: str) -> None:
    replay = Replay(tag)
    compared = list(replay.compared())
    messages = [each for each in compared if each.sent != each.recorded]
    assert {each.name for each in messages} == set(replay.differing)
    assert len(compared) - len(messages) >= 20


@pytest.mark.parametrize("tag", RUNS)
def test_the_simulator_reports_what_the_real_engine_reported(tag: str) -> None:
    replay = Replay(tag)
    differing = {each.name for each in replay.compared() if each.cached != each.reported}
    assert differing <= {"n2", "after-abort-same-prompt", "concurrent-twins"}
