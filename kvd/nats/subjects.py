"""Subjects: ``<prefix>.ev.<cluster>.<model>.<worker>.<rank>`` for events, ``….st.…`` for what a relay says of them.

Names of models and workers hold characters that NATS reserves (``.``, ``*``, ``>``, spaces). A token is the name with
every character besides ASCII letters, digits and ``-`` written as ``_XX``, the hexadecimal of each of its UTF-8 bytes:
readable, reversible, and no two names share one.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from protocols.errors import WireError

MAX_TOKEN = 200
"""Characters of an encoded name; NATS accepts longer subjects, tools and logs do not like them."""
Kind = Literal["ev", "st"]

_PLAIN = re.compile(rb"[A-Za-z0-9-]")
_ENCODED = re.compile(r"(?:[A-Za-z0-9-]|_[0-9A-F]{2})+")
_ESCAPE = re.compile(rb"_([0-9A-F]{2})")
_PREFIX = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){0,7}")


def token(name: str) -> str:
    """A name as one token. Raises ValueError for an empty or too long one."""
    raw = name.encode("utf-8", "surrogatepass")
    encoded = b"".join(byte if _PLAIN.match(byte) else b"_%02X" % byte[0] for byte in _bytes(raw)).decode()
    if not encoded or len(encoded) > MAX_TOKEN:
        raise ValueError(f"{name[:40]!r}: {len(encoded)} characters as a subject token, expected 1 to {MAX_TOKEN}")
    return encoded


def _bytes(raw: bytes) -> list[bytes]:
    return [raw[i : i + 1] for i in range(len(raw))]


def name_of(encoded: str) -> str:
    """The name a token stands for. Raises :class:`WireError` ``subject`` if none does."""
    if not _ENCODED.fullmatch(encoded) or len(encoded) > MAX_TOKEN:
        raise WireError("subject", f"{encoded[:40]!r} is no encoded name")
    try:
        name = _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]), encoded.encode()).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise WireError("subject", f"{encoded[:40]!r} is no encoded name") from None
    if token(name) != encoded:
        raise WireError("subject", f"{encoded[:40]!r} is not how {name[:40]!r} is written")
    return name


class Address(msgspec.Struct, frozen=True):
    """One worker-rank of a cluster."""

    cluster: str
    model: str
    worker: str
    rank: int


def is_prefix(text: str) -> bool:
    """Whether subjects may begin so."""
    return _PREFIX.fullmatch(text) is not None


def subject(prefix: str, kind: Kind, address: Address) -> str:
    """The subject of a worker-rank's events or status. Raises ValueError for names that make no token."""
    names = (address.cluster, address.model, address.worker)
    return ".".join([prefix, kind, *(token(name) for name in names), str(address.rank)])


def cluster_subjects(prefix: str, kind: Kind, cluster: str) -> str:
    """The wildcard over all worker-ranks of a cluster."""
    return f"{prefix}.{kind}.{token(cluster)}.>"


def address_of(text: str, prefix: str, kind: Kind) -> Address:
    """Whose a subject is. Raises :class:`WireError` ``subject`` for foreign ones."""
    head = f"{prefix}.{kind}."
    parts = text.removeprefix(head).split(".")
    if not text.startswith(head) or len(parts) != 4 or not _is_rank(parts[3]):
        raise WireError("subject", f"{text[:80]!r}, expected {head}<cluster>.<model>.<worker>.<rank>")
    cluster, model, worker = (name_of(part) for part in parts[:3])
    return Address(cluster, model, worker, int(parts[3]))


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 6 and (text == "0" or text[0] != "0")
