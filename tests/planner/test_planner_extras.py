from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from glm_fixtures import GLM, png

from planner import extras
from planner.errors import MissingExtra
from planner.images import ImagePolicy, read_image
from planner.plan import Planner

ROOT = Path(__file__).parents[2]
HEAVY = ("transformers", "PIL", "tokenizers", "huggingface_hub", "numpy", "jinja2")


@pytest.mark.parametrize("module", ["planner", "planner.plan", "planner.cli", "planner.recorded", "planner.families"])
def test_importing_loads_none_of_the_optional_packages(module: str) -> None:
    code = f"import sys, {module}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["transformers", "PIL"])
def test_what_is_missing_is_said(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = extras.importlib.import_module

    def without(name: str) -> Any:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name)

    extras.transformers.cache_clear()
    monkeypatch.setattr(extras.importlib, "import_module", without)
    with pytest.raises(MissingExtra, match=rf"{missing} is not installed: pip install kvd\[planner\]"):
        Planner.from_pretrained(GLM) if missing == "transformers" else read_image(png(3, 3), ImagePolicy())


def test_transformers_is_loaded_without_its_notice_about_torch() -> None:
    code = f"from planner.plan import Planner; Planner.from_pretrained({str(GLM)!r})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "PyTorch" not in ran.stderr
