"""A measured number, its comparison with a limit, and its text form. The module does not import
torch.
"""

import dataclasses

from cluster.record import Record, field_doc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One measured number, compared with its target (a limit) if it has one."""

    name: str = field_doc("name of the measured quantity")
    value: float = field_doc("measured number; if the unit is `fraction`, 1 is 100 %")
    unit: str = field_doc(
        "unit of the measured number, such as s, ms, tokens/s, x or fraction", default=""
    )
    target: str = field_doc(
        "limit for the measured number, as text such as `≤ 5 %`; empty: there is no limit",
        default="",
    )
    ok: bool | None = field_doc(
        "whether the measured number is within its limit; None: there is no limit", default=None
    )
    note: str = field_doc(
        "spread of the measured number, and the conditions of the measurement", default=""
    )


def row(
    name: str,
    value: float,
    unit: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Row:
    """Returns the row of a measured value. If `at_least` or `at_most` is given, the row has this
    limit as its target and says whether the value is within the limit. If both are given, only
    `at_least` is used.
    """
    target = ""
    ok = None
    if at_least is not None:
        target = f"≥ {format_value(at_least, unit)}"
        ok = value >= at_least
    elif at_most is not None:
        target = f"≤ {format_value(at_most, unit)}"
        ok = value <= at_most
    return Row(name=name, value=value, unit=unit, target=target, ok=ok, note=note)


def short_number(value: float) -> str:
    """Returns a number as text, such as `0.4`, `12.3` or `2,250`. A number below 100 is rounded to
    three significant digits. A larger number is rounded to an integer and has thousands separators.
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def parameters_text(num_params: float) -> str:
    """Returns a number of parameters as text with three significant digits and a suffix, such as
    `124M`, `6.74B` or `1.01T`.
    """
    for suffix, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if num_params >= 0.9995 * unit:
            return f"{num_params / unit:.3g}{suffix}"
    return f"{num_params:.0f}"


def format_value(value: float, unit: str) -> str:
    """Returns a number as text with three significant digits and its unit. A number with the unit
    `fraction` is printed in per cent. Integers, and numbers of at least 100, have no decimals.
    """
    number = value
    if unit == "fraction":
        number = 100 * value
    digits = f"{number:#.3g}".rstrip(".")
    if abs(number) >= 100 or number == int(number):
        digits = f"{number:,.0f}"
    suffix = {"fraction": " %", "": "", "x": "x"}.get(unit, f" {unit}")
    return digits + suffix
