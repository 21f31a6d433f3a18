"""Public reports about other subscribers of the same streams, each as a small input of our own.

Named after project and issue number. Those that also are gaps of the peer are in ``test_peer_gaps.py``; wire shapes are
in ``tests/protocols``; restarts, replays and sockets in ``tests/e2e`` and ``tests/core``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvd.client import MediaRun, exact_plan
from kvd.core.fleet import Fleet
from kvd.core.score import score_keys
from kvd.ingest.endpoints import rank_endpoint
from protocols.keys import token_keys
from protocols.media import narrow_pad, wide_pads
from protocols.tokens import pack_tokens
from tests.kit.memory import Line
from tests.kit.publisher import chain_of, cleared, payload_of, removed, stored

PROMPT = list(range(100, 116))


def test_llmd_kv_cache_372_a_daemon_that_joins_a_warm_engine_links_children_once_their_parent_is_known() -> None:
    line = Line().connect()
    line.publish(stored([3, 4], PROMPT[8:], parent=2), seq=7)
    assert line.score(PROMPT).matched_tokens == 0
    line.publish(stored([1, 2], PROMPT[:8]))
    assert line.score(PROMPT).matched_tokens == 16


def test_llmd_router_1738_a_late_event_does_not_bring_a_removed_worker_back() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT))
    line.fleet.remove("w")
    line.feed.close()
    line.publish(chain_of(PROMPT))
    assert line.fleet.of_model("m", None) == []
    while not line.fleet.sweep(100):
        pass
    assert line.fleet.check() == []


def test_aibrix_2385_dynamo_9296_a_clear_is_a_barrier_between_what_came_before_and_after() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), cleared(), stored([1], PROMPT[:4]))
    assert line.score(PROMPT).matched_tokens == 4


def test_dynamo_14627_live_messages_wait_for_what_the_replay_brings() -> None:
    line = Line(replay="inproc://r").connect()
    line.replay_end()
    line.publish(chain_of(PROMPT[:8]))
    line.publish(removed([4]), seq=3)
    line.replay(0, line_payload(line))
    line.replay(1, payload_of([stored([3, 4], PROMPT[8:], parent=2)]))
    line.replay(2, payload_of([stored([9], [7, 7, 7, 7])]))
    assert line.score(PROMPT).matched_tokens == 12
    assert line.trust.state == "exact"


def line_payload(line: Line) -> bytes:
    """The payload of the first message, as the publisher's buffer still has it."""
    return line.sent[0]


def test_vllm_57242_group_numbers_without_kinds_are_not_guessed() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT) | {"group_idx": 2})
    assert line.score(PROMPT).matched_tokens == 0
    assert line.member.index.counters(line.member.handle)["skipped_unlearned_group"] == 1
    line.publish(chain_of(PROMPT) | {"group_idx": 0})
    assert line.score(PROMPT).matched_tokens == 16


def test_llmd_kv_cache_612_windows_alone_make_nothing_usable() -> None:
    line = Line().connect()
    kinds = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
    line.publish(
        chain_of(PROMPT) | {"group_idx": 1, "kv_cache_spec_kind": "full_attention"},
        stored([3, 4], PROMPT) | {"group_idx": 0} | kinds,
    )
    whole, shorter = line.score(PROMPT), line.score(PROMPT[:12])
    assert (whole.matched_tokens, whole.usable_tokens) == (16, 16)
    assert (shorter.matched_tokens, shorter.usable_tokens) == (12, 0)


def test_llmd_router_2379_ranks_are_rows_of_their_own() -> None:
    fleet = Fleet(max_blocks=1000)
    lines = [Line(fleet, name=f"w{rank}", rank=rank).connect() for rank in (0, 5)]
    lines[1].publish(chain_of(PROMPT), rank=5)
    assert [line.score(PROMPT).matched_tokens for line in lines] == [0, 16]


