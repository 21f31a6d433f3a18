"""The daemon's settings: one table, from which file, environment and command line are read and documented.

Each setting is a field of a frozen struct with its type, bounds, default and a sentence. Precedence: default < file <
``KVD_<SECTION>_<KEY>`` < command line. Unknown keys are refused; every error names file, key, value and remedy.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from kvd.core import CORE_VARIABLE
from kvd.core.stream import Policy
from kvd.ingest.endpoints import validate
from kvd.ingest.polling import PollOptions
from kvd.ingest.zmq import ZmqOptions
from kvd.nats.options import NatsOptions
from kvd.nats.options import validate as validate_nats
from protocols.errors import ConfigError
from protocols.limits import Limits as DecodeLimits
from protocols.query import Limits as QueryLimits
from protocols.query import WorkerSpec

ENV_PREFIX = "KVD_"

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=1 << 40)]
Bytes = Annotated[int, Meta(ge=1024, le=1 << 32)]


def doc(text: str) -> Meta:
    """A setting's sentence."""
    return Meta(description=text)


class QuerySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where and what clients may ask."""

    endpoint: Annotated[str, doc("Query socket; empty: kvd.sock in the runtime directory.")] = ""
    socket_mode: Annotated[int, Meta(ge=0, le=0o777), doc("File mode of an ipc socket.")] = 0o660
    insecure: Annotated[bool, doc("Allow a TCP address that others can reach, without authentication.")] = False
    message_bytes: Annotated[Bytes, doc("Largest request.")] = 32 << 20
    plans_per_request: Annotated[Count, doc("Plans in one Score.")] = 256
    tokens_per_plan: Annotated[Count, doc("Tokens (or characters of text) in one plan.")] = 4 << 20
    in_flight_per_client: Annotated[Count, doc("Requests a client may have waiting.")] = 1024
    queued: Annotated[Count, doc("Requests of all clients that may wait; further ones are told busy.")] = 8192


class IngestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engine streams: deadlines, repair and socket options."""

    connect_timeout: Annotated[Seconds, doc("Without a handshake for this long a stream is silent.")] = 5.0
    replay_timeout: Annotated[Seconds, doc("A replay attempt without progress ends after this.")] = 2.0
    replay_total: Annotated[Seconds, doc("All attempts of one replay together.")] = 30.0
    replay_attempts: Annotated[Count, doc("Attempts of one replay.")] = 3
    probe_interval: Annotated[Seconds, doc("A stream quiet for this long is asked for a lost tail.")] = 10.0
    held_messages: Annotated[Count, doc("Live messages held back during a replay.")] = 20_000
    receive_high_water_mark: Annotated[Count, doc("Messages libzmq may queue per stream.")] = 100_000
    max_message_bytes: Annotated[Bytes, doc("Largest message of an engine.")] = 64 << 20
    poll_interval: Annotated[Seconds, doc("Between two polls of an engine that is asked over HTTP.")] = 0.25
    poll_timeout: Annotated[Seconds, doc("For one whole poll.")] = 10.0
    poll_backoff: Annotated[Seconds, doc("Longest wait after polls that failed.")] = 10.0

    def policy(self) -> Policy:
        return Policy(**{name: getattr(self, name) for name in _shared(self, Policy)})

    def options(self) -> ZmqOptions:
        return ZmqOptions(**{name: getattr(self, name) for name in _shared(self, ZmqOptions)})

    def polling(self) -> PollOptions:
        return PollOptions(**{name: getattr(self, name) for name in _shared(self, PollOptions)})

    def limits(self) -> DecodeLimits:
        return DecodeLimits(payload_bytes=self.max_message_bytes)


class IndexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What may be kept in memory."""

    max_blocks: Annotated[
        Count, doc("Blocks of one model over all ranks; beyond it stores are refused, and said so.")
    ] = 16_000_000
    max_workers: Annotated[Count, doc("Worker-ranks.")] = 4096
    routed_entries: Annotated[Count, doc("Predicted keys.")] = 1_000_000
    routed_ttl_ms: Annotated[Count, doc("How long a routed prompt is predicted.")] = 2_000
    text_ttl_ms: Annotated[Count, doc("How long routed text is predicted.")] = 120_000


class SnapshotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What survives a restart."""

    path: Annotated[str, doc("Snapshot file; empty: kvd.snapshot in the state directory, if there is one.")] = ""
    interval: Annotated[Seconds, doc("Time between snapshots; one more is taken when the daemon stops.")] = 60.0
    max_bytes: Annotated[Count, doc("Largest snapshot that is read, or fetched from a peer.")] = 8 << 30
    peer: Annotated[str, doc("Query endpoint of a daemon to fetch a snapshot from where there is none.")] = ""
    peer_timeout: Annotated[Seconds, doc("Fetching from the peer may take this long.")] = 60.0

    @property
    def file(self) -> Path | None:
        """The file in force; None where snapshots are off."""
        if self.path:
            return Path(self.path)
        directory = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
        return Path(directory) / "kvd.snapshot" if directory else None


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """NATS, where events, state and queries leave one machine; secrets are named by path only."""

    servers: Annotated[str, doc("nats://host:port or tls://host:port, separated by commas; empty: no NATS.")] = ""
    cluster: Annotated[str, doc("The fleet whose events these are: part of every subject.")] = "default"
    prefix: Annotated[str, doc("How every subject begins.")] = "kvd.v1"
    stream: Annotated[str, doc("JetStream stream of the events; empty: kvd-events-<cluster>.")] = ""
    inbox_prefix: Annotated[str, doc("How the subjects of answers begin, where permissions ask for one.")] = "_INBOX"
    credentials: Annotated[str, doc("Path of a .creds file (user JWT and seed).")] = ""
    nkey: Annotated[str, doc("Path of a file with a user's nkey seed.")] = ""
    user: Annotated[str, doc("User name, with password_file.")] = ""
    password_file: Annotated[str, doc("Path of a file with the user's password.")] = ""
    tls_ca: Annotated[str, doc("Path of the authorities that servers are checked against; empty: the system's.")] = ""
    tls_cert: Annotated[str, doc("Path of the client's certificate.")] = ""
    tls_key: Annotated[str, doc("Path of the certificate's key.")] = ""
    tls_first: Annotated[bool, doc("Begin TLS before the server has said anything (handshake_first).")] = False
    connect_timeout: Annotated[Seconds, doc("For one attempt to connect.")] = 5.0
    request_timeout: Annotated[Seconds, doc("For one request, JetStream's included.")] = 5.0
    ping_interval: Annotated[Seconds, doc("A server that misses two pings is given up.")] = 5.0
    reconnect_wait: Annotated[Seconds, doc("Shortest wait after a failure; it doubles up to reconnect_max.")] = 0.2
    reconnect_max: Annotated[Seconds, doc("Longest wait after failures.")] = 5.0
    status_timeout: Annotated[Seconds, doc("A relay silent for this long is taken for gone.")] = 5.0
    pending_messages: Annotated[Count, doc("Messages of a subscription that may wait; further ones are dropped.")] = (
        65_536
    )
    pending_bytes: Annotated[Bytes, doc("Bytes of a subscription, or to be sent, that may wait.")] = 64 << 20
    pull_messages: Annotated[Count, doc("Stored messages a reader may have on the way to it.")] = 256
    concurrent_requests: Annotated[Count, doc("JetStream requests at a time.")] = 64

    def options(self) -> NatsOptions:
        servers = tuple(server.strip() for server in self.servers.split(",") if server.strip())
        values = {name: getattr(self, name) for name in _shared(self, NatsOptions)}
        return NatsOptions(**values | {"servers": servers})


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is written to stderr."""

    level: Annotated[Literal["debug", "info", "warning", "error"], doc("Least severity that is written.")] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the daemon is told."""

    query: QuerySettings = QuerySettings()
    ingest: IngestSettings = IngestSettings()
    index: IndexSettings = IndexSettings()
    snapshot: SnapshotSettings = SnapshotSettings()
    nats: NatsSettings = NatsSettings()
    log: LogSettings = LogSettings()
    workers: tuple[WorkerSpec, ...] = ()

    @property
    def endpoint(self) -> str:
        """The query endpoint in force."""
        return self.query.endpoint or default_endpoint()

    def query_limits(self) -> QueryLimits:
        return QueryLimits(**{name: getattr(self.query, name) for name in _shared(self.query, QueryLimits)})


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "query": QuerySettings, "ingest": IngestSettings, "index": IndexSettings,
    "snapshot": SnapshotSettings, "nats": NatsSettings, "log": LogSettings,
}  # fmt: skip


class Setting(msgspec.Struct, frozen=True):
    """One row of the table."""

    section: str
    key: str
    type: Any
    default: object
    description: str

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section}_{self.key}".upper()


def settings() -> Iterator[Setting]:
    """Every scalar setting, in file order."""
    for section, struct in SECTIONS.items():
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            metas = getattr(hints[field.name], "__metadata__", ())
            text = next((meta.description for meta in metas if meta.description), "")
            yield Setting(section, field.name, hints[field.name], field.default, text)


