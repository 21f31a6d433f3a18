"""Where the planner's test data are, and pictures made on the spot."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

FIXTURES = Path(__file__).parents[1] / "fixtures"
GLM = FIXTURES / "glm"
MODELS = GLM / "models"
RECORDINGS = FIXTURES / "recordings"


def fixture_json(name: str) -> Any:
    return json.loads((GLM / name).read_text())


def png(width: int, height: int, colour: tuple[int, int, int] = (0, 0, 0), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()
