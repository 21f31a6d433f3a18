"""Every row of the table of what an exact image plan may rest on: one edit of a good checkpoint, one verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from glm_fixtures import GLM, MODELS

from planner.checkpoint import Checkpoint, open_checkpoint
from planner.errors import CheckpointError, Reason
from planner.families import family_for
from planner.families.glm5_next import Glm5Next
from planner.plan import Planner
from planner.prompt import Codec

Edited = Callable[..., Checkpoint]
IDS = ("image_token_id", "image_start_token_id", "image_end_token_id")
NUMBERS = ("patch_size", "merge_size", "temporal_patch_size", "min_image_tokens", "max_image_tokens")


def _set(name: str, value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def edit(data: dict[str, Any]) -> None:
        for key in path:
            data = data[key]
        data[name] = value

    return edit


def _drop(name: str, *path: str) -> Callable[[dict[str, Any]], None]:
    def edit(data: dict[str, Any]) -> None:
        for key in path:
            data = data[key]
        del data[name]

    return edit


def _refused(checkpoint: Checkpoint, codec: Codec) -> Reason:
    with pytest.raises(CheckpointError) as caught:
        family_for(checkpoint, codec.encode)
    assert caught.value.detail
    return caught.value.reason


def test_the_checkpoint_itself_is_good(codec: Codec) -> None:
    family = family_for(open_checkpoint(GLM), codec.encode)
    assert isinstance(family, Glm5Next)
    assert (family.patches.factor, family.min_tokens, family.max_tokens) == (28, 16, 8000)
    assert family.context_length == 1_048_576
    assert family.key_schemes == {"media_keys", "pad30", "pad62", "dynamo"}


@pytest.mark.parametrize("value", [None, "glm5", "qwen3_vl", 5, ["glm5_next"]])
def test_another_model_type_is_not_ours(edited: Edited, codec: Codec, value: object) -> None:
    assert _refused(edited(config=_set("model_type", value)), codec) is Reason.MODEL_UNSUPPORTED


def test_a_model_type_that_is_missing_is_not_ours(edited: Edited, codec: Codec) -> None:
    assert _refused(edited(config=_drop("model_type")), codec) is Reason.MODEL_UNSUPPORTED


@pytest.mark.parametrize(
    "value", [["Glm4vForConditionalGeneration"], [], "Glm5NextForConditionalGeneration", [7],
              ["Glm5NextForConditionalGeneration", "Other"]],
)  # fmt: skip
def test_architectures_that_disagree(edited: Edited, codec: Codec, value: object) -> None:
    assert _refused(edited(config=_set("architectures", value)), codec) is Reason.CONFIG_CONFLICT


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("value", [None, True, 154854.0, "154854", -1, 1 << 31, 1 << 32, [154854]])
def test_a_placeholder_id_of_another_type_or_range(edited: Edited, codec: Codec, name: str, value: object) -> None:
    assert _refused(edited(config=_set(name, value)), codec) is Reason.CONFIG_INVALID


@pytest.mark.parametrize("name", IDS)
def test_a_placeholder_id_that_is_missing(edited: Edited, codec: Codec, name: str) -> None:
    assert _refused(edited(config=_drop(name)), codec) is Reason.CONFIG_MISSING


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_token_id", 154830),
        ("image_end_token_id", 154830),
        ("video_token_id", 154854),
        ("video_end_token_id", 154831),
    ],
)
def test_two_equal_ids(edited: Edited, codec: Codec, name: str, value: int) -> None:
    assert _refused(edited(config=_set(name, value)), codec) is Reason.CONFIG_CONFLICT


@pytest.mark.parametrize("name", IDS)
def test_an_id_that_the_tokenizer_does_not_have(edited: Edited, codec: Codec, name: str) -> None:
    assert _refused(edited(config=_set(name, 7)), codec) is Reason.PLACEHOLDER_SPLIT


def test_a_tokenizer_that_splits_the_placeholder(edited: Edited) -> None:
    def forget(data: dict[str, Any]) -> None:
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != "<|image|>"]

    checkpoint = edited(tokenizer=forget, tokenizer_config=_drop("image_token"))
    assert _refused(checkpoint, Codec.load(checkpoint.directory)) is Reason.PLACEHOLDER_SPLIT


@pytest.mark.parametrize("name", ["video_token_id", "video_start_token_id", "video_end_token_id"])
def test_video_ids_may_be_missing_and_are_then_the_tokenizers(edited: Edited, codec: Codec, name: str) -> None:
    family = family_for(edited(config=_drop(name)), codec.encode)
    assert family.placeholder.video_ids == (154855, 154832, 154833)


@pytest.mark.parametrize("value", [None, "Glm4vImageProcessor", "Qwen2VLImageProcessor", 3])
def test_another_image_processor(edited: Edited, codec: Codec, value: object) -> None:
    edit = _set("image_processor_type", value, "image_processor")
    assert _refused(edited(processor_config=edit), codec) in (Reason.CONFIG_UNSUPPORTED, Reason.CONFIG_MISSING)


@pytest.mark.parametrize("kind", ["Glm5NextImageProcessorFast", "Glm5NextImageProcessorPil"])
def test_the_same_image_processor_under_its_other_names(edited: Edited, codec: Codec, kind: str) -> None:
    family_for(edited(processor_config=_set("image_processor_type", kind, "image_processor")), codec.encode)


def test_another_processor_class(edited: Edited, codec: Codec) -> None:
    edit = _set("processor_class", "Glm4vProcessor")
    assert _refused(edited(processor_config=edit), codec) is Reason.CONFIG_UNSUPPORTED


def test_no_processor_class_is_fine(edited: Edited, codec: Codec) -> None:
    family_for(edited(processor_config=_drop("processor_class")), codec.encode)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [None, True, 14.0, "14", 0, -2, 1 << 31, {"height": 14, "width": 14}])
def test_a_number_of_another_type_or_range(edited: Edited, codec: Codec, name: str, value: object) -> None:
    assert _refused(edited(processor_config=_set(name, value, "image_processor")), codec) is Reason.CONFIG_INVALID


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_missing_is_never_taken_from_the_video_budget(edited: Edited, codec: Codec, name: str) -> None:
    assert _refused(edited(processor_config=_drop(name, "image_processor")), codec) is Reason.CONFIG_MISSING


def test_a_lower_bound_above_the_upper(edited: Edited, codec: Codec) -> None:
    edit = _set("min_image_tokens", 8001, "image_processor")
    assert _refused(edited(processor_config=edit), codec) is Reason.CONFIG_CONFLICT


@pytest.mark.parametrize(("name", "value"), [("patch_size", (1 << 31) - 1), ("max_image_tokens", (1 << 31) - 1)])
def test_numbers_whose_product_overflows(edited: Edited, codec: Codec, name: str, value: int) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["image_processor"] |= {name: value, "merge_size": 1 << 20}

    checkpoint = edited(config=_drop("vision_config"), processor_config=edit)
    assert _refused(checkpoint, codec) is Reason.CONFIG_INVALID


@pytest.mark.parametrize(
    ("value", "reason"),
    [(2, Reason.CONFIG_UNSUPPORTED), (0, Reason.CONFIG_INVALID), (True, Reason.CONFIG_INVALID),
     (1.0, Reason.CONFIG_INVALID), ("1", Reason.CONFIG_INVALID), (None, Reason.CONFIG_INVALID)],
)  # fmt: skip
def test_only_an_expand_factor_of_one(edited: Edited, codec: Codec, value: object, reason: Reason) -> None:
    assert _refused(edited(processor_config=_set("patch_expand_factor", value, "image_processor")), codec) is reason


def test_the_expand_factor_may_be_missing(edited: Edited, codec: Codec) -> None:
    family_for(edited(processor_config=_drop("patch_expand_factor", "image_processor")), codec.encode)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_resize", False), ("do_resize", "yes"), ("do_resize", 1),
        ("do_rescale", "yes"), ("do_normalize", 1), ("do_convert_rgb", []),
        ("resample", "bicubic"), ("resample", 17), ("image_mean", "half"), ("image_std", [None]),
        ("rescale_factor", "x"),
        ("do_center_crop", True), ("do_pad", True), ("crop_size", {"height": 9}), ("pad_size", {"height": 9}),
        ("size", {"longest_edge": 11_760_000, "shortest_edge": 12_544}), ("size", {"longest_edge": 2}), ("size", 224),
        ("min_pixels", 3136), ("max_pixels", 1_254_400), ("resize_mode", "crop"), ("resize_mode", 3),
        ("tile_size", 336), ("max_tiles", 4), ("image_grid_pinpoints", [[336, 672]]), ("dynamic_resolution", True),
        ("aspect_ratio_limit", "200"), ("some_switch", True), ("some_number", 3), ("some_list", []),
    ],
)  # fmt: skip
def test_settings_that_change_counts_or_are_unknown(edited: Edited, codec: Codec, name: str, value: object) -> None:
    checkpoint = edited(processor_config=_set(name, value, "image_processor"))
    assert _refused(checkpoint, codec) in (Reason.CONFIG_INVALID, Reason.CONFIG_UNSUPPORTED)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_resize", True), ("do_resize", None), ("do_rescale", False), ("do_normalize", False), ("resample", 2),
        ("image_mean", [0.5, 0.5, 0.5]), ("rescale_factor", 0.1), ("size", {"longest_edge": 1}), ("size", None),
        ("do_pad", False), ("do_center_crop", None), ("crop_size", None), ("resize_mode", "pad"), ("device", None),
        ("note", "a remark"), ("_commit_hash", "abc"), ("data_format", "channels_first"),
    ],
)  # fmt: skip
def test_settings_that_change_nothing(edited: Edited, codec: Codec, name: str, value: object) -> None:
    family = family_for(edited(processor_config=_set(name, value, "image_processor")), codec.encode)
    assert family.count_image((640, 480)) == 414


def test_the_older_form_of_the_model_is_refused_and_not_converted(edited: Edited, codec: Codec) -> None:
    def edit(data: dict[str, Any]) -> None:
        settings = data["image_processor"]
        del settings["min_image_tokens"], settings["max_image_tokens"]
        settings |= {"size": {"longest_edge": 9_633_792, "shortest_edge": 12_544}, "patch_expand_factor": 2}

    assert _refused(edited(processor_config=edit), codec) is Reason.CONFIG_UNSUPPORTED


@pytest.mark.parametrize("name", ["patch_size", "spatial_merge_size", "temporal_patch_size"])
def test_a_vision_config_that_disagrees(edited: Edited, codec: Codec, name: str) -> None:
    assert _refused(edited(config=_set(name, 7, "vision_config")), codec) is Reason.CONFIG_CONFLICT
    family_for(edited(config=_drop(name, "vision_config")), codec.encode)


@pytest.mark.parametrize(
    ("edit", "ok"),
    [(_set("vision_config", None), True), (_drop("vision_config"), True), (_set("vision_config", [1]), False),
     (_set("patch_size", "14", "vision_config"), False), (_drop("text_config"), True),
     (_set("max_position_embeddings", "many", "text_config"), False), (_drop("architectures"), True)],
)  # fmt: skip
def test_the_other_parts_of_config(
    edited: Edited, codec: Codec, edit: Callable[[dict[str, Any]], None], ok: bool
) -> None:
    checkpoint = edited(config=edit)
    if ok:
        assert family_for(checkpoint, codec.encode).count_image((640, 480)) == 414
    else:
        assert _refused(checkpoint, codec) is Reason.CONFIG_INVALID


def test_declared_engine_overrides_refuse_images_and_nothing_else() -> None:
    planner = Planner.from_pretrained(GLM, engine_overrides={"max_image_tokens": 600})
    body = {"prompt_token_ids": [1, 2, 3]}
    assert planner.prepare(body).reason is None
    body |= {"multi_modal_data": {"image": [b""]}}
    assert planner.prepare(body).reason is Reason.ENGINE_OVERRIDE


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"size": {"shortest_edge": 12544}}, Reason.CONFIG_MISSING),
        ({"size": None}, Reason.CONFIG_MISSING),
        ({"size": {"shortest_edge": 12544, "longest_edge": 470400.0}}, Reason.CONFIG_INVALID),
        ({"size": {"shortest_edge": 470401, "longest_edge": 470400}}, Reason.CONFIG_CONFLICT),
        ({"size": {"shortest_edge": 12544, "longest_edge": 470400, "height": 3}}, Reason.CONFIG_INVALID),
        ({"image_processor_type": "Glm5NextImageProcessor"}, Reason.CONFIG_UNSUPPORTED),
        ({"processor_class": "Glm5NextProcessor"}, Reason.CONFIG_UNSUPPORTED),
        ({"patch_size": None}, Reason.CONFIG_INVALID),
        ({"min_image_tokens": 16}, Reason.CONFIG_UNSUPPORTED),
    ],
)
def test_the_older_family_is_as_strict(tmp_path: Any, edit: dict[str, Any], reason: Reason) -> None:
    target = tmp_path / "glm46v"
    shutil.copytree(MODELS / "tiny-glm46v", target)
    path = target / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    assert _refused(open_checkpoint(target), Codec.load(target)) is reason
