"""The first bytes of an image by URL: only where a policy allows it, and never into the own network.

A host must be on the list; every address it resolves to must be public, and the connection goes to the very address
that was checked (no second look-up). Redirects are checked like the first URL. Only a partial answer (206) is read.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, urljoin, urlsplit

import msgspec

from planner.errors import ImageError, Reason, shown

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_RANGE = re.compile(r"bytes 0-(\d+)/(\d+|\*)")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class RemotePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Which URLs may be probed, and how far.

    ``hosts``: exact names, or ``.example.com`` for every name below it. ``ports``: beyond 80 and 443. ``addresses``:
    non-public addresses that are allowed all the same. ``ranges``: bytes asked for, one request each, until the header
    can be read. ``timeout_seconds``: for one probe with its redirects (name resolution has the system's own limit).
    """

    hosts: frozenset[str]
    ports: frozenset[int] = frozenset()
    addresses: frozenset[str] = frozenset()
    ranges: tuple[int, ...] = (4096, 65536)
    timeout_seconds: float = 10.0
    max_redirects: int = 3


class Start(msgspec.Struct, frozen=True):
    """A file's first bytes; ``complete`` when that is all of it."""

    data: bytes
    complete: bool


def fetch_start(url: str, size: int, policy: RemotePolicy) -> Start:
    """The first ``size`` bytes. Raises :class:`ImageError`: refused by the policy, or failed on the way."""
    deadline = time.monotonic() + policy.timeout_seconds
    try:
        for _ in range(policy.max_redirects + 1):
            answer = _ask(url, size, policy, deadline)
            if isinstance(answer, Start):
                return answer
            url = urljoin(url, answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ImageError(Reason.REMOTE_FAILED, f"{shown(url)}: {type(error).__name__}: {error!s:.120}") from None
    raise ImageError(Reason.REMOTE_FAILED, f"{shown(url)}: more than {policy.max_redirects} redirects")


def _ask(url: str, size: int, policy: RemotePolicy, deadline: float) -> Start | str:
    """One request: the bytes, or where it was redirected to."""
    parts = _allowed(url, policy)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    connection = _connection(parts.scheme, host, port, _public_address(host, port, policy), _left(deadline))
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with _closed_at(connection, deadline):
        connection.request("GET", target, headers={"Range": f"bytes=0-{size - 1}", "Accept-Encoding": "identity"})
        with connection.getresponse() as response:
            return _read(response, url, size)


def _read(response: http.client.HTTPResponse, url: str, size: int) -> Start | str:
    location = response.headers.get("Location")
    if response.status in _REDIRECTS and location:
        return location
    if response.status != 206:
        raise ImageError(
            Reason.REMOTE_FAILED, f"{shown(url)}: status {response.status}, expected 206 to a range request"
        )
    covered = _RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    data = response.read(size)
    if covered is None or not data:
        raise ImageError(
            Reason.REMOTE_FAILED, f"{shown(url)}: an answer of {len(data)} bytes from elsewhere than byte 0"
        )
    return Start(data, covered[2] == str(len(data)))


def _allowed(url: str, policy: RemotePolicy) -> SplitResult:
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").lower()
    listed = host in policy.hosts or any(name.startswith(".") and host.endswith(name) for name in policy.hosts)
    if parts.scheme not in _PORTS or parts.username is not None or parts.password is not None:
        raise ImageError(Reason.REMOTE_REFUSED, f"{shown(url)}: expected http or https without credentials")
    if not host or not listed:
        raise ImageError(Reason.REMOTE_REFUSED, f"{shown(host)} is not among RemotePolicy.hosts")
    if (parts.port or _PORTS[parts.scheme]) not in {*_PORTS.values(), *policy.ports}:
        raise ImageError(Reason.REMOTE_REFUSED, f"port {parts.port} is not among RemotePolicy.ports")
    return parts


def _public_address(host: str, port: int, policy: RemotePolicy) -> str:
    """The address to connect to. One private address among several refuses the host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if address not in policy.addresses and not _is_public(address):
            raise ImageError(Reason.REMOTE_REFUSED, f"{host} resolves to {address}, which is not a public address")
    return addresses[0]


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return _is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if embedded is not None:
            return _is_public(str(embedded))
    return address.is_global and not address.is_multicast


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("RemotePolicy.timeout_seconds is over")
    return left


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was checked; the host's name is only for headers and the certificate.

    ``held`` is the socket, which the base class hands over to the response when the server closes after it.
    """

    held: socket.socket | None = None

    def __init__(self, host: str, port: int, address: str, timeout: float, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=timeout)
        self._address = address
        self._context = context
        self._name = host

    def connect(self) -> None:
        self.sock = self.held = socket.create_connection((self._address, self.port), self.timeout)
        if self._context:
            secured = self._context.wrap_socket(self.sock, server_hostname=self._name, do_handshake_on_connect=False)
            self.sock = self.held = secured
            secured.do_handshake()

    def hang_up(self) -> None:
        """End whatever the connection waits for, from another thread."""
        if self.held is not None:
            with suppress(OSError):
                socket.socket.shutdown(self.held, socket.SHUT_RDWR)


def _connection(scheme: str, host: str, port: int, address: str, timeout: float) -> _Pinned:
    context = ssl.create_default_context() if scheme == "https" else None
    connection = _Pinned(host, port, address, timeout, context)
    if scheme == "https":
        connection.default_port = 443  # so that the Host header leaves the port out
    return connection


@contextmanager
def _closed_at(connection: _Pinned, deadline: float) -> Iterator[None]:
    """Socket timeouts bound one read, not a server that sends a byte at a time: this bounds the whole exchange."""
    timer = threading.Timer(_left(deadline), connection.hang_up)
    timer.daemon = True
    try:
        timer.start()
        connection.connect()
        yield
    finally:
        timer.cancel()
        connection.close()
