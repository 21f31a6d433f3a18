"""The stream's state machine: every pair of its table, and each of its rules as a scene."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, get_args

import pytest

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
    StartReplay,
    StopReplay,
    Tick,
)
from kvd.core.stream import Policy, State, Stream
from protocols.events import Bad, Batch, Cleared, Event, Removed, Unknown

POLICY = Policy(
    connect_timeout=5,
    replay_timeout=2,
    replay_total=10,
    replay_attempts=3,
    probe_interval=20,
    held_messages=8,
    evidence=16,
)
CLEAR = Cleared()


def message(seq: int, *events: Event, life: int = 0, ts: float | None = None) -> Message:
    """The publisher's message ``seq`` in its ``life``-th lifetime."""
    clock = life * 1000.0 + seq if ts is None else ts
    batch = Batch(seq=seq, topic=b"", ts=clock, rank=None, events=events or (Removed(hashes=(1,)),))
    return Message(seq=seq, digest=life << 32 | seq, batch=batch)


class Scene:
    """A stream, its clock, and what its effects came to."""

    def __init__(self, *, replayable: bool = True, policy: Policy = POLICY) -> None:
        self.now = 100.0
        self.stream = Stream(self.now, replayable=replayable, policy=policy)
        self.applied: list[int] = []
        self.asked: list[int] = []
        self.resets = 0
        self.replaying = False

    def give(self, *inputs: Input) -> Scene:
        for given in inputs:
            for effect in self.stream.handle(given, self.now):
                self._perform(effect)
        return self

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Apply):
            self.applied.append(effect.message.seq)
        elif isinstance(effect, Reset):
            self.resets += 1
            self.applied = []
        elif isinstance(effect, StartReplay):
            self.asked.append(effect.start)
            self.replaying = True
        elif isinstance(effect, StopReplay):
            self.replaying = False

    def live(self, *seqs: int, life: int = 0) -> Scene:
        return self.give(*(message(seq, life=life) for seq in seqs))

    def replay(self, *seqs: int, life: int = 0, end: bool = False) -> Scene:
        self.give(*(Replayed(message(seq, life=life)) for seq in seqs))
        return self.give(ReplayEnded()) if end else self

    def wait(self, seconds: float) -> Scene:
        """Time passes in steps of a second."""
        for _ in range(int(seconds)):
            self.now += 1
            self.give(Tick())
        return self

    @property
    def state(self) -> State:
        return self.stream.state

    @property
    def trust(self) -> str:
        return self.stream.trust(self.now).state

    @property
    def reason(self) -> str:
        return self.stream.trust(self.now).reason


def started(*seqs: int, replayable: bool = True, policy: Policy = POLICY) -> Scene:
    """Connected to a publisher that has sent these messages, from its beginning."""
    scene = Scene(replayable=replayable, policy=policy).give(Connected())
    scene = scene.replay(*seqs, end=True) if replayable else scene.live(*seqs)
    assert (scene.state, scene.trust) == (State.LIVE, "exact")
    return scene


# --- the table -------------------------------------------------------------------------------------------------------

INPUTS = get_args(Input)


def instances(kind: type) -> Iterable[Any]:
    """Every plausible input of a kind."""
    messages = [
        message(0), message(1), message(2), message(3), message(5), message(40), message(2, life=1), message(0, life=1),
        message(3, CLEAR), message(3, Bad("x")), message(3, Unknown("AllTiersCleared")), message(3, ts=-500.0),
        Message(seq=3, digest=9, batch=None, fault="payload_decode"),
    ]  # fmt: skip
    if kind is Message:
        return messages
    if kind is Replayed:
        return map(Replayed, messages)
    return [kind("why")] if kind in (ReplayFailed, Refused) else [kind()]


SITUATIONS: dict[str, Any] = {
    "fresh": lambda: Scene(),
    "fresh, cannot replay": lambda: Scene(replayable=False),
    "never connected": lambda: Scene().wait(6),
    "bootstrapping": lambda: Scene().give(Connected()),
    "bootstrapping with held": lambda: Scene().give(Connected()).live(4),
    "live": lambda: started(0, 1, 2),
    "live and empty": lambda: started(),
    "live, cannot replay": lambda: started(0, 1, 2, replayable=False),
    "probing": lambda: started(0, 1, 2).wait(20),
    "silent": lambda: started(0, 1, 2).wait(40),
    "repairing": lambda: started(0, 1, 2).live(5),
    "repairing, seen": lambda: started(0, 1, 2).live(5).replay(2),
    "incomplete": lambda: started(0, 1, 2).live(5).replay(end=True),
    "disconnected": lambda: started(0, 1, 2).give(Disconnected()),
    "verifying": lambda: started(0, 1, 2).give(Disconnected(), Connected()),
    "verifying with held": lambda: started(0, 1, 2).give(Disconnected(), Connected()).live(3, 4),
    "verified, replaying": lambda: started(0, 1, 2).give(Disconnected(), Connected()).live(6).replay(2),
    "assumed connection": lambda: started(0, 1, 2).give(Disconnected()).live(3),
    "closed": lambda: started(0, 1, 2).give(Close()),
}


