"""Hostile bytes at every door: whatever comes in, a decoder answers with a value or its own error, and nothing else.

``KVDTEST_FUZZ_SECONDS`` is the time for all doors together (default 30). Rounds are seeded one after another from
``KVDTEST_SEED`` (default 0); a failure tells its round.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvd import snapshot
from kvd.config import Config, load
from kvd.core.fleet import Fleet
from kvd.core.reference import ReferenceIndex
from kvd.core.stream import Policy
from kvd.daemon import runtime
from kvd.ingest.feed import Feed
from kvd.ingest.recording import Line as RecordedLine
from kvd.ingest.recording import read_lines, read_replays
from kvd.serve.zmq import _leading_id
from protocols import dynamo, lmcache, query, trtllm
from protocols.engine import END_SEQ, decode_payload, decode_pub, decode_replay, decode_replay_request
from protocols.errors import ConfigError, WireError
from protocols.plan import exact_plan, prefix_plan
from tests.kit.engine import Dialect, Engine, Space
from tests.kit.memory import HandTransport, Line
from tests.kit.publisher import chain_of, payload_of

SECONDS = float(os.environ.get("KVDTEST_FUZZ_SECONDS", "30"))
SEED = int(os.environ.get("KVDTEST_SEED", "0").split(",")[0] or 0)
CORPUS = Path(__file__).parents[1] / "fixtures" / "events" / "corpus.json"

Door = Callable[[bytes], object]


# --- what is thrown at them ------------------------------------------------------------------------------------------


@cache
def engine_payloads() -> list[bytes]:
    """Real payloads of every dialect, and the corpus."""
    found = [payload_of([chain_of(range(100, 116))])]
    for dialect in Dialect:
        engine = Engine(dialect, blocks=12, host=4, hybrid=True)
        for start in range(4):
            engine.serve(range(start, start + 21), Space("adapter" if start else None, "salt" if start > 1 else None))
            sent = engine.step()
            found += [bytes(sent)] if sent is not None else []
            engine.finish()
        engine.reset()
    cases = json.loads(CORPUS.read_text())["cases"]
    return found + [bytes.fromhex(c["frames"][-1]) for c in cases if c["channel"] in ("pub", "replay-reply")]


@cache
def requests() -> list[bytes]:
    plan = exact_plan("m", range(100, 120), lora_name="a", cache_salt="s")
    spec = query.WorkerSpec(name="w", model="m", endpoint="inproc://w", replay="inproc://r")
    asked: list[query.AnyRequest] = [
        query.Hello(id=1), query.Score(id=2, plans=[plan, prefix_plan("m", [1, 2], "layout")], workers=["w"]),
        query.ScoreKeys(id=3, model="m", keys=bytes(16), block_size=4), query.Routed(id=4, plan=plan, worker="w"),
        query.Observed(id=5, worker="w", predicted_tokens=1, cached_tokens=2), query.AddWorker(id=6, worker=spec),
        query.RemoveWorker(id=7, name="w"), query.ListWorkers(id=8), query.ListStreams(id=9), query.Check(id=10),
        query.FetchSnapshot(id=11, fetch="", offset=0, max_bytes=10),
    ]  # fmt: skip
    return [query.encode(request) for request in asked]


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.integers(-2, 5), st.floats(), st.text(max_size=8),
    st.binary(max_size=40),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
edits = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 16), st.binary(max_size=9)), min_size=1, max_size=4)


def torn(raw: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """The bytes with some cut off, put in, overwritten or repeated."""
    for kind, where, what in changes:
        at = where % (len(raw) + 1)
        if kind == 0:
            raw = raw[:at]
        elif kind == 1:
            raw = raw[:at] + what + raw[at:]
        elif kind == 2:
            raw = raw[:at] + what + raw[at + len(what) :]
        else:
            raw = raw[:at] + raw[at : at + 8] * 3 + raw[at:]
    return raw


def grafted(raw: bytes, where: int, what: Any) -> bytes:
    """The same message with one value somewhere inside replaced."""
    try:
        root = [msgspec.msgpack.decode(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw
    places: list[tuple[Any, Any]] = [(root, 0)]
    for holder, key in places:  # grows while it is walked
        value = holder[key]
        inner = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
        places += [(value, name) for name in inner]
    holder, key = places[where % len(places)]
    holder[key] = what
    return msgspec.msgpack.encode(root[0])


def near(samples: list[bytes]) -> st.SearchStrategy[bytes]:
    """Almost right: torn, grafted, or any bytes at all."""
    sample = st.sampled_from(samples)
    return st.one_of(
        st.builds(torn, sample, edits), st.builds(grafted, sample, st.integers(0, 1 << 16), values),
        st.builds(msgspec.msgpack.encode, values), st.binary(max_size=64),
    )  # fmt: skip


def throw(strategy: st.SearchStrategy[Any], door: Callable[[Any], object], share: float) -> int:
    """Call the door for its share of the time, in seeded rounds; how many rounds there were."""
    until, rounds = time.monotonic() + SECONDS * share, 0
    while rounds == 0 or time.monotonic() < until:
        test = settings(
            max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )(given(strategy)(lambda thrown: door(thrown) and None))  # fmt: skip
        try:
            seed(SEED * 1_000_003 + rounds)(test)()
        except BaseException as error:
            error.add_note(f"KVDTEST_SEED={SEED}, round {rounds}")
            raise
        rounds += 1
    return rounds


# --- the doors -------------------------------------------------------------------------------------------------------


def test_engine_payloads() -> None:
    index = ReferenceIndex(max_blocks=200)
    rank = index.add_rank()

    def door(payload: bytes) -> None:
        try:
            batch = decode_payload(payload, 1, b"t")
        except WireError:
            return
        for event in batch.events:
            index.apply(rank, event)
        assert index.check() == []

    throw(near(engine_payloads()), door, 0.2)


def test_frames() -> None:
    frame = st.one_of(st.sampled_from([b"", b"t", END_SEQ, bytes(7) + b"\x01"]), st.binary(max_size=12))
    frames = st.lists(st.one_of(frame, st.sampled_from(engine_payloads())), max_size=6)

    def door(thrown: list[bytes]) -> None:
        for decode in (decode_pub, decode_replay, decode_replay_request):
            try:
                decode(thrown)
            except WireError:
                continue

    throw(frames, door, 0.05)


def test_a_whole_stream() -> None:
    """Any messages, live and replayed, in any order: the stream stays in a named state and the index sound."""
    sequences = st.integers(0, 6) | st.sampled_from([2**63, 2**64 - 2, 2**64 - 1])
    step = st.tuples(st.integers(0, 5), sequences, near(engine_payloads()))

    def door(steps: list[tuple[int, int, bytes]]) -> None:
        line = Line(Fleet(max_blocks=100), replay="inproc://r", policy=Policy(replay_timeout=1, replay_total=3))
        for kind, seq, payload in steps:
            _give(line.feed, kind, seq.to_bytes(8, "big"), payload)
            line.wait(0.4, step=0.2)
        assert line.fleet.check() == []
        msgspec.msgpack.encode(line.member.info(line.now))
        line.score(range(100, 116))

    throw(st.lists(step, max_size=8), door, 0.2)


def _give(feed: Feed, kind: int, seq: bytes, payload: bytes) -> None:
    assert isinstance(feed.transport, HandTransport)
    if kind == 0:
        feed.connected()
    elif kind == 1:
        feed.disconnected()
    elif kind == 2 and feed.transport.replaying:
        feed.replayed([b"", b"t", seq, payload])
    else:
        feed.message([b"t", seq, payload])


def test_other_engines_messages() -> None:
    cases = json.loads(CORPUS.read_text())["cases"]
    samples = [bytes.fromhex(f) for c in cases if c["channel"] not in ("pub", "replay-reply") for f in c["frames"]]
    doors: list[Door] = [
        trtllm.decode, trtllm.split, dynamo.decode_json, lmcache.decode_push, lmcache.decode_coordinator,
        lambda raw: dynamo.decode_zmq([b"t", bytes(8), bytes(8), raw]),
    ]  # fmt: skip

    def door(payload: bytes) -> None:
        for decode in doors:
            try:
                decode(payload)
            except WireError:
                continue

    throw(near([*samples, *engine_payloads()]), door, 0.1)


async def test_query_messages() -> None:
    async with runtime(Config()) as parts:

        def door(payload: bytes) -> None:
            _leading_id(payload)
            query.request_id(payload)
            for decode in (query.decode_reply, query.decode_request):
                try:
                    message = decode(payload)
                except WireError:
                    message = None
            if isinstance(message, query.Request):
                reply = parts.service.handle(message)
                assert getattr(reply, "code", "") != "internal", reply
                query.decode_reply(query.encode(reply))
            for name in list(parts.fleet.workers):
                parts.supervisor.remove(name)

        throw(near(requests()), door, 0.2)


def test_configuration(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    sample = (
        b'[query]\nendpoint = "ipc:///x"\nmessage_bytes = 4096\n[index]\nmax_blocks = 10\n[log]\nlevel = "info"\n'
        b'[[workers]]\nname = "w"\nmodel = "m"\nendpoint = "tcp://h:1"\nranks = 2\nreplay = "tcp://h:9"\n'
    )
    toml = st.one_of(st.builds(torn, st.just(sample), edits), st.binary(max_size=64))
    names = st.sampled_from(["KVD_QUERY_ENDPOINT", "KVD_INDEX_MAX_BLOCKS", "KVD_LOG_LEVEL", "KVD_NOTHING", "OTHER"])
    text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)

    def door(thrown: tuple[bytes, dict[str, str]]) -> None:
        raw, env = thrown
        path.write_bytes(raw)
        try:
            load(path, env=env)
        except ConfigError:
            return

    throw(st.tuples(toml, st.dictionaries(names, text, max_size=2)), door, 0.1)


def test_recordings(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    samples = [
        b'{"t": 1.5, "endpoint": "e", "frames_hex": ["", "0000000000000000", "93cb"]}\n',
        b'{"request_hex": "00", "replies_hex": [["", "0000000000000000", "93cb"]]}\n',
    ]

    def door(raw: bytes) -> None:
        path.write_bytes(raw)
        for reader in (read_lines, read_replays):
            try:
                for line in reader(path):
                    assert not isinstance(line, RecordedLine) or line.frames is not None
            except WireError:
                continue

    throw(near(samples), door, 0.05)


async def test_snapshots(tmp_path: Path) -> None:
    """Damage is seen by the checksums; a forged frame with a right checksum costs its section."""
    whole = await _snapshot(tmp_path / "whole")
    path = tmp_path / "kvd.snapshot"
    frames = list(_frames_of(whole))

    def door(thrown: tuple[bool, list[tuple[int, int, bytes]], int, int, Any]) -> None:
        tear, changes, number, where, what = thrown
        if tear:
            raw = torn(whole, changes)
        else:
            forged = [*frames]
            forged[number % len(frames)] = grafted(frames[number % len(frames)], where, what)
            raw = whole[:HEADER] + b"".join(map(framed, forged))
        path.write_bytes(raw)
        _use(path)

    throw(st.tuples(st.booleans(), edits, st.integers(0, 99), st.integers(0, 1 << 16), values), door, 0.1)


HEADER = len(snapshot.MAGIC) + 4


async def _snapshot(path: Path) -> bytes:
    """The bytes of a real snapshot of two streams."""
    async with runtime(Config()) as parts:
        for name, hybrid in (("a", False), ("b", True)):
            spec = query.WorkerSpec(name=name, model="m", endpoint=f"inproc://{name}")
            parts.supervisor.add(spec)
            feed = parts.supervisor.feeds[name, 0]
            engine = Engine(Dialect.VLLM_MAP, blocks=30, hybrid=hybrid, host=4)
            for start in range(6):
                engine.serve(range(start, start + 17), Space("adapter" if start > 3 else None))
                engine.finish()
                sent = engine.step()
                if sent is not None:
                    feed.message(sent.frames)
        assert await snapshot.SnapshotWriter(path, parts.supervisor, "i").write() is not None
    return path.read_bytes()


def _frames_of(whole: bytes) -> Iterator[bytes]:
    at = HEADER
    while at < len(whole):
        (length,) = struct.unpack_from("<I", whole, at)
        yield whole[at + 12 : at + 12 + length]
        at += 12 + length


def framed(payload: bytes) -> bytes:
    return struct.pack("<IQ", len(payload), xxh3_64_intdigest(payload)) + payload


def _use(path: Path) -> None:
    """Read it and take every section in, as a starting daemon does, then ask."""
    try:
        sections = snapshot.read(path, max_bytes=1 << 20)
    except snapshot.SnapshotError:
        return
    for section in sections.values():
        line = Line()
        importer = line.member.index.import_rank(line.member.handle)
        try:
            for part in section.parts():
                importer.take(part)
        except (snapshot.SnapshotError, ValueError):
            line.member.reset()
        finally:
            importer.finish()
        line.fleet.sweep(1 << 20)
        assert line.fleet.check() == []
        line.score(range(1, 18))
