"""Hypothesis in CI runs the same examples every time: a commit is judged by itself; by hand, each run explores anew."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
