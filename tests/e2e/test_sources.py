"""Every kind of source through the real daemon, command line and sockets; engines asked, probed, and files reloaded."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.cli import probe as probing
from kvd.client import Client, WorkerSpec, exact_plan
from protocols.errors import EngineError, RequestError
from tests.ingest.test_atom import atom_removed, atom_stored
from tests.ingest.test_pool import pool_payload, pool_removed, pool_stored
from tests.kit.daemon import Daemon
from tests.kit.http import HttpEngine, TrtllmEngine, created, removed_blocks, stored_prompt
from tests.kit.publisher import Publisher, chain_of, payload_of
from tests.kit.waiting import eventually

PROMPT = list(range(100, 116))


def kvd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvd", *arguments], capture_output=True, timeout=60, text=True)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    quick = {"ingest.poll_interval": 0.02, "ingest.poll_timeout": 1.0, "ingest.poll_backoff": 0.1}
    with Daemon(tmp_path_factory.mktemp("kvd"), **quick) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_workers_left(daemon: Daemon) -> Iterator[None]:
    yield
    for info in daemon.client.workers():
        if "/" not in info.worker.name:  # holders go with their pool
            daemon.client.remove_worker(info.worker.name)
    assert daemon.client.workers() == []
    assert daemon.client.check().ok


def vllm_engine(publisher: Publisher) -> HttpEngine:
    """The HTTP side of an engine that publishes there."""
    port = publisher.endpoint.rpartition(":")[2]
    replay = (publisher.replay or "").rpartition(":")[2]
    sources = [
        {"data_parallel_rank": 0, "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}", "topic": ""}
    ]
    answers: dict[str, Any] = {
        "GET /kv_event_sources": (200, sources), "GET /v1/models": (200, {"data": [{"id": "m"}]}),
        "GET /version": (200, {"version": "0.32.0"}),
    }  # fmt: skip
    return HttpEngine(answers)


# --- discovery -------------------------------------------------------------------------------------------------------


def test_an_engine_is_added_by_its_url_alone(daemon: Daemon) -> None:
    with Publisher() as publisher, vllm_engine(publisher) as engine:
        publisher.publish(chain_of(PROMPT))
        added = kvd("workers", "add", engine.url, "--name", "w", "-e", daemon.endpoint)
        assert (added.returncode, added.stdout) == (0, "added w\n"), added.stderr
        assert f"kvd: vllm 0.32.0: model m, rank 0 at {publisher.endpoint}, replay {publisher.replay}" in added.stderr
        assert "not learnt: block size" in added.stderr
        daemon.trusted("w", 0)
        assert daemon.score(PROMPT, "w").matched_tokens == 16
        assert daemon.stream("w").scheme == "media_keys"


def test_what_the_caller_gives_stands_over_what_the_engine_tells(daemon: Daemon) -> None:
    with Publisher() as publisher, vllm_engine(publisher) as engine:
        command = ("workers", "add", engine.url, "--model", "mine", "--block-size", "8", "--scheme", "pad30")
        added = kvd(*command, "-e", daemon.endpoint)
        assert added.returncode == 0, added.stderr
        assert "not learnt" not in added.stderr
        (info,) = daemon.client.workers()
        assert (info.worker.name, info.worker.model) == (engine.url.removeprefix("http://"), "mine")
        assert (info.worker.block_size, info.worker.scheme) == (8, "pad30")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("http://127.0.0.1:1",), 1, "http://127.0.0.1:1/kv_event_sources: cannot be asked"),
        (("gpu-1",), 1, "gpu-1: is not http://host:port"),
        (("w", "tcp://h:1"), 2, "give --model"),
        (("w", "http://h:1", "--model", "m"), 2, 'source = "trtllm-http"'),
        (("w", "tcp://h:1", "--model", "m", "--source", "trtllm-http"), 2, "the engine's http://host:port"),
        (("w", "http://u:p@h:1", "--model", "m", "--source", "trtllm-http"), 2, "without user"),
        (("w", "http://h:1", "--model", "m", "--source", "trtllm-http", "--replay", "tcp://h:2"), 2, "has none"),
        (("w", "http://h:1", "--model", "m", "--source", "trtllm-http", "--bind"), 2, "polled over HTTP"),
        (("w", "tcp://h:1", "--model", "m", "--source", "atom", "--replay", "tcp://h:2"), 2, "has none"),
        (("w", "tcp://h:1", "--model", "m", "--source", "pool", "--ranks", "2"), 2, "a pool is one stream"),
    ],
)
def test_what_cannot_be_added_is_said_in_one_line(
    daemon: Daemon, arguments: tuple[str, ...], code: int, said: str
) -> None:
    failed = kvd("workers", "add", *arguments, "-e", daemon.endpoint)
    assert failed.returncode == code, failed.stderr
    assert said in failed.stderr
    assert failed.stderr.count("\n") == 1


# --- sources ---------------------------------------------------------------------------------------------------------


def test_tensorrt_llm_is_polled(daemon: Daemon) -> None:
    with TrtllmEngine() as engine:
        for rank in (0, 1):
            engine.emit(created(), rank=rank)
        engine.emit(stored_prompt(PROMPT), rank=1)
        command = ("workers", "add", "t", engine.url, "--model", "m", "--source", "trtllm-http", "--ranks", "2")
        assert kvd(*command, "-e", daemon.endpoint).returncode == 0
        eventually(lambda: daemon.stream("t", 1).last_seq == 1)
        assert [row.matched_tokens for row in _rows(daemon)] == [0, 16]
        engine.emit(removed_blocks(4), rank=1)
        eventually(lambda: daemon.stream("t", 1).last_seq == 2)
        assert [row.matched_tokens for row in _rows(daemon)] == [0, 12]
        assert {daemon.stream("t", rank).trust.state for rank in (0, 1)} == {"exact"}


def test_an_atom_stream_says_that_gaps_cannot_be_seen(daemon: Daemon) -> None:
    with Publisher(replay=None) as engine:
        spec = WorkerSpec(name="a", model="m", endpoint=engine.endpoint, source="atom")
        daemon.client.add_worker(spec)
        daemon.listening("a")

        def heard() -> bool:
            engine.send([b"kv", payload_of([atom_removed(999)])])
            return daemon.stream("a").last_seq is not None

        eventually(heard)
        engine.send([payload_of([atom_stored()])])
        eventually(lambda: daemon.score(PROMPT, "a").matched_tokens == 16)
        trust = daemon.score(PROMPT, "a").trust
        assert (trust.state, trust.reason) == ("incomplete", "gaps_undetectable")
        found = kvd("check", "--worker", "a", "-e", daemon.endpoint)
        assert (found.returncode, "gaps_undetectable: its messages carry no sequence" in found.stdout) == (0, True)


def test_a_pool_s_holders_are_rows(daemon: Daemon) -> None:
    with Publisher(replay=None, topic=b"") as engine:
        daemon.client.add_worker(WorkerSpec(name="p", model="m", endpoint=engine.endpoint, source="pool"))
        daemon.listening("p")

        def heard() -> bool:
            engine.publish_payload(pool_payload(pool_removed("n1", 999)))
            return daemon.stream("p").last_seq is not None

        eventually(heard)
        last = engine.publish_payload(pool_payload(pool_stored("n1"), pool_stored("n2", PROMPT[:8])))
        eventually(lambda: daemon.stream("p").last_seq == last)
        rows = {row.worker: row for row in daemon.client.score(_plan(PROMPT)).workers}
        assert {name: row.tier_tokens["host"] for name, row in rows.items()} == {"p/n1": 16, "p/n2": 8}
        assert {info.worker.name for info in daemon.client.workers()} == {"p", "p/n1", "p/n2"}
        assert daemon.stream("p").counters["skipped_unknown_holder"] >= 1
        daemon.client.remove_worker("p")
        assert daemon.client.workers() == []


# --- check and probe -------------------------------------------------------------------------------------------------


def test_check_names_what_is_wrong_with_a_worker(daemon: Daemon) -> None:
    with Publisher() as engine:
        daemon.add("w", engine, block_size=16)
        engine.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        told = kvd("check", "--worker", "w", "-e", daemon.endpoint)
        assert told.returncode == 1
        assert told.stdout.startswith(
            "w/0: block_size_mismatch: 1 stores have another block size than the registered 16"
        )
        parsed = json.loads(kvd("check", "--worker", "w", "--json", "-e", daemon.endpoint).stdout)
        assert parsed["diagnoses"][0]["findings"][0]["never"] is True
        (diagnosis,) = daemon.client.diagnose("w")
        assert [finding.code for finding in diagnosis.findings] == ["block_size_mismatch"]
        with pytest.raises(RequestError, match="unknown_worker"):
            daemon.client.diagnose("nobody")
    assert kvd("check", "--probe", "-e", daemon.endpoint).returncode == 2


class ProbedEngine:
    """An engine that computes what it is sent, and announces it as ``announce`` says."""

    def __init__(self, publisher: Publisher, announce: Callable[[list[int]], list[Any]], path: str = "/v1/completions"):
        self.requests: list[dict[str, Any]] = []
        self._publisher = publisher
        self._announce = announce
        self.http = HttpEngine({f"POST {path}": self._complete})

    def _complete(self, body: bytes) -> tuple[int, Any]:
        request = json.loads(body)
        self.requests.append(request)
        events = self._announce(request.get("prompt") or request["input_ids"])
        if events:
            self._publisher.publish(*events)
        return 200, {"choices": [{"text": "x"}]}


def probed(daemon: Daemon, announce: Callable[[list[int]], list[Any]], path: str = "/v1/completions") -> Any:
    with Publisher() as publisher:
        engine = ProbedEngine(publisher, announce, path)
        daemon.add("w", publisher)
        publisher.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        with engine.http, Client(daemon.endpoint) as client:
            found = probing.probe(client, "w", engine.http.url, event_seconds=1.0)
        (request,) = engine.requests
        assert len(request.get("prompt") or request["input_ids"]) == 9  # two blocks of 4, and one more token
        return found


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_probe_whose_keys_agree(daemon: Daemon, path: str) -> None:
    found = probed(daemon, lambda tokens: [chain_of(tokens, first_hash=50)], path)
    assert (found.code, found.never) == ("agrees", False)
    assert "2 blocks of 4 tokens" in found.says


def test_a_probe_that_nothing_is_announced_for(daemon: Daemon) -> None:
    found = probed(daemon, lambda _: [])
    assert (found.code, found.never) == ("no_event", True)
    assert "KV events are off" in found.says


def test_a_probe_that_is_announced_under_other_keys(daemon: Daemon) -> None:
    found = probed(daemon, lambda tokens: [chain_of([1, *tokens], first_hash=50)])  # a token put before
    assert (found.code, found.never) == ("keys_differ", True)


def test_a_probe_of_which_only_a_part_is_announced(daemon: Daemon) -> None:
    found = probed(daemon, lambda tokens: [chain_of(tokens[:4], first_hash=50)])
    assert (found.code, found.never) == ("partial", False)


def test_a_probe_from_the_command_line(daemon: Daemon) -> None:
    with Publisher() as publisher:
        engine = ProbedEngine(publisher, lambda tokens: [chain_of(tokens, first_hash=50)])
        daemon.add("w", publisher)
        publisher.publish(chain_of(PROMPT))
        daemon.trusted("w", 0)
        at = ("--worker", "w", "-e", daemon.endpoint)
        with engine.http:
            told = kvd("check", "--probe", "--url", engine.http.url, *at)
        assert (told.returncode, told.stderr) == (0, "")
        assert re.search(r"^w/0: nothing is known to be wrong\nprobe: agrees: 2 blocks", told.stdout)
        refused = kvd("check", "--probe", *at)
        assert (refused.returncode, refused.stderr) == (
            1,
            "kvd: --url: is needed for a probe: the engine's http://host:port\n",
        )


def test_an_engine_that_refuses_the_probe_is_named(daemon: Daemon) -> None:
    with Publisher() as publisher, HttpEngine({"POST /v1/completions": (400, {"error": "no"})}) as engine:
        daemon.add("w", publisher)
        with Client(daemon.endpoint) as client:
            with pytest.raises(EngineError, match=r"/v1/completions: answered 400 .*no"):
                probing.probe(client, "w", engine.url)
            with pytest.raises(RequestError, match="unknown_worker"):
                probing.probe(client, "nobody", engine.url)


# --- reload ----------------------------------------------------------------------------------------------------------


def _entry(name: str, engine: Publisher, **fields: Any) -> str:
    told = {"name": name, "model": "m", "endpoint": engine.endpoint, "replay": engine.replay} | fields
    return "[[workers]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items())


def test_a_file_is_read_again_on_sighup(tmp_path: Path) -> None:
    with Publisher() as one, Publisher() as two, Publisher() as three:
        for engine in (one, two, three):
            engine.publish(chain_of(PROMPT))
        with Daemon(tmp_path, config=_entry("one", one) + _entry("two", two)) as daemon:
            daemon.add("mine", three)
            file, names = tmp_path / "kvd.toml", lambda: {info.worker.name for info in daemon.client.workers()}
            assert names() == {"one", "two", "mine"}
            daemon.trusted("two", 0)

            file.write_text("[[workers]\n")
            _reload(daemon, "nothing changed")
            file.write_text(_entry("two", two, block_size=0))
            _reload(daemon, "nothing changed")
            assert names() == {"one", "two", "mine"}

            file.write_text("[log]\nlevel = 'debug'\n" + _entry("two", two, block_size=16) + _entry("three", three))
            _reload(daemon, "1 added, 1 removed, 1 changed, 0 failed")
            assert names() == {"two", "three", "mine"}
            assert "take effect at the next start" in daemon.log.read_text()
            daemon.trusted("two", 0)
            assert daemon.score(PROMPT, "two").zero_reason == "block_size_mismatch"
            daemon.trusted("three", 0)
            assert daemon.score(PROMPT, "three").matched_tokens == 16

            file.write_text(_entry("mine", one))  # a request's worker is not the file's to change
            _reload(daemon, "0 added, 2 removed, 0 changed, 1 failed")
            assert names() == {"mine"}
            assert daemon.stream("mine").endpoint == three.endpoint


def _reload(daemon: Daemon, said: str) -> None:
    before = daemon.log.read_text().count(said)
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: daemon.log.read_text().count(said) > before)


def _rows(daemon: Daemon) -> list[Any]:
    return daemon.client.score(_plan(PROMPT)).workers


def _plan(tokens: list[int]) -> Any:
    return exact_plan("m", tokens)
