"""Result rows: comparison with a limit, and printed values."""

import pytest

from kit.show.results import format_value, parameters_text, row, short_number


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


@pytest.mark.parametrize(
    ("value", "text"), [(0.4, "0.4"), (12.34, "12.3"), (989.4, "989"), (2250.0, "2,250")]
)
def test_short_number_has_no_exponent(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("num_params", "text"),
    [
        (512, "512"),
        (124_439_808, "124M"),
        (999_885_952, "1B"),
        (8_030_261_248, "8.03B"),
        (1_006_700_000_000, "1.01T"),
    ],
)
def test_parameters_text_has_a_suffix(num_params: int, text: str) -> None:
    assert parameters_text(num_params) == text
