"""Reading one field of a metadata object: present, of the right type, in range, or a typed error that says which.

Nothing is defaulted here. ``origin`` names the file and object for the error text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from planner.errors import CheckpointError, Reason, shown

Object = Mapping[str, Any]
INT_MAX = (1 << 31) - 1
"""Engines hold these numbers, and token ids, in signed 32-bit integers."""


def integer(data: Object, name: str, origin: str, *, low: int = 1, high: int = INT_MAX) -> int:
    """A required integer in ``[low, high]``; booleans, floats and strings are refused."""
    if name not in data:
        raise CheckpointError(Reason.CONFIG_MISSING, f"{origin}: {name} is missing, and has no safe default")
    value = data[name]
    if type(value) is not int or not low <= value <= high:
        raise invalid(origin, name, value, f"an integer in {low}..{high}")
    return value


def optional_integer(data: Object, name: str, origin: str, *, low: int = 1, high: int = INT_MAX) -> int | None:
    """The same, or None where the field is absent or null."""
    return None if data.get(name) is None else integer(data, name, origin, low=low, high=high)


def section(data: Object, name: str, origin: str) -> Object:
    """An optional object; empty where absent or null."""
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(origin, name, value, "an object")
    return value


def name_among(data: Object, name: str, origin: str, known: Collection[str], *, required: bool) -> None:
    """A class or type name that must be one of ``known``."""
    value = data.get(name)
    if value is None and not required:
        return
    if value is None:
        raise CheckpointError(Reason.CONFIG_MISSING, f"{origin}: {name} is missing; expected {_listed(known)}")
    if not isinstance(value, str) or value not in known:
        raise unsupported(origin, name, value, _listed(known))


def boolean(data: Object, name: str, origin: str) -> bool | None:
    """An optional boolean; None where absent or null."""
    value = data.get(name)
    if value is not None and type(value) is not bool:
        raise invalid(origin, name, value, "true or false")
    return value


def number_or_list(data: Object, name: str, origin: str) -> None:
    """An optional number or list of numbers that is checked and not used (means, deviations, factors)."""
    value = data.get(name)
    numbers = value if isinstance(value, list) else [value]
    if value is not None and not all(type(entry) in (int, float) for entry in numbers):
        raise invalid(origin, name, value, "a number or a list of numbers")


def invalid(origin: str, name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(Reason.CONFIG_INVALID, f"{origin}: {name} = {shown(value)}: expected {expected}")


def unsupported(origin: str, name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(Reason.CONFIG_UNSUPPORTED, f"{origin}: {name} = {shown(value)}: expected {expected}")


def _listed(known: Collection[str]) -> str:
    return " or ".join(sorted(known))
