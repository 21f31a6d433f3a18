"""Plans as a whole: exact or not at all, whatever stands where in the request."""

from __future__ import annotations

import base64
import copy
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from glm_fixtures import GLM, MODELS, png
from PIL import Image as Pillow

from planner.checkpoint import Checkpoint
from planner.errors import CheckpointError, Reason
from planner.identity import hash_bytes
from planner.images import ImagePolicy
from planner.plan import Planned, Planner
from planner.prompt import Codec
from protocols.keys import plan_keys
from protocols.plan import ExactPlan, PrefixPlan, TextPlan, token_count
from protocols.tokens import unpack_tokens

BEGIN, IMAGE, END = 154830, 154854, 154831
ONE, TWO = png(224, 224, (1, 2, 3)), png(128, 64, (4, 5, 6))


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(source: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}, **more}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def chat(*content: Any, **body: Any) -> dict[str, Any]:
    return {"model": "glm", "messages": [{"role": "user", "content": list(content)}], **body}


def tokens_of(planned: Planned) -> list[int]:
    assert not isinstance(planned.plan, TextPlan)
    return list(unpack_tokens(planned.plan.tokens, wide=planned.plan.wide))


def exact(planned: Planned) -> ExactPlan:
    assert isinstance(planned.plan, ExactPlan), (planned.reason, planned.detail)
    assert planned.reason is None
    return planned.plan


def nothing_exact_is_left(planned: Planned, reason: Reason) -> None:
    assert planned.reason is reason, planned.detail
    assert isinstance(planned.plan, PrefixPlan | TextPlan)
    assert planned.plan.reason == reason.value
    assert planned.plan.detail
    assert (planned.counts, planned.sizes, planned.engine_extras) == ((), (), None)


# --- exact -----------------------------------------------------------------------------------------------------------


def test_two_images_are_planned_exactly(glm: Planner, codec: Codec) -> None:
    planned = glm.prepare(chat(text("first="), part(uri(ONE)), text(";second="), part(uri(TWO)), text("?")))
    plan = exact(planned)
    head = "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>first="
    expected = [*codec.encode(head), BEGIN, *[IMAGE] * 64, END, *codec.encode(";second="), BEGIN, *[IMAGE] * 18, END]
    assert tokens_of(planned) == [*expected, *codec.encode("?<|assistant|><think>")]
    assert planned.counts == (64, 18)
    assert planned.sizes == ((224, 224), (128, 64))
    first = len(codec.encode(head)) + 1
    assert [(run.start, run.count) for run in plan.media] == [(first, 64), (first + 74, 18)]
    assert [(s.start, s.message, s.kind) for s in planned.segments] == [
        (first - 7, 0, "text"), (first, 0, "image"), (first + 65, 0, "text"), (first + 74, 0, "image"),
        (first + 93, 0, "text"),
    ]  # fmt: skip


def test_the_engine_is_told_who_the_images_are(glm: Planner) -> None:
    planned = glm.prepare(chat(part(ONE), part(TWO)))
    extras = planned.engine_extras
    assert extras is not None
    hashes = [hash_bytes(ONE), hash_bytes(TWO)]
    assert extras.mm_hashes == tuple(f"{value:016x}" for value in hashes)
    assert extras.uuids == tuple(f"{value:016x}" + "0" * 48 for value in hashes)
    assert [(run.identifier, run.hash64) for run in exact(planned).media] == list(
        zip(extras.uuids, hashes, strict=True)
    )


def test_callers_identities_win(glm: Planner) -> None:
    body = chat(part(ONE, uuid="mine"), part(TWO), mm_hashes=["00000000deadbeef", "7"])
    runs = exact(glm.prepare(body)).media
    assert [(run.identifier, run.hash64) for run in runs] == [("mine", 0xDEADBEEF), ("7".zfill(16) + "0" * 48, 7)]
    same = [exact(glm.prepare(chat(part(source, uuid="mine")))).media for source in (ONE, png(224, 224, (9, 9, 9)))]
    assert same[0] == same[1]


def test_one_picture_in_another_place_is_the_same_picture(glm: Planner) -> None:
    first = exact(glm.prepare(chat(part(uri(ONE)), part(uri(TWO))))).media
    second = exact(glm.prepare(chat(part(uri(TWO)), part(uri(ONE))))).media
    assert {run.identifier for run in first} == {run.identifier for run in second}
    assert first[0].identifier == second[1].identifier


