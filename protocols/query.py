"""The query protocol: msgspec tagged structs in msgpack, the same bytes over ZMQ and NATS.

Every request carries an id that its reply repeats; replies come in any order. Units are in the field names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocols.errors import WireError
from protocols.media import Scheme
from protocols.plan import Basis, Plan

PROTOCOL = 1
"""Version of this protocol; a daemon answers ``unsupported_protocol`` to a Hello of another one."""

TrustState = Literal["exact", "incomplete", "stale", "unknown"]
StreamState = Literal["connecting", "bootstrapping", "live", "repairing", "incomplete", "silent", "closed"]
ZeroReason = Literal[
    "no_match", "no_events_yet", "block_size_mismatch", "scheme_unknown", "shorter_than_block", "incomplete",
    "unknown_model", "no_routes_yet",
]  # fmt: skip
TierName = Literal["device", "host", "disk", "external"]
TIER_NAMES: tuple[TierName, ...] = ("device", "host", "disk", "external")
SourceName = Literal["zmq", "trtllm-http", "atom", "pool"]
"""How a worker's events come: ``zmq`` (vLLM, SGLang, TensorRT-LLM streaming), ``trtllm-http`` (polled; kvd must be the
only reader), ``atom`` (ZMQ without sequences: gaps cannot be seen), ``pool`` (one ZMQ stream for many holders)."""


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """A field nobody knows is refused: ignoring, say, a tenant would answer another question than was asked.

    ``timeout_ms``: how long the client will wait; a request that waited longer in the daemon is not begun."""

    id: int
    timeout_ms: int | None = None


class Hello(Request, frozen=True, kw_only=True, tag="hello"):
    client: str = ""
    protocol: int = PROTOCOL


class Score(Request, frozen=True, kw_only=True, tag="score"):
    """Overlap of each plan with each worker (or with the named ones)."""

    plans: list[Plan]
    workers: list[str] | None = None


class ScoreKeys(Request, frozen=True, kw_only=True, tag="score_keys"):
    """The same from block keys computed elsewhere: packed u64 little-endian."""

    model: str
    keys: bytes
    block_size: int
    workers: list[str] | None = None


class Routed(Request, frozen=True, kw_only=True, tag="routed"):
    """The caller sent this plan to that worker: predicted entries until events confirm them, or ``ttl_ms`` passes."""

    plan: Plan
    worker: str
    rank: int = 0
    ttl_ms: int | None = None


class Observed(Request, frozen=True, kw_only=True, tag="observed"):
    """What the engine then reported, against what was predicted."""

    worker: str
    predicted_tokens: int
    cached_tokens: int


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine worker: where its event streams are and what is known of them beforehand.

    With ``ranks`` n, rank i is at the endpoint's port + i (and the replay endpoint's port + i). ``mode`` ``bind`` is
    for engines whose publisher connects. ``block_size`` and ``scheme`` are learnt from events where absent. A
    ``trtllm-http`` worker's endpoint is the engine's URL, the same for all its ranks.
    """

    name: str
    model: str
    endpoint: str
    replay: str | None = None
    mode: Literal["connect", "bind"] = "connect"
    rank: int = 0
    ranks: int = 1
    block_size: int | None = None
    scheme: Scheme | None = None
    topic: str = ""
    copies: Literal["counted", "single"] = "counted"
    """``single`` for engines that announce cache hits again (vLLM's report mode "full"): no block counts twice."""
    source: SourceName = "zmq"


class AddWorker(Request, frozen=True, kw_only=True, tag="add_worker"):
    worker: WorkerSpec


class RemoveWorker(Request, frozen=True, kw_only=True, tag="remove_worker"):
    name: str


class ListWorkers(Request, frozen=True, kw_only=True, tag="list_workers"):
    pass


class ListStreams(Request, frozen=True, kw_only=True, tag="list_streams"):
    worker: str | None = None


class FetchSnapshot(Request, frozen=True, kw_only=True, tag="fetch_snapshot"):
    """A piece of the daemon's newest snapshot; ``fetch`` is empty at first and then as the reply named it."""

    fetch: str = ""
    offset: int = 0
    max_bytes: int = 1 << 20


class Diagnose(Request, frozen=True, kw_only=True, tag="diagnose"):
    """What is known to be wrong with a worker: why it can never match, or not be believed."""

    worker: str


class Check(Request, frozen=True, kw_only=True, tag="check"):
    """Assert every invariant of the live index."""


AnyRequest = (
    Hello
    | Score
    | ScoreKeys
    | Routed
    | Observed
    | AddWorker
    | RemoveWorker
    | ListWorkers
    | ListStreams
    | FetchSnapshot
    | Diagnose
    | Check
)

