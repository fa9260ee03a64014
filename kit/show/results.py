"""A measured number, its comparison with a limit, and its format. Imports no torch."""

import dataclasses

from cluster.record import Record, field_doc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One measured number, with its target if it has one."""

    name: str = field_doc("name of the measured quantity")
    value: float = field_doc("measured number; a fraction of 1 if the unit is `fraction`")
    unit: str = field_doc("unit of the number, such as s, ms, tokens/s, x or fraction", default="")
    target: str = field_doc(
        "limit that the number should meet, as text; empty: the number has no limit", default=""
    )
    ok: bool | None = field_doc(
        "whether the number meets its target; None: there is no target", default=None
    )
    note: str = field_doc("spread and conditions of the measurement", default="")


def row(
    name: str,
    value: float,
    unit: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Row:
    """Returns the row of a measured value. If `at_least` or `at_most` is given, the row also says
    whether the value meets this limit. If both are
    given, only `at_least` is used.
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


def format_value(value: float, unit: str) -> str:
    """Returns a number with three significant digits and its unit. The unit `fraction` is printed
    as per cent. Integers and numbers from 100 on have no decimals.
    """
    number = value
    if unit == "fraction":
        number = 100 * value
    digits = f"{number:#.3g}".rstrip(".")
    if abs(number) >= 100 or number == int(number):
        digits = f"{number:,.0f}"
    suffix = {"fraction": " %", "": "", "x": "x"}.get(unit, f" {unit}")
    return digits + suffix
