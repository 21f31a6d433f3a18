"""A plan against the fleet: overlaps, and for each zero its reason."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from kvd.core.fleet import Fleet, FleetError, Member, totals
from kvd.core.score import routed_keys, score, score_keys
from kvd.core.signals import Connected, Disconnected, Message
from kvd.core.stream import Policy
from protocols.events import Batch, Event, Stored
from protocols.media import MediaRun, pads
from protocols.plan import ExactPlan, Plan, TextPlan, exact_plan, prefix_plan
from protocols.query import Answer, WorkerScore, WorkerSpec
from tests.kit.conformance import images, keys_of, placeholder, removed, stored

NOW = 50.0
POLICY = Policy()
PROMPT = list(range(1, 17))
"""Sixteen tokens."""
IMAGE = MediaRun(2, 4, "image-a", hash64=0xABCDEF0123456789)
PICTURED = [1, 2, 9, 9, 9, 9, 3, 4]
"""Eight tokens, four of them an image's."""


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(max_blocks=10_000)


def join(fleet: Fleet, name: str, *events: Event, **fields: Any) -> Member:
    """A worker whose stream is live and said this."""
    spec = WorkerSpec(**({"name": name, "model": "m", "endpoint": "tcp://h:5557"} | fields))
    member = fleet.add(spec, 0.0, POLICY)[0]
    member.stream.handle(Connected(), 0.0)
    if events:
        say(member, 0, *events)
    return member


def say(member: Member, seq: int, *events: Event) -> None:
    batch = Batch(seq=seq, topic=b"", ts=None, rank=None, events=events)
    member.stream.handle(Message(seq=seq, digest=seq, batch=batch), NOW)
    for event in events:
        member.apply(event)