# --- replies ---------------------------------------------------------------------------------------------------------


class Trust(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a score can be believed, and since when not.

    ``since_seq``: first message that is missing; ``missing``: how many are known to be; ``stale_seconds``: since the
    stream was last known to be current; ``reason``: why, in a word.
    """

    state: TrustState
    reason: str = ""
    since_seq: int | None = None
    missing: int = 0
    stale_seconds: float = 0.0


class WorkerScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker-rank's overlap with one plan.

    Tokens and blocks are cumulative per tier: ``host`` counts what is on device or host, and so on. ``matched_*`` is
    the reach on the device tier; ``usable_tokens`` is what a hybrid model can reuse of it (equal elsewhere).
    """

    worker: str
    rank: int
    block_size: int | None
    matched_blocks: int
    matched_tokens: int
    usable_tokens: int
    tier_tokens: dict[TierName, int]
    trust: Trust
    predicted_tokens: int = 0
    predicted_bytes: int = 0
    zero_reason: ZeroReason | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """All workers' scores for one plan, in the order workers were added."""

    model: str
    basis: Basis
    prompt_tokens: int
    workers: list[WorkerScore]
    zero_reason: ZeroReason | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    id: int


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon accepts; enforced before anything is decoded further."""

    message_bytes: int
    plans_per_request: int
    tokens_per_plan: int
    in_flight_per_client: int
    queued: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    block_sizes: list[int]
    schemes: list[str]
    workers: int


class Welcome(Reply, frozen=True, kw_only=True, tag="welcome"):
    server: str
    protocol: int
    instance: str
    limits: Limits
    models: list[ModelInfo]


class Scores(Reply, frozen=True, kw_only=True, tag="scores"):
    answers: list[Answer]


class Ok(Reply, frozen=True, kw_only=True, tag="ok"):
    pass


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One publisher's stream: state, position, and what was learnt from it."""

    worker: str
    rank: int
    model: str
    endpoint: str
    replay: str | None
    state: StreamState
    trust: Trust
    lifetime: int
    last_seq: int | None
    quiet_seconds: float | None
    blocks: int
    block_sizes: list[int]
    scheme: str | None
    counters: dict[str, int]


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerSpec
    streams: list[StreamInfo]


class Workers(Reply, frozen=True, kw_only=True, tag="workers"):
    workers: list[WorkerInfo]


class Streams(Reply, frozen=True, kw_only=True, tag="streams"):
    streams: list[StreamInfo]


class SnapshotPart(Reply, frozen=True, kw_only=True, tag="snapshot_part"):
    """``data`` at ``offset`` of a file of ``total_bytes``, which stays the same for this ``fetch``."""

    fetch: str
    offset: int
    total_bytes: int
    data: bytes


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, in one sentence; ``never``: until it is mended, the worker cannot match."""

    code: str
    says: str
    never: bool


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One worker-rank's findings, the most certain first; none where nothing is known to be wrong."""

    worker: str
    rank: int
    findings: list[Finding]


class Diagnosed(Reply, frozen=True, kw_only=True, tag="diagnosed"):
    diagnoses: list[Diagnosis]


class Checked(Reply, frozen=True, kw_only=True, tag="checked"):
    ok: bool
    failures: list[str]
    blocks: int
    nodes: int
    loop_lag_seconds: float
    """How late the daemon's loop was at most, in the last minute, for something due."""


class Error(Reply, frozen=True, kw_only=True, tag="error"):
    """The request was refused; the connection lives on. ``id`` is 0 where the request's own could not be read."""

    code: str
    message: str
    retriable: bool = False


AnyReply = Welcome | Scores | Ok | Workers | Streams | SnapshotPart | Diagnosed | Checked | Error

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


class _Id(msgspec.Struct):
    id: int = 0


_ids = msgspec.msgpack.Decoder(_Id)


def encode(message: AnyRequest | AnyReply) -> bytes:
    """A message as it travels."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> AnyRequest:
    """Raises :class:`WireError`: ``unknown_request`` or ``malformed``."""
    try:
        return _requests.decode(payload)
    except msgspec.ValidationError as error:
        code = "unknown_request" if "$.type" in str(error) or "`type`" in str(error) else "malformed"
        raise WireError(code, str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("malformed", str(error)) from None


def decode_reply(payload: bytes) -> AnyReply:
    """Raises :class:`WireError` ``malformed``."""
    try:
        return _replies.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("malformed", str(error)) from None


def request_id(payload: bytes) -> int:
    """The id of a request that could not be read otherwise, 0 if not even that can be."""
    try:
        return _ids.decode(payload).id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0
