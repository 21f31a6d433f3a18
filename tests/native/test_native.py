"""The compiled core beyond the shared contract: the same as the reference step by step, bounded memory, its switch."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvd.core import IMPLEMENTATIONS, Index, open_index
from kvd.core.residency import Applied, Bounds
from kvd.evaluate import FromTokens, evaluate
from protocols.keys import Keys, plan_keys, token_keys
from protocols.plan import exact_plan
from tests.kit.conformance import device, placeholder, removed, stored
from tests.native.differential import campaign
from tests.test_recordings import CASES, files

pytestmark = pytest.mark.skipif("native" not in IMPLEMENTATIONS, reason="built without a compiler")

TOKENS = list(range(1, 9))
HASHES = [11, 12, 13, 14]


@pytest.fixture
def index() -> Index:
    return IMPLEMENTATIONS["native"]()


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_histories_are_the_same_as_the_reference(first: int) -> None:
    campaign(IMPLEMENTATIONS["native"], range(first, first + 10), 200)


def test_more_copies_than_a_counter_holds(index: Index) -> None:
    rank = index.add_rank()
    for _ in range(200):
        index.apply(rank, stored(HASHES, TOKENS))
        index.apply(rank, placeholder(HASHES, "host"))
    for left in range(199, -1, -1):
        index.apply(rank, removed(14))
        assert device(index, rank, TOKENS) == (4 if left else 3)
    assert index.apply(rank, removed(14)) == Applied(0)
    assert index.match(token_keys(TOKENS, 2), [rank])[rank].tiers == (3, 4, 4, 4)


def test_more_windows_than_have_a_number(index: Index) -> None:
    rank = index.add_rank(bounds=Bounds(block_sizes=100))
    for size in range(1, 41):
        index.apply(rank, stored([size], [7] * size))
    assert list(index.windows(rank)) == [(size, False) for size in range(1, 41)]
    assert index.check() == []
    for size in range(1, 41):
        index.apply(rank, stored([size], [8, 8]))
    assert index.windows(rank) == {(2, False): 40}
    assert index.check() == []


def test_thousands_of_ranks_share_a_prefix(index: Index) -> None:
    ranks = [index.add_rank() for _ in range(4096)]
    for position, rank in enumerate(ranks):
        count = position % 4 + 1
        index.apply(rank, stored(HASHES[:count], TOKENS[: 2 * count]))
    found = index.match(token_keys(TOKENS, 2), ranks)
    assert [found[rank].usable for rank in ranks] == [position % 4 + 1 for position in range(4096)]
    assert index.statistics().nodes == 4


def test_everything_is_given_back() -> None:
    """Filled and cleared six times, a rank leaves no more behind than it takes once, however the allocator keeps it.

    In a process of its own: this one's heap has room from the tests before.
    """
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", "from tests.native.test_native import tell_memory; tell_memory()"]
    told = subprocess.run(command, cwd=root, capture_output=True, check=True, timeout=100).stdout
    first, kept = map(int, told.split())
    assert first > 10 << 20
    assert kept < 1.2 * first


def tell_memory() -> None:
    """Print how much resident memory filling a rank takes once, and how much is left after six times and clears."""
    index = IMPLEMENTATIONS["native"](max_blocks=1 << 40)
    rank = index.add_rank()
    before = _resident()
    first = 0
    for _ in range(6):
        _fill(index, rank, chains=800)
        first = first or _resident() - before
        index.clear_rank(rank)
        while not index.sweep(4096):
            pass
        assert index.statistics().nodes == 0
    print(first, _resident() - before)


def _fill(index: Index, rank: int, chains: int) -> None:
    rng = random.Random(1)
    for _ in range(chains):
        hashes = [rng.getrandbits(64) for _ in range(1024)]
        index.apply(rank, stored(hashes, [rng.getrandbits(16) for _ in range(4096)]))


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_image_of_a_rank_that_changed_is_given_up(index: Index) -> None:
    rank = index.add_rank()
    _fill(index, rank, chains=6)
    parts = index.export_rank(rank)
    next(parts)
    next(parts)
    index.apply(rank, stored([1], [1, 2]))
    with pytest.raises(RuntimeError, match="changed"):
        list(parts)


@pytest.mark.parametrize("wide", [False, True])
def test_a_miss_hashes_one_block_and_a_hit_what_is_looked_at(index: Index, wide: bool) -> None:
    """Both cores are asked with the same lazy keys; the compiled one hashes the packed tokens itself."""
    tokens = [*TOKENS, 1 << 40 if wide else 9, 9]
    rank = index.add_rank()
    index.apply(rank, stored([*HASHES, 15], tokens))
    keys = plan_keys(exact_plan("m", tokens), 2, None)
    assert isinstance(keys, Keys)
    assert index.match(keys, [rank])[rank].usable == 5


def test_keys_that_no_block_can_have_are_a_miss(index: Index) -> None:
    rank = index.add_rank()
    index.apply(rank, stored(HASHES, TOKENS))
    keys: list[Any] = token_keys(TOKENS, 2)
    for odd in (-1, 1 << 64, 1 << 200):
        assert index.match([*keys[:3], odd], [rank])[rank].usable == 3
        assert index.match([odd], [rank]) == {}


def test_tokens_that_cannot_be_packed_change_nothing(index: Index) -> None:
    rank = index.add_rank()
    for token in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            index.apply(rank, stored([1], [token, 2]))
    with pytest.raises(TypeError):
        index.apply(rank, msgspec.structs.replace(stored([1], [1, 2]), tokens=["a", 2]))
    assert index.statistics().blocks == 0
    assert index.check() == []


@pytest.mark.parametrize("tag", CASES)
def test_recordings_are_evaluated_alike(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for name in IMPLEMENTATIONS:
        monkeypatch.setenv("KVD_CORE", name)
        reports.append(evaluate(*files(tag), FromTokens(["tiny"])))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_environment_chooses(name: str) -> None:
    program = "from kvd.core import open_index; print(open_index().implementation)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"KVD_CORE": name}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == name


def test_an_implementation_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_CORE", "quantum")
    with pytest.raises(ImportError, match="this installation has reference and native"):
        open_index()