@pytest.mark.parametrize(
    ("endpoint", "offset", "expected"),
    [
        ("tcp://h:5557", 3, "tcp://h:5560"), ("tcp://[fd00::12]:5557", 1, "tcp://[fd00::12]:5558"),
        ("inproc://x", 2, "inproc://x_dp2"), ("ipc:///x", 0, "ipc:///x"),
    ],
)  # fmt: skip
def test_llmd_router_1242_ranks_are_on_consecutive_ports(endpoint: str, offset: int, expected: str) -> None:
    assert rank_endpoint(endpoint, offset) == expected


def test_vllm_27211_an_adapter_known_by_number_only_is_not_the_base_model() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT) | {"lora_id": 3})
    assert line.score(PROMPT).matched_tokens == 0


def test_llmd_router_1494_one_tenants_blocks_are_not_anothers() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT) | {"extra_keys": [["tenant-a"], None, None, None]})
    salted = [line.score(exact_plan("m", PROMPT, cache_salt=salt)).matched_tokens for salt in ("tenant-a", "b", None)]
    assert salted == [16, 0, 0]


def test_dynamo_8197_the_child_of_an_unknown_parent_is_not_credited_to_the_unsalted_space() -> None:
    line = Line().connect()
    line.publish(stored([2], PROMPT[4:8], parent=1))
    line.publish(stored([1], PROMPT[:4], extra_keys=[["tenant-a"]]))
    assert line.score(PROMPT).matched_tokens == 0
    assert line.score(exact_plan("m", PROMPT, cache_salt="tenant-a")).matched_tokens == 8


def test_sglang_39108_removing_the_device_copy_keeps_the_hosts() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), chain_of(PROMPT) | {"medium": "CPU_PINNED"}, removed([1, 2, 3, 4]))
    assert line.score(PROMPT).tier_tokens == {"device": 0, "host": 16, "disk": 16, "external": 16}


@pytest.mark.parametrize("medium", ["cpu", "CPU", "Cpu_Pinned", "CPU_TIER1"])
def test_dynamo_10368_media_are_folded(medium: str) -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT[:4]) | {"medium": medium})
    assert line.score(PROMPT).tier_tokens["host"] == 4


@pytest.mark.parametrize(("medium", "tier"), [("FS", "disk"), ("STORAGE", "disk"), ("OBJ", "external")])
def test_vllm_46544_storage_connectors_have_tiers_of_their_own(medium: str, tier: str) -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT[:4]) | {"medium": medium, "locality": "LOCAL"})
    tokens: dict[Any, int] = line.score(PROMPT).tier_tokens
    assert (tokens["device"], tokens[tier]) == (0, 4)


@pytest.mark.parametrize(("pads", "scheme"), [(wide_pads, "pad62"), (lambda h: (narrow_pad(h),) * 4, "pad30")])
def test_dynamo_9561_images_in_token_ids_match_plans_that_know_their_hash(pads: Any, scheme: str) -> None:
    line = Line().connect()
    image = [pads(0xDEADBEEF)[i % 4] for i in range(8)]
    line.publish(chain_of([1, 2, 3, 4, *image, 5, 6, 7, 8]))
    assert line.member.index.scheme(line.member.handle) == scheme
    held = [1, 2, 3, 4, *[154854] * 8, 5, 6, 7, 8]
    scores = [line.score(exact_plan("m", held, media=[MediaRun(4, 8, None, h)])) for h in (0xDEADBEEF, 0xBEEF)]
    assert [score.matched_tokens for score in scores] == [16, 4]


def test_smg_677_block_sizes_are_learnt_and_may_differ_between_replicas() -> None:
    fleet = Fleet(max_blocks=1000)
    small, large = Line(fleet, name="small").connect(), Line(fleet, name="large").connect()
    small.publish(chain_of(PROMPT))
    large.publish(chain_of(PROMPT, block_size=8))
    assert [(s.block_size, s.matched_tokens) for s in (small.score(PROMPT), large.score(PROMPT))] == [(4, 16), (8, 16)]


def test_sglang_12559_a_page_of_one_token_is_a_block() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT, block_size=1))
    assert line.score(PROMPT[:7]).matched_tokens == 7


