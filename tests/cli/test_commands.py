"""The command line as a shell meets it: output, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.daemon import Daemon
from tests.kit.publisher import Publisher, chain_of

PROMPT = list(range(100, 116))
CORPUS = Path(__file__).parents[1] / "fixtures" / "events" / "corpus.json"


def kvd(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "kvd", *arguments], input=stdin, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("kvd")) as running:
        yield running


def test_workers_are_added_scored_listed_and_removed(daemon: Daemon) -> None:
    with Publisher() as engine:
        at = ("--endpoint", daemon.endpoint)
        engine.publish(chain_of(PROMPT))
        added = kvd("workers", "add", "w", engine.endpoint, "--model", "m", "--replay", engine.replay or "", *at)
        assert (added.returncode, added.stdout) == (0, b"added w\n"), added.stderr
        daemon.trusted("w", 0)
        scored = kvd("score", "--model", "m", "--tokens", "100,101 102 103,104", "--json", *at)
        answer = json.loads(scored.stdout)
        assert (answer["workers"][0]["matched_tokens"], answer["workers"][0]["trust"]["state"]) == (4, "exact")
        assert (
            b"exact"
            in kvd("score", "--model", "m", "--tokens-file", "-", *at, stdin=json.dumps(PROMPT).encode()).stdout
        )
        assert json.loads(kvd("streams", "--json", *at).stdout)[0]["block_sizes"] == [4]
        assert json.loads(kvd("workers", "--json", *at).stdout)[0]["worker"]["name"] == "w"
        assert b"live" in kvd("workers", "list", *at).stdout
        assert json.loads(kvd("check", "--json", *at).stdout)["ok"] is True
        assert kvd("workers", "remove", "w", *at).returncode == 0
        again = kvd("workers", "remove", "w", *at)
        assert (again.returncode, again.stdout) == (2, b"")
        assert again.stderr == b"kvd: bad_worker: no worker 'w'; there are: none\n"


def test_media_adapter_and_salt_are_part_of_the_question(daemon: Daemon) -> None:
    at = ("--endpoint", daemon.endpoint, "--json", "--model", "m", "--tokens", "1 2 3 4")
    assert kvd("score", *at, "--media", "1:2:cat", "--lora", "a", "--salt", "s").returncode == 0
    assert kvd("score", *at, "--media", "nonsense").returncode == 2
    beyond = kvd("score", *at, "--media", "3:9:cat")
    assert (beyond.returncode, b"covers [3, 12)" in beyond.stderr) == (2, True)


def test_usage_errors_exit_2(daemon: Daemon) -> None:
    at = ("--endpoint", daemon.endpoint, "--model", "m")
    for wrong in ([], ["--tokens", "1", "--tokens-file", "-"], ["--tokens", "one"], ["--tokens-file", "/no/such"]):
        failed = kvd("score", *at, *wrong)
        assert failed.returncode == 2, wrong
        assert b"Traceback" not in failed.stderr


def test_nobody_answering_exits_69(tmp_path: Path) -> None:
    failed = kvd("streams", "--endpoint", f"ipc://{tmp_path}/none", "--timeout", "0.2")
    assert failed.returncode == 69
    assert b"is `kvd serve` running there?" in failed.stderr


def test_decode_explains_every_corpus_case() -> None:
    cases = json.loads(CORPUS.read_text())["cases"]
    lines = [json.dumps({"channel": case["channel"], "frames": case["frames"]}) for case in cases]
    printed = kvd("decode", stdin="\n".join(lines).encode()).stdout.splitlines()
    assert len(printed) == len(cases)
    for case, line in zip(cases, printed, strict=True):
        told = json.loads(line)
        events = [{k: v for k, v in event.items() if k != "detail"} for event in told.get("events", [])]
        told |= {"events": events} if "events" in told else {}
        assert told | case["expect"] == told, case["name"]


def test_decode_answers_bad_lines_in_place() -> None:
    lines = b'nonsense\n\n{"channel": "pub"}\n{"channel": "pub", "frames": ["zz"]}\n{"channel": "x", "frames": []}\n'
    printed = [json.loads(line) for line in kvd("decode", stdin=lines).stdout.splitlines()]
    assert [entry["error"] for entry in printed] == ["line", "line", "line", "channel"]


def test_a_bad_configuration_exits_78_with_file_key_value_and_remedy(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text("[ingest]\nreplay_timeout = -1\n")
    for command in (["config", "check"], ["serve"], ["config", "show"]):
        failed = kvd(*command, "--config", str(file))
        assert failed.returncode == 78, command
        assert f"kvd: {file}: ingest.replay_timeout = -1".encode() in failed.stderr
    assert kvd("config", "check", "--config", str(tmp_path / "none")).returncode == 78


def test_config_show_tells_origins(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text('[query]\ntokens_per_plan = 77\n[[workers]]\nname = "a"\nmodel = "m"\nendpoint = "tcp://h:1"\n')
    shown = kvd("config", "show", "--json", "--config", str(file), "--set", "log.level=debug")
    rows = {row["name"]: row for row in json.loads(shown.stdout)["settings"]}
    assert (rows["query.tokens_per_plan"]["value"], rows["query.tokens_per_plan"]["origin"]) == (77, str(file))
    assert (rows["log.level"]["value"], rows["log.level"]["origin"]) == ("debug", "command line")
    assert rows["ingest.replay_timeout"]["origin"] == "default"
    assert b"replay_timeout" in kvd("config", "show", "--origin").stdout


def test_record_writes_what_evaluate_reads(tmp_path: Path) -> None:
    file = tmp_path / "tag.jsonl"
    with Publisher(endpoint=f"ipc://{tmp_path}/pub", replay=None) as engine:
        command = [sys.executable, "-m", "kvd", "record", engine.endpoint, "-o", str(file), "--count", "3"]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            assert b"connected" in process.stderr.readline()
            for first in (1, 11, 21):
                engine.publish(chain_of([first, *PROMPT[1:]], first_hash=first))
            assert process.wait(timeout=30) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["frames_hex"][1] for line in lines] == [f"{seq:016x}" for seq in range(3)]
    requests = tmp_path / "tag.requests.jsonl"
    requests.write_text(json.dumps({
        "name": "r", "request": {"model": "tiny"}, "status": 200, "events_lines": [3, 3], "prompt_tokens": 16,
        "cached_tokens": 12, "prompt_token_ids": [11, *PROMPT[1:]],
    }))  # fmt: skip
    told = kvd("evaluate", "--events", str(file), "--requests", str(requests), "--json", "--strict")
    assert (told.returncode, json.loads(told.stdout)["exact"]) == (0, 1)
    requests.write_text(requests.read_text().replace('"cached_tokens": 12', '"cached_tokens": 8'))
    assert kvd("evaluate", "--events", str(file), "--requests", str(requests), "--strict").returncode == 1


def test_record_stops_after_its_seconds(tmp_path: Path) -> None:
    output = tmp_path / "x.jsonl"
    done = kvd("record", f"ipc://{tmp_path}/none", "--output", str(output), "--seconds", "0.1")
    assert (done.returncode, output.read_bytes()) == (0, b"")


def test_sigterm_stops_the_daemon_cleanly(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        assert daemon.stop() == 0
    assert not (tmp_path / "kvd.sock").exists()


def test_an_endpoint_that_cannot_be_served_is_one_line_and_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a socket")
    command = [sys.executable, "-m", "kvd", "serve", "--endpoint", f"ipc://{tmp_path}/taken"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "is not a socket" in done.stderr
