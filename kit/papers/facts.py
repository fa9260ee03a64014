"""Facts: numbers that a paper states, each with its source. Relations: statements of a paper, each
checked.
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
"""Reliability of a number of a paper.

read: The number is in the paper, or in its authors' own code and logs. quoted: Another publication
quotes the paper. derived: The number was computed from numbers that were read, and the note says
how. remembered: The number was found in no source that could be checked. It is only a hint: it is
never drawn, and no test compares with it.
"""


@functools.cache
def read_paper_toml(name: str) -> dict[str, Any]:
    """Returns the content of `kit/papers/data/NAME.toml` as a dict."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFact(Record):
    """One number that a paper or a public log states, or one word of a recipe."""

    series: str = field_doc("name of the series to which the number belongs")
    x: str = field_doc("place of the number in its series: a number on the axis, or a name")
    value: str = field_doc("value of the fact: a number as text, or a word")
    known: Known = field_doc("how the value is known: read, quoted, derived or remembered")
    source: str = field_doc("source of the value, named so that anyone can look it up")
    unit: str = field_doc("unit of the value", default="")
    note: str = field_doc("remark on the value", default="")

    @property
    def number(self) -> float:
        """The value as a float."""
        return float(self.value)

    @property
    def parsed(self) -> int | float | str:
        """The value as an int if possible, else as a float if possible, else as text."""
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(self.value)
        return self.value


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of one paper. `facts["name"]` is the facts of the series `name`."""

    name: str
    facts: tuple[PaperFact, ...]

    @classmethod
    def load(cls, name: str) -> Self:
        """Returns the facts in `kit/papers/data/NAME.csv`.

        Raises:
            ConfigError: A line is not a valid fact. The message names the line.
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
        """Returns the fact of a series with this x."""
        return {fact.x: fact for fact in self[series]}[x]

    def value(self, series: str, x: str) -> float:
        """Returns the number of the fact of a series with this x."""
        return self.only(series, x).number

    def fields(self, record: type[Record], model: str) -> dict[str, Any]:
        """Returns the fields of a plan or a recipe that the paper states for a model.

        The field `tensor_parallel` comes from the series `recipe_tensor_parallel`.
        """
        stated = {
            fact.series.removeprefix("recipe_"): fact.parsed
            for fact in self.facts
            if fact.x == model
        }
        names = [field.name for field in dataclasses.fields(record)]
        return {name: stated[name] for name in names if name in stated}

    def known(self, prefix: str, x: str) -> dict[str, Known]:
        """Returns the reliability of each fact about a model, by the name of its series without
        `prefix`.

        `x` is the name of the model. Series without the prefix are left out.
        """
        return {
            fact.series.removeprefix(prefix): fact.known
            for fact in self.facts
            if fact.x == x and fact.series.startswith(prefix)
        }

    def text(self, series: str, x: str) -> str:
        """Returns the value of one fact as text for a table. Long whole numbers have thousands
        separators.
        """
        value = self.only(series, x).value
        if value.isdigit() and len(value) > 4:
            return f"{int(value):,}"
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """A statement of a paper, checked on the model or on measurements: a number that must lie in a
    range.
    """

    claim: str
    layer: Literal["modelled", "measured"]
    value: float
    low: float = math.nan
    """Lower end of the 90 % interval of `value`, NaN if there is no interval."""
    high: float = math.nan
    """Upper end of the 90 % interval of `value`, NaN if there is no interval."""
    expected: str
    """Expected number or range, in words."""
    within: tuple[float, ...]
    """Lower and upper end of the range that `value` must lie in. An end may be infinite."""

    @property
    def verdict(self) -> str:
        """`holds`, `holds within the interval` or `fails`.

        `holds`: The whole interval lies in the range, or `value` does if there is no interval.
        `holds within the interval`: A part of the interval lies in the range.
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
        """Half-width of the range of published numbers that would have passed, as a fraction of
        `value`.

        This range is `within`, widened by the model's interval. Infinite if one end of `within` is
        infinite.
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
