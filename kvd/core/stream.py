"""One publisher's stream: order, holes, replay, lifetime, trust. Everything that decides them lives in this file.

Sans-IO: inputs go in with the time, effects come out, nothing else happens. The rules:

1. Exactly one lifetime at a time; a new one drops everything of the old one *before* anything of it is applied.
2. Messages are applied in sequence. A hole is replayed once, with deadlines; what cannot be filled is lost: said so.
3. Never frozen, never looping: every wait has a deadline, every repair a bound, and each ends in a named state.

States and what leads on from them are the table at the end of the class; a test walks every pair of it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, ClassVar, get_args

import msgspec

from kvd.core.signals import (
    Apply,
    Close,
    Connected,
    Disconnected,
    Effect,
    Input,
    Loss,
    Message,
    Refused,
    Remembered,
    Replayed,
    ReplayEnded,
    ReplayFailed,
    Reset,
    Restore,
    StartReplay,
    StopReplay,
    Tick,
)
from protocols.events import Bad, Batch, Cleared, Unknown
from protocols.query import Trust

MOST_MISSING = (1 << 63) - 1
"""What a reply can carry; a broken publisher's sequences add up to more."""


class State(StrEnum):
    """Where a stream is; what it means for a score is :meth:`Stream.trust`."""

    CONNECTING = "connecting"
    BOOTSTRAPPING = "bootstrapping"
    LIVE = "live"
    REPAIRING = "repairing"
    INCOMPLETE = "incomplete"
    SILENT = "silent"
    CLOSED = "closed"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines in seconds, and bounds."""

    connect_timeout: float = 5.0
    """Without a handshake for this long, the stream is silent."""
    replay_timeout: float = 2.0
    """A replay that makes no progress for this long has failed its attempt."""
    replay_total: float = 30.0
    """All attempts of one replay together."""
    replay_attempts: int = 3
    probe_interval: float = 10.0
    """A stream quiet for this long is asked whether its tail was lost."""
    held_messages: int = 20_000
    """Live messages held back during a replay."""
    evidence: int = 1024
    """Applied messages whose digests are kept, to tell a repeat from a new lifetime."""
    clock_slack: float = 3.0
    """An engine clock that goes back by more than this belongs to another process."""
    conflict_lifetimes: int = 3
    """So many lifetimes within ``conflict_window`` on one unbroken connection are several publishers, not restarts."""
    conflict_window: float = 10.0
    conflict_pause: float = 30.0
    """How long a stream of several publishers is left alone before it is tried again."""
    drained: bool = False
    """The publisher hands out each message once, from a bounded buffer: a repeat is another lifetime, a hole is an
    overflow that may have cost removals, so what was stored before it goes, and a sequence that goes on after a
    reconnect proves the lifetime."""


class Purpose(StrEnum):
    """Why a replay runs: to begin, to prove the lifetime after a reconnect, to fill a hole, to look for a lost tail."""

    BOOTSTRAP = "bootstrap"
    VERIFY = "verify"
    REPAIR = "repair"
    PROBE = "probe"


class Replay:
    """A replay in progress."""

    __slots__ = ("attempts", "begun", "known", "progress", "proven", "purpose", "seen")

    def __init__(self, purpose: Purpose, now: float) -> None:
        self.purpose = purpose
        self.begun = now
        self.progress = now
        self.attempts = 1
        self.seen = False
        self.proven = False
        self.known = -1
        """The newest message that was seen of the lifetime, though it could not be used: the replay must reach it."""


Action = Callable[["Stream", Any, float], None]
Table = dict[tuple[State, type], Action]


class Stream:
    """The state machine of one publisher. ``handle`` is its only entry."""

    def __init__(
        self, now: float, *, replayable: bool, policy: Policy | None = None, remembered: Remembered | None = None
    ) -> None:
        self.policy = policy or Policy()
        self.replayable = replayable
        self.state = State.CONNECTING
        self.lifetime = 0
        self.last: int | None = None
        self.last_ts: float | None = None
        self.loss: Loss | None = None
        self.confirmed = False
        self.heard_at: float | None = None
        self.counters: dict[str, int] = {}
        self._connected = False
        self._connected_from = 0
        self._assumed = False
        self._entered = now
        self._replay: Replay | None = None
        self._held: deque[Message] = deque()
        self._evidence: OrderedDict[int, int] = OrderedDict()
        self._current_at: float | None = None
        self._begun: deque[float] = deque(maxlen=self.policy.conflict_lifetimes)
        self._conflict_until: float | None = None
        self._effects: list[Effect] = []
        self._restoring = remembered is not None
        if remembered is not None:
            self.last, self.last_ts, self.loss = remembered.seq, remembered.ts, remembered.loss
            self._evidence[remembered.seq] = remembered.digest

    @property
    def position(self) -> Remembered | None:
        """What a snapshot must keep of this stream, a restored one's not proven yet included; None before the first."""
        if self.last is None or self.last not in self._evidence:
            return None
        return Remembered(self.last, self._evidence[self.last], self.last_ts, self.loss)

    def handle(self, given: Input, now: float) -> list[Effect]:
        """Take one input; return what must be done, in order."""
        self._effects = []
        self.TABLE[self.state, type(given)](self, given, now)
        return self._effects

    @property
    def _expected(self) -> int:
        return 0 if self.last is None else self.last + 1

    # --- transport ---------------------------------------------------------------------------------------------------

    def _connect(self, given: Connected, now: float) -> None:
        del given
        assumed, self._assumed = self._assumed, False
        if assumed and not self.replayable:
            return  # data had told of this connection before the transport's monitor did
        if self._connected:
            self._drop_connection(now)
        self._connected = True
        self._connected_from = self._expected
        if self.replayable:
            self._begin_replay(Purpose.BOOTSTRAP if self.last is None else Purpose.VERIFY, now)
        elif self.policy.drained:
            self._enter(self._settled(), now)
        elif self.last is None or self._restoring:
            self._enter(State.LIVE, now)
        else:  # nothing can prove that this is the publisher we knew
            self._lose(self.last + 1, 0, "reconnect_unproven")
            self._enter(State.INCOMPLETE, now)

    def _disconnect(self, given: Disconnected, now: float) -> None:
        del given
        self._drop_connection(now)

    def _drop_connection(self, now: float) -> None:
        self._count("disconnects")
        self._begun.clear()
        self._conflict_until = None
        self._connected = self._assumed = False
        if self._current_at is None or self.state in (State.LIVE, State.INCOMPLETE):
            self._current_at = now
        self._end_replay()
        self._held.clear()
        self._enter(State.CONNECTING, now)

    def _close(self, given: Close, now: float) -> None:
        del given
        self._end_replay()
        self._held.clear()
        self._enter(State.CLOSED, now)

    def _ignore(self, given: Input, now: float) -> None:
        """Nothing to do in this state."""

    # --- live messages -----------------------------------------------------------------------------------------------

    def _live(self, message: Message, now: float) -> None:
        """A message while nothing is held back."""
        self.heard_at = now
        if self._conflict_until is not None:
            self._count("conflicting")
            return
        if not self._connected:  # the transport's monitor may lag behind its data
            self._connect(Connected(), now)
            self._assumed = True
            self._again(message, now)
            return
        expected = self._expected
        if message.seq < expected:
            self._backward(message, now)
        elif message.seq == expected:
            self._in_order(message, now)
        else:
            self._hole(message, expected, now)

    def _again(self, given: Input, now: float) -> None:
        """Handle a further input within the same call, after the state changed."""
        self.TABLE[self.state, type(given)](self, given, now)

    def _in_order(self, message: Message, now: float) -> None:
        if self._clock_went_back(message):
            self._count("clock_jumps")
            if self.replayable:
                self._held = deque([message])
                self._begin_replay(Purpose.VERIFY, now)
            else:
                self._new_lifetime("clock went back", message, now)
            return
        self._restored()  # the live sequence goes on where the snapshot ends
        self._apply(message, now)
        self._enter(self._settled(), now)

    def _restored(self) -> None:
        if self._restoring:
            self._restoring = False
            self.confirmed = True
            self._count("restored")
            self._effects.append(Restore())

    def _clock_went_back(self, message: Message) -> bool:
        if message.ts is None or self.last_ts is None:
            return False
        return message.ts < self.last_ts - self.policy.clock_slack

    def _hole(self, message: Message, expected: int, now: float) -> None:
        self._count("gaps")
        if self.replayable:
            self._held = deque([message])
            self._begin_replay(Purpose.REPAIR, now)
            return
        if self._restoring:
            self._new_lifetime("snapshot cannot be proven", message, now)
            return
        if self.policy.drained and self.last is not None:
            self._effects.append(Reset("buffer overflow"))
        reason = "buffer_overflow" if self.policy.drained else "no_replay_endpoint"
        self._lose(expected, message.seq - expected, reason)
        self._apply(message, now)
        self._enter(self._settled(), now)

    def _backward(self, message: Message, now: float) -> None:
        """A sequence already passed: a repeat, a late arrival, or another lifetime."""
        if not self.policy.drained and self._is_repeat(message):
            self._restored()
            self._count("duplicates")
        elif self._is_late(message):
            self._count("late")
        else:
            self._new_lifetime("sequence went down", message, now)

    def _is_repeat(self, message: Message) -> bool:
        return self._evidence.get(message.seq) == message.digest

    def _is_late(self, message: Message) -> bool:
        """Given up as lost, and now overtaken: only an unordered transport does that, and its clock tells.

        What was missing before this connection cannot be overtaken on it: another process may be heard there.
        """
        if message.seq < self._connected_from:
            return False
        oldest = next(iter(self._evidence), message.seq)  # a clear makes up for a loss, but does not undo it
        lost = self.loss is not None and self.loss.missing > 0 and message.seq >= self.loss.since
        if message.seq in self._evidence or not (lost or message.seq > oldest):
            return False
        return message.ts is not None and self.last_ts is not None and message.ts <= self.last_ts

    def _hold(self, message: Message, now: float) -> None:
        """A live message while a replay decides what comes before it."""
        self.heard_at = now
        if self._held and message.seq <= self._held[-1].seq:
            self._hold_late(message, now)
            return
        if not self._held and self.last is not None and message.seq <= self.last:
            self._backward(message, now)
            return
        self._held.append(message)
        self._advance(now)
        if len(self._held) > self.policy.held_messages:
            self._give_up("held_overflow", now)

    def _hold_late(self, message: Message, now: float) -> None:
        """Not newer than what is held: a repeat, one overtaken on an unordered transport, or another lifetime."""
        place = next(i for i, held in enumerate(self._held) if held.seq >= message.seq)
        after = self._held[place]
        if self._is_repeat(message) or (after.seq == message.seq and after.digest == message.digest):
            self._count("duplicates")
        elif self._expected <= message.seq < after.seq and _not_after(message, after):
            self._count("late")
            self._held.insert(place, message)
            self._advance(now)
        elif message.seq < self._expected and self._is_late(message):
            self._count("late")
        else:
            self._new_lifetime("sequence went down", message, now)

    # --- replay ------------------------------------------------------------------------------------------------------

    def _begin_replay(self, purpose: Purpose, now: float) -> None:
        self._count(f"replays_{purpose}")
        self._replay = Replay(purpose, now)
        self._ask()
        if purpose is Purpose.REPAIR:
            self._enter(State.REPAIRING, now)
        elif purpose is not Purpose.PROBE:
            self._enter(State.BOOTSTRAPPING, now)

    def _ask(self) -> None:
        """From the last known message on, not after it: its return proves that this is still the same lifetime."""
        self._effects.append(StartReplay(0 if self.last is None else self.last))

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay = None
            self._effects.append(StopReplay())

    def _replayed(self, given: Replayed, now: float) -> None:
        replay = self._replay
        if replay is None:
            self._count("replay_leftovers")
            return
        message, first, replay.seen = given.message, not replay.seen, True
        expected = self._expected
        if message.seq < expected:
            self._overlapping(message, replay, now)
            return
        unproven = first and self.last is not None  # the last known message was asked for, and did not come
        if unproven and replay.purpose is Purpose.VERIFY:
            self._new_lifetime("lifetime cannot be proven", None, now, message.seq)
            return
        if unproven or message.seq > expected:
            self._lose(expected, message.seq - expected, "history_lost")
        replay.progress = now
        self._count("replayed")
        self._apply(message, now)
        self._advance(now)

    def _overlapping(self, message: Message, replay: Replay, now: float) -> None:
        """A replayed message that was applied before: the same payload proves the lifetime, another one ends it."""
        digest = self._evidence.get(message.seq)
        if digest is None:
            return
        if digest == message.digest:
            replay.proven = True
            self._restored()
            self._advance(now)
            return
        self._new_lifetime("another payload at a known sequence", None, now, message.seq)

    def _advance(self, now: float) -> None:
        """Apply what is held as far as it now follows; done when nothing is left to wait for.

        Not before a doubted lifetime is proven: what is held may be another one's. A message whose clock went back may
        be a straggler of the process before; it counts once the replay brings it as well.
        """
        replay = self._replay
        if replay is not None and replay.purpose is Purpose.VERIFY and not replay.proven:
            return
        had = bool(self._held)
        while self._held and self._held[0].seq <= self._expected:
            if self._held[0].seq == self._expected and self._clock_went_back(self._held[0]):
                return
            message = self._held.popleft()
            if message.seq == self._expected:
                self._apply(message, now)
            elif self._is_repeat(message):
                continue
            elif self._clock_went_back(message):
                self._count("stragglers")
            else:
                self._new_lifetime("another payload at a known sequence", None, now)
                return
        if had and not self._held and (replay is None or self._expected > replay.known):
            self._finish(now)

    def _replay_ended(self, given: ReplayEnded, now: float) -> None:
        del given
        replay = self._replay
        if replay is None:
            return
        if replay.purpose is Purpose.VERIFY and not replay.proven:
            self._new_lifetime("lifetime cannot be proven", None, now)
            return
        if not replay.seen and self.last is not None:
            self._count("replay_without_history")
            if replay.purpose is Purpose.PROBE:  # unseen restart, or a publisher that keeps nothing: who could tell
                self._lose(self._expected, 0, "replay_without_history")
        self._drop_stragglers()
        if self.last is None and not self._held:
            self.confirmed, self.loss = True, None  # asked from 0, told there is nothing: it holds nothing
        self._current_at = now
        self._finish(now)

    def _drop_stragglers(self) -> None:
        """The publisher was asked after these came and does not know them: they are from the process before."""
        current = deque(message for message in self._held if not self._clock_went_back(message))
        if len(current) < len(self._held):
            self._count("stragglers")
        self._held = current

    def _replay_failed(self, given: ReplayFailed, now: float) -> None:
        if self._replay is not None:
            self._retry(given.reason, now)

    def _retry(self, reason: str, now: float) -> None:
        replay = self._replay
        assert replay is not None
        if replay.attempts >= self.policy.replay_attempts or now - replay.begun >= self.policy.replay_total:
            self._give_up(reason, now)
            return
        replay.attempts += 1
        replay.progress = now
        replay.seen = replay.proven = False
        self._count("replay_retries")
        self._ask()

    def _give_up(self, reason: str, now: float) -> None:
        """The replay did not answer: go on with what there is, and say what is missing."""
        self._count("replays_failed")
        replay = self._replay
        expected = self._expected
        if replay is not None and replay.purpose is Purpose.PROBE:
            self._end_replay()
            heard = self.heard_at is not None and self.heard_at > replay.begun  # its replay is dead, not the stream
            self._enter(self._settled() if heard else State.SILENT, now)
            return
        if self._restoring:
            first, *others = self._held or (None,)
            self._new_lifetime("snapshot cannot be proven", first, now, others=others)
            return
        begins_here = self.last is None and bool(self._held) and self._held[0].seq == 0
        if not begins_here:
            self._lose(expected, 0, reason)
        self._finish(now)

    def _finish(self, now: float) -> None:
        """End the replay; apply everything held, counting what is still missing between as lost."""
        replay, held = self._replay, self._held
        self._held = deque()
        self._end_replay()
        if replay is not None and replay.purpose is Purpose.PROBE and self.state is not State.SILENT and not held:
            self._enter(self._settled(), now)
            return
        for message in held:
            expected = self._expected
            if message.seq < expected:
                continue
            if message.seq > expected:
                self._lose(expected, message.seq - expected, "not_replayed")
            self._apply(message, now)
        self._enter(self._settled(), now)

    # --- what is known -----------------------------------------------------------------------------------------------

    def _apply(self, message: Message, now: float) -> None:
        if message.seq == 0:  # the first message of a lifetime: nothing can be missing before it
            self.loss = None
        self.last = message.seq
        self._current_at = now
        self.confirmed = True
        self._evidence[message.seq] = message.digest
        if len(self._evidence) > self.policy.evidence:
            self._evidence.popitem(last=False)
        if message.ts is not None:
            self.last_ts = message.ts
        if message.batch is None:
            self._lose(message.seq, 1, message.fault)
            return
        self._effects.append(Apply(message))
        self._judge(message.seq, message.batch)
        if not message.counted:
            self._lose(message.seq, 0, "gaps_undetectable")

    def _judge(self, seq: int, batch: Batch) -> None:
        """A clear makes a lifetime whole; an unreadable event, or a clear of unknown scope, leaves it in doubt."""
        for event in batch.events:
            if isinstance(event, Cleared) and event.medium == event.backend_id == event.tenant_id is None:
                self.loss = None
            elif isinstance(event, Bad):
                self._lose(seq, 0, f"bad_event_{event.error}")
            elif isinstance(event, Unknown) and "cleared" in event.tag.casefold():
                self._lose(seq, 0, "unknown_clear")

    def _refused(self, given: Refused, now: float) -> None:
        self._lose(self.last or 0, 0, given.reason)
        if self.state is State.LIVE:
            self._enter(State.INCOMPLETE, now)

    def _lose(self, since: int, missing: int, reason: str) -> None:
        self.counters["missing"] = min(self.counters.get("missing", 0) + missing, MOST_MISSING)
        if self.loss is None:
            self.loss = Loss(since, min(missing, MOST_MISSING), reason)
        else:
            self.loss = Loss(self.loss.since, min(self.loss.missing + missing, MOST_MISSING), self.loss.reason)

    def _new_lifetime(
        self, reason: str, first: Message | None, now: float, known: int = -1, others: Sequence[Message] = ()
    ) -> None:
        """Drop the old lifetime and begin the new one, with ``first`` if a live message told of it, and ``others``
        that came after it.

        ``known``: the newest message of the new one that a replay has shown.
        """
        if first is None and self._held:
            known = max(known, self._held[-1].seq)
        self._count("restarts")
        self._end_replay()
        self._effects.append(Reset(reason))
        if self._restoring:
            self._restoring = False
            self._count("snapshots_discarded")
        self.lifetime += 1
        self.last = self.last_ts = self.loss = None
        self._connected_from = 0
        self.confirmed = False
        self._evidence.clear()
        # What is dropped here without a first message, the replay brings again.
        self._held = deque() if first is None else deque([first, *others])
        if self._is_conflict(now):
            self._pause(now)
        elif first is not None and first.seq == 0:
            self._finish(now)
        elif self.replayable and self._connected:
            self._begin_replay(Purpose.BOOTSTRAP, now)
            if self._replay is not None:
                self._replay.known = known
        else:
            self._finish(now)

    def _is_conflict(self, now: float) -> bool:
        """A restarting engine breaks its connection; several publishers on one endpoint do not."""
        self._begun.append(now)
        full = len(self._begun) == self.policy.conflict_lifetimes
        return full and now - self._begun[0] <= self.policy.conflict_window

    def _pause(self, now: float) -> None:
        self._count("conflicts")
        self._held.clear()
        self._conflict_until = now + self.policy.conflict_pause
        self._lose(0, 0, "several_publishers")
        self._enter(State.INCOMPLETE, now)

    def _resume(self, now: float) -> None:
        self._conflict_until = None
        self._begun.clear()
        if self.replayable:
            self._begin_replay(Purpose.BOOTSTRAP, now)

    def _settled(self) -> State:
        return State.LIVE if self.loss is None else State.INCOMPLETE

    def _enter(self, state: State, now: float) -> None:
        if state is not self.state:
            self.state = state
            self._entered = now

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick_connecting(self, given: Tick, now: float) -> None:
        del given
        if now - self._entered >= self.policy.connect_timeout:
            self._enter(State.SILENT, now)

    def _tick(self, given: Tick, now: float) -> None:
        del given
        replay = self._replay
        if self._conflict_until is not None:
            if now >= self._conflict_until:
                self._resume(now)
        elif replay is None:
            self._probe_if_quiet(now)
        elif now - replay.begun >= self.policy.replay_total:
            self._give_up("replay_timeout", now)
        elif now - replay.progress >= self.policy.replay_timeout:
            self._retry("replay_timeout", now)

    def _probe_if_quiet(self, now: float) -> None:
        if not self._connected or not self.replayable:
            return
        since = max(self._entered, self.heard_at or 0.0, self._current_at or 0.0)
        if now - since >= self.policy.probe_interval:
            nothing_but_loss = self.last is None and self.loss is not None
            self._begin_replay(Purpose.BOOTSTRAP if nothing_but_loss else Purpose.PROBE, now)

    # --- trust -------------------------------------------------------------------------------------------------------

    def trust(self, now: float) -> Trust:
        """How far a score of this stream can be believed."""
        if self.state is State.CLOSED:
            return Trust(state="unknown", reason="closed")
        if self._restoring:
            return Trust(state="unknown", reason="restoring")
        if not self.confirmed and self.loss is None:
            bootstrapping = self.state is State.BOOTSTRAPPING
            reason = "bootstrapping" if bootstrapping else "no_events_yet" if self._connected else "not_connected"
            return Trust(state="unknown", reason=reason)
        if not self._connected or self.state in (State.SILENT, State.BOOTSTRAPPING):
            return self._stale(now)
        if self.state is State.REPAIRING:
            return self._repairing()
        if self.loss is not None:
            loss = self.loss
            return Trust(state="incomplete", reason=loss.reason, since_seq=loss.since, missing=loss.missing)
        return Trust(state="exact")

    def _stale(self, now: float) -> Trust:
        seconds = 0.0 if self._current_at is None else max(0.0, now - self._current_at)
        reason = (
            "disconnected" if not self._connected else "verifying" if self.state is State.BOOTSTRAPPING else "silent"
        )
        if self.loss is None:
            return Trust(state="stale", reason=reason, stale_seconds=seconds)
        loss = self.loss
        return Trust(
            state="stale", reason=reason, stale_seconds=seconds, since_seq=loss.since, missing=loss.missing,
        )  # fmt: skip

    def _repairing(self) -> Trust:
        since = self._expected
        missing = self._held[0].seq - since if self._held else 0
        if self.loss is not None:
            since, missing = self.loss.since, min(missing + self.loss.missing, MOST_MISSING)
        return Trust(state="incomplete", reason="repairing", since_seq=since, missing=missing)

    TABLE: ClassVar[Table] = {}


