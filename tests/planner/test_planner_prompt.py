from __future__ import annotations

from typing import Any

import pytest
from glm_fixtures import MODELS, fixture_json

from planner.errors import BadRequest, PromptError, Reason
from planner.messages import plain, read_messages
from planner.prompt import Codec, common_prefix
from planner.request import read_prompt

CASES = fixture_json("chat_template_cases.json")
IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}


def _render(codec: Codec, messages: list[Any], **body: Any) -> Any:
    return codec.render(read_messages({"messages": messages, **body}))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_template_cases(codec: Codec, case: dict[str, Any]) -> None:
    rendered = _render(codec, case["messages"], chat_template_kwargs=case["kwargs"])
    assert rendered.text == case["rendered"]
    assert rendered.in_order is ("swap" not in case["name"])


def test_parts_are_found_in_the_text(codec: Codec) -> None:
    content = [{"type": "text", "text": "  see "}, IMAGE, {"type": "text", "text": "and"}, IMAGE]
    rendered = _render(codec, [{"role": "system", "content": "Be"}, {"role": "user", "content": content}])
    found = [(place.kind, place.message, rendered.text[place.char :][:8]) for place in rendered.places]
    assert found == [
        ("text", 0, "Be<|user"), ("text", 1, "see <|be"), ("image", 1, "<|begin_"), ("text", 1, "and<|beg"),
        ("image", 1, "<|begin_"),
    ]  # fmt: skip


def test_marks_in_the_text_itself_only_cost_the_places(codec: Codec) -> None:
    rendered = _render(codec, [{"role": "user", "content": [{"type": "text", "text": "\U000f0000"}, IMAGE]}])
    assert (rendered.places, rendered.in_order) == ((), None)
    assert "\U000f0000" in rendered.text


def test_tool_arguments_as_text_are_parsed_as_engines_do(codec: Codec) -> None:
    def call(arguments: object) -> list[Any]:
        function = {"name": "f", "arguments": arguments}
        return [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": function}],
            },
        ]

    as_text, as_object = _render(codec, call('{"k": [1]}')), _render(codec, call({"k": [1]}))
    assert as_text.text == as_object.text
    assert "<arg_key>k</arg_key><arg_value>[1]</arg_value>" in as_text.text
    with pytest.raises(PromptError) as caught:
        _render(codec, call("not json"))
    assert caught.value.reason is Reason.RENDER_FAILED


def test_template_options_come_from_the_body_and_its_template_arguments(codec: Codec) -> None:
    messages = [{"role": "user", "content": "q"}]
    assert "Effort: Low" in _render(codec, messages, reasoning_effort="low").text
    assert "Effort: High" in _render(codec, messages, chat_template_kwargs={"reasoning_effort": "high"}).text
    assert _render(codec, messages).text.endswith("<think>")
    assert not _render(codec, messages, add_generation_prompt=False).text.endswith("<think>")
    assert "<tools>" in _render(codec, messages, tools=[{"type": "function", "function": {"name": "f"}}]).text


def test_special_tokens_are_single(codec: Codec) -> None:
    for text, token in fixture_json("special_tokens.json").items():
        assert codec.encode(text) == [token]
    assert codec.encode("<|begin_of_image|><|image|><|end_of_image|>") == [154830, 154854, 154831]


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_dict", "conversation"])
def test_template_arguments_that_change_the_call(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_messages({"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": {name: 1}})
    assert caught.value.reason is Reason.PROMPT_ALTERED


def _codec_with(template: str) -> Codec:
    codec = Codec.load(MODELS / "tiny-glm5")
    codec._tokenizer.chat_template = template
    return codec


def test_a_template_that_prints_lists_gets_text() -> None:
    codec = _codec_with("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}")
    one = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert _render(codec, one).text == "user:hello\n"
    for content in ([*one[0]["content"], {"type": "text", "text": "b"}], [IMAGE]):
        with pytest.raises(PromptError) as caught:
            _render(codec, [{"role": "user", "content": content}])
        assert caught.value.reason is Reason.TEMPLATE_WITHOUT_PARTS


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("", Reason.NO_TEMPLATE),
        ("{{ raise_exception('no') }}", Reason.RENDER_FAILED),
        ("{% for m in messages %}{{ m.content | tojson", Reason.RENDER_FAILED),
        ("{{ messages.append(1) }}", Reason.RENDER_FAILED),
        ("{{ ''.__class__.__mro__ }}", Reason.RENDER_FAILED),
    ],
)
def test_templates_that_fail(template: str, reason: Reason) -> None:
    with pytest.raises(PromptError) as caught:
        _render(_codec_with(template), [{"role": "user", "content": "q"}])
    assert caught.value.reason is reason


