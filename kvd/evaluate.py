"""The measure of truth: what kvd would have predicted before each recorded request, against what the engine reported.

A recording is replayed message by message through the real decoder, state machine and index. Before each request the
prompt is scored, one token short: no engine reuses the whole prompt, since it must compute the last token (vLLM:
``min(hit, floor((prompt − 1) / block) · block)``; SGLang: whole pages of at most prompt − 1).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvd.core.fleet import Fleet
from kvd.core.score import score
from kvd.core.stream import Policy
from kvd.ingest.feed import Feed
from kvd.ingest.recording import RecordingTransport, read_lines
from protocols.errors import WireError
from protocols.media import MediaRun
from protocols.plan import ExactPlan, Plan, PrefixPlan, TextPlan, exact_plan, prefix_plan
from protocols.query import WorkerSpec

MODEL = "recorded"
WORKER = "engine"
_OVERRIDES = ("mm_processor_kwargs", "media_io_kwargs")
"""Request fields that change a media item's identity in a way that cannot be known outside the engine."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A request predicted otherwise than the engine reported."""

    name: str
    request: int
    predicted: int
    cached: int
    prompt_tokens: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``over``: predicted more than was cached; ``skipped``: requests without token ids or without a cached count."""

    requests: int
    exact: int
    over: int
    under: int
    errors: list[Difference]
    skipped: int


class Recorded(msgspec.Struct, frozen=True):
    """One line of a requests file; see the recordings' own README for the fields."""

    name: str = ""
    path: str = ""
    request: Any = None
    status: int | None = None
    events_lines: tuple[int, int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    tokenize: Any = None
    placeholder_runs: list[tuple[int, int, int]] | None = None
    images: list[dict[str, Any]] | None = None
    line: msgspec.Raw = msgspec.Raw(b"{}")
    """The whole line, for plans made from messages and images."""

    @property
    def body(self) -> dict[str, Any]:
        """The request's fields; empty for requests without a JSON object."""
        return self.request if isinstance(self.request, dict) else {}

    @property
    def token_ids(self) -> list[int] | None:
        if self.prompt_token_ids:
            return self.prompt_token_ids
        tokens = self.tokenize.get("tokens") if isinstance(self.tokenize, dict) else None
        return tokens if isinstance(tokens, list) and tokens else None

    @property
    def lora_name(self) -> str | None:
        path = self.body.get("lora_path")
        return path if isinstance(path, str) else None


class Planning(Protocol):
    """How a recorded request becomes a plan; None where it cannot."""

    def plan(self, recorded: Recorded) -> ExactPlan | PrefixPlan | None: ...


class FromMessages:
    """From the recorded messages and images, by a checkpoint's planner; the recorded token ids are not looked at."""

    def __init__(self, checkpoint: str, base_models: Sequence[str]) -> None:
        # The planner's packages are an extra: only who plans loads them.
        self._request_of = importlib.import_module("planner.recorded").request_of
        self._planner = importlib.import_module("planner.plan").Planner.from_pretrained(checkpoint, model=MODEL)
        self._base_models = base_models

    def plan(self, recorded: Recorded) -> ExactPlan | PrefixPlan | None:
        named = recorded.body.get("model")
        base = named if named in self._base_models else self._base_models[0]
        body = self._request_of(msgspec.json.decode(recorded.line), base_model=base)
        if body is None:
            return None
        plan: Plan = self._planner.plan(body)
        return None if isinstance(plan, TextPlan) else msgspec.structs.replace(plan, model=MODEL)


class FromTokens:
    """From the recorded token ids, media runs and identifiers."""

    def __init__(self, base_models: Iterable[str]) -> None:
        self.base_models = frozenset(base_models)

    def plan(self, recorded: Recorded) -> ExactPlan | PrefixPlan | None:
        """The plan, or None where the recording has no token ids."""
        tokens = recorded.token_ids
        if tokens is None:
            return None
        lora, salt = self.space(recorded)
        runs, images = recorded.placeholder_runs or [], recorded.images or []
        if runs and len(runs) != len(images):  # a video: its items are not its runs
            reason = "media items and placeholder runs differ"
            return prefix_plan(MODEL, tokens[: runs[0][1]], reason, lora_name=lora, cache_salt=salt)
        known = not any(recorded.body.get(name) for name in _OVERRIDES)
        media = [
            MediaRun(start, count, image.get("identifier") if known else None)
            for (_, start, count), image in zip(runs, images, strict=True)
        ]
        return exact_plan(MODEL, tokens, media=media, lora_name=lora, cache_salt=salt)

    def space(self, recorded: Recorded) -> tuple[str | None, str | None]:
        """Adapter and salt of a request: any model name but a base model's is an adapter's."""
        model, salt = recorded.body.get("model"), recorded.body.get("cache_salt")
        lora = recorded.lora_name
        if lora is None and isinstance(model, str) and model not in self.base_models:
            lora = model
        return lora, salt if isinstance(salt, str) else None


def evaluate(events: Path, requests: Path, planning: Planning) -> Report:
    """Replay a recording and compare. Raises :class:`WireError` or OSError for files that cannot be read."""
    fleet = Fleet(max_blocks=1 << 40)
    spec = WorkerSpec(name=WORKER, model=MODEL, endpoint="inproc://recording")
    (member,) = fleet.add(spec, 0.0, Policy())
    transport = RecordingTransport(read_lines(events))
    Feed(member, transport, lambda: 0.0).open()
    outcomes: list[tuple[int, Recorded, int]] = []
    skipped = 0
    for number, recorded in _in_order(read_requests(requests)):
        assert recorded.events_lines is not None
        transport.play(recorded.events_lines[0])
        plan = planning.plan(recorded)
        if plan is None or recorded.cached_tokens is None:
            skipped += 1
            continue
        outcomes.append((number, recorded, _predict(fleet, plan)))
    return _report(outcomes, skipped)


def _in_order(requests: Iterable[Recorded]) -> list[tuple[int, Recorded]]:
    """Requests that were served, by what a router knew before each."""
    served = [(n, r) for n, r in enumerate(requests) if r.status in (None, 200) and r.events_lines is not None]
    return sorted(served, key=lambda entry: (entry[1].events_lines or (0, 0))[0])


def _predict(fleet: Fleet, plan: ExactPlan | PrefixPlan) -> int:
    answer = score(fleet, _one_short(plan), None, 0.0)
    return answer.workers[0].usable_tokens


def _one_short(plan: ExactPlan | PrefixPlan) -> Plan:
    """Without the last token; a prefix plan stops short of the prompt's end anyway."""
    if isinstance(plan, PrefixPlan):
        return plan
    tokens = plan.tokens[: -8 if plan.wide else -4]
    end = len(tokens) // (8 if plan.wide else 4)
    cut = [MediaRun(r.start, min(r.end, end) - r.start, r.identifier, r.hash64) for r in plan.media if r.start < end]
    return msgspec.structs.replace(plan, tokens=tokens, media=tuple(cut))


def _report(outcomes: Sequence[tuple[int, Recorded, int]], skipped: int) -> Report:
    errors = [
        Difference(
            name=recorded.name,
            request=number,
            predicted=predicted,
            cached=recorded.cached_tokens or 0,
            prompt_tokens=recorded.prompt_tokens or len(recorded.token_ids or ()),
        )
        for number, recorded, predicted in outcomes
        if predicted != recorded.cached_tokens
    ]
    over = sum(error.predicted > error.cached for error in errors)
    return Report(
        requests=len(outcomes), exact=len(outcomes) - len(errors), over=over, under=len(errors) - over, errors=errors,
        skipped=skipped,
    )  # fmt: skip


def read_requests(path: Path) -> Iterator[Recorded]:
    """The requests of a recording. Raises :class:`WireError` naming file and line."""
    decoder = msgspec.json.Decoder(Recorded)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield msgspec.structs.replace(decoder.decode(line), line=msgspec.Raw(line))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise WireError("requests", f"{path}, line {number}: {error}") from None
