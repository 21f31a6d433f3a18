"""The loss cases of PUB/SUB, on real sockets against the real daemon: reproduced beside a bare subscriber that suffers
them, and repaired.

A publisher drops what a stalled subscriber's mark does not hold, and tells nobody: holes in the middle, and a tail that
stays unseen until something is published again. A subscriber that comes late misses the beginning.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvd.client import StreamInfo
from tests.chaos.world import claim
from tests.kit.daemon import Daemon
from tests.kit.engine import Dialect, Engine, Space
from tests.kit.publisher import Publisher
from tests.kit.waiting import eventually

PADDING = 1_000
"""Tokens a message carries: enough that a few thousand messages fill what the kernel holds for a connection."""


class Bare:
    """A subscriber as most are: default options, no replay. It reads only when it is asked to."""

    def __init__(self, endpoint: str, high_water_mark: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def received(self, wait_ms: int = 500) -> list[int]:
        """The sequences of all that reached it."""
        found: list[int] = []
        while self._socket.poll(wait_ms):
            found.append(int.from_bytes(self._socket.recv_multipart()[1], "big"))
        return found

    def received_first(self) -> int:
        """The sequence of the first message that reaches it."""
        assert self._socket.poll(5_000)
        return int.from_bytes(self._socket.recv_multipart()[1], "big")

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@contextmanager
def _bare(publisher: Publisher, high_water_mark: int) -> Iterator[Bare]:
    """A bare subscriber that has certainly subscribed."""
    bare = Bare(publisher.endpoint, high_water_mark)
    try:
        while not bare.received(10):
            publisher.publish()
        yield bare
    finally:
        bare.close()


def _serve(engine: Engine, publisher: Publisher, count: int, *, start: int = 0) -> int:
    """Serve so many new prompts; the last sequence."""
    for number in range(start, start + count):
        engine.seq = publisher.seq  # others published before on this counter
        engine.serve([number, *range(PADDING)], Space())
        engine.finish()
        sent = engine.step()
        assert sent is not None
        publisher.publish_payload(sent)
    return publisher.seq - 1


def _assert_true(daemon: Daemon, engine: Engine, count: int) -> None:
    for number in range(0, count, max(1, count // 25)):
        prompt = [number, *range(PADDING)]
        assert claim(daemon.score(prompt, "w")) == engine.held().of([c.digest for c in engine.contents(prompt)])
    assert daemon.client.check().ok


@pytest.mark.parametrize(
    ("receive_mark", "send_mark", "loses"), [(1000, 1000, True), (100_000, 1000, None), (1000, 100_000, False)]
)
def test_a_stalled_subscriber_gets_back_what_the_publisher_dropped(
    tmp_path: Path, receive_mark: int, send_mark: int, loses: bool | None
) -> None:
    """Loss happens at the publisher: only its own mark prevents it, and only its replay repairs it."""
    count = 4_000
    engine = Engine(Dialect.VLLM_MAP, blocks=60, block_size=250)
    settings = {"ingest.receive_high_water_mark": receive_mark}
    with Publisher(high_water_mark=send_mark, buffer=100_000) as publisher, Daemon(tmp_path, **settings) as daemon:
        daemon.add("w", publisher)
        daemon.listening("w")
        with _bare(publisher, receive_mark) as bare:
            daemon.trusted("w", publisher.seq - 1)
            daemon.process.send_signal(signal.SIGSTOP)
            last = _serve(engine, publisher, count)
            daemon.process.send_signal(signal.SIGCONT)
            got = bare.received()
        lost = count - len([seq for seq in got if seq > last - count])
        if loses is not None:  # with a great mark of its own, a bare subscriber's thread may keep up
            assert (lost > 0) == loses, f"a bare subscriber lost {lost} of {count}"
        info = daemon.until("w", lambda s: s.trust.state == "exact" and s.last_seq == last, timeout=60)
        if loses:
            assert got[-1] < last, "the tail was to be lost as well"
        if loses is not False:
            assert info.counters["replayed"] > 0
        assert info.trust.missing == 0
        _assert_true(daemon, engine, count)


def test_a_lost_tail_is_found_though_nothing_more_is_published(tmp_path: Path) -> None:
    engine = Engine(Dialect.SGLANG, blocks=1_000, block_size=250)
    with Publisher() as publisher, Daemon(tmp_path) as daemon:
        daemon.add("w", publisher)
        daemon.listening("w")
        daemon.trusted("w", _serve(engine, publisher, 20))
        for number in range(5):
            engine.serve([100 + number, *range(PADDING)])
            engine.finish()
            sent = engine.step()
            assert sent is not None
            publisher.publish_payload(sent, lost=True)
        info = daemon.trusted("w", publisher.seq - 1)
        assert info.counters["replays_probe"] >= 1
        assert "gaps" not in info.counters, "no message came that could have shown a hole"
        _assert_true(daemon, engine, 20)
        assert daemon.score([104, *range(PADDING)], "w").matched_blocks == 4


def test_a_slow_joiner_learns_what_was_before_it(tmp_path: Path) -> None:
    """An engine in full swing: a bare subscriber misses the beginning, kvd asks for it."""
    engine = Engine(Dialect.VLLM_BYTES, blocks=1_000, block_size=250)
    with Publisher() as publisher, Daemon(tmp_path) as daemon:
        stop = threading.Event()

        def swing() -> None:
            number = 0
            while not stop.wait(0.0005):
                _serve(engine, publisher, 1, start=number)
                number += 1

        thread = threading.Thread(target=swing)
        thread.start()
        try:
            eventually(lambda: publisher.seq)
            bare = Bare(publisher.endpoint, 1000)
            daemon.add("w", publisher)
            daemon.until("w", _is_exact)
            first = bare.received_first()
        finally:
            stop.set()
            thread.join()
        bare.close()
        assert first > 0, "the bare subscriber was to come late"
        info = daemon.trusted("w", publisher.seq - 1)
        assert info.counters["replays_bootstrap"] == 1
        _assert_true(daemon, engine, 1)


def _is_exact(info: StreamInfo) -> bool:
    return info.trust.state == "exact"


def test_a_restarted_engine_whose_first_messages_nobody_heard(tmp_path: Path) -> None:
    """The new process publishes before anybody has reconnected: its lifetime is known from the start all the same."""
    engine = Engine(Dialect.VLLM_MAP, blocks=1_000, block_size=250)
    with Publisher() as publisher, Daemon(tmp_path) as daemon:
        daemon.add("w", publisher)
        daemon.listening("w")
        daemon.trusted("w", _serve(engine, publisher, 5))
        engine.restart()
        publisher.restart()
        last = _serve(engine, publisher, 9)
        info = daemon.trusted("w", last)
        assert info.lifetime == 1
        _assert_true(daemon, engine, 9)
