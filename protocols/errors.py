"""Every error kvd raises on purpose, and whose fault it is.

::

    KvdError
    ├── WireError        a peer sent something that is not what its protocol says (never our fault, never fatal)
    ├── PlanError        a value the caller built does not make a plan
    ├── ConfigError      a setting is wrong: file, key, value, expected, remedy
    ├── RequestError     the daemon refused a request; carries a code and whether a retry may help
    ├── EngineError      an engine's HTTP side did not answer as it should; names the URL
    └── Unreachable      nobody answered at the endpoint in time
"""

from __future__ import annotations


class KvdError(Exception):
    """Root of the tree."""


class WireError(KvdError):
    """A frame or payload that cannot be read.

    ``code`` is one of the decoder's fixed names (``frame_count``, ``seq_len``, ``batch_shape`` …), so that it can be
    counted; ``seq`` and ``topic`` are known where the frame layer was sound and only the payload was not.
    """

    def __init__(self, code: str, detail: str = "", *, seq: int | None = None, topic: bytes | None = None) -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail
        self.seq = seq
        self.topic = topic


class PlanError(KvdError, ValueError):
    """A plan that breaks its own rules: names the value, the bound and the remedy."""


class ConfigError(KvdError):
    """A setting that cannot be used."""

    def __init__(self, key: str, value: object, expected: str, *, origin: str = "", remedy: str = "") -> None:
        where = f"{origin}: " if origin else ""
        fix = f"; {remedy}" if remedy else ""
        super().__init__(f"{where}{key} = {value!r}: expected {expected}{fix}")
        self.key = key
        self.value = value
        self.expected = expected
        self.origin = origin
        self.remedy = remedy


class RequestError(KvdError):
    """The daemon answered with an error. ``retriable`` says whether the same request may succeed later."""

    def __init__(self, code: str, message: str, *, retriable: bool = False) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retriable = retriable


class EngineError(KvdError):
    """An engine's HTTP side could not be asked, or its answer lacks what was asked for. ``status``: HTTP's."""

    def __init__(self, url: str, what: str, *, status: int | None = None) -> None:
        super().__init__(f"{url}: {what}")
        self.url = url
        self.what = what
        self.status = status


class Unreachable(KvdError, TimeoutError):
    """No answer from the endpoint before the deadline."""
