"""What kvd answers, whatever carried the question: one request in, one reply out, never an exception."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvd.core.diagnosis import Case, Tallies, diagnose
from kvd.core.fleet import Fleet, FleetError, Member, totals
from kvd.core.score import routed_keys, score, score_keys
from kvd.ingest.supervisor import Supervisor
from kvd.serve.handout import SnapshotHandout
from kvd.serve.lag import LoopLag
from protocols import query
from protocols.errors import ConfigError, PlanError, RequestError
from protocols.plan import Plan, TextPlan, token_count, validate

log = logging.getLogger(__name__)

MAX_TTL_MS = 3_600_000


def _version() -> str:
    try:
        return version("kvd")
    except PackageNotFoundError:
        return "unknown"


class Service:
    """The request handlers. ``limits`` are told in Welcome and enforced here for what is inside a message."""

    def __init__(
        self, fleet: Fleet, supervisor: Supervisor, clock: Callable[[], float], *, limits: query.Limits,
        routed_ttl_ms: int = 2_000, text_ttl_ms: int = 120_000, snapshot: Path | None = None,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self.limits = limits
        self.handout = SnapshotHandout(snapshot)
        self.loop_lag = LoopLag()
        self.instance = uuid.uuid4().hex
        self.observed: dict[str, list[int]] = {}
        self.tallies = Tallies()
        self._supervisor = supervisor
        self._clock = clock
        self._routed_ttl_ms = routed_ttl_ms
        self._text_ttl_ms = text_ttl_ms

    def handle(self, request: query.AnyRequest) -> query.AnyReply:
        """Answer one request; what cannot be done is an Error that says why."""
        try:
            return self._answer(request)
        except RequestError as error:
            return query.Error(id=request.id, code=error.code, message=error.message, retriable=error.retriable)
        except PlanError as error:
            return query.Error(id=request.id, code="bad_plan", message=str(error))
        except (FleetError, ConfigError) as error:
            return query.Error(id=request.id, code="bad_worker", message=str(error))
        except Exception:
            log.exception("request %s failed", type(request).__name__)
            return query.Error(id=request.id, code="internal", message="the daemon failed; its log has the cause")

    def _answer(self, request: query.AnyRequest) -> query.AnyReply:
        match request:
            case query.Score():
                return self._score(request)
            case query.ScoreKeys():
                return self._score_keys(request)
            case query.Hello():
                return self._hello(request)
            case query.Routed():
                return self._routed(request)
            case query.Observed():
                return self._observe(request)
            case query.AddWorker():
                self._supervisor.add(request.worker, dynamic=True)
            case query.RemoveWorker():
                self._supervisor.remove(request.name)
                self.observed.pop(request.name, None)
                self.tallies.keep(self.fleet.members)
            case query.ListWorkers():
                return self._list_workers(request)
            case query.ListStreams():
                return self._list_streams(request)
            case query.FetchSnapshot():
                return self.handout.piece(request)
            case query.Diagnose():
                return self._diagnose(request)
            case query.Check():
                return self._check(request)
        return query.Ok(id=request.id)

    def _hello(self, request: query.Hello) -> query.Welcome:
        if request.protocol != query.PROTOCOL:
            said = f"protocol {request.protocol}, this daemon speaks {query.PROTOCOL}: use a matching client"
            raise RequestError("unsupported_protocol", said)
        return query.Welcome(
            id=request.id, server=f"kvd {_version()}", protocol=query.PROTOCOL, instance=self.instance,
            limits=self.limits, models=list(self.fleet.models()),
        )  # fmt: skip

    def _score(self, request: query.Score) -> query.Scores:
        self._within("plans", len(request.plans), self.limits.plans_per_request, "send them in several requests")
        for plan in request.plans:
            self._accept(plan)
        self._known(request.workers)
        now = self._clock()
        answers = [score(self.fleet, plan, request.workers, now) for plan in request.plans]
        for plan, answer in zip(request.plans, answers, strict=True):
            self.tallies.note(plan, answer)
        return query.Scores(id=request.id, answers=answers)

    def _accept(self, plan: Plan) -> None:
        validate(plan)
        size = len(plan.text) if isinstance(plan, TextPlan) else token_count(plan)
        self._within("tokens in a plan", size, self.limits.tokens_per_plan, "raise query.tokens_per_plan")

    def _known(self, workers: Sequence[str] | None) -> None:
        unknown = [name for name in workers or () if name not in self.fleet.workers]
        if unknown:
            raise RequestError("unknown_worker", f"no worker {unknown[0]!r}: `kvd workers` lists them")

    @staticmethod
    def _within(what: str, value: int, bound: int, remedy: str) -> None:
        if value > bound:
            raise RequestError("too_large", f"{value} {what}, at most {bound}: {remedy}")

    def _score_keys(self, request: query.ScoreKeys) -> query.Scores:
        if len(request.keys) % 8 or request.block_size < 1:
            said = (
                f"{len(request.keys)} bytes of keys, block size {request.block_size}: expected packed u64 and 1 or more"
            )
            raise RequestError("bad_keys", said)
        self._within("keys", len(request.keys) // 8, self.limits.tokens_per_plan, "ask for a shorter prefix")
        self._known(request.workers)
        answer = score_keys(self.fleet, request.model, request.keys, request.block_size, request.workers, self._clock())
        return query.Scores(id=request.id, answers=[answer])

    def _routed(self, request: query.Routed) -> query.Ok:
        self._accept(request.plan)
        member = self._member(request.worker, request.rank)
        default = self._text_ttl_ms if isinstance(request.plan, TextPlan) else self._routed_ttl_ms
        ttl_ms = default if request.ttl_ms is None else request.ttl_ms
        if not 0 < ttl_ms <= MAX_TTL_MS:
            raise RequestError("bad_ttl", f"ttl_ms {ttl_ms}: expected 1 to {MAX_TTL_MS}")
        keys = routed_keys(request.plan, member)
        self.fleet.routed.insert(member.owner, keys, self._clock(), ttl_ms / 1000)
        return query.Ok(id=request.id)

    def _member(self, worker: str, rank: int) -> Member:
        member = self.fleet.members.get((worker, rank))
        if member is None:
            raise RequestError("unknown_worker", f"no worker {worker!r} with rank {rank}: `kvd workers` lists them")
        return member

    def _observe(self, request: query.Observed) -> query.Ok:
        self._known([request.worker])
        totals_of = self.observed.setdefault(request.worker, [0, 0, 0])
        totals_of[0] += 1
        totals_of[1] += request.predicted_tokens
        totals_of[2] += abs(request.predicted_tokens - request.cached_tokens)
        return query.Ok(id=request.id)

    def _list_workers(self, request: query.ListWorkers) -> query.Workers:
        now = self._clock()
        streams: dict[str, list[query.StreamInfo]] = {name: [] for name in self.fleet.workers}
        for member in self.fleet.members.values():
            streams[member.spec.name].append(self._info(member, now))
        infos = [query.WorkerInfo(worker=spec, streams=streams[name]) for name, spec in self.fleet.workers.items()]
        return query.Workers(id=request.id, workers=infos)

    def _list_streams(self, request: query.ListStreams) -> query.Streams:
        if request.worker is not None:
            self._known([request.worker])
        now = self._clock()
        members = [m for m in self.fleet.members.values() if request.worker in (None, m.spec.name)]
        return query.Streams(id=request.id, streams=[self._info(member, now) for member in members])

    def _info(self, member: Member, now: float) -> query.StreamInfo:
        info = member.info(now)
        feed = self._supervisor.feeds.get(member.owner)
        if feed is not None:
            info.counters.update(feed.counters)
        return info

    def _diagnose(self, request: query.Diagnose) -> query.Diagnosed:
        self._known([request.worker])
        self.tallies.keep(self.fleet.members)
        now = self._clock()
        members = [member for member in self.fleet.members.values() if member.spec.name == request.worker]
        cases = [Case(spec=m.spec, info=self._info(m, now), tally=self.tallies.of(m.owner)) for m in members]
        diagnoses = [
            query.Diagnosis(worker=case.info.worker, rank=case.info.rank, findings=diagnose(case)) for case in cases
        ]
        return query.Diagnosed(id=request.id, diagnoses=diagnoses)

    def _check(self, request: query.Check) -> query.Checked:
        failures, sizes = self.fleet.check(), totals(self.fleet)
        return query.Checked(
            id=request.id, ok=not failures, failures=failures[:100], blocks=sizes.blocks, nodes=sizes.nodes,
            loop_lag_seconds=self.loop_lag.worst(self._clock()),
        )  # fmt: skip
