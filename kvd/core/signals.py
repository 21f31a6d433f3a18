"""What goes into a stream's state machine and what comes out of it."""

from __future__ import annotations

import msgspec

from protocols.events import Batch

# --- inputs ----------------------------------------------------------------------------------------------------------


class Connected(msgspec.Struct, frozen=True):
    """The transport finished its handshake with the publisher."""


class Disconnected(msgspec.Struct, frozen=True):
    """The transport lost the publisher."""


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A live message. ``digest`` identifies its payload; ``batch`` is None when that cannot be used (``fault``).

    ``counted``: the publisher gave the sequence; where the transport had to number messages itself, none can be missed.
    """

    seq: int
    digest: int
    batch: Batch | None
    fault: str = ""
    counted: bool = True

    @property
    def ts(self) -> float | None:
        return None if self.batch is None else self.batch.ts


class Replayed(msgspec.Struct, frozen=True):
    """A message that came through the replay channel."""

    message: Message


class ReplayEnded(msgspec.Struct, frozen=True):
    """The publisher said that there is no more."""


class ReplayFailed(msgspec.Struct, frozen=True):
    """The replay channel broke, or spoke nonsense."""

    reason: str


class Refused(msgspec.Struct, frozen=True):
    """The index could not take, or cannot credit, some of what was just applied."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


class Close(msgspec.Struct, frozen=True):
    """The worker was removed."""


class Loss(msgspec.Struct, frozen=True):
    """What is known to be missing of this lifetime, since which sequence, and why it could not be had."""

    since: int
    missing: int
    reason: str


class Remembered(msgspec.Struct, frozen=True):
    """A stream's position when a snapshot was taken: the last applied message, by which a lifetime is proven."""

    seq: int
    digest: int
    ts: float | None
    loss: Loss | None


Input = Connected | Disconnected | Message | Replayed | ReplayEnded | ReplayFailed | Refused | Tick | Close

# --- effects ---------------------------------------------------------------------------------------------------------


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Apply the message's events to the index."""

    message: Message


class Reset(msgspec.Struct, frozen=True):
    """Drop everything this stream ever stored: a new lifetime began."""

    reason: str


class Restore(msgspec.Struct, frozen=True):
    """The lifetime of the snapshot is proven: what it holds is this stream's now."""


class StartReplay(msgspec.Struct, frozen=True):
    """Ask the publisher for every message from ``start`` on; a running replay is replaced."""

    start: int


class StopReplay(msgspec.Struct, frozen=True):
    """Close the replay channel; what still arrives on it is ignored."""


Effect = Apply | Reset | Restore | StartReplay | StopReplay
