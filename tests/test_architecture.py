"""Imports point downwards only, and what the client library loads and shows is pinned."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvd.client

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocols", "planner", "kvd")
BOTTOM = {"kvd.sockets", "kvd.fetch", "kvd.nats"}
"""Below the rooms: they know sockets, HTTP and NATS, nothing of the index."""
ENGINE_ROOM = {"protocols", "planner", "kvd.core", "kvd.ingest", "kvd.serve", *BOTTOM}
ALLOWED: dict[str, set[str]] = {
    "protocols": set(),
    "planner": {"protocols"},
    "kvd.sockets": {"protocols"},
    "kvd.fetch": {"protocols"},
    "kvd.nats": {"protocols"},
    "kvd.core": {"protocols"},
    "kvd.ingest": {"protocols", "kvd.core", *BOTTOM},
    "kvd.serve": {"protocols", "kvd.core", "kvd.ingest", *BOTTOM},
    "kvd.client": {"protocols", "planner", "kvd.sockets"},
}
"""Room → rooms it may import. ``kvd.cli`` may import everything; other modules of ``kvd`` compose the engine room."""

CLIENT_EXPORTS = {
    "Answer", "AsyncClient", "Choice", "Client", "EmbeddedKvd", "ExactPlan", "KvdError", "MediaRun", "Plan",
    "PlanError", "PrefixPlan", "RequestError", "StreamInfo", "TextPlan", "TierCredits", "Trust", "Unreachable",
    "WorkerInfo", "WorkerScore", "WorkerSpec", "exact_plan", "prefix_plan", "select",
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
ROOMS = {name for name in MODULES if name in PACKAGES or (name.count(".") == 1 and name.startswith("kvd."))}


def imported(name: str, path: Path) -> Iterator[str]:
    """Every module of this project that the file imports, at the top or within a function."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            while target and target not in MODULES:
                target = target.rpartition(".")[0]
            if target:
                yield target


def room_of(name: str) -> str:
    """The package below ``kvd``, or the whole package beside it."""
    package, _, rest = name.partition(".")
    return f"kvd.{rest.split('.')[0]}" if package == "kvd" and rest else package


def may_import(room: str) -> set[str]:
    if room in ("kvd.cli", "kvd.__main__"):
        return ROOMS
    composition = {name for name in ROOMS if name not in ENGINE_ROOM and name not in ("kvd.cli", "kvd")}
    return ALLOWED.get(room, ENGINE_ROOM | composition)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name: str) -> None:
    room = room_of(name)
    for target in imported(name, MODULES[name]):
        allowed = room_of(target) == room or room_of(target) in may_import(room)
        assert allowed, f"{name} imports {target}: {room} may import {sorted(may_import(room))}"


def test_no_import_leads_back() -> None:
    graph = {name: set(imported(name, path)) - {name} for name, path in MODULES.items()}
    for name in graph:  # a package's own front imports its modules, which is no cycle
        if MODULES[name].name != "__init__.py":
            graph[name] = {target for target in graph[name] if not name.startswith(f"{target}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


def test_the_table_names_rooms_that_exist() -> None:
    assert set(ALLOWED) <= ROOMS


@pytest.mark.parametrize("module", ["kvd.client", "planner", "protocols.query"])
def test_a_client_does_not_load_the_daemon(module: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", f"import {module}, sys; print(*sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    heavy = ("kvd.core", "kvd.ingest", "kvd.serve", "kvd.daemon", "transformers", "torch", "rich", "typer")
    assert not [name for name in said.stdout.split() if name.startswith(heavy)]


def test_the_client_librarys_surface_is_pinned() -> None:
    assert set(kvd.client.__all__) == CLIENT_EXPORTS
    assert all(hasattr(kvd.client, name) for name in kvd.client.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_published(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