def test_text_is_planned_exactly_whatever_it_says(glm: Planner, codec: Codec) -> None:
    body = {"messages": [{"role": "user", "content": "what is <|image|> and \0?"}]}
    planned = glm.prepare(body)
    assert tokens_of(planned)[-len(codec.encode("<|assistant|><think>")) :] == codec.encode("<|assistant|><think>")
    assert exact(planned).media == ()
    assert planned.engine_extras is None
    assert exact(planned).model == "glm"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_token_ids": [1, BEGIN, IMAGE, END, 2], "multi_modal_data": {"image": [ONE]}},
        {"prompt_token_ids": [1, BEGIN, IMAGE, END, 2], "multi_modal_data": {"image": ONE}},
        {"prompt": [1, BEGIN, IMAGE, END, 2], "multi_modal_data": {"image": [uri(ONE)]}},
        {"prompt": [[1, BEGIN, IMAGE, END, 2]], "multi_modal_data": {"image": [uri(ONE)]}},
        {"input_ids": [1, BEGIN, IMAGE, END, 2], "image_data": [uri(ONE)]},
        {"input_ids": [1, BEGIN, IMAGE, END, 2], "image_data": base64.b64encode(ONE).decode()},
        {"input_ids": [1, BEGIN, IMAGE, END, 2], "image_data": {"url": uri(ONE)}},
        {"input_ids": [1, BEGIN, IMAGE, END, 2], "image_data": [Pillow.open(io.BytesIO(ONE))]},
    ],
)
def test_callers_token_ids(glm: Planner, body: dict[str, Any]) -> None:
    planned = glm.prepare(body)
    assert tokens_of(planned) == [1, BEGIN, *[IMAGE] * 64, END, 2]
    assert [(run.start, run.count) for run in exact(planned).media] == [(2, 64)]


def test_text_prompts(glm: Planner, codec: Codec) -> None:
    body = {"text": "a<|begin_of_image|><|image|><|end_of_image|>b", "image_data": [TWO], "mm_hashes": ["ff"]}
    planned = glm.prepare(body)
    assert tokens_of(planned) == [*codec.encode("a"), BEGIN, *[IMAGE] * 18, END, *codec.encode("b")]
    assert exact(planned).media[0].hash64 == 255
    assert tokens_of(glm.prepare({"prompt": "hello"})) == codec.encode("hello")
    assert tokens_of(glm.prepare({"prompt": ["hello"]})) == codec.encode("hello")


def test_images_with_vllm_uuids_beside_them(glm: Planner) -> None:
    body = {"prompt_token_ids": [BEGIN, IMAGE, END], "multi_modal_data": {"image": [ONE]}}
    named = body | {"multi_modal_uuids": {"image": ["u"]}}
    assert exact(glm.prepare(named)).media[0].identifier == "u"
    nothing_exact_is_left(glm.prepare(body | {"multi_modal_uuids": {"image": ["u", "v"]}}), Reason.IDENTITY_COUNT)


@pytest.mark.parametrize("more", [{"mm_hashes": ["a"]}, {"mm_processor_kwargs": {"x": 1}}, {"multi_modal_data": {}}])
def test_what_concerns_images_does_not_concern_text(glm: Planner, more: dict[str, Any]) -> None:
    exact(glm.prepare({"prompt": "x", **more}))


def test_uuids_of_images_that_are_not_there(glm: Planner) -> None:
    body = {"prompt_token_ids": [1, BEGIN, IMAGE, END], "multi_modal_uuids": {"image": ["cached"]}}
    planned = glm.prepare(body)
    nothing_exact_is_left(planned, Reason.IDENTITY_COUNT)
    assert tokens_of(planned) == [1]


def test_head_fields(glm: Planner) -> None:
    plan = exact(glm.prepare({"prompt": "x", "model": "other", "lora_path": "ad", "cache_salt": "s"}))
    assert (plan.model, plan.lora_name, plan.cache_salt) == ("other", "ad", "s")
    assert exact(glm.prepare({"prompt": "x", "lora": "ad"})).lora_name == "ad"
    adapters = Planner.from_pretrained(GLM, model="base", loras=["ad"])
    plan = exact(adapters.prepare({"prompt": "x", "model": "ad"}))
    assert (plan.model, plan.lora_name) == ("base", "ad")


@pytest.mark.parametrize(
    "body", [None, 3, "x", [], {"prompt": "x", "cache_salt": 3}, {"prompt": "x", "model": ["m"]},
             {"prompt": "x", "lora_path": ["a"]}, {"prompt": "x", "cache_salt": "\ud800"}],
)  # fmt: skip
def test_without_a_head_nothing_may_be_scored(glm: Planner, body: object) -> None:
    planned = glm.prepare(body)
    nothing_exact_is_left(planned, Reason.BAD_REQUEST)
    assert isinstance(planned.plan, TextPlan)
    assert planned.plan.text == ""


