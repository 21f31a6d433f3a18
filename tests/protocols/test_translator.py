"""TensorRT-LLM's polled events, engine-neutral: what is indexed, what is left out, and what is taken back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.fleet import Fleet, Member
from kvd.core.score import score
from kvd.core.stream import Policy
from protocols.errors import WireError
from protocols.events import BlockExtra, Event, Removed, Stored
from protocols.limits import Limits
from protocols.media import MediaRun
from protocols.plan import exact_plan
from protocols.query import WorkerScore, WorkerSpec
from protocols.translator import Translator
from protocols.trtllm import from_object, read, split
from tests.kit.http import block, created, mm_key, moved, removed_blocks, stored_blocks, stored_prompt

PROMPT = list(range(100, 116))


class Rank:
    """A translator in front of a member of a fleet."""

    def __init__(self, block_size: int | None = None) -> None:
        self.fleet = Fleet(max_blocks=1 << 20)
        spec = WorkerSpec(name="w", model="m", endpoint="inproc://x", block_size=block_size)
        self.member: Member = self.fleet.add(spec, 0.0, Policy())[0]
        self.translator = Translator(block_size)
        self.events: list[Event] = []
        self._next = 0

    def take(self, data: dict[str, Any], window: int | None = None) -> tuple[Event, ...]:
        value = {"event_id": self._next, "data": data, "window_size": window}
        self._next += 1
        events = self.translator.translate(from_object(json.loads(json.dumps(value))))
        for event in events:
            self.member.apply(event)
        return events

    def score(self, tokens: list[int], *media: MediaRun) -> WorkerScore:
        assert self.fleet.check() == []
        return score(self.fleet, exact_plan("m", tokens, media=media), None, 0.0).workers[0]

    def matched(self, tokens: list[int], *media: MediaRun) -> int:
        return self.score(tokens, *media).matched_tokens


def test_whole_blocks_are_indexed_and_the_partial_one_is_not() -> None:
    rank = Rank()
    (stored,) = rank.take(stored_prompt(PROMPT[:10]))
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.block_size, stored.dense) == ((1, 2), 4, True)
    assert rank.matched(PROMPT) == 8
    assert rank.take(removed_blocks(3)) == ()  # the partial one
    assert rank.matched(PROMPT) == 8
    assert rank.translator.counters["partial_blocks"] == 1
    assert rank.member.info(0.0).counters.get("unknown_removals", 0) == 0


def test_a_partial_block_that_came_first_is_taken_back_once_a_whole_one_shows_the_size() -> None:
    rank = Rank()
    rank.take(stored_prompt(PROMPT[:3], first=50))
    assert rank.matched(PROMPT) == 3  # the largest seen so far
    rank.take(stored_prompt(PROMPT[:4]))
    assert rank.matched(PROMPT[:3]) == 0
    assert rank.matched(PROMPT) == 4
    assert rank.take(removed_blocks(50)) == ()


@pytest.mark.parametrize("windows", [(8, 4096), (4096, 8)])
def test_a_partial_block_is_taken_back_from_every_window(windows: tuple[int, int]) -> None:
    rank = Rank()
    for window in windows:
        rank.take(created(), window)
    for window in windows:
        rank.take(stored_prompt(PROMPT[:3], first=50), window)
    for window in windows:
        rank.take(stored_prompt(PROMPT[:4]), window)
    assert rank.matched(PROMPT[:3]) == 0
    assert rank.score(PROMPT).usable_tokens == 4
    for window in windows:
        assert rank.take(removed_blocks(50), window) == ()


def test_a_registered_size_needs_no_learning() -> None:
    rank = Rank(block_size=4)
    assert rank.take(stored_prompt(PROMPT[:3])) == ()
    rank.take(stored_prompt(PROMPT))
    assert rank.matched(PROMPT) == 16


@pytest.mark.parametrize("tokens", [PROMPT, PROMPT[:8]])
def test_another_size_than_registered_is_refused_by_name(tokens: list[int]) -> None:
    rank = Rank(block_size=4)
    rank.take(stored_prompt(tokens, size=8))
    answer = rank.score(PROMPT)
    assert (answer.matched_tokens, answer.zero_reason) == (0, "block_size_mismatch")


def test_a_block_behind_a_partial_one_is_never_chained_past_it() -> None:
    rank = Rank(block_size=4)
    rank.take(stored_blocks(block(1, PROMPT[:4]), block(2, [7]), block(3, PROMPT[4:8])))
    assert rank.matched(PROMPT) == 4


def test_a_block_that_moves_to_the_host_is_demoted_and_comes_back() -> None:
    rank = Rank()
    rank.take(stored_prompt(PROMPT))
    rank.take(moved(4, 0, 1))
    answer = rank.score(PROMPT)
    assert (answer.matched_tokens, answer.tier_tokens["host"]) == (12, 16)
    rank.take(moved(4, 1, 0))
    assert rank.matched(PROMPT) == 16
    rank.take(moved(4, 0, 1))
    rank.take(removed_blocks(4))  # a removal does not say from where
    answer = rank.score(PROMPT)
    assert (answer.matched_tokens, answer.tier_tokens["external"]) == (12, 12)


def test_a_change_of_priority_moves_nothing() -> None:
    rank = Rank()
    rank.take(stored_prompt(PROMPT))
    priority = {"type": "event_diff", "new_value": 1, "old_value": 2}
    assert rank.take({"type": "updated", "block_hash": 1, "cache_level": None, "priority": priority}) == ()
    assert rank.matched(PROMPT) == 16


def test_blocks_stored_on_the_host_are_not_on_the_device() -> None:
    rank = Rank()
    rank.take(stored_blocks(block(1, PROMPT[:4]), block(2, PROMPT[4:8], level=1)))
    answer = rank.score(PROMPT)
    assert (answer.matched_tokens, answer.tier_tokens["host"]) == (4, 8)


def test_a_level_nobody_documented_scores_nowhere() -> None:
    rank = Rank()
    rank.take(stored_blocks(block(1, PROMPT[:4], level=7), block(2, PROMPT[4:8], level=7)))
    assert rank.score(PROMPT).tier_tokens["external"] == 0
    assert rank.member.info(0.0).counters["skipped_unknown_medium"] == 1


def test_only_the_largest_window_is_indexed_and_the_others_limit_what_is_usable() -> None:
    rank = Rank()
    for window in (8, 4096):
        rank.take(created(), window)
    for window in (8, 4096):
        rank.take(stored_prompt(PROMPT), window)
    answer = rank.score(PROMPT)
    assert (answer.matched_tokens, answer.usable_tokens) == (16, 16)
    rank.take(removed_blocks(1, 2, 3), 8)  # out of the window of the prompt's end
    assert rank.score(PROMPT).usable_tokens == 0  # 4 alone is not the last ceil(7 / 4) blocks
    rank.take(stored_blocks(block(3, PROMPT[8:12]), parent=2), 8)
    assert rank.score(PROMPT).usable_tokens == 16
    rank.take(removed_blocks(4), 4096)
    assert rank.score(PROMPT).matched_tokens == 12


def test_a_larger_window_seen_late_never_scores_more_than_both_hold() -> None:
    rank = Rank()
    rank.take(stored_prompt(PROMPT), 8)
    rank.take(stored_prompt(PROMPT[:8]), 4096)
    assert rank.score(PROMPT).usable_tokens == 8


def test_windows_are_bounded() -> None:
    rank = Rank()
    for window in range(1, 200):
        rank.take(stored_blocks(block(window, PROMPT[:4])), window)
    assert rank.member.info(0.0).counters["skipped_too_many_groups"] > 0


def test_a_window_that_is_no_number_of_tokens_is_counted_and_left_out() -> None:
    rank = Rank()
    rank.take(stored_prompt(PROMPT), -1)
    rank.take(stored_prompt(PROMPT[:8]), 4096)
    rank.take(removed_blocks(1), -1)
    assert rank.score(PROMPT).usable_tokens == 8
    assert rank.member.info(0.0).counters["skipped_group_kind"] == 2


IMAGE = "ab" * 32


def test_media_is_read_where_the_next_block_tells_where_it_began() -> None:
    rank = Rank()
    tokens = [1, 2, 9, 9, 9, 9, 9, 9, 9, 3, 4, 5]  # the item is tokens 2..8
    rank.take(stored_blocks(
        block(1, tokens[:4], mm_keys=[mm_key(IMAGE, 0)]), block(2, tokens[4:8], mm_keys=[mm_key(IMAGE, 2)]),
        block(3, tokens[8:], mm_keys=[mm_key(IMAGE, 6)]),
    ))  # fmt: skip
    assert rank.matched(tokens, MediaRun(2, 7, IMAGE)) == 12
    assert rank.matched(tokens, MediaRun(2, 7, "cd" * 32)) == 0
    assert rank.matched(tokens) == 0
    assert rank.member.info(0.0).scheme == "media_keys"


def test_an_item_whose_begin_is_unknown_is_left_out_not_guessed() -> None:
    rank = Rank()
    tokens = [1, 2, 3, 4, 5, 9, 9, 6, 7, 8, 9, 10]
    (text, media, after) = rank.take(stored_blocks(
        block(1, tokens[:4]), block(2, tokens[4:8], mm_keys=[mm_key(IMAGE, 0)]), block(3, tokens[8:]),
    ))  # fmt: skip
    assert isinstance(media, Stored)
    assert (media.tokens, media.warn) == ([], ("placeholder",))
    for start in (4, 5, 6):
        assert rank.matched(tokens, MediaRun(start, 2, IMAGE)) == 4
    assert rank.translator.counters["media_unreadable"] == 1
    assert isinstance(after, Stored)
    assert after.parent == 2
    del text
    rank.take(removed_blocks(1, 2, 3))
    assert rank.member.info(0.0).blocks == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"mm_keys": [mm_key(IMAGE, 0), mm_key(IMAGE, 2)]},  # one item, two runs in a block
        {"mm_keys": [{"type": "mm_key", "hash": IMAGE}]},
        {"mm_keys": [mm_key(IMAGE, -3)]},
    ],
)
def test_media_that_cannot_be_placed_is_unreadable(extra: dict[str, Any]) -> None:
    rank = Rank()
    rank.take(stored_blocks(block(1, PROMPT[:4], **extra), block(2, PROMPT[4:8])))
    assert rank.matched(PROMPT) == 0
    assert rank.translator.counters["media_unreadable"] == 1


def test_prompt_tuning_ids_are_content_that_tokens_do_not_tell() -> None:
    rank = Rank()
    tuned = block(1, PROMPT[:4])
    tuned["tokens"][0]["token_extra_id"] = 77
    rank.take(stored_blocks(tuned, block(2, PROMPT[4:8])))
    assert rank.matched(PROMPT) == 0


def test_salted_blocks_are_another_space() -> None:
    rank = Rank()
    rank.take(stored_blocks(block(1, PROMPT[:4], cache_salt="t"), block(2, PROMPT[4:8], cache_salt="t")))
    rank.take(stored_blocks(block(11, PROMPT[:4], cache_salt=7)))
    assert rank.matched(PROMPT) == 0
    salted = exact_plan("m", PROMPT, cache_salt="t")
    assert score(rank.fleet, salted, None, 0.0).workers[0].matched_tokens == 8


def test_integers_stay_exact() -> None:
    rank = Rank()
    high = (1 << 64) - 1
    rank.take(stored_blocks(block(high, PROMPT[:4]), block(high - 1, PROMPT[4:8])))
    rank.take(removed_blocks(high - 1))
    assert rank.matched(PROMPT) == 4


# --- a drained list --------------------------------------------------------------------------------------------------


def raws(*values: object) -> list[msgspec.Raw]:
    return split(msgspec.json.encode(list(values)))


def test_one_bad_event_costs_one_event() -> None:
    good = {"event_id": 0, "data": created(), "window_size": 8}
    bad = {"event_id": 1, "data": {"type": "stored", "blocks": 3}, "attention_dp_rank": 2}
    parts = [read(raw) for raw in raws(good, bad, good | {"event_id": 2})]
    assert [(part.event_id, part.fault) for part in parts] == [(0, ""), (1, "field"), (2, "")]
    assert (parts[1].rank, parts[1].event) == (2, None)


@pytest.mark.parametrize(
    "value",
    [3, [], {"data": created()}, {"event_id": -1, "data": created()}, {"event_id": "1"}, {"event_id": 1 << 63}],
)
def test_an_event_without_an_id_is_refused(value: object) -> None:
    (raw,) = raws(value)
    with pytest.raises(WireError):
        read(raw)


@pytest.mark.parametrize(
    "data",
    [
        {"type": "stored", "parent_hash": None, "blocks": [block(1, [-1])]},
        {"type": "stored", "parent_hash": None, "blocks": [block(1, [1 << 64])]},
        {"type": "stored", "parent_hash": None, "blocks": [block(1, [1], cache_level="x")]},
        {"type": "stored", "parent_hash": None, "blocks": [block(1, [1], mm_keys=3)]},
        {"type": "stored", "parent_hash": None, "blocks": [block(1, [1], mm_keys=[{"hash": 3}])]},
        {"type": "stored", "parent_hash": None, "blocks": [block(1, [1], cache_salt=[])]},
        {"type": "stored", "parent_hash": None, "blocks": [block(1, [1], cache_salt="s" * 5000)]},
        {"type": "stored", "parent_hash": None, "blocks": [block(1, [1], mm_keys=[mm_key("s" * 5000, 0)])]},
        {"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 1, "tokens": [3]}]},
        {"type": "removed", "block_hashes": ["x"]},
        {"type": "removed", "block_hashes": [1, 2, 3]},
        {"type": "renamed"},
        {"type": "created", "num_blocks_per_cache_level": 3},
    ],
)
def test_fields_of_another_kind_make_an_event_unusable(data: dict[str, Any]) -> None:
    (raw,) = raws({"event_id": 5, "data": data})
    part = read(raw, Limits(hashes=2))
    assert (part.event_id, part.event) == (5, None)
    assert part.fault


@pytest.mark.parametrize(
    ("body", "code"), [(b"{}", "payload_decode"), (b"[", "payload_decode"), (b"[" * 5000, "payload_decode")]
)
def test_a_body_that_is_no_list_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(WireError) as caught:
        split(body)
    assert caught.value.code == code


def test_a_list_beyond_its_bounds_is_refused() -> None:
    with pytest.raises(WireError, match="payload_size"):
        split(b"[1,2,3]", Limits(payload_bytes=4))
    with pytest.raises(WireError, match="events_limit"):
        split(b"[1,2,3]", Limits(events=2))


_leaf = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
_json = (
    _leaf | st.lists(_leaf, max_size=4) | st.dictionaries(st.text(max_size=8), st.lists(_leaf, max_size=3), max_size=4)
)
_data = st.fixed_dictionaries(
    {"type": st.sampled_from(["created", "stored", "removed", "updated"])},
    optional={
        "blocks": st.lists(
            st.fixed_dictionaries(
                {"block_hash": st.integers(), "tokens": st.lists(st.fixed_dictionaries({"token_id": st.integers()}))},
                optional={"cache_level": _json, "mm_keys": _json, "cache_salt": _json},
            ),
            max_size=4,
        ),
        "parent_hash": _json, "block_hashes": _json, "block_hash": _json, "cache_level": _json,
        "num_blocks_per_cache_level": _json,
    },
)  # fmt: skip


@given(st.lists(st.fixed_dictionaries({"event_id": _json, "data": _data | _json}, optional={"window_size": _json})))
def test_anything_is_an_event_or_a_named_error_and_leaves_the_index_sound(values: list[dict[str, Any]]) -> None:
    rank = Rank()
    for raw in split(json.dumps(values).encode()):
        try:
            part = read(raw)
        except WireError:
            continue
        for event in rank.translator.translate(part.event) if part.event is not None else ():
            rank.member.apply(event)
    assert rank.fleet.check() == []


def test_events_are_of_the_neutral_vocabulary() -> None:
    translator = Translator()
    event = from_object({"event_id": 0, "data": stored_blocks(block(1, [1, 2], mm_keys=[mm_key(IMAGE, 2)])),
                         "window_size": 64})  # fmt: skip
    (stored,) = translator.translate(event)
    assert isinstance(stored, Stored)
    assert stored.extra == (BlockExtra(media=((IMAGE, -2),)),)
    assert (stored.group, stored.spec_kind, stored.sliding_window, stored.medium) == (64, "full_attention", None, "GPU")
    (removal,) = translator.translate(from_object({"event_id": 1, "data": removed_blocks(1), "window_size": 64}))
    assert removal == Removed(hashes=(1,), medium="GPU", group=64)
