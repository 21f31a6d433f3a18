"""One server for the tests that leave it as it was, and one of its own for those that do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.nats import NatsServer

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Shared: tests keep apart by the ``cluster`` they use."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """For tests that stop it, stall it or change its users."""
    with NatsServer(tmp_path) as running:
        yield running


@pytest.fixture
def cluster() -> str:
    """A cluster that no other test uses."""
    return f"c{next(_numbers)}"