def test_the_table_names_an_action_for_every_pair() -> None:
    assert set(Stream.TABLE) == set(itertools.product(State, INPUTS))


def test_the_situations_reach_every_state() -> None:
    assert {build().state for build in SITUATIONS.values()} == set(State)


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("kind", INPUTS)
def test_any_input_anywhere_leads_to_a_legal_state(name: str, kind: type) -> None:
    for given in instances(kind):
        scene = SITUATIONS[name]().give(given)
        assert scene.state in State
        assert scene.trust in ("exact", "incomplete", "stale", "unknown")
        assert (scene.stream._replay is not None) == scene.replaying
        assert scene.replaying or scene.state not in (State.BOOTSTRAPPING, State.REPAIRING)


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("first", INPUTS)
def test_any_pair_of_inputs_ends_once_time_passes(name: str, first: type) -> None:
    for a, second in itertools.product(instances(first), (message(6), message(0, life=2), Disconnected(), Connected())):
        scene = SITUATIONS[name]().give(a, second).wait(12)
        assert scene.state not in (State.BOOTSTRAPPING, State.REPAIRING)


@pytest.mark.parametrize("kind", INPUTS)
def test_closed_absorbs_everything(kind: type) -> None:
    for given in instances(kind):
        scene = started(0, 1, 2).give(Close())
        assert scene.stream.handle(given, scene.now) == []
        assert scene.state is State.CLOSED
        assert (scene.trust, scene.reason) == ("unknown", "closed")


# --- beginning -------------------------------------------------------------------------------------------------------


def test_before_anything_is_known_trust_is_unknown() -> None:
    scene = Scene()
    assert (scene.trust, scene.reason) == ("unknown", "not_connected")
    assert scene.give(Connected()).reason == "bootstrapping"


def test_no_handshake_ends_silent_and_a_late_one_is_welcome() -> None:
    scene = Scene().wait(5)
    assert scene.state is State.SILENT
    scene.give(Connected()).replay(0, end=True)
    assert (scene.state, scene.trust) == (State.LIVE, "exact")


def test_history_is_replayed_before_what_came_meanwhile() -> None:
    scene = Scene().give(Connected()).live(3, 4).replay(0, 1, 2)
    assert scene.applied == [0, 1, 2, 3, 4]
    assert (scene.asked, scene.replaying, scene.trust) == ([0], False, "exact")


def test_replay_and_live_overlap_without_counting_twice() -> None:
    scene = Scene().give(Connected()).live(2, 3).replay(0, 1, 2, 3, end=True)
    assert scene.applied == [0, 1, 2, 3]
    assert scene.trust == "exact"


def test_a_first_sequence_above_zero_is_a_hole_from_zero() -> None:
    scene = Scene(replayable=False).give(Connected()).live(7)
    trust = scene.stream.trust(scene.now)
    assert (scene.state, trust.state, trust.since_seq, trust.missing) == (State.INCOMPLETE, "incomplete", 0, 7)


def test_history_that_the_publisher_no_longer_has_is_missing() -> None:
    scene = Scene().give(Connected()).replay(7, 8, end=True)
    trust = scene.stream.trust(scene.now)
    assert (scene.applied, trust.state, trust.since_seq, trust.missing) == ([7, 8], "incomplete", 0, 7)


def test_an_empty_publisher_heals_what_an_unanswered_bootstrap_left() -> None:
    scene = Scene().give(Connected(), *[ReplayFailed("refused")] * 3)
    assert (scene.state, scene.trust) == (State.INCOMPLETE, "incomplete")
    scene.wait(20).replay(end=True)
    assert (scene.state, scene.trust) == (State.LIVE, "exact")


def test_an_idle_publisher_that_says_so_is_known_to_be_empty() -> None:
    assert started().trust == "exact"


