"""Result rows: comparison with a limit, and printed values."""

import pytest

from kit.show.results import format_value, row


def test_row_is_judged_by_its_limit() -> None:
    assert row("a", 2, at_least=1).ok and not row("a", 0.5, at_least=1).ok
    assert row("a", 1, at_most=1).ok and not row("a", 2, at_most=1).ok
    assert row("a", 1).ok is None and row("a", 1).target == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0196, "fraction", "1.96 %"),
        (7446.2, "tokens/s", "7,446 tokens/s"),
        (1.266, "x", "1.27x"),
        (0.3, "s", "0.300 s"),
    ],
)
def test_value_is_printed_to_three_digits(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text
