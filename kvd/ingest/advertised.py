"""What an engine's HTTP answers say of its event streams. Values in, worker entries out; nothing is asked here.

vLLM (0.31 and later) lists its publishers at ``/kv_event_sources``: one object a rank with ``data_parallel_rank``,
``endpoint``, ``replay_endpoint`` and ``topic``. SGLang describes the range of them in ``/server_info`` under
``kv_events``. Whatever an answer leaves open is left open here too, and said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvd.ingest.endpoints import MAX_RANKS
from protocols.errors import EngineError
from protocols.media import Scheme
from protocols.query import WorkerSpec

Engine = Literal["vllm", "sglang"]
MAX_SOURCES = MAX_RANKS
_VLLM_CONFIG = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
_EITHER_WAY = (
    "is what a publisher bound to port 0 tells, but also one that connects to a configured host; if it does the "
    "latter, kvd must bind there (--bind)"
)
_LATER_SIZE = "it is learnt from the first event (--block-size fixes it)"
_WILDCARDS = ("*", "0.0.0.0", "::", "[::]", "")


class Publisher(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's stream as advertised; wildcard hosts are replaced already. ``named``: there was no wildcard."""

    rank: int
    endpoint: str
    replay: str | None = None
    topic: str = ""
    named: bool = False


class Learnt(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine told of itself. ``unknown``: for each field it did not tell, a sentence with how to give it."""

    engine: Engine
    version: str | None
    model: str
    publishers: list[Publisher]
    block_size: int | None = None
    scheme: Scheme | None = None
    unknown: dict[str, str] = {}


# --- vLLM ------------------------------------------------------------------------------------------------------------


def vllm_publishers(answer: Any, host: str, url: str) -> list[Publisher]:
    """The publishers in an answer of ``/kv_event_sources``. Raises :class:`EngineError` naming what is missing."""
    found = [_vllm_publisher(entry, number, host, url) for number, entry in enumerate(_sources(answer, url))]
    publishers = sorted((p for p in found if p is not None), key=lambda publisher: publisher.rank)
    if not publishers:
        raise EngineError(url, f"lists no publisher: start the engine with --kv-events-config '{_VLLM_CONFIG}'")
    if len({publisher.rank for publisher in publishers}) < len(publishers):
        raise EngineError(url, f"lists a rank twice: {[publisher.rank for publisher in publishers]}")
    return publishers


def _sources(answer: Any, url: str) -> Sequence[Any]:
    """A bare list, or one inside an object."""
    if isinstance(answer, Mapping):
        answer = next((answer[key] for key in ("sources", "kv_event_sources", "data") if key in answer), answer)
    if not isinstance(answer, list):
        raise EngineError(url, f"answered {_kind(answer)} where a list of publishers was expected")
    if len(answer) > MAX_SOURCES:
        raise EngineError(url, f"lists {len(answer)} publishers, at most {MAX_SOURCES}")
    return answer


def _vllm_publisher(entry: Any, number: int, host: str, url: str) -> Publisher | None:
    if not isinstance(entry, Mapping):
        raise EngineError(url, f"publisher {number} is {_kind(entry)}, expected an object")
    if str(entry.get("publisher") or entry.get("transport") or "zmq") != "zmq":
        return None
    endpoint = entry.get("endpoint")
    if not isinstance(endpoint, str) or "://" not in endpoint:
        raise EngineError(url, f"publisher {number} has no endpoint, but {sorted(map(str, entry))[:8]}")
    rank = next((entry[key] for key in ("data_parallel_rank", "dp_rank", "rank") if entry.get(key) is not None), 0)
    if type(rank) is not int or rank < 0:
        raise EngineError(url, f"publisher {number} has rank {rank!r:.40}, expected 0 or more")
    replay, topic = entry.get("replay_endpoint"), entry.get("topic")
    return Publisher(
        rank=rank, endpoint=with_host(endpoint, host), named=with_host(endpoint, host) == endpoint,
        topic=topic if isinstance(topic, str) else "",
        replay=with_host(replay, host) if isinstance(replay, str) and "://" in replay else None,
    )  # fmt: skip


def vllm_learnt(
    sources: Any, models: Any, version: Any, *, host: str, url: str, model: str | None = None
) -> Learnt:  # fmt: skip
    """Everything from vLLM's three answers; ``models`` and ``version`` may be None. Raises :class:`EngineError`."""
    publishers = vllm_publishers(sources, host, f"{url}/kv_event_sources")
    release = _text(version, "version")
    number = version_of(release)
    unknown = {"block_size": f"block size: not told; {_LATER_SIZE}"}
    named = model or _served(models, f"{url}/v1/models", unknown)
    scheme: Scheme | None = "media_keys"
    if number is not None and number < (0, 19):
        scheme = None
        unknown["scheme"] = f"key scheme: vLLM {release} lists media without offsets; prompts match up to it"
    if publishers[0].named and publishers[0].endpoint.startswith("tcp://"):
        unknown["mode"] = f"direction: {publishers[0].endpoint} {_EITHER_WAY}"
    unknown |= _doubts(publishers)
    return Learnt(
        engine="vllm", version=release, model=named, publishers=publishers, scheme=scheme, unknown=unknown
    )  # fmt: skip


def _served(models: Any, url: str, unknown: dict[str, str]) -> str:
    """The model's name: the first that is not an adapter of another one."""
    data = models.get("data") if isinstance(models, Mapping) else None
    entries = [entry for entry in data if isinstance(entry, Mapping)] if isinstance(data, list) else []
    names = [e["id"] for e in entries if isinstance(e.get("id"), str) and e["id"] and not e.get("parent")]
    if not names:
        raise EngineError(url, "names no model: give --model")
    if len(names) > 1:
        others = ", ".join(names[1:6])
        unknown["model"] = f"model: {names[0]!r}, but served as {others} too; kvd knows it by one name (--model)"
    return str(names[0])


# --- SGLang ----------------------------------------------------------------------------------------------------------


def describes_sglang(info: Any) -> bool:
    """Whether an answer of ``/server_info`` is SGLang's."""
    return isinstance(info, Mapping) and ("kv_events" in info or "page_size" in info or "model_path" in info)


def sglang_publishers(info: Mapping[str, Any], host: str, url: str) -> list[Publisher]:
    """The publishers in ``/server_info``. Raises :class:`EngineError` naming what is missing."""
    told = info.get("kv_events")
    if not isinstance(told, Mapping):
        said = 'start it with --kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557"}\''
        raise EngineError(url, f"has no kv_events: the engine publishes none, or is older than this field; {said}")
    if told.get("publisher", "zmq") != "zmq":
        raise EngineError(url, f"kv_events.publisher is {told['publisher']!r:.40}, expected zmq")
    base = _port(told, "endpoint_port_base", url)
    if base is None:
        raise EngineError(url, f"kv_events has no endpoint_port_base, but {sorted(map(str, told))[:12]}")
    ranks = told.get("dp_size") or 1
    if type(ranks) is not int or not 1 <= ranks <= MAX_SOURCES:
        raise EngineError(url, f"kv_events.dp_size is {ranks!r:.40}, expected 1 to {MAX_SOURCES}")
    replay = _port(told, "replay_endpoint_port_base", url)
    if max(base, replay or 0) + ranks - 1 > 65535:
        raise EngineError(url, f"kv_events has {ranks} ranks from port {max(base, replay or 0)} on: beyond 65535")
    where = _routable(str(told.get("endpoint_host") or ""), host)
    topic = told.get("topic")
    return [
        Publisher(
            rank=rank, endpoint=f"tcp://{where}:{base + rank}", topic=topic if isinstance(topic, str) else "",
            replay=None if replay is None else f"tcp://{where}:{replay + rank}",
        )
        for rank in range(ranks)
    ]  # fmt: skip


def _port(told: Mapping[str, Any], name: str, url: str) -> int | None:
    port = told.get(name)
    if port is None:
        return None
    if type(port) is not int or not 0 < port <= 65535:
        raise EngineError(url, f"kv_events.{name} is {port!r:.40}, expected 1 to 65535")
    return port


def sglang_learnt(info: Any, *, host: str, url: str, model: str | None = None) -> Learnt:
    """Everything from ``/server_info``. Raises :class:`EngineError`."""
    where = f"{url}/server_info"
    publishers = sglang_publishers(info, host, where)
    release = _text(info, "version")
    unknown: dict[str, str] = {}
    named = model or _text(info, "served_model_name") or _text(info, "model_path")
    if named is None:
        raise EngineError(where, "has neither served_model_name nor model_path: give --model")
    block_size = _sglang_block_size(info, unknown)
    scheme = sglang_scheme(version_of(release))
    if scheme is None:
        told = f"SGLang {release}" if release else "the version is not told"
        unknown["scheme"] = f"key scheme: {told}; it is learnt from the first media event (--scheme fixes it)"
    unknown |= _doubts(publishers)
    return Learnt(
        engine="sglang", version=release, model=named, publishers=publishers, block_size=block_size, scheme=scheme,
        unknown=unknown,
    )  # fmt: skip


def _sglang_block_size(info: Mapping[str, Any], unknown: dict[str, str]) -> int | None:
    """As told, unless decode-context parallelism multiplies the page and the answer may mean either."""
    size, parallel = info["kv_events"].get("block_size"), info.get("dcp_size") or 1
    if type(size) is int and size > 0 and parallel == 1:
        return size
    why = "not told" if parallel == 1 else f"told as {size!r:.20} with dcp_size {parallel!r:.20}, which multiplies it"
    unknown["block_size"] = f"block size: {why}; {_LATER_SIZE}"
    return None


def sglang_scheme(number: tuple[int, ...] | None) -> Scheme | None:
    """How that release tells media apart."""
    if number is None or number < (0, 5, 9):
        return None
    return "pad62" if number >= (0, 5, 23) else "pad30"


# --- both ------------------------------------------------------------------------------------------------------------


def version_of(text: str | None) -> tuple[int, ...] | None:
    """``0.5.23.post1`` as (0, 5, 23); None for what is no release's number (builds from source say 0.1.dev…)."""
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?!\d)", text or "")
    if found is None or ".dev" in (text or ""):
        return None
    return tuple(int(part) for part in found.groups() if part is not None)


