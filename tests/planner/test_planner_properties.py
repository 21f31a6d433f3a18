"""Whatever a request holds: a plan comes back, of one kind, and the request is as it was."""

from __future__ import annotations

import base64
import copy
from typing import Any

import pytest
from glm_fixtures import png
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import Reason
from planner.plan import Planned, Planner
from protocols.plan import ExactPlan, PrefixPlan, TextPlan, token_count, validate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
QUIET = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

LEAF = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.binary(max_size=12)
    | st.sampled_from(["text", "image", "image_url", "user", "tool", "<|image|>", "data:image/png;base64,AAAA", "\0"])
)  # fmt: skip
JSONISH = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = [
    "model", "messages", "prompt", "prompt_token_ids", "text", "input_ids", "image_data", "mm_hashes", "tools", "lora",
    "lora_path", "cache_salt", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs", "multi_modal_data",
    "multi_modal_uuids", "video_data", "continue_final_message", "add_generation_prompt", "reasoning_effort",
    "documents",
]  # fmt: skip
GARBAGE = st.dictionaries(st.sampled_from(NAMES), JSONISH, max_size=6) | JSONISH
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "image_url", "video", "input_audio", "x"])},
    optional={"text": JSONISH, "image_url": JSONISH, "image": JSONISH, "uuid": JSONISH},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]) | LEAF},
    optional={"content": JSONISH | st.lists(PART, max_size=4), "tool_calls": JSONISH, "tool_call_id": LEAF},
)
CHATTY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4)}, optional={"tools": JSONISH, "mm_hashes": JSONISH, "cache_salt": LEAF}
)


def _is_one_kind(planned: Planned) -> None:
    if isinstance(planned.plan, ExactPlan):
        validate(planned.plan)
        assert planned.reason is None
        assert len(planned.counts) == len(planned.sizes) == len(planned.plan.media)
        assert (planned.engine_extras is not None) == bool(planned.plan.media)
        return
    assert isinstance(planned.plan, PrefixPlan | TextPlan)
    assert planned.reason not in (None, Reason.INTERNAL), planned.detail
    assert (planned.counts, planned.sizes, planned.engine_extras) == ((), (), None)
    assert planned.plan.reason == planned.reason.value


@QUIET
@given(GARBAGE)
def test_garbage_becomes_a_plan(glm: Planner, body: Any) -> None:
    _is_one_kind(glm.prepare(body))


@QUIET
@given(CHATTY)
def test_chat_garbage_becomes_a_plan(glm: Planner, body: Any) -> None:
    before = copy.deepcopy(body)
    _is_one_kind(glm.prepare(body))
    assert repr(body) == repr(before)


GOOD = [f"data:image/png;base64,{base64.b64encode(png(side, 40)).decode()}" for side in (20, 300, 640)]
WORDS = st.text(st.characters(codec="ascii", exclude_characters="<|>\0"), max_size=30)
GOOD_PART = st.sampled_from(GOOD).map(lambda url: {"type": "image_url", "image_url": {"url": url}})
BAD_PART = st.sampled_from([
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "image_url", "image_url": None},
    {"type": "video_url", "video_url": {"url": "v"}}, {"type": "x"}, {"type": "text", "text": "<|begin_of_image|>"},
])  # fmt: skip
TEXT_PART = WORDS.map(lambda words: {"type": "text", "text": words})


@QUIET
@given(st.lists(st.lists(GOOD_PART | TEXT_PART, max_size=4), min_size=1, max_size=3))
def test_good_requests_are_exact(glm: Planner, contents: list[list[Any]]) -> None:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    planned = glm.prepare({"messages": messages})
    _is_one_kind(planned)
    images = sum(part["type"] == "image_url" for content in contents for part in content)
    assert isinstance(planned.plan, ExactPlan), planned.detail
    assert len(planned.counts) == images
    short = glm.prepare({"messages": messages, "mm_hashes": ["1"] * images}) if images else planned
    assert token_count(short.plan) == token_count(planned.plan)


@QUIET
@given(st.lists(GOOD_PART | TEXT_PART, max_size=4), BAD_PART, st.lists(GOOD_PART | TEXT_PART, max_size=4), GOOD_PART)
def test_one_bad_part_anywhere_leaves_a_prefix(
    glm: Planner, before: list[Any], bad: Any, after: list[Any], image: Any
) -> None:
    content = [*before, bad, *after, image]
    planned = glm.prepare({"messages": [{"role": "user", "content": content}]})
    _is_one_kind(planned)
    assert isinstance(planned.plan, PrefixPlan)
    first = next(i for i, part in enumerate(content) if part["type"] != "text" or part is bad)
    alone = glm.prepare({"messages": [{"role": "user", "content": content[:first]}], "add_generation_prompt": False})
    assert isinstance(alone.plan, ExactPlan)
    assert planned.plan.tokens == alone.plan.tokens
