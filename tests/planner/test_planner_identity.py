from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from glm_fixtures import fixture_json

from planner import identity
from planner.errors import ImageError, Reason
from planner.identity import EngineExtras, Identity, from_caller, from_hash
from planner.layout import Placeholder, expand, validate
from protocols.keys import namespace_seed, plan_keys
from protocols.media import MediaRun, narrow_pad, pads, wide_pads
from protocols.plan import ExactPlan, exact_plan
from protocols.tokens import block_words

VECTORS = fixture_json("hash_vectors.json")
EXAMPLE = VECTORS["example"]
IDS = Placeholder(image=154854, image_start=154830, image_end=154831)


@pytest.mark.parametrize("vector", VECTORS["pads"])
def test_identifiers_and_pads(vector: dict[str, Any]) -> None:
    value = int(vector["mm_hash_hex"], 16)
    assert value == vector["mm_hash"]
    assert from_hash(value) == Identity(vector["vllm_uuid64"], value)
    assert narrow_pad(value) == vector["narrow"]
    assert list(wide_pads(value)) == vector["wide"]


@pytest.mark.parametrize("vector", VECTORS["image_identity"])
def test_content_identities(vector: dict[str, Any]) -> None:
    if "url" in vector:
        found = identity.hash_url(vector["url"])
    else:
        found = identity.hash_pixels(vector["shape"], bytes.fromhex(vector["rgb_hex"]))
    assert f"{found:016x}" == vector["mm_hash_hex"]


def test_namespace_seeds() -> None:
    seeds = VECTORS["seed"]
    assert namespace_seed(None, None) == seeds["none"]
    assert namespace_seed("my-lora", None) == seeds["lora 'my-lora'"]
    assert namespace_seed(None, "ns") == seeds["salt 'ns'"]


@pytest.fixture(scope="module")
def example() -> ExactPlan:
    """The vectors' two-image prompt, expanded by the planner's own layout."""
    runs = EXAMPLE["runs"]
    validate(EXAMPLE["prompt_ids"], IDS, len(runs))
    expansion = expand(EXAMPLE["prompt_ids"], IDS, [count for _, count, _ in runs])
    assert expansion.tokens == EXAMPLE["expanded_ids"]
    assert list(expansion.starts) == [start for start, _, _ in runs]
    media = []
    for start, count, digits in runs:
        named = from_hash(int(digits, 16))
        media.append(MediaRun(start, count, named.identifier, named.hash64))
    return exact_plan("m", expansion.tokens, media=media)


@pytest.mark.parametrize(("scheme", "field"), [("pad30", "routing_narrow"), ("pad62", "routing_wide")])
def test_the_tokens_an_sglang_cache_holds(example: ExactPlan, scheme: Any, field: str) -> None:
    tokens = list(EXAMPLE["expanded_ids"])
    for run in example.media:
        tokens[run.start : run.end] = pads(run, scheme)
    assert tokens == EXAMPLE[field]
    pages = EXAMPLE[field.replace("routing", "sglang_page_hashes")]
    assert _sglang_pages(tokens, 16) == pages


def _sglang_pages(tokens: list[int], size: int) -> list[dict[str, Any]]:
    """SGLang's own page hash: what its events call these blocks."""
    digest, pages = b"", []
    for start in range(0, len(tokens) // size * size, size):
        words = block_words(tokens[start : start + size])
        wide = b"\xff" if len(words) == 8 * size else b""
        digest = hashlib.sha256(digest + wide + words).digest()
        pages.append({"hex": digest.hex(), "event_int64": int.from_bytes(digest[:8], "big", signed=True)})
    return pages


def test_router_keys_equal_dynamos(example: ExactPlan) -> None:
    assert list(plan_keys(example, 16, "dynamo")) == EXAMPLE["dynamo_hashes_narrow"]["sequence"]
    assert list(plan_keys(example, 16, "pad30")) == EXAMPLE["dynamo_hashes_narrow"]["sequence"]


def test_the_runs_are_vllms_extra_keys(example: ExactPlan) -> None:
    for block in EXAMPLE["vllm_blocks"]:
        start = block["start"]
        touching = [run for run in example.media if run.start < start + 16 and run.end > start]
        assert [[run.identifier, run.start - start] for run in touching] == block["extra_keys"]


def test_one_plan_has_keys_in_every_scheme(example: ExactPlan) -> None:
    keys = {scheme: list(plan_keys(example, 4, scheme)) for scheme in ("media_keys", "pad30", "pad62")}
    assert len({tuple(found[:3]) for found in keys.values()}) == 1, "text blocks are the same in every scheme"
    assert len({found[3] for found in keys.values()}) == 3


@pytest.mark.parametrize(
    ("uuid", "hash64", "expected"),
    [
        (None, None, None),
        (None, 0xABC, Identity("0000000000000abc" + "0" * 48, 0xABC)),
        ("ab" * 32, None, Identity("ab" * 32, 0xABABABABABABABAB)),
        ("ab" * 32, 5, Identity("ab" * 32, 5)),
        ("my-uuid-1", 7, Identity("my-uuid-1", 7)),
    ],
)
def test_the_callers_identity_wins(uuid: str | None, hash64: int | None, expected: Identity | None) -> None:
    assert from_caller(uuid, hash64) == expected


def test_a_free_uuid_still_names_one_content_in_pads() -> None:
    first, again, other = (from_caller(uuid, None) for uuid in ("u1", "u1", "u2"))
    assert first == again
    assert first is not None
    assert other is not None
    assert first.hash64 != other.hash64


@pytest.mark.parametrize("value", ["", 3, True, ["x"], "x" * 4097, "\ud800"])
def test_a_uuid_that_no_engine_takes(value: object) -> None:
    with pytest.raises(ImageError) as caught:
        identity.read_uuid(value)
    assert caught.value.reason is Reason.IDENTITY_INVALID


@pytest.mark.parametrize(("value", "expected"), [("00000000deadbeef", 0xDEADBEEF), ("f" * 64, (1 << 64) - 1)])
def test_mm_hashes_are_read_as_sglang_reads_them(value: str, expected: int) -> None:
    assert identity.read_mm_hash(value) == expected


@pytest.mark.parametrize("value", ["", "xyz", 12, None, True, b"ab"])
def test_an_mm_hash_that_sglang_would_ignore(value: object) -> None:
    with pytest.raises(ImageError) as caught:
        identity.read_mm_hash(value)
    assert caught.value.reason is Reason.IDENTITY_INVALID


def test_extras_are_put_beside_or_into_a_copy() -> None:
    extras = EngineExtras(("u1", "u2"), ("01", "02"))
    image = {"type": "image_url", "image_url": {"url": "x"}}
    request = {"messages": [{"role": "system", "content": "s"},
                            {"role": "user", "content": [image, {"type": "text", "text": "t"}, image]}]}  # fmt: skip
    before = json.dumps(request)
    named = extras.vllm_chat(request)
    assert json.dumps(request) == before
    assert [part.get("uuid") for part in named["messages"][1]["content"]] == ["u1", None, "u2"]
    assert extras.sglang() == {"mm_hashes": ["01", "02"]}
    assert extras.vllm() == {"multi_modal_uuids": {"image": ["u1", "u2"]}}