# --- all or nothing --------------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[dict[str, Any], Reason]] = {
    "not an image": (part(uri(b"nothing")), Reason.IMAGE_FORMAT),
    "cut short": (part(uri(ONE[: len(ONE) // 2])), Reason.IMAGE_TRUNCATED),
    "not base64": (part("data:image/png;base64,?"), Reason.IMAGE_ENCODING),
    "missing": (part(None), Reason.IMAGE_MISSING),
    "only named": ({"type": "image_url", "image_url": None, "uuid": "known"}, Reason.IMAGE_MISSING),
    "no file": (part("/nowhere.png"), Reason.IMAGE_FILE),
    "remote": (part("https://example.com/a.png"), Reason.REMOTE_REFUSED),
    "bad uuid": (part(uri(ONE), uuid=7), Reason.IDENTITY_INVALID),
    "own pixels": (part(uri(ONE), max_pixels=1000), Reason.REQUEST_OVERRIDE),
    "own pixels inside": (
        {"type": "image_url", "image_url": {"url": uri(ONE), "min_pixels": 9}},
        Reason.REQUEST_OVERRIDE,
    ),
    "video": ({"type": "video_url", "video_url": {"url": "v"}}, Reason.VIDEO),
    "audio": ({"type": "input_audio", "input_audio": {}}, Reason.AUDIO),
    "unknown": ({"type": "input_image", "image_url": uri(ONE)}, Reason.UNKNOWN_PART),
    "typed placeholder": (text("<|image|>"), Reason.PLACEHOLDER_COUNT),
    "typed delimiter": (text("<|begin_of_image|>"), Reason.DELIMITER_STRAY),
    "typed triple": (text("<|begin_of_image|><|image|><|end_of_image|>"), Reason.PLACEHOLDER_COUNT),
    "typed video": (text("<|video|>"), Reason.VIDEO_TOKENS),
    "NUL": (text("a\0b"), Reason.NUL_IN_PROMPT),
}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("name", BROKEN)
def test_one_failure_before_or_after_good_images_leaves_nothing(glm: Planner, codec: Codec, name: str, at: int) -> None:
    content = [text("look: "), part(uri(ONE)), part(uri(TWO))]
    bad, reason = BROKEN[name]
    content.insert(1 + at, bad)
    planned = glm.prepare(chat(*content))
    nothing_exact_is_left(planned, reason)
    assert isinstance(planned.plan, PrefixPlan)
    head = codec.encode("[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>look: ")
    if at == 0 and name == "NUL":
        head += codec.encode("a")
    assert tokens_of(planned) == head


def test_a_prefix_ends_where_a_part_of_unknown_treatment_stood(glm: Planner, codec: Codec) -> None:
    unknown = {"type": "file", "file": {}}
    planned = glm.prepare(chat(text("before "), unknown, text("after"), part(uri(ONE))))
    nothing_exact_is_left(planned, Reason.UNKNOWN_PART)
    head = codec.encode("[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>before ")
    assert tokens_of(planned) == head
    assert [segment.kind for segment in planned.segments] == ["text"]


def test_a_prefix_shares_its_blocks_with_the_exact_plan(glm: Planner) -> None:
    content = [text("a long beginning that fills some blocks"), part(uri(ONE))]
    good, bad = glm.prepare(chat(*content)), glm.prepare(chat(*content, part(None)))
    assert isinstance(bad.plan, PrefixPlan)
    prefix = list(plan_keys(bad.plan, 16, "media_keys"))
    assert len(prefix) == token_count(bad.plan) // 16 > 2
    assert list(plan_keys(exact(good), 16, "media_keys"))[: len(prefix)] == prefix


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs", "mm_process_config", "images_kwargs"])
def test_a_requests_overrides(glm: Planner, name: str) -> None:
    nothing_exact_is_left(glm.prepare(chat(part(uri(ONE)), **{name: {"max_image_tokens": 9}})), Reason.REQUEST_OVERRIDE)
    exact(glm.prepare(chat(part(uri(ONE)), **{name: {}})))
    exact(glm.prepare(chat(text("no image"), **{name: {"max_image_tokens": 9}})))


@pytest.mark.parametrize(
    ("hashes", "reason"),
    [
        ([], Reason.IDENTITY_COUNT), (["1"], Reason.IDENTITY_COUNT), (["1", "2", "3"], Reason.IDENTITY_COUNT),
        ({"a": 1}, Reason.IDENTITY_COUNT), (["1", "xyz"], Reason.IDENTITY_INVALID),
        (["1", None], Reason.IDENTITY_INVALID), ([1, 2], Reason.IDENTITY_INVALID),
    ],
)  # fmt: skip
def test_hashes_that_an_engine_would_ignore(glm: Planner, hashes: object, reason: Reason) -> None:
    nothing_exact_is_left(glm.prepare(chat(part(uri(ONE)), part(uri(TWO)), mm_hashes=hashes)), reason)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"video_data": ["v"]}, Reason.VIDEO),
        ({"audio_data": ["a"]}, Reason.AUDIO),
        ({"prompt": "x", "multi_modal_data": {"video": [1]}}, Reason.VIDEO),
        ({"prompt": "x", "multi_modal_data": {"audio": [1]}}, Reason.AUDIO),
        ({"prompt": "x", "multi_modal_data": {"vision_chunk": [1]}}, Reason.UNKNOWN_PART),
        ({"prompt": "x", "multi_modal_data": [1]}, Reason.BAD_REQUEST),
    ],
)
def test_other_media_beside_the_prompt(glm: Planner, body: dict[str, Any], reason: Reason) -> None:
    nothing_exact_is_left(glm.prepare({"text": "x"} | body if "prompt" not in body else body), reason)


