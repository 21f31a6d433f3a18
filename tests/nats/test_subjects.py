"""Names as subject tokens: readable, reversible, and nothing that NATS reserves gets through."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.nats.subjects import MAX_TOKEN, Address, address_of, cluster_subjects, is_prefix, name_of, subject, token
from protocols.errors import WireError

names = st.text(min_size=1, max_size=15)


def test_a_model_name_stays_readable() -> None:
    assert token("zai-org/GLM-5.3-Flash") == "zai-org_2FGLM-5_2E3-Flash"


@given(names)
def test_a_token_holds_nothing_reserved_and_leads_back(name: str) -> None:
    encoded = token(name)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", encoded)
    assert name_of(encoded) == name


@given(names, names)
def test_two_names_never_share_a_token(one: str, other: str) -> None:
    assert (token(one) == token(other)) == (one == other)


@given(st.text(max_size=30))
def test_any_token_is_a_name_that_is_written_so_or_refused(encoded: str) -> None:
    with suppress(WireError):
        assert token(name_of(encoded)) == encoded


@given(names, names, names, st.integers(0, 999_999))
def test_a_subject_leads_back_to_its_worker(cluster: str, model: str, worker: str, rank: int) -> None:
    address = Address(cluster, model, worker, rank)
    text = subject("kvd.v1", "ev", address)
    assert address_of(text, "kvd.v1", "ev") == address
    assert text.startswith(cluster_subjects("kvd.v1", "ev", cluster).removesuffix(">"))


@pytest.mark.parametrize(
    "foreign",
    [
        "kvd.v1.ev", "kvd.v1.ev.c.m.w", "kvd.v1.ev.c.m.w.0.x", "kvd.v1.ev.c.m.w.-1", "kvd.v1.ev.c.m.w.01",
        "kvd.v1.ev.c.m.w.x", "kvd.v1.st.c.m.w.0", "other.ev.c.m.w.0", "kvd.v1.ev.c.m_2g.w.0", "kvd.v1.ev.c..w.0",
        "kvd.v1.ev.c.m_41.w.0", "kvd.v1.ev.c.m_FF.w.0", "",
    ],
)  # fmt: skip
def test_foreign_subjects_are_told(foreign: str) -> None:
    with pytest.raises(WireError, match="subject"):
        address_of(foreign, "kvd.v1", "ev")


@pytest.mark.parametrize("name", ["", "x" * (MAX_TOKEN + 1), "ü" * 40])
def test_names_that_make_no_token_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected 1 to"):
        token(name)


@pytest.mark.parametrize(("text", "good"), [("kvd.v1", True), ("", False), ("a..b", False), ("a.*", False)])
def test_prefixes(text: str, good: bool) -> None:
    assert is_prefix(text) is good