def test_a_directory_without_a_tokenizer(tmp_path: Any) -> None:
    with pytest.raises(PromptError) as caught:
        Codec.load(tmp_path)
    assert caught.value.reason is Reason.NO_TOKENIZER


def test_plain_copies_and_refuses() -> None:
    value = {"a": [1, {"b": None}], "c": ("x", 1.5, True)}
    copy = plain(value)
    assert copy == {"a": [1, {"b": None}], "c": ["x", 1.5, True]}
    assert copy["a"] is not value["a"]
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for bad in ({1: 2}, b"x", object(), deep):
        with pytest.raises(BadRequest):
            plain(bad)


@pytest.mark.parametrize(
    ("a", "b", "shared"), [([], [], 0), ([1], [2], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2)]
)
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(a, b) == shared


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, Reason.BAD_REQUEST),
        ({"prompt": None}, Reason.BAD_REQUEST),
        ({"prompt": 7}, Reason.BAD_REQUEST),
        ({"prompt": {"a": 1}}, Reason.BAD_REQUEST),
        ({"prompt": ["a", "b"]}, Reason.SEVERAL_PROMPTS),
        ({"prompt": [[1], [2]]}, Reason.SEVERAL_PROMPTS),
        ({"prompt": [[["a"]]]}, Reason.SEVERAL_PROMPTS),
        ({"text": ["a", "b"]}, Reason.SEVERAL_PROMPTS),
        ({"prompt": [1, True]}, Reason.BAD_TOKEN_IDS),
        ({"prompt": [1, -1]}, Reason.BAD_TOKEN_IDS),
        ({"prompt": [1, 2.0]}, Reason.BAD_TOKEN_IDS),
        ({"prompt_token_ids": [1 << 32]}, Reason.BAD_TOKEN_IDS),
        ({"input_ids": [None]}, Reason.BAD_TOKEN_IDS),
        ({"messages": []}, Reason.BAD_REQUEST),
        ({"messages": "hi"}, Reason.BAD_REQUEST),
        ({"messages": ["hi"]}, Reason.BAD_REQUEST),
        ({"messages": [{"content": "no role"}]}, Reason.BAD_REQUEST),
        ({"messages": [{"role": "user", "content": 3}]}, Reason.BAD_REQUEST),
        ({"messages": [{"role": "user", "content": [3]}]}, Reason.BAD_REQUEST),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, Reason.BAD_REQUEST),
        ({"messages": [{"role": "user", "content": "q"}], "tools": "f"}, Reason.BAD_REQUEST),
        ({"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": []}, Reason.BAD_REQUEST),
        ({"prompt": "x", "truncate_prompt_tokens": 5}, Reason.PROMPT_ALTERED),
        ({"prompt": "x", "prompt_embeds": "AAAA"}, Reason.PROMPT_ALTERED),
        ({"messages": [{"role": "user", "content": "q"}], "chat_template": "x"}, Reason.PROMPT_ALTERED),
    ],
)
def test_requests_without_a_single_readable_prompt(body: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(BadRequest) as caught:
        read_prompt(body)
    assert caught.value.reason is reason
