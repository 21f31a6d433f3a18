"""Snapshots: whole or not at all, and used only by streams that prove to be the same."""

from __future__ import annotations

import asyncio
import errno
import random
import signal
from pathlib import Path

import pytest

from kvd.bootstrap import fetch
from kvd.client import AsyncClient, WorkerSpec, exact_plan
from kvd.config import Config, SnapshotSettings
from kvd.core.fleet import Fleet
from kvd.core.image import Importer
from kvd.core.signals import Remembered
from kvd.daemon import Runtime, runtime
from kvd.serve.zmq import QueryServer
from kvd.snapshot import MAGIC, SnapshotError, SnapshotWriter, load, read
from protocols import query
from tests.kit.daemon import Daemon
from tests.kit.memory import Line
from tests.kit.publisher import Publisher, chain_of, payload_of, removed, stored
from tests.kit.waiting import eventually, eventually_async

PROMPT = list(range(100, 116))
HYBRID = [
    chain_of(PROMPT) | {"group_idx": 1, "kv_cache_spec_kind": "full_attention"},
    stored([2, 4], PROMPT) | {"group_idx": 0, "kv_cache_spec_kind": "mamba"},
]


# --- images of a rank ------------------------------------------------------------------------------------------------


def copied(line: Line) -> Line:
    """A line of another fleet whose rank was filled from the first one's image."""
    other = Line(Fleet(max_blocks=10_000))
    importer: Importer = other.member.index.import_rank(other.member.handle)
    for part in line.member.index.export_rank(line.member.handle):
        importer.take(part)
    importer.finish()
    assert other.fleet.check() == []
    return other


def test_an_image_holds_all_that_scores_and_later_events_depend_on() -> None:
    line = Line().connect()
    line.publish(
        *HYBRID, stored([7], [9, 9, 9, 9], parent=6), removed([3], group_idx=1),
        stored([1, 2], [], medium="CPU", block_size=0, group_idx=1),
        stored([50], [5, 5, 5, 5], lora_name="a", group_idx=1),
        stored([60], [6, 6, 6, 6], group_idx=1, extra_keys=[["s"]]),
    )  # fmt: skip
    other = copied(line)
    plans = [exact_plan("m", t, lora_name=a, cache_salt=s) for t, a, s in
             [(PROMPT, None, None), ([5] * 4, "a", None), ([6] * 4, None, "s"), ([6] * 4, None, None)]]  # fmt: skip
    for both in (line, other):
        both.publish_payload(payload_of([stored([3], PROMPT[8:12], parent=2, group_idx=1)]), seq=5)
        both.publish_payload(payload_of([stored([6], [8, 8, 8, 8], parent=4, group_idx=1)]), seq=6)
    for plan in plans:
        assert other.score(plan).tier_tokens == line.score(plan).tier_tokens
        assert other.score(plan).usable_tokens == line.score(plan).usable_tokens
    linked = [*PROMPT, 8, 8, 8, 8, 9, 9, 9, 9]
    assert other.score(linked).matched_tokens == line.score(linked).matched_tokens == 24
    assert other.member.index.scheme(other.member.handle) == line.member.index.scheme(line.member.handle)


def test_an_image_of_a_random_history_equals_its_rank() -> None:
    rng = random.Random(7)
    line = Line().connect()
    prompts = [[rng.randrange(3) for _ in range(24)] for _ in range(20)]
    for step in range(300):
        prompt = rng.choice(prompts)
        event = chain_of(prompt, first_hash=1000 * prompts.index(prompt)) if rng.random() < 0.5 else removed(
            [1000 * prompts.index(prompt) + rng.randrange(6)]
        )  # fmt: skip
        line.publish(event, seq=step)
    other = copied(line)
    assert [other.score(p).matched_tokens for p in prompts] == [line.score(p).matched_tokens for p in prompts]
    assert other.member.info(0).blocks == line.member.info(0).blocks


# --- proof before use ------------------------------------------------------------------------------------------------


