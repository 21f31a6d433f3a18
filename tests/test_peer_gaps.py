"""Measured gaps of the system most used for this today (its release 1.6.1): each is a test that kvd passes.

The numbers are those of the list of gaps the project started from.
"""

from __future__ import annotations

import msgspec
import pytest

from kvd.client import MediaRun, WorkerSpec, exact_plan
from kvd.core.fleet import Fleet
from kvd.core.score import score_keys
from kvd.core.stream import Policy
from kvd.ingest.endpoints import validate
from protocols import query
from protocols.errors import ConfigError, WireError
from protocols.keys import token_keys
from protocols.tokens import pack_tokens
from tests.kit.memory import Line
from tests.kit.publisher import chain_of, cleared, payload_of, removed, stored

PROMPT = list(range(100, 116))


@pytest.mark.parametrize("replay", ["inproc://silent"])
def test_g1_a_silent_or_dead_replay_endpoint_freezes_nothing(replay: str) -> None:
    line = Line(replay=replay, policy=Policy(replay_timeout=1, replay_attempts=2, replay_total=5)).connect()
    line.publish(chain_of(PROMPT))
    line.publish(stored([9], [1, 2, 3, 4]), seq=2)
    assert line.member.stream.state == "repairing"
    line.wait(3)
    assert not line.transport.replaying
    assert (line.trust.state, line.trust.missing) == ("incomplete", 1)
    line.publish(stored([10], [5, 6, 7, 8]))
    assert line.score([5, 6, 7, 8]).matched_tokens == 4


def test_g2_a_restarted_publisher_is_neither_ignored_nor_are_its_old_blocks_served() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT))
    line.publish(removed([99]))
    line.publish(chain_of([7, *PROMPT[1:]]), seq=0)
    assert line.score(PROMPT).matched_tokens == 0
    assert line.score([7, *PROMPT[1:]]).matched_tokens == 16
    assert line.trust.state == "exact"


def test_g3_one_bad_event_costs_one_event_and_every_batch_shape_is_read() -> None:
    line = Line().connect()
    good = [stored([bytes(24) + bytes([0] * 7 + [n])], PROMPT[4 * n : 4 * n + 4], parent=n or None) for n in range(2)]
    good[1]["parent_block_hash"] = bytes(32)
    bad = {"type": "BlockStored", "block_hashes": [1.5]}
    line.publish_payload(msgspec.msgpack.encode({"ts": 1.0, "events": [good[0], bad, good[1]]}))
    line.publish_payload(msgspec.msgpack.encode([2.0, []]))
    assert line.score(PROMPT).matched_tokens == 8
    assert line.trust.state == "incomplete"
    assert line.member.stream.last == 1


def test_g4_two_images_of_one_size_never_share_a_block() -> None:
    line = Line().connect()
    tokens = [1, 2, 3, 4, *[7] * 8, 5, 6, 8, 9]
    extra = [None, [["a" * 64, 0]], [["a" * 64, -4]], None]
    line.publish(stored([1, 2, 3, 4], tokens, extra_keys=extra))
    seen, other = (exact_plan("m", tokens, media=[MediaRun(4, 8, letter * 64)]) for letter in "ab")
    assert line.score(seen).matched_tokens == 16
    assert line.score(other).matched_tokens == 4
    near = exact_plan("m", tokens, media=[MediaRun(4, 8, "a" * 63 + "c")])
    assert line.score(near).matched_tokens == 4


def test_g5_copies_are_counted() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), stored([4], PROMPT[12:], parent=3), removed([4]))
    assert line.score(PROMPT).matched_tokens == 16
    line.publish(removed([4]))
    assert line.score(PROMPT).matched_tokens == 12


def test_g6_engines_with_different_hashes_do_not_disturb_each_other() -> None:
    fleet = Fleet(max_blocks=1000)
    one, two = Line(fleet, name="one").connect(), Line(fleet, name="two").connect()
    one.publish(chain_of(PROMPT, first_hash=1))
    two.publish(chain_of(PROMPT[:8], first_hash=1001))
    two.publish(stored([1003, 1004], PROMPT[8:], parent=1002))
    assert (one.score(PROMPT).matched_tokens, two.score(PROMPT).matched_tokens) == (16, 16)
    two.publish(removed([1003, 1004]), removed([1001]))
    assert (one.score(PROMPT).matched_tokens, two.score(PROMPT).matched_tokens) == (16, 0)
    assert fleet.check() == []


def test_g7_a_hole_in_the_middle_heals() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), removed([2]))
    assert line.score(PROMPT).matched_tokens == 4
    line.publish(stored([2], PROMPT[4:8], parent=1))
    assert line.score(PROMPT).matched_tokens == 16


def test_g8_a_model_name_may_hold_anything() -> None:
    line = Line(model="org/m:7b@rev 2").connect()
    line.publish(chain_of(PROMPT))
    assert line.score(exact_plan("org/m:7b@rev 2", PROMPT)).matched_tokens == 16


def test_g9_g10_workers_and_single_ranks_are_removed_without_a_trace() -> None:
    fleet = Fleet(max_blocks=1000)
    lines = [Line(fleet, name=f"w{rank}", rank=rank).connect() for rank in range(3)]
    for line in lines:
        line.publish(chain_of(PROMPT), rank=line.member.rank)
    fleet.remove("w1")
    answer_workers = [member.spec.name for member in fleet.of_model("m", None)]
    assert answer_workers == ["w0", "w2"]
    for name in answer_workers:
        fleet.remove(name)
    while not fleet.sweep(1):
        pass
    assert fleet.indexes == {}


