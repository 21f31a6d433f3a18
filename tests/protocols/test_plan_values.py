"""Plans: what makes one, and what is said of values that do not."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.errors import PlanError
from protocols.media import MediaRun
from protocols.plan import (
    MAX_IDENTIFIER,
    ExactPlan,
    PrefixPlan,
    Segment,
    TextPlan,
    basis_of,
    exact_plan,
    prefix_plan,
    token_count,
    validate,
)
from protocols.tokens import pack_tokens


def test_a_plan_from_token_ids() -> None:
    plan = exact_plan("m", iter([1, 2, 3]), media=[MediaRun(1, 2, "a")], segments=[Segment(0, 0, "text")])
    assert (plan.tokens, plan.wide, token_count(plan), basis_of(plan)) == (pack_tokens([1, 2, 3]), False, 3, "exact")


def test_one_wide_token_makes_the_plan_wide() -> None:
    plan = exact_plan("m", [1, 1 << 62])
    assert (plan.wide, len(plan.tokens), token_count(plan)) == (True, 16, 2)


def test_empty_names_are_no_names() -> None:
    plan = exact_plan("m", [], lora_name="", cache_salt="")
    assert (plan.lora_name, plan.cache_salt, token_count(plan)) == (None, None, 0)


def test_each_kind_knows_its_basis() -> None:
    prefix = prefix_plan("m", [1, 2], "accounting", detail="why", lora_name="a")
    text = TextPlan(model="m", text="hello", reason="no_tokenizer")
    assert (basis_of(prefix), token_count(prefix)) == ("prefix", 2)
    assert (basis_of(text), token_count(text)) == ("text", 0)
    validate(text)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, -1], "token id -1 outside"),
        ([1 << 64], "outside 0..2"),
        ([1, "2"], "'2' is str: expected an integer"),
        ([1.0], "is float"),
        ([True], "is bool"),
        ([None], "is NoneType"),
    ],
)
def test_token_ids_are_named_when_wrong(tokens: list[Any], said: str) -> None:
    for make in (lambda: exact_plan("m", tokens), lambda: prefix_plan("m", tokens, "why")):
        with pytest.raises(PlanError, match=said):
            make()


@pytest.mark.parametrize(
    ("media", "said"),
    [
        ([MediaRun(0, 0)], "run 0 has count 0"),
        ([MediaRun(0, -3)], "has count -3"),
        ([MediaRun(-1, 2)], r"covers \[-1, 1\)"),
        ([MediaRun(7, 2)], r"covers \[7, 9\): expected it within \[0, 8\)"),
        ([MediaRun(0, 4), MediaRun(3, 1)], r"run 1 covers \[3, 4\): expected it within \[4, 8\)"),
        ([MediaRun(4, 1), MediaRun(0, 1)], "in prompt order"),
        ([MediaRun(0, 1, hash64=-1)], "hash64 -1"),
        ([MediaRun(0, 1, hash64=1 << 64)], "expected 0..2"),
        ([MediaRun(0, 1, "x" * (MAX_IDENTIFIER + 1))], "4097 characters, at most 4096"),
        ([MediaRun(0, 1, "\ud800")], "identifier is not valid Unicode"),
    ],
)
def test_media_runs_are_named_when_wrong(media: list[MediaRun], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        exact_plan("m", range(8), media=media)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ExactPlan(model="", tokens=b""), "model is empty"),
        (TextPlan(model="", text="", reason=""), "model is empty"),
        (ExactPlan(model="m", tokens=b"\0" * 5), "5 bytes, not a multiple of 4"),
        (PrefixPlan(model="m", tokens=b"\0" * 12, reason="", wide=True), "pack them as u64 LE"),
        (ExactPlan(model="m", tokens=b"\0" * 8, wide=True, media=(MediaRun(0, 2),)), "covers"),
        (ExactPlan(model="m", tokens=b"", lora_name="\ud800"), "lora_name is not valid Unicode at position 0"),
        (PrefixPlan(model="m", tokens=b"", reason="", cache_salt="a\udfff"), "cache_salt .* at position 1"),
        (TextPlan(model="m", text="ab\ud800", reason=""), "text is not valid Unicode at position 2"),
    ],
)
def test_plans_from_elsewhere_are_checked(plan: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        validate(plan)
