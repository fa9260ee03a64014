"""One measured number, judged by its limit, and how it is printed. No torch."""

import dataclasses

from cluster.record import Record, field_doc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One measured number."""

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
    """Returns a row, judged by one limit if there is one."""
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
    """Returns a number to three significant digits with its unit; a fraction is printed in per
    cent.
    """
    number = value
    if unit == "fraction":
        number = 100 * value
    digits = f"{number:#.3g}".rstrip(".")
    if abs(number) >= 100 or number == int(number):
        digits = f"{number:,.0f}"
    suffix = {"fraction": " %", "": "", "x": "x"}.get(unit, f" {unit}")
    return digits + suffix
