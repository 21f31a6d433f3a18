"""Where each data-parallel rank of a worker publishes, and what each kind of source may be told.

vLLM and SGLang publish one stream per rank: tcp ports count up from the base, inproc names get a suffix, and ipc cannot
carry more than one rank. TensorRT-LLM's HTTP server has all ranks of a worker behind one URL.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from protocols.errors import ConfigError
from protocols.query import SourceName, WorkerSpec

_SCHEMES = ("tcp", "ipc", "inproc")
MAX_RANKS = 1024


def rank_endpoint(endpoint: str, offset: int) -> str:
    """The endpoint ``offset`` ranks above the base. Raises ValueError where that is not defined."""
    if not offset:
        return endpoint
    if endpoint.startswith("tcp://"):
        base, _, port = endpoint.rpartition(":")
        return f"{base}:{int(port) + offset}"
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{offset}"
    raise ValueError(f"{endpoint}: ipc carries one rank; give each rank a worker entry of its own")


def validate(spec: WorkerSpec, origin: str = "") -> WorkerSpec:
    """The spec, if every endpoint it stands for can exist. Raises :class:`ConfigError` naming key and remedy."""
    key = f"worker {spec.name!r}"
    if not spec.name or not spec.model:
        raise ConfigError(f"{key}.name/model", (spec.name, spec.model), "non-empty names", origin=origin)
    if not 1 <= spec.ranks <= MAX_RANKS:
        raise ConfigError(f"{key}.ranks", spec.ranks, f"1 to {MAX_RANKS}", origin=origin)
    if spec.rank < 0:
        raise ConfigError(f"{key}.rank", spec.rank, "0 or more", origin=origin)
    if spec.block_size is not None and spec.block_size < 1:
        remedy = "leave it out to learn it from events"
        raise ConfigError(f"{key}.block_size", spec.block_size, "1 or more", origin=origin, remedy=remedy)
    _RULES[spec.source](key, spec, origin)
    return spec


def _validate_zmq(key: str, spec: WorkerSpec, origin: str) -> None:
    _validate_endpoint(f"{key}.endpoint", spec.endpoint, spec, origin)
    if spec.replay is not None:
        _validate_endpoint(f"{key}.replay", spec.replay, spec, origin)


def _validate_atom(key: str, spec: WorkerSpec, origin: str) -> None:
    _refuse_replay(key, spec, origin)
    _validate_endpoint(f"{key}.endpoint", spec.endpoint, spec, origin)


def _validate_pool(key: str, spec: WorkerSpec, origin: str) -> None:
    if spec.ranks != 1 or spec.rank:
        said = "0 and 1: a pool is one stream, its holders are rows"
        raise ConfigError(f"{key}.rank/ranks", (spec.rank, spec.ranks), said, origin=origin)
    _validate_atom(key, spec, origin)


def _validate_http(key: str, spec: WorkerSpec, origin: str) -> None:
    _refuse_replay(key, spec, origin)
    try:
        parts = urlsplit(spec.endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{key}.endpoint", spec.endpoint, "the engine's http://host:port", origin=origin)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{key}.endpoint", spec.endpoint, "a URL without user, query and fragment", origin=origin)
    if spec.mode != "connect" or spec.topic:
        told = (spec.mode, spec.topic)
        raise ConfigError(f"{key}.mode/topic", told, "neither: this source is polled over HTTP", origin=origin)


def _refuse_replay(key: str, spec: WorkerSpec, origin: str) -> None:
    if spec.replay is not None:
        said = f"no replay endpoint: a source {spec.source!r} has none"
        raise ConfigError(f"{key}.replay", spec.replay, said, origin=origin)


def _validate_endpoint(key: str, endpoint: str, spec: WorkerSpec, origin: str) -> None:
    scheme, _, rest = endpoint.partition("://")
    if scheme not in _SCHEMES or not rest:
        remedy = 'an engine polled over HTTP needs source = "trtllm-http"' if scheme in ("http", "https") else ""
        said = "tcp://host:port, ipc://path or inproc://name"
        raise ConfigError(key, endpoint, said, origin=origin, remedy=remedy)
    if scheme == "ipc" and spec.ranks > 1:
        remedy = "give each rank a worker entry of its own"
        raise ConfigError(key, endpoint, "tcp for several ranks", origin=origin, remedy=remedy)
    if scheme == "tcp":
        _validate_port(key, endpoint, spec, origin)


def _validate_port(key: str, endpoint: str, spec: WorkerSpec, origin: str) -> None:
    try:
        parts = urlsplit(endpoint.replace("*", "0.0.0.0"))
        port, host = parts.port, parts.hostname
    except ValueError:
        port, host = None, None
    if port is None or not host or not 0 < port + spec.ranks - 1 <= 65535 or port == 0:
        raise ConfigError(key, endpoint, "tcp://host:port with a port for every rank", origin=origin)
    if spec.mode == "connect" and "*" in endpoint:
        remedy = 'name the engine\'s host, or set mode = "bind" if the engine connects'
        raise ConfigError(key, endpoint, "a host to connect to", origin=origin, remedy=remedy)


_RULES: dict[SourceName, Callable[[str, WorkerSpec, str], None]] = {
    "zmq": _validate_zmq, "atom": _validate_atom, "pool": _validate_pool, "trtllm-http": _validate_http,
}  # fmt: skip
