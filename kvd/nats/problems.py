"""What can be wrong with NATS, as names that are shown, counted and logged.

``off``: not told of any server. Of the connection: ``unreachable`` (nobody answers), ``unauthorized`` (who this is was
not accepted), ``tls_failed``, ``secret_unreadable``, ``refused`` (the server said something else), ``disconnected``.
Of what is asked on it: ``denied`` (the user may not), ``no_stream``, ``no_consumer``, ``no_jetstream``,
``storage_full``, ``wrong_sequence`` (somebody else wrote), ``too_large``, ``timeout``, ``slow_consumer`` (messages were
dropped here), and ``api_<code>`` for JetStream errors without a name here.
"""

from __future__ import annotations

import ssl

import nats.errors
import nats.js.errors

from protocols.errors import ConfigError, KvdError

_API_CODES = {
    10059: "no_stream", 10014: "no_consumer", 10071: "wrong_sequence", 10164: "wrong_sequence", 10047: "storage_full",
    10023: "storage_full", 10077: "storage_full", 10054: "too_large", 10039: "no_jetstream", 10076: "no_jetstream",
}  # fmt: skip
"""JetStream's error codes (nats-server's errors.json)."""


class NatsProblem(KvdError):
    """Something asked of NATS did not work; ``name`` is one of this module's."""

    def __init__(self, name: str, detail: str = "") -> None:
        super().__init__(f"{name}: {detail}" if detail else name)
        self.name = name


FAULTS = (nats.errors.Error, OSError, TimeoutError, NatsProblem)
"""Everything that asking NATS may raise."""


def problem_of(error: BaseException) -> str:
    """The name of what went wrong."""
    if isinstance(error, NatsProblem):
        return error.name
    if isinstance(error, nats.js.errors.APIError):
        return _api_problem(error)
    if isinstance(error, nats.js.errors.NoStreamResponseError):
        return "no_stream"
    if isinstance(error, nats.errors.NoRespondersError):
        return "no_jetstream"
    if isinstance(error, nats.errors.MaxPayloadError):
        return "too_large"
    if isinstance(error, nats.errors.SlowConsumerError):
        return "slow_consumer"
    if isinstance(error, (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError)):
        return "disconnected"
    return "timeout" if isinstance(error, TimeoutError) else "refused"


def _api_problem(error: nats.js.errors.APIError) -> str:
    code = error.err_code or 0
    return _API_CODES.get(code) or f"api_{code or error.code}"


def connection_problem(error: BaseException) -> str:
    """The name of why no connection came about."""
    if isinstance(error, ConfigError):
        return "secret_unreadable"
    if isinstance(error, ssl.SSLError):
        return "tls_failed"
    said = str(error).lower()
    if isinstance(error, nats.errors.AuthorizationError) or "authorization" in said or "authentication" in said:
        return "unauthorized"
    if isinstance(error, (OSError, TimeoutError, nats.errors.NoServersError)):
        return "unreachable"
    return "tls_failed" if "tls" in said or "secure" in said else "refused"