def tokens(count: int, size: int = 2, **fields: Any) -> Stored:
    """The first tokens of the prompt in blocks of a size."""
    return stored(range(100, 100 + count // size), PROMPT[:count], **fields)


def ask(fleet: Fleet, plan: Plan | None = None, workers: list[str] | None = None) -> dict[str, WorkerScore]:
    answer = score(fleet, plan or exact_plan("m", PROMPT), workers, NOW)
    return {entry.worker: entry for entry in answer.workers}


def matched(fleet: Fleet, plan: Plan | None = None) -> dict[str, int]:
    return {name: entry.matched_tokens for name, entry in ask(fleet, plan).items()}


# --- overlaps --------------------------------------------------------------------------------------------------------


def test_each_worker_says_how_much_it_holds(fleet: Fleet) -> None:
    join(fleet, "some", tokens(6))
    join(fleet, "all", tokens(16))
    join(fleet, "none", stored([1], [7, 7]))
    answers = ask(fleet)
    assert list(answers) == ["some", "all", "none"]
    assert {n: (a.matched_blocks, a.matched_tokens, a.usable_tokens) for n, a in answers.items()} == {
        "some": (3, 6, 6), "all": (8, 16, 16), "none": (0, 0, 0),
    }  # fmt: skip
    assert [a.zero_reason for a in answers.values()] == [None, None, "no_match"]
    assert all(a.trust.state == "exact" and a.block_size == 2 for a in answers.values())


def test_block_sizes_may_differ_among_workers(fleet: Fleet) -> None:
    join(fleet, "two", tokens(6, 2))
    join(fleet, "four", tokens(12, 4))
    join(fleet, "sixteen", tokens(16, 16))
    assert matched(fleet) == {"two": 6, "four": 12, "sixteen": 16}
    assert [a.block_size for a in ask(fleet).values()] == [2, 4, 16]


def test_a_stream_with_several_block_sizes_counts_the_best(fleet: Fleet) -> None:
    member = join(fleet, "w", tokens(4, 4))
    say(member, 1, stored([7], PROMPT[:8], block_size=8, dense=True))
    assert matched(fleet) == {"w": 8}


def test_pairs_are_windows_that_overlap(fleet: Fleet) -> None:
    join(fleet, "eagle", stored([1, 2, 3], PROMPT[:13], block_size=4, eagle=True, dense=True))
    join(fleet, "plain", tokens(12, 4))
    assert matched(fleet) == {"eagle": 12, "plain": 12}
    assert matched(fleet, exact_plan("m", PROMPT[:12])) == {"eagle": 8, "plain": 12}


def test_tiers_are_cumulative(fleet: Fleet) -> None:
    member = join(fleet, "w", tokens(8), placeholder([102], "CPU"), placeholder([103], "DISK"))
    say(member, 1, removed(102, 103))
    entry = ask(fleet)["w"]
    assert entry.tier_tokens == {"device": 4, "host": 6, "disk": 8, "external": 8}
    assert (entry.matched_tokens, entry.zero_reason) == (4, None)


def test_what_is_held_only_off_the_device_is_no_zero(fleet: Fleet) -> None:
    member = join(fleet, "w", tokens(4), placeholder([100, 101], "DISK"))
    say(member, 1, removed(100, 101))
    entry = ask(fleet)["w"]
    assert (entry.matched_tokens, entry.tier_tokens["disk"], entry.zero_reason) == (0, 4, None)


def test_only_the_named_workers_are_asked(fleet: Fleet) -> None:
    for name in "abc":
        join(fleet, name, tokens(4))
    assert list(ask(fleet, workers=["c", "a", "nobody"])) == ["a", "c"]
    assert ask(fleet, workers=[]) == {}


def test_models_do_not_mix(fleet: Fleet) -> None:
    join(fleet, "w", tokens(4))
    join(fleet, "v", tokens(8), model="other:model@x")
    assert matched(fleet) == {"w": 4}
    assert matched(fleet, exact_plan("other:model@x", PROMPT)) == {"v": 8}


def test_adapter_and_salt_are_asked_for(fleet: Fleet) -> None:
    join(fleet, "w", tokens(4, lora_name="a", cache_salt="s"))
    assert matched(fleet) == {"w": 0}
    assert matched(fleet, exact_plan("m", PROMPT, lora_name="a", cache_salt="s")) == {"w": 4}


def test_a_prefix_plan_is_scored_as_text(fleet: Fleet) -> None:
    join(fleet, "w", tokens(16))
    answer = score(fleet, prefix_plan("m", PROMPT[:7], "accounting"), None, NOW)
    assert (answer.basis, answer.prompt_tokens, answer.workers[0].matched_tokens) == ("prefix", 7, 6)


def test_keys_computed_elsewhere(fleet: Fleet) -> None:
    join(fleet, "two", tokens(6))
    join(fleet, "four", tokens(8, 4))
    keys = struct.pack("<8Q", *keys_of(PROMPT))
    answer = score_keys(fleet, "m", keys, 2, None, NOW)
    assert [(w.worker, w.matched_tokens, w.zero_reason) for w in answer.workers] == [
        ("two", 6, None), ("four", 0, "block_size_mismatch"),
    ]  # fmt: skip


# --- media -----------------------------------------------------------------------------------------------------------


def in_each_scheme(fleet: Fleet) -> None:
    extra = images(None, [("image-a", 0)], [("image-a", -2)], None)
    join(fleet, "vllm", stored(range(4), PICTURED, extra=extra))
    for name, scheme in (("sgl-old", "pad30"), ("sgl-new", "pad62")):
        join(fleet, name, stored(range(4), [1, 2, *pads(IMAGE, scheme), 3, 4]))  # type: ignore[arg-type]


def pictured(**changes: Any) -> ExactPlan:
    run = {"start": 2, "count": 4, "identifier": IMAGE.identifier, "hash64": IMAGE.hash64} | changes
    return exact_plan("m", PICTURED, media=[MediaRun(**run)])


def test_one_plan_is_scored_in_every_scheme(fleet: Fleet) -> None:
    in_each_scheme(fleet)
    assert matched(fleet, pictured()) == {"vllm": 8, "sgl-old": 8, "sgl-new": 8}


def test_another_image_matches_only_the_text_before_it(fleet: Fleet) -> None:
    in_each_scheme(fleet)
    other = pictured(identifier="image-b", hash64=5)
    assert matched(fleet, other) == {"vllm": 2, "sgl-old": 2, "sgl-new": 2}


def test_an_identity_that_a_scheme_lacks_ends_the_prefix_before_the_image(fleet: Fleet) -> None:
    in_each_scheme(fleet)
    assert matched(fleet, pictured(hash64=None)) == {"vllm": 8, "sgl-old": 2, "sgl-new": 2}
    assert matched(fleet, pictured(identifier=None)) == {"vllm": 2, "sgl-old": 8, "sgl-new": 8}


def test_an_unknown_scheme_counts_the_text_before_the_image(fleet: Fleet) -> None:
    join(fleet, "text-only", tokens(4))
    join(fleet, "same-start", stored([1, 2], [1, 2, 9, 9]))
    assert matched(fleet, pictured()) == {"text-only": 2, "same-start": 2}


def test_an_image_within_the_first_block_of_an_unknown_scheme(fleet: Fleet) -> None:
    join(fleet, "w", tokens(4))
    plan = exact_plan("m", [9, 9, 3, 4], media=[MediaRun(0, 2, "x")])
    assert ask(fleet, plan)["w"].zero_reason == "scheme_unknown"


# --- zero reasons ----------------------------------------------------------------------------------------------------


def reason(fleet: Fleet, plan: Plan | None = None) -> str | None:
    return ask(fleet, plan)["w"].zero_reason


def test_a_prompt_shorter_than_a_block(fleet: Fleet) -> None:
    join(fleet, "w", tokens(16, 16))
    assert reason(fleet, exact_plan("m", PROMPT[:15])) == "shorter_than_block"
    assert reason(fleet, exact_plan("m", [])) == "shorter_than_block"


def test_no_events_yet(fleet: Fleet) -> None:
    join(fleet, "w")
    assert reason(fleet) == "no_events_yet"


def test_a_worker_whose_cache_is_empty_has_no_match(fleet: Fleet) -> None:
    join(fleet, "w", removed(1))
    assert reason(fleet) == "no_match"


def test_a_block_size_other_than_the_registered_one(fleet: Fleet) -> None:
    join(fleet, "w", tokens(16, 2), block_size=4)
    assert reason(fleet) == "block_size_mismatch"


def test_a_hole_in_the_stream_makes_a_zero_uncertain(fleet: Fleet) -> None:
    member = join(fleet, "w", stored([1], [7, 7]))
    say(member, 5, removed(9))
    entry = ask(fleet)["w"]
    assert (entry.zero_reason, entry.trust.state, entry.trust.missing) == ("incomplete", "incomplete", 4)


def test_an_unknown_model(fleet: Fleet) -> None:
    join(fleet, "w", tokens(4))
    answer = score(fleet, exact_plan("other", PROMPT), None, NOW)
    assert (answer.workers, answer.zero_reason) == ([], "unknown_model")


def test_a_model_is_unknown_as_soon_as_its_last_worker_is_gone(fleet: Fleet) -> None:
    join(fleet, "w", tokens(4))
    fleet.remove("w")
    assert score(fleet, exact_plan("m", PROMPT), None, NOW).zero_reason == "unknown_model"


def test_a_known_model_of_which_no_named_worker_is_there_is_not_unknown(fleet: Fleet) -> None:
    join(fleet, "w", tokens(4))
    answer = score(fleet, exact_plan("m", PROMPT), ["nobody"], NOW)
    assert (answer.workers, answer.zero_reason) == ([], None)


# --- trust -----------------------------------------------------------------------------------------------------------


def test_trust_is_each_workers_own(fleet: Fleet) -> None:
    join(fleet, "exact", tokens(4))
    say(join(fleet, "holed", tokens(4)), 9, removed(1))
    join(fleet, "gone", tokens(4)).stream.handle(Disconnected(), NOW - 5)
    join(fleet, "new")
    states = {name: (entry.trust.state, entry.matched_tokens) for name, entry in ask(fleet).items()}
    assert states == {"exact": ("exact", 4), "holed": ("incomplete", 4), "gone": ("stale", 4), "new": ("unknown", 0)}
    assert ask(fleet)["gone"].trust.stale_seconds == 5


# --- predictions -----------------------------------------------------------------------------------------------------


def test_what_was_routed_is_predicted_apart_from_what_is_held(fleet: Fleet) -> None:
    a, b = join(fleet, "a", tokens(4)), join(fleet, "b", tokens(4))
    fleet.routed.insert(a.owner, routed_keys(exact_plan("m", PROMPT), a), NOW, 2.0)
    answers = ask(fleet)
    assert (answers["a"].matched_tokens, answers["a"].predicted_tokens) == (4, 16)
    assert answers["b"].predicted_tokens == 0
    later = score(fleet, exact_plan("m", PROMPT), None, NOW + 2).workers
    assert [entry.predicted_tokens for entry in later] == [0, 0]
    assert b.owner != a.owner


def test_a_worker_without_events_predicts_nothing_from_tokens(fleet: Fleet) -> None:
    assert routed_keys(exact_plan("m", PROMPT), join(fleet, "w")) == []


def test_text_is_matched_against_what_was_routed_only(fleet: Fleet) -> None:
    member = join(fleet, "w", tokens(16))
    join(fleet, "v")
    plan = TextPlan(model="m", text="word " * 200, reason="no_tokenizer")
    fleet.routed.insert(member.owner, routed_keys(plan, member), NOW, 60.0)
    answer = score(fleet, plan, None, NOW)
    assert (answer.basis, answer.prompt_tokens) == ("text", 0)
    assert [(w.predicted_bytes, w.matched_tokens, w.zero_reason) for w in answer.workers] == [
        (768, 0, None), (0, 0, "no_routes_yet"),
    ]  # fmt: skip


# --- the fleet -------------------------------------------------------------------------------------------------------


def test_ranks_of_a_worker_are_scored_each(fleet: Fleet) -> None:
    spec = WorkerSpec(name="w", model="m", endpoint="tcp://h:5557", ranks=2)
    first, second = fleet.add(spec, 0.0, POLICY)
    first.apply(tokens(4))
    second.apply(tokens(8))
    answer: Answer = score(fleet, exact_plan("m", PROMPT), None, NOW)
    assert [(w.rank, w.matched_tokens) for w in answer.workers] == [(0, 4), (1, 8)]


def test_a_removed_worker_is_gone_at_once_and_its_memory_soon(fleet: Fleet) -> None:
    join(fleet, "w", tokens(16))
    join(fleet, "v", tokens(4))
    assert [member.rank for member in fleet.remove("w")] == [0]
    assert matched(fleet) == {"v": 4}
    while not fleet.sweep(3):
        pass
    assert fleet.check() == []
    assert (totals(fleet).blocks, totals(fleet).nodes) == (2, 2)


def test_a_model_without_workers_takes_no_memory(fleet: Fleet) -> None:
    join(fleet, "w", tokens(16))
    fleet.remove("w")
    while not fleet.sweep(3):
        pass
    assert fleet.indexes == {}
    assert list(fleet.models()) == []


def test_a_name_returns_as_another_worker(fleet: Fleet) -> None:
    join(fleet, "w", tokens(16))
    fleet.remove("w")
    join(fleet, "w", tokens(4))
    assert matched(fleet) == {"w": 4}
    assert fleet.check() == []


def test_a_new_lifetime_of_a_member(fleet: Fleet) -> None:
    member = join(fleet, "w", tokens(16))
    member.reset()
    assert matched(fleet) == {"w": 0}


def test_what_cannot_be_added_or_removed_is_named() -> None:
    fleet = Fleet(max_blocks=10, max_workers=2)
    join(fleet, "w")
    with pytest.raises(FleetError, match="'w' is there already"):
        join(fleet, "w")
    with pytest.raises(FleetError, match="no worker 'x'; there are: w"):
        fleet.remove("x")
    with pytest.raises(FleetError, match="at most 2"):
        fleet.add(WorkerSpec(name="v", model="m", endpoint="e", ranks=2), 0.0, POLICY)


def test_what_a_member_says_of_itself(fleet: Fleet) -> None:
    info = join(fleet, "w", tokens(16)).info(NOW)
    assert (info.worker, info.state, info.blocks, info.block_sizes, info.last_seq) == ("w", "live", 8, [2], 0)
    assert [model.model for model in fleet.models()] == ["m"]
