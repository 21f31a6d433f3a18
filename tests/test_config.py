"""Settings: precedence, refusals that name file, key, value and remedy, and one table for everything."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.config import SECTIONS, Config, default_endpoint, load, settings
from protocols.errors import ConfigError


def written(directory: Path, text: str) -> Path:
    path = directory / "kvd.toml"
    path.write_text(text)
    return path


def test_default_file_environment_and_command_line_in_rising_precedence(tmp_path: Path) -> None:
    path = written(tmp_path, "[ingest]\nreplay_timeout = 3\nreplay_total = 4\nprobe_interval = 5\n")
    env = {"KVD_INGEST_REPLAY_TOTAL": "6", "KVD_INGEST_PROBE_INTERVAL": "7", "PATH": "x"}
    found = load(path, env=env, overrides={"ingest.probe_interval": "8"})
    ingest = found.config.ingest
    assert (ingest.connect_timeout, ingest.replay_timeout, ingest.replay_total, ingest.probe_interval) == (5, 3, 6, 8)
    assert [found.origins[f"ingest.{key}"] for key in ("connect_timeout", "replay_timeout", "replay_total")] == [
        "default", str(path), "KVD_INGEST_REPLAY_TOTAL",
    ]  # fmt: skip
    assert ingest.policy().replay_total == 6


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("[ingest]\nreplay = 1\n", "ingest.replay", "a known setting"),
        ("[nothing]\nx = 1\n", "nothing.x", "a known setting"),
        ("query = 1\n", "query", "a table"),
        ("[query]\nmessage_bytes = 'x'\n", "query.message_bytes", "int"),
        ("[query]\nmessage_bytes = 1\n", "query.message_bytes", ">= 1024"),
        ("[query]\nmessage_bytes = true\n", "query.message_bytes", "int"),
        ("[query]\nendpoint = 'http://x'\n", "query.endpoint", "ipc://path or tcp"),
        ("[query]\nendpoint = 'tcp://0.0.0.0:7000'\n", "query.endpoint", "query.insecure"),
        ("[query]\nendpoint = 'tcp://*:7000'\n", "query.endpoint", "query.insecure"),
        ("[log]\nlevel = 'loud'\n", "log.level", "Invalid enum value"),
        ("workers = 3\n", "workers", "[[workers]]"),
        ("[[workers]]\nname = 'a'\n", "workers[0]", "missing required field"),
        ("[[workers]]\nname='a'\nmodel='m'\nendpoint='tcp://h:1'\nport=1\n", "workers[0]", "unknown field `port`"),
        ("[[workers]]\nname='a'\nmodel='m'\nendpoint='tcp://h'\n", "worker 'a'.endpoint", "port"),
        ("[[workers]]\nname='a'\nmodel='m'\nendpoint='tcp://*:5557'\n", "worker 'a'.endpoint", 'mode = "bind"'),
        ("[[workers]]\nname='a'\nmodel='m'\nendpoint='tcp://h:1'\nranks=0\n", "worker 'a'.ranks", "1 to"),
        ("[[workers]]\nname='a'\nmodel='m'\nendpoint='tcp://h:1'\nscheme='x'\n", "workers[0]", "Invalid enum"),
        ("[[workers]]\nname='a'\nmodel='m'\nendpoint='tcp://h:1'\nreplay='x'\n", "worker 'a'.replay", "tcp://"),
        ("not toml", "config", "TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, text: str, key: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, env={})
    assert caught.value.key == key
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_two_workers_of_one_name_are_refused(tmp_path: Path) -> None:
    worker = "[[workers]]\nname='a'\nmodel='m'\nendpoint='tcp://h:1'\n"
    with pytest.raises(ConfigError, match="a name of its own"):
        load(written(tmp_path, worker * 2), env={})


def test_a_mistyped_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="KVD_QUERY_ENDPIONT"):
        load(env={"KVD_QUERY_ENDPIONT": "x"})
    with pytest.raises(ConfigError, match="KVD_LOG_LEVEL"):
        load(env={"KVD_LOG_LEVEL": "loud"})


def test_the_choice_of_the_core_is_no_setting_and_not_refused() -> None:
    assert load(env={"KVD_CORE": "reference"}).config == Config()


def test_a_reachable_address_needs_to_be_asked_for(tmp_path: Path) -> None:
    text = "[query]\nendpoint = 'tcp://0.0.0.0:7000'\ninsecure = true\n"
    assert load(written(tmp_path, text), env={}).config.endpoint == "tcp://0.0.0.0:7000"


def test_one_table_covers_every_field_with_a_sentence() -> None:
    rows = list(settings())
    assert {row.name for row in rows} == {
        f"{section}.{field}" for section, struct in SECTIONS.items() for field in struct.__struct_fields__
    }
    assert all(row.description.endswith(".") for row in rows)
    assert len({row.env for row in rows}) == len(rows)
    assert [row.default for row in rows] == [getattr(getattr(Config(), row.section), row.key) for row in rows]


def test_the_default_endpoint_follows_the_service_then_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    assert default_endpoint() == "ipc:///run/user/7/kvd.sock"
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/kvd")
    assert default_endpoint() == "ipc:///run/kvd/kvd.sock"
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_endpoint().startswith("ipc:///tmp/kvd-")


@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("c") / "kvd.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(ConfigError):
        load(path, env={})
