"""One stream from frames to index: decode, let the state machine decide, do what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

from kvd.core.fleet import Member
from kvd.core.residency import Applied, Outcome, Skipped
from kvd.core.signals import (
    Apply,
    Close,
    Connected,
    Disconnected,
    Effect,
    Input,
    Message,
    Refused,
    Replayed,
    ReplayEnded,
    ReplayFailed,
    Reset,
    Restore,
    StartReplay,
    StopReplay,
    Tick,
)
from kvd.ingest.transport import Transport
from protocols.engine import decode_pub, decode_replay
from protocols.errors import WireError
from protocols.events import Batch, Event, ReplayEnd
from protocols.limits import DEFAULT_LIMITS, Limits

MAX_PAUSED = 20_000
"""Inputs that may wait while a feed stands still."""


class Holder(Protocol):
    """What a feed's events are applied to: a worker-rank, or all holders of a pool."""

    def apply(self, event: Event) -> Outcome: ...
    def reset(self) -> None: ...


class Feed:
    """The sink of one transport. ``counters`` holds what never became a message (bad frames, by code)."""

    def __init__(
        self, member: Member, transport: Transport, clock: Callable[[], float], limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.member = member
        self.transport = transport
        self.counters: Counter[str] = Counter()
        self._holder: Holder = member
        self._clock = clock
        self._limits = limits
        self._paused: list[Input] | None = None

    def open(self) -> None:
        """Begin to listen."""
        self.transport.open(self)

    def close(self) -> None:
        """Stop listening; the stream is closed."""
        self._handle(Close())
        self.transport.close()

    def tick(self) -> None:
        """Let deadlines pass."""
        if self._paused is None:
            self._handle(Tick())

    # --- a standstill ------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Let nothing more happen to stream and index until :meth:`resume`; what comes meanwhile waits, in order."""
        self._paused = []

    @property
    def overflowing(self) -> bool:
        """So much waits that the pause should end."""
        return self._paused is not None and len(self._paused) > MAX_PAUSED

    def resume(self) -> None:
        """Let everything that waited happen."""
        waiting, self._paused = self._paused or [], None
        for given in waiting:
            self._handle(given)

    # --- what the transport brings -----------------------------------------------------------------------------------

    def connected(self) -> None:
        self._handle(Connected())

    def disconnected(self) -> None:
        self._handle(Disconnected())

    def message(self, frames: Sequence[bytes]) -> None:
        try:
            batch = decode_pub(frames, self._limits)
        except WireError as error:
            if error.seq is None:  # not a message of the stream at all: if one was lost, the next one shows it
                self.counters[f"frames_{error.code}"] += 1
                return
            self._handle(self._unusable(error.seq, frames[-1], error.code))
            return
        self._handle(self._message(batch, frames[-1]))

    def received(self, message: Message) -> None:
        """A live message that a transport has decoded itself."""
        self._handle(message)

    def replayed(self, frames: Sequence[bytes]) -> None:
        try:
            reply = decode_replay(frames, self._limits)
        except WireError as error:
            if error.seq is None:
                self._handle(ReplayFailed(f"replay_{error.code}"))
            else:
                self._handle(Replayed(self._unusable(error.seq, frames[-1], error.code)))
            return
        if isinstance(reply, ReplayEnd):
            self._handle(ReplayEnded())
        else:
            self._handle(Replayed(self._message(reply, frames[-1])))

    def replay_failed(self, reason: str) -> None:
        self._handle(ReplayFailed(reason))

    # --- what the state machine says ---------------------------------------------------------------------------------

    def _message(self, batch: Batch, payload: bytes) -> Message:
        if batch.rank is not None and batch.rank != self.member.rank:
            self.counters["rank_mismatch"] += 1
            return self._unusable(batch.seq, payload, "rank_mismatch")
        return Message(seq=batch.seq, digest=xxh3_64_intdigest(payload), batch=batch)

    def _unusable(self, seq: int, payload: bytes, fault: str) -> Message:
        return Message(seq=seq, digest=xxh3_64_intdigest(payload), batch=None, fault=fault)

    def _handle(self, given: Input) -> None:
        if self._paused is not None:
            self._paused.append(given)
            return
        stream = self.member.stream
        refused = None
        for effect in stream.handle(given, self._clock()):
            refused = self._perform(effect) or refused
        if refused is not None:
            stream.handle(Refused(refused), self._clock())

    def _perform(self, effect: Effect) -> str | None:
        """Do one effect; the reason if the index had to refuse what it was given."""
        if isinstance(effect, Apply):
            return self._apply(effect.message)
        if isinstance(effect, Reset):
            self._holder.reset()
        elif isinstance(effect, Restore):
            self.member.restore()
        elif isinstance(effect, StartReplay):
            self.transport.replay(effect.start)
        elif isinstance(effect, StopReplay):
            self.transport.stop_replay()
        return None

    def _apply(self, message: Message) -> str | None:
        refused = None
        for event in message.batch.events if message.batch is not None else ():
            outcome = self._holder.apply(event)
            while _is_full(outcome) and self._make_room():
                outcome = self._holder.apply(event)
            if _is_full(outcome):
                refused = "index_full"
            elif isinstance(outcome, Applied) and outcome.doubt:
                refused = outcome.doubt
        return refused

    def _make_room(self) -> bool:
        """Let others give way; False if there is nobody left who could."""
        return self.member.fleet.evict(self.member, self._clock())


def _is_full(outcome: Outcome) -> bool:
    return isinstance(outcome, Skipped) and outcome.reason == "index_full"
