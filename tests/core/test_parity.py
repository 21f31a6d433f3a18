"""Parity: what an engine announces is found by the plan of the same prompt, through real bytes, in every scheme."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.engine import decode_payload
from protocols.keys import plan_keys
from protocols.media import MediaRun, Scheme, pads
from protocols.plan import exact_plan
from tests.kit.conformance import FACTORIES, AnyIndex

SIZE = 4


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[MediaRun]]:
    tokens: list[int] = []
    runs = []
    for _ in range(draw(st.integers(0, 3))):
        tokens += draw(st.lists(st.integers(0, 99), max_size=9))
        count = draw(st.integers(1, 11))
        identifier = draw(st.sampled_from(["a" * 64, "a" * 63 + "b", "uuid"]))
        runs.append(MediaRun(len(tokens), count, identifier, draw(st.integers(0, (1 << 64) - 1))))
        tokens += [9] * count
    return tokens + draw(st.lists(st.integers(0, 99), max_size=9)), runs


def extra_keys(start: int, runs: list[MediaRun], lora: str | None, salt: str | None) -> list[Any] | None:
    """As vLLM lists them: adapter, media that touch the block, salt of the first block."""
    names = [lora] if lora else []
    media = [[run.identifier, run.start - start] for run in runs if run.start < start + SIZE and run.end > start]
    entry = [*names, *media, *([salt] if salt and not start else [])]
    return entry or None


def announced(
    tokens: list[int],
    runs: list[MediaRun],
    scheme: Scheme,
    cut: int,
    *,
    eagle: bool,
    lora: str | None,
    salt: str | None,
) -> list[bytes]:
    """The prompt as one or two messages of an engine of this scheme; hashes are its own affair."""
    words = list(tokens)
    if scheme != "media_keys":
        for run in runs:
            words[run.start : run.end] = pads(run, scheme)
    blocks = (len(words) - eagle) // SIZE
    spans = [(0, min(cut, blocks)), (min(cut, blocks), blocks)]
    return [
        msgspec.msgpack.encode([1.0, [_store(words, runs, scheme, span, eagle=eagle, lora=lora, salt=salt)], None])
        for span in spans if span[0] < span[1]
    ]  # fmt: skip


def _store(
    words: list[int], runs: list[MediaRun], scheme: Scheme, span: tuple[int, int], *, eagle: bool, lora: str | None,
    salt: str | None,
) -> dict[str, Any]:  # fmt: skip
    first, last = span
    flat = words[first * SIZE : last * SIZE + eagle]
    event: dict[str, Any] = {
        "type": "BlockStored", "block_hashes": list(range(first + 1, last + 1)), "parent_block_hash": first or None,
        "token_ids": [list(pair) for pair in pairwise(flat)] if eagle else flat, "block_size": SIZE,
        "lora_name": lora, "medium": "GPU",
    }  # fmt: skip
    if scheme == "media_keys":
        event["extra_keys"] = [extra_keys(i * SIZE, runs, lora, salt) for i in range(first, last)]
    elif salt:
        event["cache_salt"] = salt
    return event


def held(index: AnyIndex, payloads: list[bytes], scheme: Scheme) -> int:
    rank = index.add_rank(scheme=scheme)
    for seq, payload in enumerate(payloads):
        for event in decode_payload(payload, seq, b"").events:
            index.apply(rank, event)
    return rank


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("scheme", ["media_keys", "pad30", "pad62"])
@given(
    prompt=prompts(), cut=st.integers(0, 6), eagle=st.booleans(), lora=st.sampled_from([None, "adapter"]),
    salt=st.sampled_from([None, "tenant", "adapter"]),
)  # fmt: skip
def test_an_announced_prompt_is_found_whole(
    name: str, scheme: Scheme, prompt: tuple[list[int], list[MediaRun]], cut: int, eagle: bool, lora: str | None,
    salt: str | None,
) -> None:  # fmt: skip
    tokens, runs = prompt
    eagle = eagle and scheme != "media_keys"  # pairs are SGLang's
    index = FACTORIES[name]()
    rank = held(index, announced(tokens, runs, scheme, cut, eagle=eagle, lora=lora, salt=salt), scheme)
    plan = exact_plan("m", tokens, media=runs, lora_name=lora, cache_salt=salt)
    keys = plan_keys(plan, SIZE, scheme, eagle=eagle)
    found = index.match(keys, [rank]).get(rank)
    assert (found.tiers[0] if found else 0) == len(keys) == max(0, len(tokens) - eagle) // SIZE
    assert index.check() == []
    stranger = exact_plan("m", tokens, media=runs, lora_name="other", cache_salt=salt)
    assert index.match(plan_keys(stranger, SIZE, scheme, eagle=eagle), [rank]) == {}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("scheme", ["media_keys", "pad30", "pad62"])
@given(prompt=prompts().filter(lambda prompt: prompt[1]), which=st.integers(0, 2), change=st.integers(1, 1 << 20))
def test_another_image_ends_the_match_where_it_begins(
    name: str, scheme: Scheme, prompt: tuple[list[int], list[MediaRun]], which: int, change: int
) -> None:
    tokens, runs = prompt
    at = min(which, len(runs) - 1)
    run = runs[at]
    other = MediaRun(run.start, run.count, f"{run.identifier}x", (run.hash64 or 0) ^ change)
    index = FACTORIES[name]()
    rank = held(index, announced(tokens, runs, scheme, 99, eagle=False, lora=None, salt=None), scheme)
    keys = plan_keys(exact_plan("m", tokens, media=[*runs[:at], other, *runs[at + 1 :]]), SIZE, scheme)
    found = index.match(keys, [rank]).get(rank)
    assert (found.tiers[0] if found else 0) == min(run.start // SIZE, len(keys))
