from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from glm_fixtures import GLM

from planner.checkpoint import MAX_JSON_BYTES, Checkpoint, open_checkpoint
from planner.errors import CheckpointError, Reason
from planner.plan import Planner


def test_a_local_directory_is_read_as_it_is() -> None:
    checkpoint = open_checkpoint(GLM)
    assert checkpoint.config()["image_token_id"] == 154854
    settings = checkpoint.image_settings()
    assert settings.values["max_image_tokens"] == 8000
    assert settings.processor_class == "Glm5NextProcessor"


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", Path("nowhere"), "just-a-name"])
def test_a_missing_directory_is_named(source: str | Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory") as caught:
        open_checkpoint(source)
    assert caught.value.reason is Reason.CHECKPOINT_MISSING


def test_the_flat_file_serves_where_the_nested_one_is_not(tmp_path: Path) -> None:
    shutil.copy(GLM / "preprocessor_config.json", tmp_path)
    settings = Checkpoint(directory=tmp_path, name="flat").image_settings()
    assert settings.origin == "preprocessor_config.json"
    assert settings.values["max_image_tokens"] == 8000


def test_a_nested_file_without_image_processor_leaves_it_to_the_flat_one(tmp_path: Path) -> None:
    shutil.copy(GLM / "preprocessor_config.json", tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Glm5NextProcessor"}')
    assert Checkpoint(directory=tmp_path, name="legacy").image_settings().origin == "preprocessor_config.json"


def test_the_nested_file_wins_and_the_difference_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(GLM / "processor_config.json", tmp_path)
    flat = json.loads((GLM / "preprocessor_config.json").read_text()) | {"max_image_tokens": 77}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(flat))
    with caplog.at_level(logging.WARNING):
        assert Checkpoint(directory=tmp_path, name="both").image_settings().values["max_image_tokens"] == 8000
    assert "differs" in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"not json", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b" " * (MAX_JSON_BYTES + 1)]
)
@pytest.mark.parametrize("name", ["config.json", "processor_config.json", "preprocessor_config.json"])
def test_a_malformed_file_is_refused_and_not_passed_over(tmp_path: Path, name: str, content: bytes) -> None:
    if name == "processor_config.json":
        shutil.copy(GLM / "preprocessor_config.json", tmp_path)
    (tmp_path / name).write_bytes(content)
    checkpoint = Checkpoint(directory=tmp_path, name="bad")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.config() if name == "config.json" else checkpoint.image_settings()
    assert caught.value.reason is Reason.CONFIG_UNREADABLE
    assert name in caught.value.detail


@pytest.mark.parametrize("value", [None, [], "x", 3, True])
def test_an_image_processor_that_is_no_object_is_refused(tmp_path: Path, value: object) -> None:
    shutil.copy(GLM / "preprocessor_config.json", tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": value}))
    with pytest.raises(CheckpointError, match="expected an object") as caught:
        Checkpoint(directory=tmp_path, name="bad").image_settings()
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_a_revision_that_is_not_cached_names_repo_revision_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        Planner.from_pretrained("some-org/some-model@0123abc")
    assert caught.value.reason is Reason.REVISION_NOT_CACHED
    for part in ("some-org/some-model", "0123abc", str(tmp_path)):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("source", "revision"), [("org/name@pinned", None), ("org/name", "pinned"), ("org/name", None)]
)
def test_a_cached_revision_is_found_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, revision: str | None
) -> None:
    commit = "0123456789012345678901234567890123456789"
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    shutil.copy(GLM / "config.json", snapshot)
    (repo / "refs").mkdir()
    for ref in ("main", "pinned"):
        (repo / "refs" / ref).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert open_checkpoint(source, revision).directory == snapshot
