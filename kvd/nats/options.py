"""How this process speaks to NATS: servers, secrets by path only, deadlines and bounds."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvd.nats import subjects
from protocols.errors import ConfigError

_SCHEMES = ("nats", "tls")
_CREDENTIALS_MARKS = (b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED")


class NatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. ``servers`` empty: there is no NATS here."""

    servers: tuple[str, ...] = ()
    cluster: str = "default"
    prefix: str = "kvd.v1"
    stream: str = ""
    inbox_prefix: str = "_INBOX"
    credentials: str = ""
    nkey: str = ""
    user: str = ""
    password_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_first: bool = False
    connect_timeout: float = 5.0
    request_timeout: float = 5.0
    ping_interval: float = 5.0
    reconnect_wait: float = 0.2
    reconnect_max: float = 5.0
    status_timeout: float = 5.0
    pending_messages: int = 65_536
    pending_bytes: int = 64 << 20
    pull_messages: int = 256
    concurrent_requests: int = 64

    @property
    def stream_name(self) -> str:
        """The JetStream stream of the cluster's events."""
        return self.stream or f"kvd-events-{subjects.token(self.cluster)}"


def validate(options: NatsOptions, origin: str = "") -> NatsOptions:
    """The options, if they can be used as far as text tells. Raises :class:`ConfigError`."""
    for server in options.servers:
        _validate_server(server, origin)
    if not subjects.is_prefix(options.prefix):
        said = "tokens of letters, digits, _ and -, separated by dots"
        raise ConfigError("nats.prefix", options.prefix, said, origin=origin)
    if not subjects.is_prefix(options.inbox_prefix):
        raise ConfigError("nats.inbox_prefix", options.inbox_prefix, "tokens separated by dots", origin=origin)
    try:
        stream = options.stream_name
    except ValueError as error:
        raise ConfigError("nats.cluster", options.cluster, str(error), origin=origin) from None
    if not subjects.is_prefix(stream) or "." in stream:
        raise ConfigError("nats.stream", options.stream, "letters, digits, _ and -", origin=origin)
    _validate_secrets(options, origin)
    return options


def _validate_server(server: str, origin: str) -> None:
    try:
        parts = urlsplit(server)
        usable = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError("nats.servers", _without_user(server), "nats://host:port or tls://host:port", origin=origin)
    if "@" in parts.netloc:
        remedy = "name a file: nats.credentials, nats.nkey, or nats.user with nats.password_file"
        raise ConfigError("nats.servers", _without_user(server), "no secret in it", origin=origin, remedy=remedy)


def _without_user(server: str) -> str:
    scheme, separator, rest = server.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _validate_secrets(options: NatsOptions, origin: str) -> None:
    ways = [name for name in ("credentials", "nkey", "user") if getattr(options, name)]
    if len(ways) > 1:
        raise ConfigError("nats", ways, "one way to prove who this is", origin=origin)
    for one, other in (("user", "password_file"), ("tls_cert", "tls_key")):
        if bool(getattr(options, one)) != bool(getattr(options, other)):
            given = one if getattr(options, one) else other
            raise ConfigError(f"nats.{given}", getattr(options, given), f"both {one} and {other}", origin=origin)


def secrets(options: NatsOptions) -> dict[str, Any]:
    """What the client is told about TLS and about who this is. Raises ConfigError if a file cannot be used.

    Read anew for every connection, so that renewed credentials are taken up.
    """
    found: dict[str, Any] = {"tls": _tls(options), "tls_handshake_first": options.tls_first}
    if options.credentials:
        text = _read("nats.credentials", options.credentials)
        if not all(mark in text for mark in _CREDENTIALS_MARKS):
            raise ConfigError("nats.credentials", options.credentials, "a .creds file of user JWT and seed")
        found["user_credentials"] = options.credentials
    elif options.nkey:
        if not _read("nats.nkey", options.nkey).strip().startswith(b"SU"):
            raise ConfigError("nats.nkey", options.nkey, "a file with a user's nkey seed (SU…)")
        found["nkeys_seed"] = options.nkey
    elif options.user:
        found["user"] = options.user
        found["password"] = _read("nats.password_file", options.password_file).decode().strip()
    return found


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(key, path, f"a readable file ({error.strerror})") from None


def _tls(options: NatsOptions) -> ssl.SSLContext | None:
    wanted = options.tls_ca or options.tls_cert or any(server.startswith("tls://") for server in options.servers)
    if not wanted:
        return None
    try:
        context = ssl.create_default_context(cafile=options.tls_ca or None)
        if options.tls_cert:
            context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        paths = [options.tls_ca, options.tls_cert, options.tls_key]
        raise ConfigError("nats.tls_*", paths, f"readable PEM files ({error.strerror or 'not PEM'})") from None
    return context
