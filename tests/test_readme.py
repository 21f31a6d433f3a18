"""What the README promises is there: the commands it names, the tests behind its claims, the files it links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvd.cli.main import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = sorted({match[1] for match in re.finditer(r"`?kvd ((?:workers|config|plan) [a-z][a-z-]+|[a-z]+)", README)})
TESTS = sorted(set(re.findall(r"`(tests/[\w/.]+)`", README)))
NAMED = sorted(set(re.findall(r"`(test_\w+?)_?\*?`", README)))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[0] not in ("is", "that", "says", "then", "must")])
def test_every_command_is_known(command: str) -> None:
    words = command.split()
    told = CliRunner().invoke(app, [*words, "--help"])
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize("path", TESTS)
def test_every_test_file_exists(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", NAMED)
def test_every_named_test_exists(name: str) -> None:
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert any(f"def {name}" in source for source in sources)


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_python_examples_compile() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(blocks) >= 2
    for block in blocks:
        compile(
            f"async def example(request, token_ids, kvd):\n{'    '.join(['', *block.splitlines(True)])}",
            "README",
            "exec",
        )