def test_without_replay_nothing_is_claimed_until_a_message_came() -> None:
    scene = Scene(replayable=False).give(Connected())
    assert (scene.state, scene.trust, scene.reason) == (State.LIVE, "unknown", "no_events_yet")


def test_sequence_zero_needs_no_replay() -> None:
    scene = Scene().give(Connected()).live(0)
    assert (scene.state, scene.trust, scene.replaying) == (State.LIVE, "exact", False)


# --- holes -----------------------------------------------------------------------------------------------------------


def test_a_hole_is_repaired_in_order() -> None:
    scene = started(0, 1, 2).live(5, 6)
    assert (scene.state, scene.trust, scene.applied) == (State.REPAIRING, "incomplete", [0, 1, 2])
    assert scene.asked[-1] == 2
    scene.replay(2, 3, 4)
    assert (scene.state, scene.trust, scene.applied) == (State.LIVE, "exact", [0, 1, 2, 3, 4, 5, 6])


def test_while_a_hole_is_repaired_it_says_what_is_missing() -> None:
    scene = started(0, 1, 2).live(6)
    trust = scene.stream.trust(scene.now)
    assert (trust.reason, trust.since_seq, trust.missing) == ("repairing", 3, 3)


def test_a_hole_that_cannot_be_filled_is_lost_and_life_goes_on() -> None:
    scene = started(0, 1, 2).live(6).replay(2, end=True).live(7)
    trust = scene.stream.trust(scene.now)
    assert scene.applied == [0, 1, 2, 6, 7]
    assert (scene.state, trust.state, trust.since_seq, trust.missing) == (State.INCOMPLETE, "incomplete", 3, 3)


def test_a_partly_filled_hole_counts_what_is_still_missing() -> None:
    scene = started(0, 1, 2).live(9).replay(5, 6, end=True)
    trust = scene.stream.trust(scene.now)
    assert (scene.applied, trust.since_seq, trust.missing) == ([0, 1, 2, 5, 6, 9], 3, 4)


def test_without_replay_a_hole_is_lost_at_once() -> None:
    scene = started(0, 1, replayable=False).live(4)
    trust = scene.stream.trust(scene.now)
    assert (scene.applied, trust.reason, trust.since_seq, trust.missing) == ([0, 1, 4], "no_replay_endpoint", 2, 2)


def test_a_clear_heals_a_loss() -> None:
    scene = started(0, 1, 2).live(6).replay(2, end=True)
    assert scene.give(message(7, CLEAR)).trust == "exact"
    assert scene.state is State.LIVE


@pytest.mark.parametrize("event", [Cleared(medium="GPU"), Cleared(tenant_id="t"), Cleared(backend_id="b")])
def test_a_clear_of_something_else_heals_nothing(event: Cleared) -> None:
    scene = started(0, 1, 2).live(6).replay(2, end=True)
    assert scene.give(message(7, event)).trust == "incomplete"


def test_a_repeat_is_not_applied_again() -> None:
    scene = started(0, 1, 2).live(1, 2)
    assert (scene.applied, scene.resets, scene.stream.counters["duplicates"]) == ([0, 1, 2], 0, 2)


def test_a_late_message_of_a_lost_hole_is_not_a_restart() -> None:
    scene = started(0, 1, 2, replayable=False).live(6, 4)
    assert (scene.applied, scene.resets, scene.stream.counters["late"]) == ([0, 1, 2, 6], 0, 1)


def test_more_held_messages_than_the_bound_end_the_repair() -> None:
    scene = started(0, 1, 2).live(*range(5, 15))
    assert scene.applied == [0, 1, 2, *range(5, 15)]
    assert (scene.state, scene.reason) == (State.INCOMPLETE, "held_overflow")


# --- replay deadlines ------------------------------------------------------------------------------------------------


def test_a_silent_replay_endpoint_is_tried_a_bounded_number_of_times() -> None:
    scene = started(0, 1, 2).live(5).wait(10)
    assert scene.asked == [0, 2, 2, 2]
    assert (scene.state, scene.trust, scene.applied) == (State.INCOMPLETE, "incomplete", [0, 1, 2, 5])


def test_a_broken_replay_channel_is_tried_again_then_given_up() -> None:
    scene = started(0, 1, 2).live(5).give(*[ReplayFailed("refused")] * 3)
    assert (scene.state, scene.reason, scene.replaying) == (State.INCOMPLETE, "refused", False)


def test_a_stalled_replay_resumes_where_it_stopped() -> None:
    scene = started(0, 1, 2).live(9).replay(2, 3, 4).wait(2)
    assert scene.asked[-1] == 4
    scene.replay(4, 5, 6, 7, 8)
    assert (scene.state, scene.trust) == (State.LIVE, "exact")