def _shared(values: msgspec.Struct, target: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(target) if hasattr(values, field.name)]


# --- reading ---------------------------------------------------------------------------------------------------------


class Loaded(msgspec.Struct, frozen=True):
    """A configuration and where each setting's value came from."""

    config: Config
    origins: dict[str, str]


def load(
    path: Path | None = None, *, env: Mapping[str, str] | None = None, overrides: Mapping[str, str] | None = None
) -> Loaded:
    """Read and check everything. Raises :class:`ConfigError`."""
    table = {setting.name: setting for setting in settings()}
    values: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    origins = dict.fromkeys(table, "default")
    raw = {} if path is None else _read_toml(path)
    workers = _workers(raw.pop("workers", []), str(path))
    for name, value, origin, text in _given(raw, str(path), os.environ if env is None else env, overrides or {}):
        setting = table.get(name)
        if setting is None:
            raise ConfigError(name, value, "a known setting", origin=origin, remedy="`kvd config show` lists them")
        values[setting.section][setting.key] = _converted(setting, value, origin, text=text)
        origins[name] = origin
    parts: dict[str, Any] = {section: SECTIONS[section](**given) for section, given in values.items()}
    return Loaded(_checked(Config(**parts, workers=workers), origins), origins)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"a readable file ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", str(path), f"TOML ({error})") from None


def _given(
    raw: dict[str, Any], origin: str, env: Mapping[str, str], overrides: Mapping[str, str]
) -> Iterator[tuple[str, object, str, bool]]:
    """(name, value, origin, whether it is text to convert), lowest precedence first."""
    for section, entries in raw.items():
        if not isinstance(entries, dict):
            raise ConfigError(section, entries, f"a table: one of {', '.join(SECTIONS)}", origin=origin)
        for key, value in entries.items():
            yield f"{section}.{key}", value, origin, False
    names = {setting.env: setting.name for setting in settings()}
    for variable, text in env.items():
        if variable in names:
            yield names[variable], text, variable, True
        elif variable.startswith(ENV_PREFIX) and variable != CORE_VARIABLE:
            raise ConfigError(variable, text, "a known setting", origin="environment", remedy="see `kvd config show`")
    for name, text in overrides.items():
        yield name, text, "command line", True


def _converted(setting: Setting, value: object, origin: str, *, text: bool) -> object:
    try:
        return msgspec.convert(value, setting.type, strict=not text)
    except msgspec.ValidationError as error:
        remedy = f"default {setting.default!r}: {setting.description}"
        raise ConfigError(setting.name, value, str(error), origin=origin, remedy=remedy) from None


def _workers(raw: object, origin: str) -> tuple[WorkerSpec, ...]:
    if not isinstance(raw, list):
        raise ConfigError("workers", raw, "[[workers]] tables", origin=origin)
    specs: dict[str, WorkerSpec] = {}
    for number, entry in enumerate(raw):
        try:
            spec = msgspec.convert(entry, WorkerSpec)
        except msgspec.ValidationError as error:
            raise ConfigError(f"workers[{number}]", entry, str(error), origin=origin) from None
        if spec.name in specs:
            raise ConfigError(f"workers[{number}].name", spec.name, "a name of its own", origin=origin)
        specs[spec.name] = validate(spec, origin)
    return tuple(specs.values())


def _checked(config: Config, origins: Mapping[str, str]) -> Config:
    validate_nats(config.nats.options(), origins["nats.servers"])
    endpoint, origin = config.endpoint, origins["query.endpoint"]
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not address:
        raise ConfigError("query.endpoint", endpoint, "ipc://path or tcp://host:port", origin=origin)
    host = address.rpartition(":")[0]
    if scheme == "tcp" and host not in ("127.0.0.1", "[::1]", "localhost") and not config.query.insecure:
        remedy = "bind loopback or ipc, or write query.insecure = true"
        raise ConfigError("query.endpoint", endpoint, "an address only this host reaches", origin=origin, remedy=remedy)
    return config


def default_endpoint() -> str:
    """The query socket where none is configured: in the service's, the user's, or a private temporary directory."""
    for variable in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        directory = os.environ.get(variable)
        if directory:
            return f"ipc://{directory.split(':')[0]}/kvd.sock"
    return f"ipc:///tmp/kvd-{os.getuid()}/kvd.sock"


def default_path() -> Path | None:
    """The configuration file where none is named, if it exists."""
    candidates = [Path(os.environ.get("CONFIGURATION_DIRECTORY", "/etc/kvd").split(":")[0]) / "kvd.toml"]
    return next((path for path in candidates if path.is_file()), None)
