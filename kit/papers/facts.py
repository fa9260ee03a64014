"""Published numbers of a paper (facts), each with its source, and statements of a paper that are
checked (relations).
"""

import contextlib
import csv
import dataclasses
import functools
import math
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from cluster.record import Record, field_doc
from kit.errors import check_known

DATA = Path(__file__).parent / "data"
Known = Literal["read", "quoted", "derived", "remembered"]
"""Reliability of a number that is attributed to a paper.

read: The number was read in the paper, or in code and logs of its authors. quoted: Another
publication quotes the paper. derived: The number was computed from numbers that were read, and its
note says how. remembered: The number was found in no source that could be checked. It is only a
hint. It is never drawn, and no test compares with it."""


@functools.cache
def read_paper_toml(name: str) -> dict[str, Any]:
    """Returns the content of `kit/papers/data/NAME.toml` as a dict."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFact(Record):
    """One published number, from a paper or a public log. The value may also be a word, such as a
    setting of a recipe.
    """

    series: str = field_doc(
        "name of the series to which the number belongs, such as `throughput_percent`"
    )
    x: str = field_doc(
        "position of the number in its series: a coordinate on the x axis, or a name such as"
        " a model"
    )
    value: str = field_doc("published value: a number as text, or a word")
    known: Known = field_doc("reliability of the value: read, quoted, derived or remembered")
    source: str = field_doc("source of the value, named so that anyone can look it up")
    unit: str = field_doc("unit of the published value", default="")
    note: str = field_doc("remark on the published value", default="")

    @property
    def number(self) -> float:
        """The published value as a float."""
        return float(self.value)

    @property
    def parsed(self) -> int | float | str:
        """The published value as an int if possible, else as a float if possible, else as text."""
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(self.value)
        return self.value


@dataclasses.dataclass(frozen=True)
class Facts:
    """The published numbers of one paper. `facts["name"]` is the tuple of all numbers in the series
    `name`.
    """

    name: str
    facts: tuple[PaperFact, ...]

    @classmethod
    def load(cls, name: str) -> Self:
        """Returns the published numbers in `kit/papers/data/NAME.csv`.

        Raises:
            ConfigError: A line of the file is not a valid published number. The message gives the
                number of the line.
        """
        with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as stream:
            lines = list(csv.DictReader(stream))
        facts = []
        for number, line in enumerate(lines, start=2):
            fields = {column: cell for column, cell in line.items() if cell}
            facts.append(PaperFact.from_dict(fields, f"{name}.csv:{number}"))
        return cls(name, tuple(facts))

    def __getitem__(self, series: str) -> tuple[PaperFact, ...]:
        check_known(f"{self.name}.csv", series, {fact.series for fact in self.facts})
        return tuple(fact for fact in self.facts if fact.series == series)

    def only(self, series: str, x: str) -> PaperFact:
        """Returns the published value of a series at the position `x`, with its source. A series
        has at most one value per position.
        """
        return {fact.x: fact for fact in self[series]}[x]

    def value(self, series: str, x: str) -> float:
        """Returns the published number of a series at the position `x`, as a float."""
        return self.only(series, x).number

    def fields(self, record: type[Record], model: str) -> dict[str, Any]:
        """Returns a dict from field name to value: the fields of a plan or recipe that the paper
        publishes for a model.

        For example, the field `tensor_parallel` comes from the published series
        `recipe_tensor_parallel`.
        """
        stated = {
            fact.series.removeprefix("recipe_"): fact.parsed
            for fact in self.facts
            if fact.x == model
        }
        names = [field.name for field in dataclasses.fields(record)]
        return {name: stated[name] for name in names if name in stated}

    def known(self, prefix: str, x: str) -> dict[str, Known]:
        """Returns a dict from series to the reliability (read, quoted, derived or remembered) of
        each published number about a model.

        `x` is the name of the model. Only series whose names begin with `prefix` are included. The
        keys are the names of the series without `prefix`.
        """
        return {
            fact.series.removeprefix(prefix): fact.known
            for fact in self.facts
            if fact.x == x and fact.series.startswith(prefix)
        }

    def text(self, series: str, x: str) -> str:
        """Returns one published value as text for a table. Whole numbers with five or more digits
        have thousands separators.
        """
        value = self.only(series, x).value
        if value.isdigit() and len(value) > 4:
            return f"{int(value):,}"
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """A statement of a paper as a number that must lie in a range. The number comes from the
    planner's model or from measurements.
    """

    claim: str
    layer: Literal["modelled", "measured"]
    value: float
    low: float = math.nan
    """Lower end of the interval of `value`. For a modelled number, it is the 90 % interval. For a
    measured number, it comes from quartiles over training steps. NaN: there is no interval."""
    high: float = math.nan
    """Upper end of the interval of `value`. For a modelled number, it is the 90 % interval. For a
    measured number, it comes from quartiles over training steps. NaN: there is no interval."""
    expected: str
    """Expected number or range in words, for tables."""
    within: tuple[float, ...]
    """(lower end, upper end) of the range in which `value` must lie. An end may be infinite."""

    @property
    def verdict(self) -> str:
        """`holds`, `holds within the interval` or `fails`.

        `holds`: The whole interval lies in the range `within`. Without an interval, `value` lies in
        the range. `holds within the interval`: Only a part of the interval lies in the range.
        `fails`: No part lies in the range.
        """
        least, most = self.within
        low = self.value
        high = self.value
        if not math.isnan(self.low):
            low = self.low
            high = self.high
        if least <= low and high <= most:
            return "holds"
        if low <= most and least <= high:
            return "holds within the interval"
        return "fails"

    @property
    def width(self) -> float:
        """Half the length of the range in which the paper's number could have lain with a passed
        check, as a fraction of `value`. If the range is short, a passed check is strong evidence.

        The length of this range is the length of `within` plus the length of the interval of
        `value`. The width is infinite if one end of `within` is infinite.
        """
        least, most = self.within
        accepted = most - least
        if not math.isnan(self.low):
            accepted += self.high - self.low
        return accepted / 2 / abs(self.value)


def plain_number(value: float) -> str:
    """Returns a number as text for a caption or a page.

    Numbers from 1,000 on are rounded to whole numbers. Smaller numbers are rounded to three
    significant digits.
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
