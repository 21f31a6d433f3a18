"""Exit codes, and errors told in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from kvd.core.fleet import FleetError
from protocols.errors import ConfigError, KvdError, PlanError, RequestError, Unreachable

OK = 0
NEGATIVE = 1
"""The answer is no: a check that fails, a request that was refused."""
USAGE = 2
UNREACHABLE = 69
BAD_CONFIG = 78


def fail(message: str, code: int) -> NoReturn:
    """Say why on stderr and leave."""
    print(f"kvd: {message}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def told() -> Iterator[None]:
    """Turn this project's errors into one line and the documented exit code."""
    try:
        yield
    except (KvdError, FleetError, OSError, ExceptionGroup) as error:
        cause = _cause(error)
        if cause is None:
            raise
        fail(str(cause), _code(cause))


def _cause(error: Exception) -> Exception | None:
    """The one error inside what task groups made of it; None if it is not for people, or they are several."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, (KvdError, FleetError, OSError)) else None


def _code(error: Exception) -> int:
    if isinstance(error, Unreachable):
        return UNREACHABLE
    if isinstance(error, (ConfigError, FleetError)):
        return BAD_CONFIG
    if isinstance(error, RequestError):
        return USAGE if error.code.startswith(("bad_", "unknown_")) else NEGATIVE
    return USAGE if isinstance(error, (PlanError, OSError)) else NEGATIVE
