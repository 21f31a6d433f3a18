"""Everything goes wrong at once, by seed: kvd never claims more than an engine held while it says ``exact``, and once
it is quiet it knows the truth again.

``KVDTEST_SEED=n`` runs one more seed, ``KVDTEST_STEPS=n`` longer histories; a failure names its seed and tells the end
of its history.
"""

from __future__ import annotations

import os

import pytest

from kvd.core import CORE_VARIABLE, IMPLEMENTATIONS
from tests.chaos.world import CROWDED, MENDABLE, Profile, World

STEPS = int(os.environ.get("KVDTEST_STEPS", "3000"))
QUIET_EVERY = 300
SEEDS = [1, 2, 3, 5, 8, 13]
EXTRA = [int(seed) for seed in os.environ.get("KVDTEST_SEED", "").split(",") if seed]


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every history with every implementation of the index."""
    monkeypatch.setenv(CORE_VARIABLE, request.param)


def _run(seed: int, profile: Profile) -> World:
    world = World(seed, profile)
    for number in range(1, STEPS + 1):
        world.step()
        if number % QUIET_EVERY == 0:
            world.quiet()
    return world


@pytest.mark.parametrize("seed", [*SEEDS, *EXTRA])
def test_exact_never_claims_more_than_the_engine_held(seed: int) -> None:
    seen = _run(seed, Profile()).seen
    assert seen["exact"] > 1_000, f"seed {seed} is no test of exactness: {seen}"


@pytest.mark.parametrize("seed", [*SEEDS[:3], *EXTRA])
def test_what_can_be_repaired_is_repaired(seed: int) -> None:
    seen = _run(seed, MENDABLE).seen
    assert seen["exact"] > 1_000, f"seed {seed} is no test of exactness: {seen}"


@pytest.mark.parametrize("seed", [*SEEDS[:2], *EXTRA])
def test_who_had_to_give_way_says_so(seed: int) -> None:
    seen = _run(seed, CROWDED).seen
    assert seen["exact"] > 100, f"seed {seed} is no test of exactness: {seen}"
    assert seen["incomplete"] > 100, f"seed {seed} is no test of giving way: {seen}"