def test_sglang_38561_metadata_in_the_adapters_slot_is_a_salt() -> None:
    line = Line().connect()
    event = ["BlockStored", [1], None, PROMPT[:4], 4, None, "GPU", {"cache_salt": "t"}]
    line.publish_payload(msgspec.msgpack.encode([1.0, [event], 0]))
    assert line.score(exact_plan("m", PROMPT, cache_salt="t")).matched_tokens == 4
    assert line.score(PROMPT).matched_tokens == 0


def test_dynamo_4394_a_block_that_is_its_own_parent_costs_itself() -> None:
    line = Line().connect()
    line.publish(stored([5], [1, 1, 1, 1], parent=5), chain_of(PROMPT))
    assert line.score(PROMPT).matched_tokens == 16
    assert line.fleet.check() == []


def test_dynamo_14652_an_absent_block_does_not_stop_a_removal() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), removed([77, 4, 78, 3]))
    assert line.score(PROMPT).matched_tokens == 8


@pytest.mark.parametrize(
    "field", [{"lora_name": "x" * 5000}, {"cache_salt": "x" * 5000}, {"extra_keys": [["x" * 5000]]}]
)
def test_names_that_are_kept_are_bounded(field: dict[str, Any]) -> None:
    line = Line().connect()
    line.publish(stored([1], PROMPT[:4], **field), chain_of(PROMPT))
    assert line.trust.state == "incomplete"
    assert line.score(PROMPT).matched_tokens == 16


@pytest.mark.parametrize(
    ("event", "doubt"),
    [
        (stored([1], PROMPT[:5]), "not_dense"),
        (stored([2], PROMPT[4:8], parent=1, lora_name="other"), "ambiguous_namespace"),
    ],
)
def test_device_blocks_that_cannot_be_credited_are_no_silent_zero(event: dict[str, Any], doubt: str) -> None:
    line = Line().connect()
    line.publish(stored([1], [1, 2, 3, 4]))
    line.publish(event)
    assert (line.trust.state, line.trust.reason) == ("incomplete", doubt)
    assert line.score([50, 51, 52, 53]).zero_reason == "incomplete"
    line.publish(cleared())
    assert line.trust.state == "exact"


@pytest.mark.parametrize(
    "event",
    [
        stored([2], PROMPT[:4], extra_keys=[["a", "b"]]),
        stored([2], PROMPT[:4], extra_keys=[None, None]),
        stored([2], ["image", 1, 2, 3]),
    ],
)
def test_media_that_cannot_be_read_are_a_reason_of_their_own_and_text_stays_exact(event: dict[str, Any]) -> None:
    line = Line().connect()
    line.publish(stored([1], [1, 2, 3, 4]), event)
    assert (line.trust.state, line.score([1, 2, 3, 4]).matched_tokens) == ("exact", 4)
    assert line.score([50, 51, 52, 53]).zero_reason == "no_match"
    image = exact_plan("m", [50, 51, 52, 53], media=[MediaRun(0, 4, "a", 1)])
    assert line.score(image).zero_reason == "scheme_unknown"


def test_offloaded_blocks_of_another_hash_space_do_not_cast_doubt_on_the_device() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), stored([77], PROMPT[:5], medium="cpu"), stored([78], [], medium="CPU", block_size=0))
    assert line.trust.state == "exact"


def test_keys_that_are_no_chain_get_an_answer_from_a_hybrid_rank() -> None:
    line = Line().connect()
    line.publish(
        chain_of(PROMPT) | {"group_idx": 1, "kv_cache_spec_kind": "full_attention"},
        stored([4], PROMPT) | {"group_idx": 0, "kv_cache_spec_kind": "mamba"},
    )
    first, _, _, last = token_keys(PROMPT, 4)
    keys = pack_tokens([first, 7, 7, last], wide=True)
    assert score_keys(line.fleet, "m", keys, 4, None, line.now).workers[0].usable_tokens == 0