def test_images_without_a_placeholder_in_the_ids(glm: Planner) -> None:
    planned = glm.prepare({"input_ids": [1, 2, 3], "image_data": [ONE]})
    nothing_exact_is_left(planned, Reason.PLACEHOLDER_MISSING)


def test_ids_that_are_already_expanded(glm: Planner) -> None:
    planned = glm.prepare({"input_ids": [1, BEGIN, *[IMAGE] * 64, END], "image_data": [ONE]})
    nothing_exact_is_left(planned, Reason.PLACEHOLDER_ADJACENT)
    assert tokens_of(planned) == [1]


def _tool_turn(first: str, second: str) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": {}}} for name in "ab"]
    results = [
        {"role": "tool", "tool_call_id": name, "content": [text(name), part(uri(data))]}
        for name, data in ((first, ONE), (second, TWO))
    ]
    return {"messages": [{"role": "user", "content": "w"}, {"role": "assistant", "content": "", "tool_calls": calls},
                         *results]}  # fmt: skip


def test_tool_results_that_the_template_reorders(glm: Planner) -> None:
    assert glm.prepare(_tool_turn("a", "b")).counts == (64, 18)
    nothing_exact_is_left(glm.prepare(_tool_turn("b", "a")), Reason.ORDER_CHANGED)


def test_an_order_that_cannot_be_shown(glm: Planner) -> None:
    body = _tool_turn("a", "b")
    body["messages"][0]["content"] = "\U000f0000"
    nothing_exact_is_left(glm.prepare(body), Reason.ORDER_UNKNOWN)
    exact(glm.prepare({"messages": [{"role": "user", "content": ["\U000f0000", part(ONE), part(TWO)]}]}))


def test_limits() -> None:
    few = Planner.from_pretrained(GLM, policy=ImagePolicy(max_images=1))
    exact(few.prepare(chat(part(ONE))))
    nothing_exact_is_left(few.prepare(chat(part(ONE), part(TWO))), Reason.TOO_MANY_IMAGES)
    short = Planner.from_pretrained(GLM, context_length=110)
    nothing_exact_is_left(short.prepare(chat(part(ONE), text("x" * 50))), Reason.PROMPT_TOO_LONG)


# --- orientation -----------------------------------------------------------------------------------------------------


def _photo(width: int, height: int, kind: str) -> bytes:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Pillow.new("L", (width, height)).save(file, kind, exif=exif)
    return file.getvalue()


def test_a_turned_jpeg_whose_count_depends_on_it(glm: Planner) -> None:
    photo = _photo(3658, 2029, "JPEG")
    nothing_exact_is_left(glm.prepare(chat(part(photo))), Reason.IMAGE_ORIENTATION)
    vllm, sglang = (Planner.from_pretrained(GLM, engine=engine) for engine in ("vllm", "sglang"))
    assert vllm.prepare(chat(part(photo))).counts == (7920,)
    nothing_exact_is_left(sglang.prepare(chat(part(photo))), Reason.IMAGE_ORIENTATION)
    generate = {"input_ids": [BEGIN, IMAGE, END], "image_data": [photo]}
    nothing_exact_is_left(vllm.prepare(generate), Reason.IMAGE_ORIENTATION)


