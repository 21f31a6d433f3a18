"""Predictions: what was reported as routed, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.routed import TEXT_CHUNK_BYTES, RoutedTable, text_keys

A, B = ("a", 0), ("b", 0)


def test_leading_keys_count_until_they_expire() -> None:
    table = RoutedTable()
    table.insert(A, [1, 2, 3], now=0, ttl=10)
    assert table.reach(A, [1, 2, 3, 4], now=9.9) == 3
    assert table.reach(A, [2, 3], now=0) == 2
    assert table.reach(A, [9, 1, 2], now=0) == 0
    assert table.reach(A, [1, 2, 3], now=10) == 0


def test_owners_are_apart() -> None:
    table = RoutedTable()
    table.insert(A, [1], now=0, ttl=10)
    assert table.reach(B, [1], now=0) == 0
    table.forget(A)
    assert (table.reach(A, [1], now=0), len(table)) == (0, 0)


def test_ranks_of_a_worker_are_apart() -> None:
    table = RoutedTable()
    table.insert(("a", 1), [1], now=0, ttl=10)
    assert table.reach(("a", 0), [1], now=0) == 0


def test_a_second_report_prolongs() -> None:
    table = RoutedTable()
    table.insert(A, [1, 2], now=0, ttl=10)
    table.insert(A, [1], now=5, ttl=10)
    assert table.reach(A, [1, 2], now=12) == 1
    assert len(table) == 2


def test_expired_entries_are_dropped() -> None:
    table = RoutedTable()
    table.insert(A, range(100), now=0, ttl=1)
    table.insert(A, [1], now=2, ttl=1)
    assert len(table) == 1


def test_beyond_the_limit_what_expires_first_goes() -> None:
    table = RoutedTable(limit=3)
    table.insert(A, [1], now=0, ttl=1)
    table.insert(A, [2, 3, 4], now=0, ttl=9)
    assert (len(table), table.evicted) == (3, 1)
    assert table.reach(A, [1], now=0) == 0
    assert table.reach(A, [2, 3, 4], now=0) == 3


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 6), st.integers(1, 9)), max_size=40))
def test_it_agrees_with_a_plain_table(inserts: list[tuple[tuple[str, int], int, int]]) -> None:
    table, plain = RoutedTable(limit=1000), {}
    for now, (owner, key, ttl) in enumerate(inserts):
        table.insert(owner, [key], now=now, ttl=ttl)
        plain[owner, key] = now + ttl
    now = len(inserts)
    for owner in (A, B):
        for key in range(7):
            assert table.reach(owner, [key], now=now) == (plain.get((owner, key), 0) > now)
    table.expire(now)
    assert len(table) == sum(expiry > now for expiry in plain.values())
    assert len(table._order) == len(table)


def test_text_is_cut_into_whole_chunks() -> None:
    assert text_keys("m", "x" * (TEXT_CHUNK_BYTES - 1), None, None) == []
    assert len(text_keys("m", "x" * (3 * TEXT_CHUNK_BYTES + 5), None, None)) == 3


def test_text_keys_are_chained() -> None:
    first, second = "a" * TEXT_CHUNK_BYTES, "b" * TEXT_CHUNK_BYTES
    both = text_keys("m", first + second, None, None)
    assert text_keys("m", first, None, None) == both[:1]
    assert text_keys("m", second, None, None)[0] not in both
    assert len(set(text_keys("m", first * 4, None, None))) == 4


@pytest.mark.parametrize("other", [("n", None, None), ("m", "a", None), ("m", None, "a"), ("m", "a", "a")])
def test_model_adapter_and_salt_are_part_of_a_text_key(other: tuple[str, str | None, str | None]) -> None:
    text = "é" * TEXT_CHUNK_BYTES
    assert not set(text_keys("m", text, None, None)) & set(text_keys(other[0], text, *other[1:]))
