"""Block keys: Dynamo's public vectors, and what must hold for any tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from protocols.keys import BlockContent, Keys, namespace_seed, plan_keys, token_keys
from protocols.media import PAD_BASE, MediaRun, Scheme, narrow_pad, pads, wide_pads
from protocols.plan import exact_plan, prefix_plan
from protocols.tokens import block_words, pack_tokens, unpack_tokens

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures/hash/dynamo.json").read_text())["cases"]
TEXT_VECTORS = [case for case in VECTORS if "media_hashes" not in case]
SCHEMES: list[Scheme] = ["media_keys", "pad30", "pad62", "dynamo"]

token = st.one_of(st.integers(0, 50), st.integers(0, (1 << 64) - 1))
narrow = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)
tokens_of_any_width = st.lists(token, max_size=40)
sizes = st.integers(1, 9)
hash64s = st.integers(0, (1 << 64) - 1)


@st.composite
def pictures(draw: st.DrawFn) -> tuple[list[int], list[MediaRun]]:
    """Tokens with one or more media runs among them."""
    tokens: list[int] = []
    runs = []
    for _ in range(draw(st.integers(1, 4))):
        tokens += draw(st.lists(st.integers(0, 99), max_size=6))
        count = draw(st.integers(1, 12))
        runs.append(MediaRun(len(tokens), count, draw(st.text(min_size=1, max_size=8)), draw(hash64s)))
        tokens += [9] * count
    return tokens + draw(st.lists(st.integers(0, 99), max_size=6)), runs


@pytest.mark.parametrize("case", TEXT_VECTORS, ids=lambda case: case["name"])
def test_keys_equal_the_public_vectors(case: dict[str, Any]) -> None:
    options = {name: case[name] for name in ("lora_name", "cache_salt", "eagle") if name in case}
    assert token_keys(case["tokens"], case["block_size"], **options) == case["keys"]


@given(tokens_of_any_width, sizes, st.booleans())
def test_keys_are_what_the_definition_says(tokens: list[int], size: int, eagle: bool) -> None:
    expected: list[int] = []
    for start in range(0, len(tokens) - size - eagle + 1, size):
        block = tokens[start : start + size + eagle]
        width = 8 if max(block) >= 1 << 32 else 4
        local = xxh3_64_intdigest(b"".join(t.to_bytes(width, "little") for t in block), 1337)
        chained = (expected[-1] if expected else 0).to_bytes(8, "little") + local.to_bytes(8, "little")
        expected.append(xxh3_64_intdigest(chained, 1337) if expected else local)
    assert token_keys(tokens, size, eagle=eagle) == expected


@given(tokens_of_any_width, sizes, st.booleans(), st.data())
def test_lazy_keys_equal_eager_ones_in_any_order(
    tokens: list[int], size: int, eagle: bool, data: st.DataObject
) -> None:
    plan = exact_plan("m", tokens)
    eager = token_keys(tokens, size, eagle=eagle)
    lazy = plan_keys(plan, size, None, eagle=eagle)
    assert len(lazy) == len(eager)
    for i in data.draw(st.lists(st.integers(0, len(eager) - 1), max_size=5)) if eager else []:
        assert lazy[i] == eager[i]
    assert list(lazy) == eager


def test_a_look_hashes_no_further() -> None:
    lazy = plan_keys(exact_plan("m", range(1000)), 10, None)
    assert lazy[3] == token_keys(list(range(40)), 10)[3]
    assert len(lazy._keys) == 4


@pytest.mark.parametrize("index", [-1, 2, 1 << 40])
def test_there_are_no_other_keys(index: int) -> None:
    with pytest.raises(IndexError):
        plan_keys(exact_plan("m", range(5)), 2, None)[index]


@given(narrow, sizes)
def test_a_longer_prompt_has_the_same_first_keys(tokens: list[int], size: int) -> None:
    keys = token_keys(tokens, size)
    assert token_keys([*tokens, *range(2 * size)], size)[: len(keys)] == keys


@given(narrow.filter(len), sizes, st.data())
def test_every_key_depends_on_every_token_before_it(tokens: list[int], size: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = token_keys(tokens, size), token_keys(changed, size)
    same = min(at // size, len(before))
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_adapter_and_salt_are_namespaces() -> None:
    names = [(None, None), ("a", None), (None, "a"), ("a", "a"), ("b", "a"), ("a", "b"), ("ab", None)]
    seeds = {namespace_seed(*name) for name in names}
    assert len(seeds) == len(names)
    assert namespace_seed("", "") == namespace_seed(None, None) == 1337


def test_a_block_size_is_positive() -> None:
    with pytest.raises(ValueError, match="block size 0"):
        BlockContent(b"", wide=False, block_size=0)


# --- packed tokens ---------------------------------------------------------------------------------------------------


@given(tokens_of_any_width)
def test_tokens_survive_packing(tokens: list[int]) -> None:
    assert list(unpack_tokens(pack_tokens(tokens, wide=True), wide=True)) == tokens


@given(narrow)
def test_narrow_tokens_are_little_endian_words(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(t.to_bytes(4, "little") for t in tokens)
    assert list(unpack_tokens(packed, wide=False)) == tokens
    assert block_words(tokens) == packed


def test_one_wide_token_makes_its_block_wide_and_no_other() -> None:
    assert len(block_words([1, 1 << 32])) == 16
    assert token_keys([1, 2, 1 << 32, 4], 2)[0] == token_keys([1, 2], 2)[0]


def test_a_token_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([1 << 32])


# --- media -----------------------------------------------------------------------------------------------------------


@given(pictures(), sizes, st.booleans(), st.sampled_from(["pad30", "pad62", "dynamo"]))
def test_pads_are_tokens(picture: tuple[list[int], list[MediaRun]], size: int, eagle: bool, scheme: Scheme) -> None:
    tokens, runs = picture
    padded = list(tokens)
    for run in runs:
        padded[run.start : run.end] = pads(run, scheme)
    keys = plan_keys(exact_plan("m", tokens, media=runs), size, scheme, eagle=eagle)
    assert list(keys) == token_keys(padded, size, eagle=eagle)


@given(pictures(), sizes)
def test_media_keys_are_what_the_definition_says(picture: tuple[list[int], list[MediaRun]], size: int) -> None:
    tokens, runs = picture
    expected: list[int] = []
    for start in range(0, len(tokens) - size + 1, size):
        content = b"".join(t.to_bytes(4, "little") for t in tokens[start : start + size])
        for run in runs:
            if run.start < start + size and run.end > start:
                content += xxh3_64_intdigest((run.identifier or "").encode(), 0).to_bytes(8, "little")
                content += (run.start - start).to_bytes(8, "little", signed=True)
        local = xxh3_64_intdigest(content, 1337)
        chained = (expected[-1] if expected else 0).to_bytes(8, "little") + local.to_bytes(8, "little")
        expected.append(xxh3_64_intdigest(chained, 1337) if expected else local)
    assert list(plan_keys(exact_plan("m", tokens, media=runs), size, "media_keys")) == expected
    assert token_keys(tokens, size, media=runs) == expected


@given(pictures(), sizes, st.sampled_from(SCHEMES))
def test_text_before_the_first_item_has_the_same_keys_in_every_scheme(
    picture: tuple[list[int], list[MediaRun]], size: int, scheme: Scheme
) -> None:
    tokens, runs = picture
    keys = list(plan_keys(exact_plan("m", tokens, media=runs), size, scheme))
    text = list(plan_keys(exact_plan("m", tokens, media=runs), size, None))
    assert text == token_keys(tokens[: runs[0].start], size)
    assert keys[: len(text)] == text


@given(pictures(), sizes, st.booleans())
def test_an_item_without_identity_ends_what_can_be_keyed(
    picture: tuple[list[int], list[MediaRun]], size: int, eagle: bool
) -> None:
    tokens, runs = picture
    nameless = [*runs[:-1], MediaRun(runs[-1].start, runs[-1].count)]
    shorter = exact_plan("m", tokens[: runs[-1].start], media=runs[:-1])
    for scheme in SCHEMES:
        keys = plan_keys(exact_plan("m", tokens, media=nameless), size, scheme, eagle=eagle)
        assert list(keys) == list(plan_keys(shorter, size, scheme, eagle=eagle))


@given(narrow, sizes, st.sampled_from([*SCHEMES, None]))
def test_text_has_the_same_keys_in_every_scheme(tokens: list[int], size: int, scheme: Scheme | None) -> None:
    assert list(plan_keys(exact_plan("m", tokens), size, scheme)) == token_keys(tokens, size)
    assert list(plan_keys(prefix_plan("m", tokens, "why"), size, scheme)) == token_keys(tokens, size)


def image_key(identifier: str) -> int:
    return plan_keys(exact_plan("m", [9] * 4, media=[MediaRun(0, 4, identifier)]), 4, "media_keys")[0]


@given(st.text(max_size=70), st.text(max_size=70))
def test_different_identifiers_never_share_a_key(a: str, b: str) -> None:
    assert (image_key(a) == image_key(b)) == (a == b)


def test_identifiers_that_share_any_prefix_are_told_apart() -> None:
    names = {"f" * n for n in range(1, 130)} | {"f" * n + "e" for n in range(129)}
    assert len({image_key(name) for name in names}) == len(names)


def test_where_an_item_lies_counts() -> None:
    keys = [
        plan_keys(exact_plan("m", [9] * 8, media=[MediaRun(start, 4, "a")]), 8, "media_keys")[0] for start in range(5)
    ]
    assert len(set(keys)) == 5


def test_the_order_of_items_counts() -> None:
    ab, ba = (
        plan_keys(exact_plan("m", [9] * 4, media=[MediaRun(0, 2, x), MediaRun(2, 2, y)]), 4, "media_keys")[0]
        for x, y in ("ab", "ba")
    )
    assert ab != ba


def test_pads_of_each_release() -> None:
    hash64 = 0x0123456789ABCDEF
    assert narrow_pad(hash64) == PAD_BASE + (hash64 & (1 << 30) - 1)
    digest = hashlib.sha256(b"sglang-mm-wide-pad-v1" + hash64.to_bytes(8, "big")).digest()
    first = PAD_BASE + (int.from_bytes(digest[:8], "big") & (1 << 62) - 1)
    assert wide_pads(hash64)[0] == first
    assert pads(MediaRun(3, 6, hash64=hash64), "pad62") == [*wide_pads(hash64), *wide_pads(hash64)[:2]]
    assert pads(MediaRun(3, 3, hash64=hash64), "pad30") == [narrow_pad(hash64)] * 3


def test_pads_need_an_identity() -> None:
    with pytest.raises(ValueError, match="no hash64"):
        pads(MediaRun(0, 1, "a"), "pad30")


def test_keys_of_no_blocks() -> None:
    keys = plan_keys(exact_plan("m", []), 4, None)
    assert isinstance(keys, Keys)
    assert (len(keys), list(keys)) == (0, [])
