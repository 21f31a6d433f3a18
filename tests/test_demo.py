"""The demo says what it is to show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_demo_runs_and_shows_matches_trust_and_reasons() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "examples.demo"], cwd=root, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    shown = done.stdout.decode()
    rows = re.findall(r"│ (\S+)\s+│\s+(\d+) │ (\w+)", shown)
    assert ("vllm-1", "160", "exact") in rows
    assert ("sglang-1", "160", "incomplete") in rows
    assert ("vllm-2", "0", "unknown") in rows
    assert [matched for name, matched, _ in rows if name == "vllm-glm"] == ["192", "96", "0"]
    assert "basis prefix" in shown
