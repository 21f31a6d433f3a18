"""The query protocol on a real socket: every refusal is an Error on a connection that lives on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvd.client import (
    AsyncClient,
    Client,
    ExactPlan,
    PlanError,
    RequestError,
    TextPlan,
    Unreachable,
    WorkerSpec,
    exact_plan,
    prefix_plan,
)
from kvd.config import Config, IngestSettings, QuerySettings
from kvd.daemon import Runtime, runtime
from kvd.serve.zmq import QueryServer, Waiting
from protocols import query
from protocols.errors import ConfigError
from protocols.keys import pack_tokens, token_keys
from tests.kit.publisher import Publisher, chain_of
from tests.kit.waiting import eventually_async

PROMPT = list(range(100, 116))
LIMITS = QuerySettings(
    message_bytes=64 << 10, plans_per_request=4, tokens_per_plan=1000, in_flight_per_client=8, queued=100
)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Runtime, QueryServer]]:
    """A served runtime in a task of its own: its task group must be left where it was entered."""
    config = Config(query=LIMITS, ingest=IngestSettings(probe_interval=0.5))
    ready: asyncio.Future[tuple[Runtime, QueryServer]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def run() -> None:
        async with runtime(config) as parts:
            server = QueryServer(parts.service, f"ipc://{tmp_path}/kvd.sock", parts.clock)
            server.open()
            ready.set_result((parts, server))
            await stop.wait()
            server.close()

    task = asyncio.create_task(run())
    yield await ready
    stop.set()
    await task


@pytest.fixture
async def client(served: tuple[Runtime, QueryServer]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served[1].endpoint) as connected:
        yield connected


@pytest.fixture
async def raw(served: tuple[Runtime, QueryServer]) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(served[1].endpoint)
    yield socket
    socket.close()
    context.term()


async def ask(socket: zmq.asyncio.Socket, payload: bytes) -> Any:
    await socket.send(payload)
    async with asyncio.timeout(10):
        return query.decode_reply(await socket.recv())


async def watched(client: AsyncClient, engine: Publisher, **fields: Any) -> None:
    spec = {"name": "w", "model": "m", "endpoint": engine.endpoint, "replay": engine.replay} | fields
    await client.add_worker(WorkerSpec(**spec))

    async def exact() -> bool:
        return (await client.streams(spec["name"]))[0].trust.state == "exact"

    await eventually_async(exact)


async def test_hello_tells_limits_and_models(client: AsyncClient) -> None:
    with Publisher() as engine:
        engine.publish(chain_of(PROMPT))
        await watched(client, engine)
        welcome = await client.hello()
    assert welcome.protocol == query.PROTOCOL
    assert welcome.limits.tokens_per_plan == 1000
    assert [(m.model, m.block_sizes, m.schemes, m.workers) for m in welcome.models] == [("m", [4], ["unknown"], 1)]


async def test_scores_many_plans_for_many_workers(client: AsyncClient) -> None:
    with Publisher() as one, Publisher() as two:
        one.publish(chain_of(PROMPT))
        two.publish(chain_of(PROMPT[:8], first_hash=70))
        await watched(client, one, name="one")
        await watched(client, two, name="two")
        longer, other = exact_plan("m", [*PROMPT, 1, 2, 3]), exact_plan("m", [9, 9, 9, 9])
        first, second = await client.score_many([longer, other])
        only = await client.score(longer, workers=["two"])
        await client.remove_worker("one")
        left = await client.score(longer)
    assert [(s.worker, s.matched_tokens, s.zero_reason) for s in first.workers] == [("one", 16, None), ("two", 8, None)]
    assert [(s.matched_tokens, s.zero_reason) for s in second.workers] == [(0, "no_match"), (0, "no_match")]
    assert [(s.worker, s.matched_tokens) for s in only.workers] == [("two", 8)]
    assert [s.worker for s in left.workers] == ["two"]


async def test_scores_block_keys(client: AsyncClient) -> None:
    with Publisher() as engine:
        engine.publish(chain_of(PROMPT))
        await watched(client, engine)
        keys = pack_tokens(token_keys([*PROMPT, 5, 5, 5, 5], 4), wide=True)
        answer = await client.score_keys("m", keys, 4)
        wrong_size = await client.score_keys("m", keys, 8)
    assert (answer.prompt_tokens, answer.workers[0].matched_blocks) == (20, 4)
    assert wrong_size.workers[0].matched_tokens == 0


async def test_an_unknown_model_is_said_to_be_unknown(client: AsyncClient) -> None:
    answer = await client.score(exact_plan("nobody", PROMPT))
    assert (answer.workers, answer.zero_reason) == ([], "unknown_model")


async def test_routed_prompts_are_predicted_apart_and_expire(client: AsyncClient) -> None:
    with Publisher() as engine:
        engine.publish(chain_of(PROMPT[:4]))
        await watched(client, engine)
        plan = exact_plan("m", PROMPT)
        await client.routed(plan, "w", ttl_ms=3_600_000)
        score = (await client.score(plan)).workers[0]
        text = TextPlan(model="m", text="hello " * 166, reason="no tokenizer")
        before = (await client.score(text)).workers[0]
        await client.routed(text, "w")
        after = await client.score(text)
    assert (score.matched_tokens, score.predicted_tokens) == (4, 16)
    assert (before.predicted_bytes, before.zero_reason) == (0, "no_routes_yet")
    assert (after.basis, after.workers[0].predicted_bytes) == ("text", 768)


async def test_a_prefix_plan_names_its_basis(client: AsyncClient) -> None:
    with Publisher() as engine:
        engine.publish(chain_of(PROMPT))
        await watched(client, engine)
        answer = await client.score(prefix_plan("m", PROMPT[:9], "layout"))
    assert (answer.basis, answer.workers[0].matched_tokens) == ("prefix", 8)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\x91" * 3000, "malformed"),
        (msgspec.msgpack.encode([1, 2]), "malformed"),
        (msgspec.msgpack.encode({"id": 7}), "unknown_request"),
        (msgspec.msgpack.encode({"type": "fly", "id": 7}), "unknown_request"),
        (msgspec.msgpack.encode({"type": "score", "id": 7, "plans": 3}), "malformed"),
        (msgspec.msgpack.encode({"type": "score", "id": "x"}), "malformed"),
        (msgspec.msgpack.encode({"type": "hello", "id": 7, "protocol": 99}), "unsupported_protocol"),
        (msgspec.msgpack.encode({"type": "routed", "id": 7, "plan": {"type": "exact"}}), "malformed"),
    ],
)
async def test_what_cannot_be_read_is_refused_and_the_connection_lives(
    raw: zmq.asyncio.Socket, payload: bytes, code: str
) -> None:
    refused = await ask(raw, payload)
    assert (type(refused), refused.code, refused.retriable) == (query.Error, code, False)
    assert refused.message
    if b"id\x07" in payload:
        assert refused.id == 7
    assert isinstance(await ask(raw, query.encode(query.Hello(id=1))), query.Welcome)


async def test_too_large_is_refused_with_its_id_and_the_connection_lives(raw: zmq.asyncio.Socket) -> None:
    plan = ExactPlan(model="m", tokens=bytes(70_000))
    refused = await ask(raw, query.encode(query.Score(id=300, plans=[plan])))
    assert (refused.id, refused.code, refused.retriable) == (300, "too_large", False)
    assert "65536" in refused.message
    assert isinstance(await ask(raw, query.encode(query.Hello(id=1))), query.Welcome)


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (query.Score(id=1, plans=[exact_plan("m", [1])] * 5), "too_large", "at most 4"),
        (query.Score(id=1, plans=[exact_plan("m", [1] * 1001)]), "too_large", "at most 1000"),
        (query.Score(id=1, plans=[ExactPlan(model="m", tokens=b"123")]), "bad_plan", "multiple of 4"),
        (query.Score(id=1, plans=[ExactPlan(model="", tokens=b"")]), "bad_plan", "model is empty"),
        (query.Score(id=1, plans=[exact_plan("m", [1])], workers=["x"]), "unknown_worker", "no worker 'x'"),
        (query.ScoreKeys(id=1, model="m", keys=b"123", block_size=4), "bad_keys", "packed u64"),
        (query.ScoreKeys(id=1, model="m", keys=b"", block_size=0), "bad_keys", "block size 0"),
        (query.Routed(id=1, plan=exact_plan("m", [1]), worker="x"), "unknown_worker", "no worker 'x'"),
        (query.RemoveWorker(id=1, name="x"), "bad_worker", "no worker 'x'"),
        (query.AddWorker(id=1, worker=WorkerSpec(name="x", model="m", endpoint="http://x")), "bad_worker", "tcp://"),
        (query.AddWorker(id=1, worker=WorkerSpec(name="x", model="m", endpoint="tcp://h:0")), "bad_worker", "port"),
        (
            query.AddWorker(id=1, worker=WorkerSpec(name="x", model="m", endpoint="tcp://h:65535", ranks=2)),
            "bad_worker", "port for every rank",
        ),
        (
            query.AddWorker(id=1, worker=WorkerSpec(name="x", model="m", endpoint="ipc://x", ranks=2)),
            "bad_worker", "several ranks",
        ),
        (
            query.AddWorker(id=1, worker=WorkerSpec(name="x", model="m", endpoint="tcp://h:1", block_size=0)),
            "bad_worker", "1 or more",
        ),
        (
            query.AddWorker(id=1, worker=WorkerSpec(name="x", model="m", endpoint="ipc:///no/such/dir/s", mode="bind")),
            "bad_worker", "cannot be used",
        ),
        (query.ListStreams(id=1, worker="x"), "unknown_worker", "no worker 'x'"),
        (query.Observed(id=1, worker="x", predicted_tokens=1, cached_tokens=1), "unknown_worker", "no worker 'x'"),
    ],
)  # fmt: skip
async def test_requests_that_ask_for_too_much_or_for_nothing(
    client: AsyncClient, request_: query.AnyRequest, code: str, said: str
) -> None:
    reply = await client.request(request_)
    assert isinstance(reply, query.Error), reply
    assert reply.code == code
    assert said in reply.message
    assert (await client.workers()) == []


async def test_a_name_is_given_once(client: AsyncClient) -> None:
    with Publisher() as engine:
        await watched(client, engine)
        with pytest.raises(RequestError, match="there already"):
            await client.add_worker(WorkerSpec(name="w", model="m", endpoint=engine.endpoint))
        assert len(await client.workers()) == 1


async def test_beyond_the_in_flight_bound_a_client_is_told_busy_and_others_are_served(
    served: tuple[Runtime, QueryServer], raw: zmq.asyncio.Socket, client: AsyncClient
) -> None:
    server = served[1]
    await client.hello()
    server._schedule = lambda: None  # type: ignore[method-assign]
    for number in range(1, 12):
        await raw.send(query.encode(query.Hello(id=number)))
    refused = [query.decode_reply(await raw.recv()) for _ in range(3)]
    assert [(r.id, r.code, r.retriable) for r in refused if isinstance(r, query.Error)] == [
        (9, "busy", True), (10, "busy", True), (11, "busy", True),
    ]  # fmt: skip
    del server._schedule
    server._schedule()
    assert [query.decode_reply(await raw.recv()).id for _ in range(8)] == list(range(1, 9))
    assert (await client.hello()).protocol == query.PROTOCOL


async def test_once_the_whole_queue_is_full_everybody_is_told_busy(
    served: tuple[Runtime, QueryServer], client: AsyncClient
) -> None:
    server = served[1]
    await client.hello()
    server._schedule = lambda: None  # type: ignore[method-assign]
    server._queue.extend(Waiting([b"c"], query.encode(query.Hello(id=1)), 0.0) for _ in range(LIMITS.queued))
    server._in_flight[b"c"] = LIMITS.queued
    refused = await client.request(query.Hello(id=0))
    assert isinstance(refused, query.Error)
    assert (refused.code, refused.retriable) == ("busy", True)
    del server._schedule
    server._schedule()
    assert (await client.hello()).protocol == query.PROTOCOL


async def test_a_request_that_waited_past_its_deadline_is_not_begun(served: tuple[Runtime, QueryServer]) -> None:
    parts, server = served
    request = query.encode(query.RemoveWorker(id=5, timeout_ms=20, name="x"))
    late = server._answer(Waiting([b"c"], request, parts.clock() - 1.0))
    assert isinstance(late, query.Error)
    assert (late.id, late.code, late.retriable) == (5, "late", True)
    soon = server._answer(Waiting([b"c"], request, parts.clock()))
    assert isinstance(soon, query.Error)
    assert soon.code == "bad_worker"


async def test_requests_are_pipelined(client: AsyncClient) -> None:
    welcomes = await asyncio.gather(*(client.hello() for _ in range(8)))
    assert {w.instance for w in welcomes} == {welcomes[0].instance}


async def test_clients_that_vanish_or_never_read_harm_nobody(
    served: tuple[Runtime, QueryServer], client: AsyncClient
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    for _ in range(20):
        socket = context.socket(zmq.DEALER)
        socket.connect(served[1].endpoint)
        for number in range(5):
            socket.send(query.encode(query.Hello(id=number + 1)))
        socket.close(linger=0)
    context.term()
    assert (await client.hello()).protocol == query.PROTOCOL


async def test_a_delimiter_frame_is_kept(raw: zmq.asyncio.Socket) -> None:
    await raw.send_multipart([b"", query.encode(query.Hello(id=3))])
    delimiter, reply = await raw.recv_multipart()
    assert (delimiter, query.decode_reply(reply).id) == (b"", 3)


async def test_nobody_there_is_unreachable_within_the_deadline(tmp_path: Path) -> None:
    async with AsyncClient(f"ipc://{tmp_path}/none", timeout=0.2) as client:
        with pytest.raises(Unreachable, match=r"within 0.2 s: is `kvd serve` running"):
            await client.hello()
    with Client(f"ipc://{tmp_path}/none", timeout=0.2) as blocking, pytest.raises(Unreachable, match="within"):
        blocking.hello()
    with pytest.raises(Unreachable, match="no endpoint"):
        Client("nonsense")


async def test_a_lost_connection_fails_what_is_in_flight_and_later_calls_reconnect(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kvd.sock"
    async with runtime() as parts, AsyncClient(endpoint, timeout=20) as client:
        server = QueryServer(parts.service, endpoint, parts.clock)
        server.open()
        await client.hello()
        server._schedule = lambda: None  # type: ignore[method-assign]
        pending = asyncio.create_task(client.hello())

        async def received() -> bool:
            return bool(server._queue)

        await eventually_async(received)
        server.close()
        with pytest.raises(Unreachable, match="closed the connection"):
            await pending
        again = QueryServer(parts.service, endpoint, parts.clock)
        again.open()
        assert (await client.hello()).protocol == query.PROTOCOL
        again.close()


async def test_a_second_daemon_does_not_take_the_socket_over(served: tuple[Runtime, QueryServer]) -> None:
    parts, server = served
    second = QueryServer(parts.service, server.endpoint, parts.clock)
    with pytest.raises(ConfigError, match="another daemon serves"):
        second.open()


async def test_a_socket_left_by_a_dead_daemon_is_reused(tmp_path: Path) -> None:
    import socket as posix

    path = tmp_path / "kvd.sock"
    left = posix.socket(posix.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with runtime() as parts, AsyncClient(f"ipc://{path}") as client:
        server = QueryServer(parts.service, f"ipc://{path}", parts.clock)
        server.open()
        assert (await client.hello()).protocol == query.PROTOCOL
        server.close()


async def test_a_plan_is_checked_before_it_is_sent() -> None:
    with pytest.raises(PlanError, match="outside"):
        exact_plan("m", [-1])
