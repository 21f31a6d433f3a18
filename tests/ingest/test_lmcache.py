"""LMCache's chunks inside an engine's stream: another hash space on the host, never device memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.memory import Line
from tests.kit.publisher import chain_of, cleared, removed, stored

PROMPT = list(range(100, 116))
CHUNK = 8


def chunk(hash_: Any, tokens: list[int], *, parent: Any = None, **fields: Any) -> dict[str, Any]:
    """A CacheStoreEvent as vLLM's connector publishes it: one hash for a chunk of its own size."""
    return stored([hash_], tokens, parent=parent, **({"block_size": CHUNK, "medium": "cpu"} | fields))


@pytest.mark.parametrize("medium", ["cpu", "CPU"])
def test_chunks_are_on_the_host_and_never_on_the_device(medium: str) -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT[:4], first_hash=1))
    line.publish(chunk(901, PROMPT[:8], medium=medium), chunk(902, PROMPT[8:], parent=901, medium=medium))
    answer = line.score(PROMPT)
    assert (answer.matched_tokens, answer.tier_tokens["device"], answer.tier_tokens["host"]) == (4, 4, 4)
    line.publish(removed([1]))
    answer = line.score(PROMPT)
    assert (answer.matched_tokens, answer.block_size, answer.tier_tokens["host"]) == (0, 8, 16)


def test_the_engine_s_and_the_connector_s_blocks_do_not_share_a_name() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), chunk(901, PROMPT[:8]), chunk(902, PROMPT[8:], parent=901))
    line.publish(removed([901], medium="cpu"))
    answer = line.score(PROMPT)
    assert (answer.matched_tokens, answer.tier_tokens["host"]) == (16, 16)
    line.publish(removed([901]))  # not on the device: nothing of the engine's goes
    assert line.score(PROMPT).matched_tokens == 16


def test_chunks_with_one_token_more_than_their_size_are_resident_and_match_nothing() -> None:
    line = Line().connect()
    line.publish(chunk(901, [*PROMPT[:8], 7]), chunk(902, [*PROMPT[8:], 8], parent=901))
    answer = line.score(PROMPT)
    assert set(answer.tier_tokens.values()) == {0}
    info = line.member.info(0.0)
    assert (info.blocks, info.counters["not_dense"]) == (2, 2)
    line.publish(removed([901, 902], medium="cpu"))
    assert line.member.info(0.0).blocks == 0


def test_parent_0_is_a_root() -> None:
    line = Line().connect()
    line.publish(chunk(901, PROMPT[:8], parent=0))
    assert line.score(PROMPT).tier_tokens["host"] == 8


def test_a_true_hash_0_is_a_parent() -> None:
    line = Line().connect()
    line.publish(stored([0], PROMPT[:4]), stored([1], PROMPT[4:8], parent=0))
    assert line.score(PROMPT).matched_tokens == 8


def test_digests_are_named_as_integers_are() -> None:
    line = Line().connect()
    digest = bytes(24) + (901).to_bytes(8, "big")
    line.publish(chunk(digest, PROMPT[:8]))
    line.publish(removed([901], medium="CPU"))
    assert line.score(PROMPT).tier_tokens["host"] == 0


def test_a_connector_that_never_removes_is_emptied_by_a_clear() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), chunk(901, PROMPT[:8]))
    line.publish(cleared())
    assert line.score(PROMPT).tier_tokens["external"] == 0
    assert line.member.info(0.0).counters["unconfirmed"] == 1
    line.publish(chunk(901, PROMPT[:8]))
    assert line.score(PROMPT).tier_tokens["host"] == 8


def test_a_medium_that_is_no_text_costs_its_event() -> None:
    """A torch device in ``medium`` cannot be encoded by the engine; what arrives in its place is of another type."""
    line = Line().connect()
    line.publish(chunk(901, PROMPT[:8], medium={"device": "cuda:0"}), chain_of(PROMPT))
    assert line.score(PROMPT).matched_tokens == 16
    assert line.trust.reason == "bad_event_medium_type"


def test_a_batch_that_could_not_be_encoded_leaves_a_hole_that_is_said() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT))
    line.publish(chunk(901, PROMPT[:8]), seq=2)
    assert (line.trust.state, line.trust.missing) == ("incomplete", 1)


def test_placeholders_of_the_offloading_connector_take_the_content_announced_before() -> None:
    line = Line().connect()
    line.publish(
        chain_of(PROMPT), stored([1, 2], [], block_size=0, medium="CPU"), stored([77], [], block_size=0, medium="CPU")
    )
    line.publish(removed([1, 2, 3, 4]))
    answer = line.score(PROMPT)
    assert (answer.matched_tokens, answer.tier_tokens["host"]) == (0, 8)
