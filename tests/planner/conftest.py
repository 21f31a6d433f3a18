"""Checkpoints for the planner's tests, loaded once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from glm_fixtures import GLM

from planner.checkpoint import Checkpoint, open_checkpoint
from planner.families import ImageFamily, family_for
from planner.plan import Planner
from planner.prompt import Codec

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="session")
def glm() -> Planner:
    return Planner.from_pretrained(GLM, model="glm")


@pytest.fixture(scope="session")
def codec(glm: Planner) -> Codec:
    assert isinstance(glm.codec, Codec)
    return glm.codec


@pytest.fixture(scope="session")
def glm_family(codec: Codec) -> ImageFamily:
    return family_for(open_checkpoint(GLM), codec.encode)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Checkpoint]:
    """The fixture checkpoint with some JSON files edited: ``edited(config=…, processor_config=…)``."""

    def build(**edits: Edit) -> Checkpoint:
        target = tmp_path / "checkpoint"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(GLM, target, ignore=shutil.ignore_patterns("models", "*vectors.json"))
        for name, edit in edits.items():
            path = target / f"{name}.json"
            value = json.loads(path.read_text())
            edit(value)
            path.write_text(json.dumps(value))
        return Checkpoint(directory=target, name="edited")

    return build