def test_an_endless_replay_ends_at_its_total_deadline() -> None:
    scene = started(0).live(1000)
    for seq in range(1, 12):
        scene.replay(seq).wait(1)
    assert (scene.state, scene.replaying) == (State.INCOMPLETE, False)
    assert scene.applied[-1] == 1000


def test_a_replay_that_repeats_itself_for_ever_ends_as_well() -> None:
    scene = started(0, 1, 2).live(9)
    for _ in range(12):
        scene.replay(2).wait(1)
    assert scene.state is State.INCOMPLETE


def test_what_a_given_up_replay_still_brings_is_ignored() -> None:
    scene = started(0, 1, 2).live(5).wait(10).replay(3, 4, end=True)
    assert scene.applied == [0, 1, 2, 5]
    assert scene.stream.counters["replay_leftovers"] == 2


# --- lifetimes -------------------------------------------------------------------------------------------------------


def test_a_lower_sequence_is_a_new_lifetime() -> None:
    scene = started(0, 1, 2).live(0, life=1)
    assert (scene.resets, scene.applied, scene.trust) == (1, [0], "exact")


def test_a_lower_sequence_above_zero_begins_anew_from_zero() -> None:
    scene = started(0, 1, 2, 3, 4).live(2, life=1)
    assert (scene.resets, scene.applied, scene.asked[-1], scene.trust) == (1, [], 0, "unknown")
    scene.replay(0, 1, 2, life=1)
    assert (scene.applied, scene.trust) == ([0, 1, 2], "exact")


def test_reconnecting_to_the_same_lifetime_keeps_everything() -> None:
    scene = started(0, 1, 2).give(Disconnected())
    assert (scene.trust, scene.reason) == ("stale", "disconnected")
    scene.give(Connected())
    assert (scene.trust, scene.reason) == ("stale", "verifying")
    scene.replay(2, 3, end=True)
    assert (scene.resets, scene.applied, scene.trust) == (0, [0, 1, 2, 3], "exact")


def test_reconnecting_to_a_publisher_that_knows_less_is_a_new_lifetime() -> None:
    scene = started(0, 1, 2).give(Disconnected(), Connected()).replay(end=True)
    assert (scene.resets, scene.asked[-1]) == (1, 0)
    scene.replay(0, life=1, end=True)
    assert (scene.applied, scene.trust) == ([0], "exact")


def test_another_payload_at_a_known_sequence_is_a_new_lifetime() -> None:
    scene = started(0, 1, 2).give(Disconnected(), Connected()).replay(2, life=1)
    assert (scene.resets, scene.applied, scene.asked[-1]) == (1, [], 0)


@pytest.mark.parametrize("first", [3, 5])
def test_a_reconnect_whose_replay_begins_later_proves_nothing(first: int) -> None:
    scene = started(0, 1, 2).give(Disconnected(), Connected()).replay(first, life=1)
    assert (scene.resets, scene.applied) == (1, [])


def test_nothing_is_applied_after_a_reconnect_before_the_lifetime_is_proven() -> None:
    scene = started(0, 1, 2).give(Disconnected(), Connected()).live(3, life=1)
    assert scene.applied == [0, 1, 2]
    scene.wait(2)
    assert scene.asked[-1] == 2, "a retry must ask for a message of the lifetime in doubt"
    scene.replay(2, life=1)
    assert (scene.resets, scene.applied) == (1, [])


@pytest.mark.parametrize("answer", [(), (4,)])
def test_each_attempt_of_a_replay_must_prove_the_lifetime_again(answer: tuple[int, ...]) -> None:
    scene = started(0, 1, 2).give(Disconnected(), Connected()).replay(2).wait(2).replay(*answer, life=1, end=True)
    assert (scene.resets, scene.applied) == (1, [])


def test_messages_too_old_to_compare_prove_nothing() -> None:
    scene = started(*range(20)).give(Disconnected(), Connected()).replay(0, 1, end=True)
    assert (scene.resets, scene.applied) == (1, [])


def test_messages_held_in_doubt_follow_once_the_lifetime_is_proven() -> None:
    scene = started(0, 1, 2).give(Disconnected(), Connected()).live(3, 4).replay(2)
    assert (scene.applied, scene.trust, scene.replaying) == ([0, 1, 2, 3, 4], "exact", False)