@pytest.mark.parametrize("rank", [-1, 2**31])
def test_g10_an_impossible_rank_is_refused(rank: int) -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), rank=rank)
    assert line.trust.state == "incomplete"
    assert line.score(PROMPT).matched_tokens == 0


def test_g10_another_ranks_messages_are_not_credited() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), rank=3)
    assert line.score(PROMPT).matched_tokens == 0
    assert line.trust.reason == "rank_mismatch"


def test_g11_a_field_nobody_knows_is_refused_instead_of_ignored() -> None:
    for spoiled in ({"tenant_id": "t"}, {"plans": [{"type": "exact", "model": "m", "tokens": b"", "tenant_id": "t"}]}):
        asked = {"type": "score", "id": 1, "plans": []} | spoiled
        with pytest.raises(WireError, match="tenant_id"):
            query.decode_request(msgspec.msgpack.encode(asked))


def test_g12_an_offloaded_block_without_tokens_is_found_by_what_it_was() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), stored([1, 2], [], medium="CPU", block_size=0), removed([1, 2, 3, 4]))
    score = line.score(PROMPT)
    assert (score.matched_tokens, score.tier_tokens["host"], score.tier_tokens["disk"]) == (0, 8, 8)


def test_g13_media_eagle_and_unsigned_keys_can_be_asked_for() -> None:
    line = Line().connect()
    pairs = [[a, a + 1] for a in range(100, 108)]
    line.publish(stored([1, 2], [], block_size=4) | {"token_ids": pairs})
    assert line.score(range(100, 109)).matched_tokens == 8
    keys = token_keys(list(range(100, 109)), 4, eagle=True)
    assert max(keys) >= 2**63
    answer = score_keys(line.fleet, "m", pack_tokens(keys, wide=True), 4, None, line.now)
    assert answer.workers[0].matched_blocks == 2


def test_g14_every_answer_says_how_fresh_it_is() -> None:
    line = Line(replay="inproc://r").connect()
    line.replay_end()
    line.publish(chain_of(PROMPT))
    assert line.score(PROMPT).trust.state == "exact"
    line.feed.disconnected()
    line.now += 7
    stale = line.score(PROMPT).trust
    assert (stale.state, round(stale.stale_seconds)) == ("stale", 7)


def test_g15_a_block_size_mismatch_is_the_reason_of_the_zero() -> None:
    line = Line(block_size=16).connect()
    line.publish(chain_of(PROMPT))
    score = line.score(PROMPT)
    assert (score.matched_tokens, score.zero_reason) == (0, "block_size_mismatch")


def test_g16_a_hash_reused_for_other_content_takes_the_old_content_away() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), stored([1], [9, 9, 9, 9]))
    assert line.score(PROMPT).matched_tokens == 0
    assert line.score([9, 9, 9, 9]).matched_tokens == 4


def test_g17_a_block_size_of_zero_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="block_size = 0: expected 1 or more"):
        validate(WorkerSpec(name="w", model="m", endpoint="tcp://h:1", block_size=0))


def test_several_publishers_on_one_endpoint_are_named_instead_of_thrashing() -> None:
    line = Line().connect()
    one, two = (payload_of([chain_of([first, *PROMPT[1:]], first_hash=first)]) for first in (1, 50))
    for seq in range(6):
        line.publish_payload(one + b"", seq=seq)
        line.publish_payload(two + b"", seq=seq)
    counters = dict(line.member.stream.counters)
    assert counters["conflicts"] == 1
    assert counters["restarts"] == 3
    assert (line.trust.state, line.trust.reason) == ("incomplete", "several_publishers")
    assert line.score(PROMPT).matched_tokens == 0
    line.wait(31)
    line.publish(chain_of(PROMPT), seq=0)
    assert line.trust.state == "exact"


def test_chunks_offloaded_together_count_together() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT))
    line.publish(stored([1, 2], PROMPT[:8], medium="CPU"), stored([3, 4], PROMPT[8:], medium="CPU", parent=2))
    line.publish(removed([1, 2, 3, 4]))
    assert line.score(PROMPT).tier_tokens["host"] == 16
    assert line.score([*PROMPT[:12], 0, 0, 0, 0]).tier_tokens["host"] == 8
    assert line.score([*PROMPT[:4], 0, 0, 0, 0]).tier_tokens["host"] == 0
    line.publish(stored([3], PROMPT[8:12], parent=2))
    assert line.score([*PROMPT[:12], 0, 0, 0, 0]).tier_tokens["host"] == 12


def test_full_report_mode_is_declared_and_then_no_block_counts_twice() -> None:
    line = Line(copies="single").connect()
    line.publish(chain_of(PROMPT), chain_of(PROMPT), removed([4]))
    assert line.score(PROMPT).matched_tokens == 12


def test_a_clear_leaves_the_other_tiers_unconfirmed() -> None:
    line = Line().connect()
    line.publish(chain_of(PROMPT), stored([1, 2], [], medium="CPU", block_size=0), cleared())
    assert line.score(PROMPT).tier_tokens["external"] == 0
    line.publish(stored([1], [], medium="cpu", block_size=0))
    assert line.score(PROMPT).tier_tokens["host"] == 4


@pytest.mark.parametrize("fields", [{"medium": "TAPE"}, {"locality": "REMOTE"}, {"locality": "MOON"}])
def test_unknown_media_and_remote_copies_are_nobodys_device(fields: dict[str, str]) -> None:
    line = Line().connect()
    line.publish(stored([1], PROMPT[:4], **({"medium": "GPU"} | fields)))
    assert set(line.score(PROMPT).tier_tokens.values()) == {0}
    assert line.trust.state == "exact"
