"""The stream's state machine against a simulated publisher: losses, restarts, replays answered, cut short or never.

The wire keeps order. Messages of a lost connection may still come; an engine takes a while to be back, by its clock.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.core.signals import (
    Apply,
    Connected,
    Disconnected,
    Input,
    Message,
    Refused,
    Replayed,
    ReplayEnded,
    ReplayFailed,
    Reset,
    StartReplay,
    StopReplay,
    Tick,
)
from kvd.core.stream import Policy, State, Stream
from protocols.events import Bad, Batch, Cleared, Event, Removed

POLICY = Policy(
    connect_timeout=5,
    replay_timeout=2,
    replay_total=12,
    replay_attempts=3,
    probe_interval=8,
    held_messages=6,
    evidence=8,
    clock_slack=3,
)
fates = st.sampled_from(["before", "lost", "after"])
BUFFER = 6
"""Messages the publisher can replay; short, so that history is lost."""

CONTENTS: dict[str, tuple[Event, ...]] = {
    "plain": (Removed(hashes=(1,)),), "clear": (Cleared(),), "bad": (Removed(hashes=(1,)), Bad("token_type")),
}  # fmt: skip


class Publisher:
    """One engine process after another."""

    def __init__(self) -> None:
        self.life = 0
        self.sent: list[Message] = []

    def publish(self, content: str, ts: float) -> Message:
        seq = len(self.sent)
        batch = Batch(seq=seq, topic=b"", ts=ts, rank=None, events=CONTENTS[content])
        if content == "undecodable":
            self.sent.append(Message(seq=seq, digest=self.life << 32 | seq, batch=None, fault="payload_decode"))
        else:
            self.sent.append(Message(seq=seq, digest=self.life << 32 | seq, batch=batch))
        return self.sent[-1]

    @property
    def kept(self) -> list[Message]:
        return self.sent[-BUFFER:]


class StreamMachine(RuleBasedStateMachine):
    """``applied`` is what the index holds: everything since the last reset or clear."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.publisher = Publisher()
        self.stream = Stream(self.now, replayable=True, policy=POLICY)
        self.applied: list[Message] = []
        self.cleared = False
        self.attached = False
        self.told = True
        self.known_life = 0
        self.wire: list[Message] = []
        self.request: tuple[int, int] | None = None

    # --- plumbing ---

    def give(self, given: Input) -> None:
        message = given.message if isinstance(given, Replayed) else given
        if isinstance(message, Message):
            self.known_life = max(self.known_life, message.digest >> 32)
        elif isinstance(given, Connected):
            self.known_life = self.publisher.life
        for effect in self.stream.handle(given, self.now):
            self._perform(effect)

    def _perform(self, effect: Any) -> None:
        if isinstance(effect, Apply):
            if any(isinstance(event, Cleared) for event in effect.message.batch.events):
                self.applied, self.cleared = [], True
            self.applied.append(effect.message)
        elif isinstance(effect, Reset):
            self.applied, self.cleared = [], False
        elif isinstance(effect, StartReplay):
            self.request = (self.publisher.life, effect.start)
        elif isinstance(effect, StopReplay):
            self.request = None

    # --- what happens to the publisher and between it and us ---

    @initialize(count=st.integers(0, 4))
    def begin(self, count: int) -> None:
        for _ in range(count):
            self.publisher.publish("plain", self.now)

    @rule(content=st.sampled_from(["plain", "plain", "plain", "plain", "clear", "bad"]), lost=st.booleans())
    def publish(self, content: str, lost: bool) -> None:
        message = self.publisher.publish(content, self.now)
        if self.attached and not lost and not self._mistakable(message):
            self.wire.append(message)

    def _mistakable(self, message: Message) -> bool:
        """An unnoticed restart whose first message continues the old count cannot be told from a continuation."""
        if self.told:
            return False
        queued = [*self.stream._held, *self.wire]
        following = queued[-1].seq + 1 if queued else self.stream._expected
        self.told = message.seq != following
        return not self.told

    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            self.give(self.wire.pop(0))

    @precondition(lambda self: self.wire)
    @rule()
    def deliver_twice(self) -> None:
        self.give(self.wire[0])

    @precondition(lambda self: not self.attached)
    @rule()
    def connect(self) -> None:
        self.attached = True
        self.give(Connected())

    @precondition(lambda self: self.attached)
    @rule(fate=fates)
    def disconnect(self, fate: str) -> None:
        self._hang_up(fate)

    def _hang_up(self, fate: str) -> None:
        """What was on its way comes before we know, is lost, or comes afterwards."""
        if fate == "before":
            self.deliver(len(self.wire))
        # A stray message 0 looks like the first of a new lifetime until that one's own first message comes.
        self.wire = [message for message in self.wire if message.seq] if fate == "after" else []
        self.attached, self.told = False, True
        self.give(Disconnected())

    @rule(fate=fates, reconnect=st.booleans(), count=st.integers(0, 9))
    def restart(self, fate: str, reconnect: bool, count: int) -> None:
        """Another process, which may have sent something before we are back."""
        if self.attached:
            self._hang_up(fate)
        self._another_life()
        self.wait(4)
        for _ in range(count):
            self.publisher.publish("plain", self.now)
        if reconnect:
            self.connect()

    def _another_life(self) -> None:
        self.publisher.life += 1
        self.publisher.sent = []

    @precondition(lambda self: self.attached and self.told)
    @rule()
    def restart_unnoticed(self) -> None:
        self._another_life()
        self.wait(4)
        self.told = False

    # --- the replay channel ---

    @rule(count=st.integers(1, 7), end=st.booleans())
    def answer(self, count: int, end: bool) -> None:
        """The next messages that were asked for, and perhaps the end; nothing if the process asked is gone."""
        for _ in range(count):
            if self.request is None or self.request[0] != self.publisher.life:
                return
            life, start = self.request
            wanted = [message for message in self.publisher.kept if message.seq >= start]
            if not wanted:
                break
            self.request = (life, wanted[0].seq + 1)
            self.give(Replayed(wanted[0]))
        if end and self.request is not None and not [m for m in self.publisher.kept if m.seq >= self.request[1]]:
            self.request = None
            self.give(ReplayEnded())

    @rule()
    def break_replay(self) -> None:
        self.give(ReplayFailed("broken"))

    @rule()
    def refuse(self) -> None:
        self.give(Refused("index_full"))

    @rule(seconds=st.sampled_from([1, 1, 2, 9]))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.give(Tick())

    @rule()
    def settle(self) -> None:
        """Everything is delivered and every question answered: the stream is exact, or says why not."""
        if not self.attached:
            self.connect()
        for _ in range(40):
            self.deliver(len(self.wire))
            self.answer(100, end=True)
            self.wait(1)
        for _ in range(3):  # a last probe may find a restart, and that a bootstrap
            self.answer(100, end=True)
        trust = self.stream.trust(self.now)
        assert self.stream.state in (State.LIVE, State.INCOMPLETE)
        self.told = True
        if trust.state == "exact":
            newest = self.publisher.sent[-1:] if self.applied else []
            assert self.applied[-1:] == newest
        else:
            assert trust.state == "incomplete"
            assert trust.reason

    # --- after every step ---

    @invariant()
    def exact_means_one_lifetime_without_a_hole(self) -> None:
        if self.stream.trust(self.now).state != "exact":
            return
        seqs = [message.seq for message in self.applied]
        lives = {message.digest >> 32 for message in self.applied}
        assert len(lives) <= 1, f"lifetimes {lives} mixed"
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True
        assert self.cleared or seqs[:1] in ([], [0]), f"begins at {seqs[0]} without a clear"
        assert not any(isinstance(event, Bad) for message in self.applied for event in message.batch.events)
        assert lives <= {self.known_life}, "an old lifetime is called exact"

    @invariant()
    def replays_end(self) -> None:
        replay = self.stream._replay
        assert replay is None or self.now - replay.begun < POLICY.replay_total
        assert (replay is None) == (self.stream.state not in (State.BOOTSTRAPPING, State.REPAIRING)) or (
            replay is not None and replay.purpose == "probe"
        )
        assert len(self.stream._held) <= POLICY.held_messages


def test_exact_is_never_a_lie() -> None:
    case = StreamMachine.TestCase
    case.settings = settings(
        max_examples=600, stateful_step_count=40, deadline=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case("runTest").runTest()