def test_what_was_held_in_the_old_lifetime_does_not_reach_the_new_one() -> None:
    scene = started(0, 1, 2).give(Disconnected(), Connected()).live(3)  # a straggler of the old publisher
    scene.replay(2, life=1)
    scene.replay(0, 1, 2, life=1, end=True)
    assert (scene.applied, scene.trust) == ([0, 1, 2], "exact")


def test_an_unproven_reconnect_is_incomplete_until_a_clear() -> None:
    scene = started(0, 1, 2).give(Disconnected(), Connected()).live(3).wait(10)
    assert (scene.state, scene.trust) == (State.INCOMPLETE, "incomplete")
    assert scene.give(message(4, CLEAR)).trust == "exact"


def test_without_replay_a_reconnect_cannot_be_proven() -> None:
    scene = started(0, 1, 2, replayable=False).give(Disconnected(), Connected()).live(3)
    assert (scene.trust, scene.reason) == ("incomplete", "reconnect_unproven")


def test_a_replay_that_begins_after_the_last_known_message_leaves_doubt() -> None:
    scene = started(0, 1, 2).live(5).replay(3, 4)
    assert (scene.applied, scene.trust, scene.reason) == ([0, 1, 2, 3, 4, 5], "incomplete", "history_lost")


def test_a_clock_that_jumps_back_is_checked_with_the_publisher() -> None:
    stepped = message(3, ts=-60.0)
    scene = started(0, 1, 2).give(stepped)
    assert (scene.state, scene.applied) == (State.BOOTSTRAPPING, [0, 1, 2])
    scene.replay(2)
    assert scene.applied == [0, 1, 2]
    scene.give(Replayed(stepped), ReplayEnded())
    assert (scene.resets, scene.applied, scene.trust) == (0, [0, 1, 2, 3], "exact")


def test_a_straggler_of_the_process_before_is_not_taken_for_the_next_message() -> None:
    scene = Scene().give(Connected(), Disconnected(), Connected()).live(3)  # it had been on its way
    scene.replay(0, 1, 2, life=1, end=True)
    assert (scene.applied, scene.trust, scene.stream.counters["stragglers"]) == ([0, 1, 2], "exact", 1)


def test_a_straggler_after_the_bootstrap_is_none_either() -> None:
    scene = Scene().give(Connected()).replay(0, 1, 2, life=1, end=True).live(3)
    assert (scene.state, scene.asked[-1]) == (State.BOOTSTRAPPING, 2)
    scene.replay(2, life=1, end=True)
    assert (scene.applied, scene.resets, scene.trust) == ([0, 1, 2], 0, "exact")


def test_a_straggler_beyond_a_hole_is_no_loss() -> None:
    scene = Scene().give(Connected()).replay(0, 1, 2, life=1, end=True).live(7).replay(2, life=1, end=True)
    assert (scene.applied, scene.resets, scene.trust) == ([0, 1, 2], 0, "exact")


def test_a_clock_that_jumps_back_without_replay_is_a_new_lifetime() -> None:
    scene = started(0, 1, 2, replayable=False).give(message(3, ts=-60.0))
    assert (scene.resets, scene.applied, scene.trust) == (1, [3], "incomplete")


def test_a_new_lifetime_forgets_the_losses_of_the_old_one() -> None:
    scene = started(0, 1, 2).live(6).replay(2, end=True).live(0, life=1)
    assert (scene.resets, scene.trust, scene.stream.lifetime) == (1, "exact", 1)


def test_a_reset_comes_before_anything_of_the_new_lifetime() -> None:
    scene = started(0, 1, 2)
    kinds = [type(effect) for effect in scene.stream.handle(message(0, life=1), scene.now)]
    assert kinds == [Reset, Apply]


def test_data_that_overtakes_the_handshake_is_replayed_after_it() -> None:
    scene = started(0, 1).give(Disconnected()).live(2)
    assert (scene.applied, scene.asked[-1]) == ([0, 1], 1)
    scene.give(Connected()).replay(1, 2, end=True)
    assert (scene.applied, scene.resets, scene.trust) == ([0, 1, 2], 0, "exact")


def test_data_that_overtakes_the_handshake_is_taken_where_nothing_can_be_replayed() -> None:
    scene = Scene(replayable=False).live(0).give(Connected()).live(1)
    assert (scene.applied, scene.trust) == ([0, 1], "exact")


def test_stragglers_after_a_disconnect_do_not_use_up_the_next_handshake() -> None:
    scene = started(0, 1).give(Disconnected()).live(2).wait(10).give(Connected())
    assert (scene.state, scene.asked[-1]) == (State.BOOTSTRAPPING, 2)


