"""JSON that keeps 64-bit integers exact, and raises this project's error for anything unreadable."""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.errors import WireError

_any = msgspec.json.Decoder()


def decode_object(payload: bytes) -> dict[str, Any]:
    """A JSON object. Raises :class:`WireError` ``payload_decode`` or ``shape``."""
    try:
        value = _any.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("payload_decode", str(error)) from None
    if not isinstance(value, dict):
        raise WireError("shape", f"{type(value).__name__}, expected an object")
    return value


def require(value: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a known type. Raises :class:`WireError` ``field``."""
    field = value.get(name)
    if not isinstance(field, kind) or (isinstance(field, bool) and kind is not bool):
        raise WireError("field", f"{name} is {type(field).__name__}")
    return field
