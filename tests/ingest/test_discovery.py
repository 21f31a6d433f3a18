"""Engines asked over HTTP: what they advertise becomes worker entries, what they do not is said by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.ingest.advertised import (
    Learnt,
    Publisher,
    sglang_learnt,
    sglang_scheme,
    version_of,
    vllm_learnt,
    with_host,
    worker_specs,
)
from kvd.ingest.discovery import MAX_ANSWER_BYTES, discover, engine_url
from kvd.ingest.endpoints import validate
from protocols.errors import EngineError
from tests.kit.http import HttpEngine

MODELS = {"data": [{"id": "adapter", "parent": "glm"}, {"id": "glm"}]}


def source(rank: int, endpoint: str, replay: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"data_parallel_rank": rank, "endpoint": endpoint, "replay_endpoint": replay, "topic": ""} | fields


def vllm(sources: Any, models: Any = MODELS, version: Any = None, **fields: Any) -> Learnt:
    told = {"version": "0.32.0"} if version is None else version
    return vllm_learnt(sources, models, told, host="gpu-1", url="http://gpu-1:8000", **fields)


def sglang(**fields: Any) -> Learnt:
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "block_size": 64,
              "dp_size": 1, "load_endpoint_port_base": 5558}  # fmt: skip
    info = {"version": "0.5.23", "served_model_name": "glm", "kv_events": events | fields.pop("events", {})} | fields
    return sglang_learnt(info, host="gpu-1", url="http://gpu-1:30000")


# --- vLLM ------------------------------------------------------------------------------------------------------------


def test_vllm_ranks_on_consecutive_ports_are_one_worker() -> None:
    learnt = vllm([source(1, "tcp://*:5558", "tcp://*:5658"), source(0, "tcp://*:5557", "tcp://*:5657")])
    (spec,) = worker_specs(learnt, "w")
    assert (spec.endpoint, spec.replay, spec.rank, spec.ranks) == ("tcp://gpu-1:5557", "tcp://gpu-1:5657", 0, 2)
    assert (spec.model, spec.scheme, spec.block_size) == ("glm", "media_keys", None)
    assert validate(spec) is spec
    assert set(learnt.unknown) == {"block_size"}


def test_vllm_ranks_on_ports_the_system_chose_are_workers_of_their_own() -> None:
    learnt = vllm([source(0, "tcp://10.0.0.1:41001"), source(1, "tcp://10.0.0.1:39007"), source(2, "tcp://10.0.0.2:1")])
    specs = worker_specs(learnt, "w", mode="bind")
    assert [(spec.name, spec.rank, spec.ranks, spec.endpoint) for spec in specs] == [
        ("w-0", 0, 1, "tcp://10.0.0.1:41001"), ("w-1", 1, 1, "tcp://10.0.0.1:39007"), ("w-2", 2, 1, "tcp://10.0.0.2:1"),
    ]  # fmt: skip
    assert {spec.mode for spec in specs} == {"bind"}
    assert {"replay", "mode"} <= set(learnt.unknown)


@pytest.mark.parametrize("wrapped", ["sources", "kv_event_sources", "data"])
def test_vllm_shapes_that_wrap_the_list_or_name_the_rank_otherwise(wrapped: str) -> None:
    entry = {"dp_rank": 3, "transport": "zmq", "endpoint": "tcp://[::]:5557", "replay_endpoint": "", "topic": None}
    learnt = vllm({wrapped: [entry, {"publisher": "null", "endpoint": None}]})
    assert learnt.publishers == [Publisher(rank=3, endpoint="tcp://gpu-1:5557")]


def test_a_replay_port_that_another_rank_publishes_on_is_said() -> None:
    learnt = vllm([source(0, "tcp://*:5557", "tcp://*:5558"), source(1, "tcp://*:5558", "tcp://*:5559")])
    assert "stride" in learnt.unknown["ranks"]


def test_an_old_vllm_does_not_place_media() -> None:
    learnt = vllm([source(0, "tcp://*:5557")], version={"version": "0.18.1"})
    assert (learnt.scheme, "scheme" in learnt.unknown) == (None, True)


def test_a_model_with_several_names_is_known_by_its_first() -> None:
    learnt = vllm([source(0, "tcp://*:5557")], models={"data": [{"id": "a"}, {"id": "b"}]})
    assert learnt.model == "a"
    assert "'a', but served as b too" in learnt.unknown["model"]


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([], "lists no publisher"),
        ({"detail": "x"}, "a list of publishers was expected"),
        (None, "null where a list"),
        ([3], "publisher 0 is int"),
        ([{"data_parallel_rank": 0}], r"publisher 0 has no endpoint, but \['data_parallel_rank'\]"),
        ([source(-1, "tcp://*:1")], "rank -1"),
        ([source("0", "tcp://*:1")], "rank '0'"),  # type: ignore[arg-type]
        ([source(0, "tcp://*:1"), source(0, "tcp://*:2")], "a rank twice"),
        ([source(0, "tcp://*:1", publisher="null")], "lists no publisher"),
        ([{}] * 2000, "2000 publishers, at most"),
    ],
)
def test_what_vllm_does_not_tell_is_named_with_the_url(sources: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        vllm(sources)
    assert "http://gpu-1:8000/kv_event_sources" in str(caught.value)


@pytest.mark.parametrize("models", [None, [], {"data": "x"}, {"data": [{"id": "a", "parent": "b"}, 3, {"id": 3}]}])
def test_a_model_that_is_not_told_must_be_given(models: Any) -> None:
    with pytest.raises(EngineError, match="give --model"):
        vllm([source(0, "tcp://*:5557")], models=models)
    assert vllm([source(0, "tcp://*:5557")], models=models, model="mine").model == "mine"


# --- SGLang ----------------------------------------------------------------------------------------------------------


def test_sglang_describes_the_range_of_its_ranks() -> None:
    learnt = sglang(events={"dp_size": 4, "replay_endpoint_port_base": 5657})
    (spec,) = worker_specs(learnt, "w")
    assert (spec.endpoint, spec.replay, spec.ranks, spec.topic) == ("tcp://gpu-1:5557", "tcp://gpu-1:5657", 4, "kv")
    assert (spec.block_size, spec.scheme, spec.model) == (64, "pad62", "glm")
    assert learnt.unknown == {}
    assert validate(spec) is spec


def test_sglang_s_load_reports_are_not_subscribed_to() -> None:
    assert [publisher.endpoint for publisher in sglang().publishers] == ["tcp://gpu-1:5557"]


def test_a_page_that_context_parallelism_multiplies_is_learnt_from_events() -> None:
    learnt = sglang(dcp_size=2)
    assert learnt.block_size is None
    assert "dcp_size 2" in learnt.unknown["block_size"]
    assert sglang(events={"block_size": "64"}).block_size is None


def test_the_key_scheme_follows_sglang_s_version() -> None:
    versions = ("0.5.8", "0.5.9", "0.5.22", "0.5.23", "0.6.0", "x", "0.5.24.dev1")
    schemes = [sglang_scheme(version_of(version)) for version in versions]
    assert schemes == [None, "pad30", "pad30", "pad62", "pad62", None, None]
    assert "scheme" in sglang(version=None).unknown


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_events": None}, "has no kv_events"),
        ({"kv_events": 3}, "has no kv_events"),
        ({"kv_events": {"publisher": "null"}}, "publisher is 'null'"),
        ({"kv_events": {"publisher": "zmq"}}, "no endpoint_port_base, but"),
        ({"events": {"endpoint_port_base": 0}}, "endpoint_port_base is 0"),
        ({"events": {"endpoint_port_base": True}}, "endpoint_port_base is True"),
        ({"events": {"replay_endpoint_port_base": "x"}}, "replay_endpoint_port_base is 'x'"),
        ({"events": {"dp_size": -2}}, "dp_size is -2"),
        ({"events": {"dp_size": 5000}}, "dp_size is 5000"),
        ({"events": {"endpoint_port_base": 65535, "dp_size": 2}}, "beyond 65535"),
        ({"served_model_name": None}, "give --model"),
    ],
)
def test_what_sglang_does_not_tell_is_named_with_the_url(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        sglang(**fields)
    assert "http://gpu-1:30000/server_info" in str(caught.value)


def test_wildcards_are_the_engine_s_host() -> None:
    hosts = ["tcp://*:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://:1", "tcp://10.0.0.1:1", "ipc:///x"]
    assert [with_host(endpoint, "fd00::1") for endpoint in hosts] == [
        *["tcp://[fd00::1]:1"] * 4, "tcp://10.0.0.1:1", "ipc:///x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.32.0", (0, 32, 0)), ("0.5.23.post1", (0, 5, 23)), ("0.31.0rc1+cu128", (0, 31, 0)), ("v1.2", (1, 2)),
     ("0.1.dev9+gabc", None), ("main", None), ("", None), (None, None), ("9" * 99, None)],
)  # fmt: skip
def test_versions(text: str | None, expected: tuple[int, ...] | None) -> None:
    assert version_of(text) == expected


@pytest.mark.parametrize(
    "url",
    ["tcp://h:1", "h:8000", "http://", "http://h:0", "http://u:p@h", "http://h:99999", "http://h/?a=1", "http://["],
)
def test_urls_that_are_no_engine_s(url: str) -> None:
    with pytest.raises(EngineError):
        engine_url(url)


def test_the_base_of_an_openai_url_is_the_engine_s() -> None:
    assert engine_url("http://h:8000/v1/") == ("http://h:8000", "h")


# --- over HTTP -------------------------------------------------------------------------------------------------------


async def test_a_vllm_engine_is_asked() -> None:
    answers = {"GET /kv_event_sources": (200, [source(0, "tcp://*:5557", "tcp://*:5657")]),
               "GET /v1/models": (200, MODELS), "GET /version": (200, {"version": "0.32.0"})}  # fmt: skip
    with HttpEngine(answers) as engine:  # type: ignore[arg-type]
        learnt = await discover(engine.url)
    assert (learnt.engine, learnt.version, learnt.model) == ("vllm", "0.32.0", "glm")
    assert learnt.publishers[0].endpoint == "tcp://127.0.0.1:5557"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_an_sglang_engine_is_asked(path: str) -> None:
    info = {"version": "0.5.20", "model_path": "glm", "kv_events": {"endpoint_port_base": 7, "block_size": 1}}
    with HttpEngine({f"GET {path}": (200, info)}) as engine:
        learnt = await discover(engine.url)
    assert (learnt.engine, learnt.scheme, learnt.block_size) == ("sglang", "pad30", 1)


async def test_an_engine_that_does_not_tell_is_explained() -> None:
    answers = {"GET /version": (200, {"version": "0.28.0"}), "GET /server_info": (200, {"vllm_config": "x"})}
    with HttpEngine(answers) as engine:  # type: ignore[arg-type]
        with pytest.raises(EngineError, match=r"version 0\.28\.0 does not tell where it publishes") as caught:
            await discover(engine.url)
        assert "kvd workers add NAME tcp://127.0.0.1:5557" in str(caught.value)
        assert f"{engine.url}/kv_event_sources" in str(caught.value)
        assert not [asked for asked in engine.asked if asked.startswith("POST")]  # nothing is taken away by asking


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, {"detail": "boom"}), "answered 500"),
        ((401, b""), "answered 401"),
        ((200, b"<html>"), "did not answer with JSON"),
        ((200, b"[" * 5000), "did not answer with JSON"),
        ((200, b" " * (MAX_ANSWER_BYTES + 1)), "more than 4194304 bytes"),
    ],
)
async def test_answers_that_cannot_be_used_are_named_with_the_url(answer: tuple[int, Any], said: str) -> None:
    with HttpEngine({"GET /kv_event_sources": answer}) as engine:
        with pytest.raises(EngineError, match=said) as caught:
            await discover(engine.url)
        assert f"{engine.url}/kv_event_sources" in str(caught.value)


async def test_a_redirect_is_told_and_not_followed() -> None:
    with HttpEngine() as other, HttpEngine({"GET /kv_event_sources": (302, {})}) as engine:
        engine.headers = {"location": f"{other.url}/kv_event_sources"}
        with pytest.raises(EngineError, match="redirects to"):
            await discover(engine.url)
        assert other.asked == []


async def test_an_engine_that_is_not_there_or_too_slow() -> None:
    with HttpEngine() as engine:
        url = engine.url
    with pytest.raises(EngineError, match="cannot be asked"):
        await discover(url)
    with HttpEngine() as engine:
        engine._server.shutdown()
        engine._thread.join()  # the port is open, and nobody answers
        with pytest.raises(EngineError, match=r"no whole answer within 0\.1 s"):
            await discover(engine.url, seconds=0.1)
        engine._server.server_close()
        engine.start()


# --- anything --------------------------------------------------------------------------------------------------------

_leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
_field = _leaf | st.sampled_from(["tcp://*:5557", "tcp://[::]:1", "tcp://", "ipc:///x", "zmq", "0.5.23", "m"])
_publisher = st.dictionaries(
    st.sampled_from(["data_parallel_rank", "dp_rank", "endpoint", "replay_endpoint", "topic", "publisher"]), _field
)
_events = st.dictionaries(
    st.sampled_from(["publisher", "endpoint_host", "endpoint_port_base", "topic", "block_size", "dp_size",
                     "replay_endpoint_port_base"]), _field | st.integers(0, 70_000),
)  # fmt: skip
_models = st.fixed_dictionaries(
    {}, optional={"data": st.lists(st.dictionaries(st.sampled_from(["id", "parent"]), _field))}
)


@given(
    st.lists(_publisher | _leaf, max_size=4) | st.dictionaries(st.sampled_from(["sources", "data"]), _leaf) | _leaf,
    _models | _leaf, st.fixed_dictionaries({}, optional={"version": _field}) | _leaf,
)  # fmt: skip
def test_any_answer_of_vllm_is_worker_entries_or_a_named_error(sources: Any, models: Any, version: Any) -> None:
    try:
        learnt = vllm_learnt(sources, models, version, host="h", url="http://h")
    except EngineError as error:
        assert error.url.startswith("http://h/")  # noqa: PT017
        return
    assert sum(entry.ranks for entry in worker_specs(learnt, "w")) == len(learnt.publishers) > 0


@given(
    st.fixed_dictionaries(
        {"kv_events": _events | _leaf},
        optional={"version": _field, "served_model_name": _field, "model_path": _field, "dcp_size": _field},
    )
)
def test_any_answer_of_sglang_is_worker_entries_or_a_named_error(info: dict[str, Any]) -> None:
    try:
        learnt = sglang_learnt(info, host="h", url="http://h")
    except EngineError as error:
        assert error.url.startswith("http://h/")  # noqa: PT017
        return
    (entry,) = worker_specs(learnt, "w")
    assert entry.ranks == len(learnt.publishers)