def test_a_turned_image_that_all_agree_about(glm: Planner) -> None:
    assert glm.prepare(chat(part(_photo(3658, 2029, "PNG")))).counts == (7920,)
    planned = glm.prepare(chat(part(_photo(640, 480, "JPEG"))))
    assert (planned.counts, planned.sizes) == ((414,), ((480, 640),))


# --- checkpoints that are not what they should be --------------------------------------------------------------------


def test_a_refused_image_configuration_leaves_text_alone(edited: Callable[..., Checkpoint], codec: Codec) -> None:
    broken = edited(processor_config=lambda data: data["image_processor"].pop("max_image_tokens"))
    planner = Planner.from_pretrained(broken.directory)
    exact(planner.prepare({"prompt": "text"}))
    planned = planner.prepare(chat(text("see "), part(uri(ONE))))
    nothing_exact_is_left(planned, Reason.CONFIG_MISSING)
    assert tokens_of(planned) == codec.encode("[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>see ")


def test_a_model_without_a_family(tmp_path: Path) -> None:
    target = tmp_path / "other"
    shutil.copytree(MODELS / "tiny-glm5", target)
    (target / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{% for c in m.content %}"
        "{{ c.text if c.type == 'text' else '<picture>' }}{% endfor %}{% endfor %}"
    )
    planner = Planner.from_pretrained(target)
    planned = planner.prepare(chat(text("one two"), part(uri(ONE)), text("three")))
    nothing_exact_is_left(planned, Reason.MODEL_UNSUPPORTED)
    assert isinstance(planner.codec, Codec)
    assert tokens_of(planned) == planner.codec.encode("[user]one two")
    with_ids = planner.prepare({"input_ids": [1, 2, 3], "image_data": [ONE]})
    nothing_exact_is_left(with_ids, Reason.MODEL_UNSUPPORTED)


def test_without_a_tokenizer_there_is_text(tmp_path: Path) -> None:
    shutil.copy(GLM / "config.json", tmp_path)
    planner = Planner.from_pretrained(tmp_path)
    planned = planner.prepare(chat(text("see "), part(uri(ONE)), text(" this \ud800")))
    nothing_exact_is_left(planned, Reason.NO_TOKENIZER)
    assert isinstance(planned.plan, TextPlan)
    assert planned.plan.text == "user:\nsee \n this ?"
    assert tokens_of(planner.prepare({"prompt": [1, 2]})) == [1, 2]
    nothing_exact_is_left(planner.prepare({"prompt": "raw"}), Reason.NO_TOKENIZER)


def test_without_a_template_there_is_text(tmp_path: Path) -> None:
    for name in ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GLM / name, tmp_path)
    planner = Planner.from_pretrained(tmp_path)
    planned = planner.prepare(chat(text("see "), part(uri(ONE))))
    nothing_exact_is_left(planned, Reason.NO_TEMPLATE)
    assert isinstance(planned.plan, TextPlan)
    assert planned.plan.text == "user:\nsee "


def test_no_checkpoint_at_all_is_an_error() -> None:
    with pytest.raises(CheckpointError):
        Planner.from_pretrained("/nowhere")
    with pytest.raises(ValueError, match="model is empty"):
        Planner("", CheckpointError(Reason.NO_TOKENIZER), CheckpointError(Reason.MODEL_UNSUPPORTED))


def test_a_fault_of_the_planner_itself_is_a_plan_too(
    glm: Planner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr("planner.plan.read_prompt", fail)
    nothing_exact_is_left(glm.prepare({"prompt": "x"}), Reason.INTERNAL)
    assert "planning failed" in caplog.text


def test_requests_are_left_as_they_are(glm: Planner) -> None:
    bodies = [
        chat(text("a"), part(uri(ONE)), tools=[{"type": "function", "function": {"name": "f"}}]),
        _tool_turn("b", "a"),
        {"input_ids": [BEGIN, IMAGE, END], "image_data": [uri(ONE)], "mm_hashes": ["1"]},
    ]
    for body in bodies:
        before = copy.deepcopy(body)
        glm.prepare(body)
        assert body == before


def test_a_flat_checkpoint_plans_the_same(tmp_path: Path, glm: Planner) -> None:
    names = (
        "config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    )
    for name in names:
        shutil.copy(GLM / name, tmp_path)
    body = chat(part(uri(ONE)), part(uri(TWO)))
    assert Planner.from_pretrained(tmp_path).plan(body) == glm.plan(body)