def resumed(line: Line, *, replay: str | None = "inproc://r") -> Line:
    """The same stream in a daemon started anew from a snapshot, connected, nothing proven yet."""
    position = line.member.stream.position
    assert position is not None
    fleet = Fleet(max_blocks=10_000)
    new = Line(fleet, remembered=position, replay=replay)
    new.member.shadow = new.member.new_handle()
    importer = new.member.index.import_rank(new.member.shadow)
    for part in line.member.index.export_rank(line.member.handle):
        importer.take(part)
    importer.finish()
    new.connect()
    assert new.trust.state == "unknown"
    assert new.score(PROMPT).matched_tokens == 0
    return new


def before() -> tuple[Line, bytes]:
    line = Line().connect()
    line.publish(removed([99]), ts=1.0)
    payload = payload_of([chain_of(PROMPT)], ts=2.0)
    line.publish_payload(payload)
    return line, payload


def test_the_same_payload_at_the_last_message_restores_and_the_gap_follows() -> None:
    old, payload = before()
    new = resumed(old)
    assert new.transport.asked == [1]
    new.replay(1, payload)
    assert new.score(PROMPT).matched_tokens == 16
    assert new.trust.state != "exact"
    new.replay(2, payload_of([removed([4])], ts=3.0))
    new.replay_end()
    assert new.score(PROMPT).matched_tokens == 12
    assert new.trust.state == "exact"


@pytest.mark.parametrize("how", ["another payload", "nothing", "later ones"])
def test_what_does_not_prove_the_lifetime_discards_the_snapshot(how: str) -> None:
    old, _ = before()
    new = resumed(old)
    if how == "another payload":
        new.replay(1, payload_of([chain_of([7] * 16)], ts=9.0))
    elif how == "later ones":
        new.replay(5, payload_of([removed([4])], ts=9.0))
    else:
        new.replay_end()
    assert new.score(PROMPT).matched_tokens == 0
    assert new.member.stream.counters["snapshots_discarded"] == 1
    assert new.transport.asked == [1, 0]
    new.replay(0, payload_of([chain_of([7] * 16)], ts=9.0))
    new.replay_end()
    assert new.trust.state == "exact"
    assert (new.score([7] * 16).matched_tokens, new.score(PROMPT).matched_tokens) == (16, 0)
    while not new.fleet.sweep(100):
        pass
    assert new.fleet.check() == []


def test_a_silent_replay_endpoint_discards_the_snapshot_within_its_deadline() -> None:
    old, _ = before()
    new = resumed(old)
    new.wait(14)
    assert new.member.stream.counters["snapshots_discarded"] == 1
    assert new.trust.state == "incomplete"
    assert new.score(PROMPT).matched_tokens == 0


def test_without_replay_a_live_sequence_that_goes_on_restores() -> None:
    old, _ = before()
    new = resumed(old, replay=None)
    new.publish(removed([4]), seq=2, ts=3.0)
    assert new.score(PROMPT).matched_tokens == 12
    assert new.trust.state == "exact"


@pytest.mark.parametrize("seq", [0, 1, 3])
def test_without_replay_any_other_live_sequence_discards(seq: int) -> None:
    old, _ = before()
    new = resumed(old, replay=None)
    new.publish(chain_of([7] * 16), seq=seq, ts=3.0)
    assert (new.score(PROMPT).matched_tokens, new.score([7] * 16).matched_tokens) == (0, 16)
    assert new.trust.state == ("exact" if seq == 0 else "incomplete")


def test_a_loss_is_remembered_too() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), seq=4, ts=1.0)
    position = line.member.stream.position
    assert isinstance(position, Remembered)
    assert position.loss is not None
    new = resumed(line, replay=None)
    new.publish(seq=5, ts=2.0)
    assert (new.trust.state, new.trust.missing) == ("incomplete", 4)


# --- files -----------------------------------------------------------------------------------------------------------


