"""What each kind of source may be told, in a request as in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvd.config import load
from kvd.ingest.endpoints import rank_endpoint, validate
from protocols.errors import ConfigError
from protocols.query import WorkerSpec


def spec(**fields: Any) -> WorkerSpec:
    return WorkerSpec(**({"name": "w", "model": "m", "endpoint": "tcp://h:5557"} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"replay": "tcp://h:5657", "ranks": 8}, {"endpoint": "ipc:///x"}, {"endpoint": "tcp://*:1", "mode": "bind"},
        {"source": "atom"}, {"source": "atom", "ranks": 2}, {"source": "pool"},
        {"source": "trtllm-http", "endpoint": "http://h:8000"},
        {"source": "trtllm-http", "endpoint": "https://[fd00::1]/base/", "ranks": 8, "rank": 2},
    ],
)  # fmt: skip
def test_what_each_source_takes(fields: dict[str, Any]) -> None:
    assert validate(spec(**fields)) == spec(**fields)


@pytest.mark.parametrize(
    ("fields", "key", "said"),
    [
        ({"endpoint": "http://h:1"}, "endpoint", 'source = "trtllm-http"'),
        ({"endpoint": "udp://h:1"}, "endpoint", "tcp://host:port"),
        ({"source": "atom", "replay": "tcp://h:1"}, "replay", "a source 'atom' has none"),
        ({"source": "pool", "replay": "tcp://h:1"}, "replay", "a source 'pool' has none"),
        ({"source": "pool", "ranks": 2}, "rank/ranks", "a pool is one stream"),
        ({"source": "pool", "rank": 1}, "rank/ranks", "a pool is one stream"),
        ({"source": "trtllm-http"}, "endpoint", "http://host:port"),
        ({"source": "trtllm-http", "endpoint": "http://"}, "endpoint", "http://host:port"),
        ({"source": "trtllm-http", "endpoint": "http://h:0"}, "endpoint", "http://host:port"),
        ({"source": "trtllm-http", "endpoint": "http://h:99999"}, "endpoint", "http://host:port"),
        ({"source": "trtllm-http", "endpoint": "http://["}, "endpoint", "http://host:port"),
        ({"source": "trtllm-http", "endpoint": "http://u:p@h"}, "endpoint", "without user"),
        ({"source": "trtllm-http", "endpoint": "http://h/?a=1"}, "endpoint", "without user, query"),
        ({"source": "trtllm-http", "endpoint": "http://h", "mode": "bind"}, "mode/topic", "polled over HTTP"),
        ({"source": "trtllm-http", "endpoint": "http://h", "topic": "kv"}, "mode/topic", "polled over HTTP"),
        ({"source": "trtllm-http", "endpoint": "http://h", "replay": "tcp://h:1"}, "replay", "has none"),
        ({"source": "trtllm-http", "endpoint": "http://h", "ranks": 0}, "ranks", "1 to"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(fields: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(spec(**fields), "here")
    assert caught.value.key == f"worker 'w'.{key}"
    assert said in str(caught.value)
    assert str(caught.value).startswith("here: ")


def test_a_file_names_sources(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text("[[workers]]\nname='t'\nmodel='m'\nendpoint='http://h:8000'\nsource='trtllm-http'\n")
    assert load(file, env={}).config.workers == (spec(name="t", endpoint="http://h:8000", source="trtllm-http"),)
    file.write_text("[[workers]]\nname='t'\nmodel='m'\nendpoint='http://h:8000'\nsource='polled'\n")
    with pytest.raises(ConfigError, match="Invalid enum value 'polled'"):
        load(file, env={})


def test_ranks_count_up_from_the_base() -> None:
    assert rank_endpoint("tcp://h:5557", 3) == "tcp://h:5560"
    assert rank_endpoint("inproc://x", 1) == "inproc://x_dp1"
    assert rank_endpoint("ipc:///x", 0) == "ipc:///x"
    with pytest.raises(ValueError, match="ipc carries one rank"):
        rank_endpoint("ipc:///x", 1)
