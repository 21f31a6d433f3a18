from __future__ import annotations

import pytest

from planner.errors import ImageError, MissingExtra, PlanningError, Reason, shown


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    assert reason.sentence.endswith(".")
    assert PlanningError(reason).detail == reason.sentence


def test_an_error_names_its_reason_and_detail() -> None:
    error = ImageError(Reason.IMAGE_SIZE, "0x7")
    assert str(error) == "image_size: 0x7"


def test_a_missing_package_says_what_to_install() -> None:
    error = MissingExtra("transformers")
    assert "pip install kvd[planner]" in str(error)
    assert isinstance(error, ImportError)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("data:image/png;base64,SECRET", "data:image/png;base64,…"),
        ("DATA:image/png;base64,SECRET", "DATA:image/png;base64,…"),
        (b"SECRET", "<6 bytes>"),
        ({"a": "SECRET"}, "<dict>"),
        ("x" * 100, repr("x" * 60 + "…")),
        (1.5, "1.5"),
    ],
)
def test_values_are_shown_short_and_pictures_not_at_all(value: object, text: str) -> None:
    assert shown(value) == text
