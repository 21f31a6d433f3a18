"""The real daemon on real sockets that lose, restart, fall silent and talk nonsense: state and trust after each."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.client import WorkerSpec
from tests.kit.daemon import Daemon
from tests.kit.publisher import Publisher, ReplayMode, chain_of, cleared, removed, stored

PROMPT = list(range(100, 116))
LONGER = list(range(100, 124))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("kvd")) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_workers_left(daemon: Daemon) -> Iterator[None]:
    yield
    for info in daemon.client.workers():
        daemon.client.remove_worker(info.worker.name)
    assert daemon.client.check().ok


def test_stores_are_scored_and_removals_shorten_the_reach(daemon: Daemon) -> None:
    with Publisher() as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        assert daemon.score(LONGER, "w").matched_tokens == 16
        daemon.trusted("w", engine.publish(removed([3])))
        assert daemon.score(LONGER, "w").matched_tokens == 8
        daemon.trusted("w", engine.publish(stored([3], PROMPT[8:12], parent=2)))
        assert daemon.score(LONGER, "w").matched_tokens == 16


def test_history_from_before_the_daemon_came_is_replayed(daemon: Daemon) -> None:
    with Publisher() as engine:
        engine.publish(chain_of(PROMPT))
        daemon.add("w", engine)
        daemon.trusted("w", 0)
        assert daemon.score(PROMPT, "w").matched_tokens == 16


def test_replay_layout_without_topic_is_read(daemon: Daemon) -> None:
    with Publisher(old_layout=True) as engine:
        engine.publish(chain_of(PROMPT))
        daemon.add("w", engine)
        daemon.trusted("w", 0)
        assert daemon.score(PROMPT, "w").matched_tokens == 16


def test_lost_messages_are_repaired_by_replay(daemon: Daemon) -> None:
    with Publisher() as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        engine.publish(chain_of(PROMPT[:8]))
        engine.publish(stored([3], PROMPT[8:12], parent=2), lost=True)
        last = engine.publish(stored([4], PROMPT[12:16], parent=3))
        info = daemon.trusted("w", last)
        assert info.counters["gaps"] == 1
        assert daemon.score(PROMPT, "w").matched_tokens == 16


def test_lost_messages_without_a_replay_endpoint_are_said_to_be_missing(daemon: Daemon) -> None:
    with Publisher(replay=None) as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        _publish_until_heard(daemon, engine)
        engine.publish(chain_of(PROMPT), lost=True)
        engine.publish(removed([99]), lost=True)
        last = engine.publish(stored([50], [1, 2, 3, 4]))
        info = daemon.until("w", lambda s: s.last_seq == last)
        assert info.state == "incomplete"
        assert (info.trust.state, info.trust.missing, info.trust.since_seq) == ("incomplete", 2, last - 2)
        zero = daemon.score(PROMPT, "w")
        assert (zero.matched_tokens, zero.zero_reason) == (0, "incomplete")
        daemon.trusted("w", engine.publish(cleared()))


def _publish_until_heard(daemon: Daemon, engine: Publisher) -> None:
    """Without replay a slow joiner misses the beginning; start the lifetime over once somebody listens."""
    engine.seq = 0
    engine.publish()
    daemon.until("w", lambda s: s.last_seq == 0)


def test_a_lost_tail_is_found_by_the_probe(daemon: Daemon) -> None:
    with Publisher() as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        last = engine.publish(removed([4]), lost=True)
        daemon.trusted("w", last)
        assert daemon.score(PROMPT, "w").matched_tokens == 12


def test_a_restarted_engine_is_a_new_lifetime(daemon: Daemon) -> None:
    with Publisher() as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        for first in (1, 11, 21):
            engine.publish(chain_of([first, *PROMPT[1:]], first_hash=first))
        daemon.trusted("w", 2)
        engine.restart()
        daemon.until("w", lambda s: s.lifetime == 1 and s.trust.state == "exact")
        assert daemon.score([1, *PROMPT[1:]], "w").matched_tokens == 0
        engine.publish(chain_of([11, *PROMPT[1:]], first_hash=1))
        daemon.trusted("w", 0)
        assert daemon.score([11, *PROMPT[1:]], "w").matched_tokens == 16
        assert daemon.score([21, *PROMPT[1:]], "w").matched_tokens == 0


def test_a_restarted_engine_without_replay_is_seen_by_its_sequence(daemon: Daemon) -> None:
    with Publisher(replay=None) as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        _publish_until_heard(daemon, engine)
        last = engine.publish(chain_of(PROMPT))
        daemon.trusted("w", last)
        engine.restart()
        daemon.until("w", lambda s: s.trust.state in ("stale", "incomplete"))
        daemon.listening("w")
        engine.publish(chain_of(LONGER[4:]))
        info = daemon.until("w", lambda s: s.lifetime == 1)
        assert info.last_seq == 0
        assert daemon.score(PROMPT, "w").matched_tokens == 0
        assert daemon.score(LONGER[4:], "w").matched_tokens == 20


def test_garbage_costs_itself_and_nothing_else(daemon: Daemon) -> None:
    with Publisher() as engine, Publisher() as other:
        daemon.add("w", engine)
        daemon.add("other", other)
        daemon.listening("w")
        daemon.listening("other")
        other.publish(chain_of(PROMPT))
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        for frames in ([b""], [b"x"] * 7, [b"t", b"123", b"p"], [b"t", b"\xff" * 8, b"p"]):
            engine.send(frames)
        bad = {"type": "BlockRemoved", "block_hashes": "no"}
        seq = engine.publish(bad, removed([4]), {"type": "Surprise"})
        info = daemon.until("w", lambda s: s.last_seq == seq)
        assert info.trust.state == "incomplete"
        assert info.trust.since_seq == seq
        assert info.counters["frames_frame_count"] == 2
        assert info.counters["frames_seq_len"] == 1
        assert info.counters["frames_seq_reserved"] == 1
        assert info.counters["skipped_unknown_tag"] == 1
        assert daemon.score(PROMPT, "w").matched_tokens == 12
        seq = engine.publish_payload(b"\xdd\xff\xff\xff\xff")
        info = daemon.until("w", lambda s: s.last_seq == seq)
        assert info.trust.missing == 1
        assert daemon.trusted("other", 0).trust.state == "exact"
        daemon.trusted("w", engine.publish(cleared()))


def test_a_silent_replay_endpoint_ends_in_incomplete_and_the_stream_goes_on(daemon: Daemon) -> None:
    with Publisher(mode="silent") as engine:
        daemon.add("w", engine)
        daemon.until("w", lambda s: s.state == "incomplete" and s.trust.reason == "replay_timeout")
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)  # the first message of a lifetime proves that nothing came before it
        engine.publish(removed([1]), lost=True)
        last = engine.publish(stored([9], [1, 2, 3, 4]))
        info = daemon.until("w", lambda s: s.last_seq == last)
        assert (info.trust.state, info.trust.missing) == ("incomplete", 1)
        last = engine.publish(stored([10], [5, 6, 7, 8]))
        daemon.until("w", lambda s: s.last_seq == last)
        assert daemon.score([5, 6, 7, 8], "w").matched_tokens == 4


def test_a_dead_replay_endpoint_ends_in_incomplete_and_the_stream_goes_on(daemon: Daemon) -> None:
    with Publisher(replay=None) as engine, Publisher() as gone:
        dead = gone.replay
        gone.stop()
        daemon.add("w", engine, replay=dead)
        daemon.until("w", lambda s: s.state == "incomplete")
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        engine.publish(lost=True)
        last = engine.publish(stored([9], [1, 2, 3, 4]))
        info = daemon.until("w", lambda s: s.last_seq == last)
        assert (info.trust.state, info.trust.missing) == ("incomplete", 1)
        gone.start()


@pytest.mark.parametrize("mode", ["endless", "garbage", "cut"])
def test_a_replay_that_never_ends_well_is_given_up(daemon: Daemon, mode: ReplayMode) -> None:
    with Publisher() as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        engine.mode = mode
        engine.publish(removed([4]), lost=True)
        last = engine.publish(stored([9], [1, 2, 3, 4]))
        info = daemon.until("w", lambda s: s.last_seq == last)
        if mode == "cut":  # everything came but the end marker: nothing is missing
            assert info.trust.state == "exact"
        else:
            assert info.trust.state == "incomplete"
        assert daemon.score([1, 2, 3, 4], "w").matched_tokens == 4


def test_an_unplugged_publisher_goes_stale_then_silent_and_comes_back(daemon: Daemon) -> None:
    with Publisher() as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        engine.stop()
        info = daemon.until("w", lambda s: s.state == "silent")
        assert info.trust.state == "stale"
        assert info.trust.stale_seconds > 0
        stale = daemon.score(PROMPT, "w")
        assert (stale.matched_tokens, stale.trust.state) == (16, "stale")
        engine.start()  # the same process: its buffer proves it
        info = daemon.trusted("w", 0)
        assert info.lifetime == 0
        assert daemon.score(PROMPT, "w").matched_tokens == 16


def test_a_worker_that_was_never_there_is_unknown_not_zero(daemon: Daemon) -> None:
    with Publisher() as engine:
        endpoint, replay = engine.endpoint, engine.replay
        engine.stop()
        daemon.client.add_worker(WorkerSpec(name="w", model="m", endpoint=endpoint, replay=replay))
        daemon.until("w", lambda s: s.state == "silent")
        answer = daemon.score(PROMPT, "w")
        assert (answer.trust.state, answer.trust.reason, answer.zero_reason) == (
            "unknown", "not_connected", "no_events_yet",
        )  # fmt: skip
        engine.start()


def test_a_stalled_daemon_recovers_what_the_publisher_dropped(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Publisher(high_water_mark=20) as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        daemon.process.send_signal(signal.SIGSTOP)
        padding = list(range(4_000))
        for number in range(400):  # more than socket buffers and the high-water mark hold
            engine.publish(stored(range(1000 + number, 1001 + number), padding, block_size=4_000))
        last = engine.publish(removed([4]))
        daemon.process.send_signal(signal.SIGCONT)
        info = daemon.trusted("w", last)
        assert info.counters["replayed"] > 0
        assert daemon.score(PROMPT, "w").matched_tokens == 12
        assert daemon.client.check().ok


def test_bind_mode_takes_engines_that_connect(daemon: Daemon, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/events"
    daemon.client.add_worker(WorkerSpec(name="w", model="m", endpoint=address, mode="bind"))
    with Publisher(endpoint=address, replay=None, connect=True) as engine:
        daemon.listening("w")
        _publish_until_heard(daemon, engine)
        last = engine.publish(chain_of(PROMPT))
        daemon.until("w", lambda s: s.last_seq == last)
        assert daemon.score(PROMPT, "w").matched_tokens == 16
    daemon.until("w", lambda s: s.trust.state == "stale")