def _not_after(message: Message, other: Message) -> bool:
    """Whether the engine's clock says so; False where it says nothing."""
    return message.ts is not None and other.ts is not None and message.ts <= other.ts


def _table() -> Table:
    """(state, input) → what is done. States not named for an input ignore it."""
    waiting = (State.CONNECTING,)
    listening = (State.LIVE, State.INCOMPLETE, State.SILENT)
    replaying = (State.BOOTSTRAPPING, State.REPAIRING)
    opened = (*waiting, *listening, *replaying)
    rows: list[tuple[tuple[State, ...], type, Action]] = [
        (opened, Connected, Stream._connect),
        (opened, Disconnected, Stream._disconnect),
        (opened, Close, Stream._close),
        (opened, Refused, Stream._refused),
        ((*waiting, *listening), Message, Stream._live),
        (replaying, Message, Stream._hold),
        ((*listening, *replaying), Replayed, Stream._replayed),
        ((*listening, *replaying), ReplayEnded, Stream._replay_ended),
        ((*listening, *replaying), ReplayFailed, Stream._replay_failed),
        (waiting, Tick, Stream._tick_connecting),
        ((*listening, *replaying), Tick, Stream._tick),
    ]
    table: Table = {(state, kind): Stream._ignore for state in State for kind in get_args(Input)}
    table |= {(state, kind): action for states, kind, action in rows for state in states}
    return table


Stream.TABLE = _table()