def with_host(endpoint: str, host: str) -> str:
    """The endpoint as others reach it: a wildcard means every interface of the engine's host."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    bound, _, port = rest.rpartition(":")
    return f"tcp://{_routable(bound, host)}:{port}"


def _routable(bound: str, host: str) -> str:
    where = host if bound in _WILDCARDS else bound
    return f"[{where}]" if ":" in where and not where.startswith("[") else where


def _doubts(publishers: Sequence[Publisher]) -> dict[str, str]:
    doubts = {}
    if any(publisher.replay is None for publisher in publishers):
        doubts["replay"] = "replay endpoint: none is told; without one holes cannot be repaired (--replay names it)"
    if {publisher.endpoint for publisher in publishers} & {publisher.replay for publisher in publishers}:
        doubts["ranks"] = "replay endpoint: it is another rank's event port; leave a stride of at least the ranks"
    others = [publisher.endpoint for publisher in publishers if not publisher.endpoint.startswith("tcp://")]
    if others:
        doubts["endpoint"] = f"endpoint: {others[0]} reaches only the engine's own host"
    return doubts


def _text(value: Any, name: str) -> str | None:
    field = value.get(name) if isinstance(value, Mapping) else None
    return field if isinstance(field, str) and field else None


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def worker_specs(learnt: Learnt, name: str, **given: Any) -> list[WorkerSpec]:
    """Worker entries for the publishers: one where ranks are on consecutive ports, else one per run of them.

    ``given``: fields that the caller fixes, over what was learnt.
    """
    runs = list(_consecutive(learnt.publishers))
    specs = []
    for run in runs:
        first = run[0]
        fields = {
            "model": learnt.model, "endpoint": first.endpoint, "replay": first.replay, "topic": first.topic,
            "rank": first.rank, "ranks": len(run), "block_size": learnt.block_size, "scheme": learnt.scheme,
        } | given  # fmt: skip
        specs.append(WorkerSpec(name=name if len(runs) == 1 else f"{name}-{first.rank}", **fields))
    return specs


def _consecutive(publishers: Iterable[Publisher]) -> Iterator[list[Publisher]]:
    run: list[Publisher] = []
    for publisher in publishers:
        if run and not _follows(run[-1], publisher):
            yield run
            run = []
        run.append(publisher)
    if run:
        yield run


def _follows(before: Publisher, after: Publisher) -> bool:
    if (before.replay is None) != (after.replay is None):
        return False
    pairs = [(before.endpoint, after.endpoint)]
    if before.replay is not None and after.replay is not None:
        pairs.append((before.replay, after.replay))
    return after.rank == before.rank + 1 and before.topic == after.topic and all(_next_port(*pair) for pair in pairs)


def _next_port(before: str, after: str) -> bool:
    where, _, port = before.rpartition(":")
    there, _, following = after.rpartition(":")
    number = port.isdigit() and following.isdigit() and int(following) == int(port) + 1
    return before.startswith("tcp://") and where == there and number