async def watched(parts: Runtime, engine: Publisher, name: str = "w") -> None:
    parts.supervisor.add(WorkerSpec(name=name, model="m", endpoint=engine.endpoint, replay=engine.replay), dynamic=True)

    async def exact() -> bool:
        return parts.fleet.members[name, 0].stream.trust(parts.clock()).state == "exact"

    await eventually_async(exact)


async def a_snapshot(path: Path) -> bytes:
    """A file with two sections, one of a few thousand blocks."""
    with Publisher() as one, Publisher() as two:
        one.publish(chain_of(list(range(20_000))))
        two.publish(chain_of(PROMPT))
        async with runtime() as parts:
            await watched(parts, one, "one")
            await watched(parts, two, "two")
            written = await SnapshotWriter(path, parts.supervisor, "i").write()
    assert written is not None
    assert (written.sections, written.size) == (2, path.stat().st_size)
    return path.read_bytes()


async def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "kvd.snapshot"
    await a_snapshot(path)
    sections = read(path, max_bytes=1 << 30)
    assert set(sections) == {("one", 0), ("two", 0)}
    assert sections["one", 0].begin.dynamic
    assert sum(1 for _ in sections["one", 0].parts()) > 5
    assert not list(tmp_path.glob("*.partial"))


async def test_a_damaged_file_is_never_used_and_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kvd.snapshot"
    whole = await a_snapshot(path)
    rng = random.Random(3)
    damaged = [b"", whole[:5], MAGIC, whole[:-1], whole + b"x", b"GIF89a" + whole, MAGIC + b"\2\0\0\0" + whole[17:]]
    damaged += [whole[: rng.randrange(len(whole))] for _ in range(60)]
    for _ in range(60):
        at = rng.randrange(len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(SnapshotError):
            read(path, max_bytes=1 << 30)
    assert load(path, max_bytes=1 << 30) == {}
    assert not path.exists()
    assert (tmp_path / "kvd.snapshot.rejected").read_bytes() == damaged[-1]
    assert "starting empty" in caplog.text
    path.write_bytes(MAGIC + b"\2\0\0\0" + whole[17:])
    with pytest.raises(SnapshotError, match="version 2, this kvd reads 1"):
        read(path, max_bytes=1 << 30)
    path.write_bytes(whole)
    with pytest.raises(SnapshotError, match=r"raise snapshot\.max_bytes"):
        read(path, max_bytes=100)
    assert len(load(path, max_bytes=1 << 30)) == 2


async def test_a_full_disk_keeps_the_old_file_and_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvd.snapshot"
    whole = await a_snapshot(path)

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvd.snapshot._sync", full)
    async with runtime() as parts:
        writer = SnapshotWriter(path, parts.supervisor, "i")
        assert await writer.write() is None
        assert writer.failures == 1
    assert path.read_bytes() == whole
    assert not list(tmp_path.glob("*.partial"))


async def test_streams_go_on_while_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that come while a stream stands still wait and are applied after it; the section is of one instant."""
    monkeypatch.setattr("kvd.snapshot.TURN_SECONDS", 0.0)
    path = tmp_path / "kvd.snapshot"
    with Publisher() as engine:
        engine.publish(chain_of(list(range(40_000))))
        async with runtime() as parts:
            await watched(parts, engine)
            writing = asyncio.create_task(SnapshotWriter(path, parts.supervisor, "i").write())
            feed = parts.supervisor.feeds["w", 0]

            async def standing() -> bool:
                return feed._paused is not None

            await eventually_async(standing)
            last = engine.publish(removed([10_000]))

            async def applied() -> bool:
                return feed.member.stream.last == last

            await writing
            await eventually_async(applied)
            assert parts.fleet.check() == []
    sections = read(path, max_bytes=1 << 30)
    assert sections["w", 0].begin.position.seq == 0


# --- the real daemon -------------------------------------------------------------------------------------------------


def settings_of(tmp_path: Path) -> dict[str, object]:
    return {"snapshot.path": str(tmp_path / "kvd.snapshot"), "snapshot.interval": 0.2}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_warm_restart_knows_everything_again(tmp_path: Path, how: signal.Signals) -> None:
    with Daemon(tmp_path, **settings_of(tmp_path)) as daemon, Publisher(buffer=3) as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        engine.publish(chain_of(PROMPT))
        for _ in range(5):  # the first store is no longer in the engine's buffer
            engine.publish()
        daemon.trusted("w", 5)
        if how == signal.SIGKILL:
            eventually(lambda: _position(tmp_path) == 5)
        daemon.client.close()
        daemon.stop(how)
        engine.publish(removed([4]))
        daemon.start()
        info = daemon.trusted("w", 6)
        assert info.counters["restored"] == 1
        assert daemon.score(PROMPT, "w").matched_tokens == 12
        assert daemon.client.check().ok


def _position(tmp_path: Path) -> int | None:
    try:
        sections = read(tmp_path / "kvd.snapshot", max_bytes=1 << 30)
    except (OSError, SnapshotError):
        return None
    return sections["w", 0].begin.position.seq if sections else None


def test_an_engine_restarted_meanwhile_gets_nothing_of_the_snapshot(tmp_path: Path) -> None:
    with Daemon(tmp_path, **settings_of(tmp_path)) as daemon, Publisher() as engine:
        daemon.add("w", engine)
        daemon.listening("w")
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        daemon.client.close()
        daemon.stop()
        engine.restart()
        engine.publish(chain_of([7] * 16))
        engine.publish()
        daemon.start()
        info = daemon.trusted("w", 1)
        assert info.counters["snapshots_discarded"] == 1
        assert daemon.score(PROMPT, "w").matched_tokens == 0
        assert daemon.score([7] * 16, "w").matched_tokens == 16


def test_a_worker_removed_or_changed_in_the_meantime_starts_empty(tmp_path: Path) -> None:
    with Publisher() as engine:
        engine.publish(chain_of(PROMPT))
        worker = (
            f'[[workers]]\nname = "w"\nmodel = "{{}}"\nendpoint = "{engine.endpoint}"\nreplay = "{engine.replay}"\n'
        )
        with Daemon(tmp_path, config=worker.format("m"), **settings_of(tmp_path)) as daemon:
            daemon.trusted("w", 0)
        with Daemon(tmp_path, config=worker.format("other"), **settings_of(tmp_path)) as daemon:
            info = daemon.trusted("w", 0)
            assert "restored" not in info.counters
            assert info.model == "other"
        with Daemon(tmp_path, **settings_of(tmp_path)) as daemon:
            assert daemon.client.workers() == []


def test_a_garbage_snapshot_does_not_keep_the_daemon_from_starting(tmp_path: Path) -> None:
    (tmp_path / "kvd.snapshot").write_bytes(b"garbage")
    with Daemon(tmp_path, **settings_of(tmp_path)) as daemon:
        assert daemon.client.workers() == []
    assert "not a kvd snapshot" in (tmp_path / "kvd.log").read_text()
    assert (tmp_path / "kvd.snapshot.rejected").read_bytes() == b"garbage"


# --- from a peer -----------------------------------------------------------------------------------------------------


def test_a_starting_daemon_takes_its_peers_snapshot(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with Publisher(buffer=3) as engine, Daemon(one, **settings_of(one)) as first:
        first.add("w", engine)
        first.listening("w")
        for events in ([chain_of(PROMPT)], [], [], [], []):
            engine.publish(*events)
        first.trusted("w", 4)
        eventually(lambda: _position(one) == 4)
        peer = {"snapshot.peer": first.endpoint}
        with Daemon(two, **settings_of(two), **peer) as second:
            assert second.trusted("w", 4).counters["restored"] == 1
            assert second.score(PROMPT, "w").matched_tokens == 16


async def test_pieces_are_bounded_and_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "kvd.snapshot"
    whole = await a_snapshot(path)
    async with runtime(Config(snapshot=SnapshotSettings(path=str(path), interval=3600))) as parts:
        server = QueryServer(parts.service, f"ipc://{tmp_path}/kvd.sock", parts.clock)
        server.open()
        async with AsyncClient(server.endpoint) as client:
            first = await client.request(query.FetchSnapshot(id=0, max_bytes=1000))
            assert isinstance(first, query.SnapshotPart)
            path.rename(tmp_path / "older")
            path.write_bytes(b"another")
            more = await client.request(query.FetchSnapshot(id=0, fetch=first.fetch, offset=1000, max_bytes=1000))
            assert isinstance(more, query.SnapshotPart)
            assert (more.total_bytes, first.data + more.data) == (len(whole), whole[:2000])
            for wrong, code in [
                (query.FetchSnapshot(id=0, max_bytes=1 << 30), "bad_piece"),
                (query.FetchSnapshot(id=0, offset=-1), "bad_piece"),
                (query.FetchSnapshot(id=0, fetch="x"), "unknown_fetch"),
            ]:
                reply = await client.request(wrong)
                assert isinstance(reply, query.Error)
                assert reply.code == code
        server.close()


async def test_a_peer_that_cannot_help_is_said_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kvd.snapshot"
    assert not await fetch(f"ipc://{tmp_path}/none", path, max_bytes=1 << 20, timeout=0.2)
    await a_snapshot(tmp_path / "peer.snapshot")
    async with runtime(Config(snapshot=SnapshotSettings(path=str(tmp_path / "peer.snapshot"), interval=3600))) as parts:
        server = QueryServer(parts.service, f"ipc://{tmp_path}/kvd.sock", parts.clock)
        server.open()
        assert not await fetch(server.endpoint, path, max_bytes=1000, timeout=5)
        assert not path.exists()
        assert await fetch(server.endpoint, path, max_bytes=1 << 30, timeout=5)
        server.close()
    assert len(read(path, max_bytes=1 << 30)) == 2
    assert "at most 1000" in caplog.text
    assert not list(tmp_path.glob("*.fetched"))


# --- a full index ----------------------------------------------------------------------------------------------------


def test_a_full_index_gives_up_what_nothing_links_to_before_any_stream_and_says_so() -> None:
    fleet = Fleet(max_blocks=10)
    lines = [Line(fleet, name=name).connect() for name in ("old", "new")]
    lines[0].publish(chain_of(PROMPT))
    lines[0].publish(*(stored([100 + i], [i, i, i, i], parent=9_000 + i) for i in range(5)))
    assert lines[0].trust.state == "exact"
    lines[1].now = 5.0
    lines[1].publish(chain_of([7] * 16, first_hash=50))
    assert lines[1].trust.state == "exact"
    assert lines[1].score([7] * 16).matched_tokens == 16
    assert lines[0].score(PROMPT).matched_tokens == 16
    assert (lines[0].trust.state, lines[0].trust.reason) == ("incomplete", "unlinked_dropped")
    assert fleet.check() == []


def test_a_full_index_gives_up_its_least_recently_heard_stream_and_says_so() -> None:
    fleet = Fleet(max_blocks=10)
    lines = [Line(fleet, name=name).connect() for name in ("old", "new")]
    for now, line in enumerate(lines):
        line.now = float(now)
        line.publish(chain_of(PROMPT))
    lines[1].now = 5.0
    lines[1].publish(chain_of([7] * 16, first_hash=50))
    assert lines[1].trust.state == "exact"
    assert lines[1].score([7] * 16).matched_tokens == 16
    assert (lines[0].trust.state, lines[0].trust.reason) == ("incomplete", "evicted")
    assert lines[0].score(PROMPT).zero_reason == "incomplete"
    assert fleet.check() == []
    lines[1].publish(chain_of(list(range(80)), first_hash=500))
    assert (lines[1].trust.state, lines[1].trust.reason) == ("incomplete", "index_full")