def test_a_second_handshake_without_a_loss_in_between_is_verified() -> None:
    scene = started(0, 1).give(Connected())
    assert (scene.state, scene.asked[-1]) == (State.BOOTSTRAPPING, 1)


# --- quiet streams ---------------------------------------------------------------------------------------------------


def test_a_probe_finds_a_lost_tail() -> None:
    scene = started(0, 1, 2).wait(20)
    assert (scene.asked[-1], scene.trust) == (2, "exact")
    scene.replay(2, 3, 4, end=True)
    assert (scene.applied, scene.trust, scene.replaying) == ([0, 1, 2, 3, 4], "exact", False)


def test_a_probe_that_finds_nothing_new_is_repeated_an_interval_later() -> None:
    scene = started(0, 1, 2).wait(20).replay(2, end=True).wait(19)
    assert scene.asked == [0, 2]
    assert scene.wait(1).asked == [0, 2, 2]


def test_an_unanswered_probe_makes_the_stream_silent_until_it_speaks() -> None:
    scene = started(0, 1, 2).wait(30)
    assert (scene.state, scene.trust, scene.reason) == (State.SILENT, "stale", "silent")
    assert scene.live(3).trust == "exact"
    assert scene.state is State.LIVE


def test_a_silent_stream_is_asked_again_and_recovers_by_the_answer() -> None:
    scene = started(0, 1, 2).wait(47)
    assert scene.replaying
    assert scene.replay(2, end=True).state is State.LIVE


def test_a_dead_replay_endpoint_does_not_silence_a_stream_that_speaks() -> None:
    scene = started(0, 1, 2).wait(20)
    for seq in range(3, 15):
        scene.live(seq).wait(1)
        assert (scene.state, scene.trust) == (State.LIVE, "exact")
    assert scene.stream.counters["replays_failed"] == 1


def test_a_probe_that_does_not_know_the_last_message_leaves_doubt_until_a_message_tells() -> None:
    """An unseen restart, or a publisher that keeps nothing: neither stale blocks nor a zero may be called exact."""
    scene = started(0, 1, 2).wait(20).replay(end=True)
    assert (scene.resets, scene.trust, scene.reason) == (0, "incomplete", "replay_without_history")
    scene.give(message(0, life=1))
    assert (scene.resets, scene.trust) == (1, "exact")


def test_a_probe_that_brings_another_payload_found_a_restart() -> None:
    scene = started(0, 1, 2).wait(20).replay(2, life=1)
    assert (scene.resets, scene.asked[-1]) == (1, 0)


def test_a_stream_without_replay_is_not_probed() -> None:
    assert started(0, replayable=False).wait(100).asked == []


# --- content ---------------------------------------------------------------------------------------------------------


def test_a_bad_event_leaves_the_stream_incomplete() -> None:
    scene = started(0).give(message(1, Bad("token_type")))
    assert (scene.applied, scene.trust, scene.reason) == ([0, 1], "incomplete", "bad_event_token_type")


def test_a_clear_after_a_bad_event_heals_it_and_one_before_does_not() -> None:
    assert started(0).give(message(1, Bad("x"), CLEAR)).trust == "exact"
    assert started(0).give(message(1, CLEAR, Bad("x"))).trust == "incomplete"


def test_an_undecodable_batch_is_one_lost_message() -> None:
    scene = started(0).give(Message(seq=1, digest=5, batch=None, fault="payload_decode")).live(2)
    trust = scene.stream.trust(scene.now)
    assert (scene.applied, trust.reason, trust.since_seq, trust.missing) == ([0, 2], "payload_decode", 1, 1)


def test_an_unknown_clear_leaves_doubt() -> None:
    assert started(0).give(message(1, Unknown("TierBlocksCleared"))).trust == "incomplete"


def test_other_unknown_tags_are_harmless() -> None:
    assert started(0).give(message(1, Unknown("Ignored"))).trust == "exact"


def test_what_the_index_refuses_is_missing() -> None:
    scene = started(0, 1).give(Refused("index_full"))
    assert (scene.state, scene.trust, scene.reason) == (State.INCOMPLETE, "incomplete", "index_full")


def test_a_refusal_during_the_bootstrap_survives_it() -> None:
    scene = Scene().give(Connected()).replay(0).give(Refused("index_full")).replay(1, end=True)
    assert (scene.state, scene.trust) == (State.INCOMPLETE, "incomplete")
