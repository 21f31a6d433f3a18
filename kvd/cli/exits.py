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
    except Unreachable as error:
        fail(str(error), UNREACHABLE)
    except (ConfigError, FleetError) as error:
        fail(str(error), BAD_CONFIG)
    except PlanError as error:
        fail(str(error), USAGE)
    except RequestError as error:
        fail(str(error), USAGE if error.code.startswith(("bad_", "unknown_")) else NEGATIVE)
    except KvdError as error:
        fail(str(error), NEGATIVE)
    except OSError as error:
        fail(str(error), USAGE)
