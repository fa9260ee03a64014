"""What a paper states, each number with its source and how it is known; and a statement of it,
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
"""How a number of a paper is known.

read: in the paper, or in its authors' own code and logs. quoted: in somebody else's account of it.
derived: computed from numbers that were read; the note says how. remembered: not found in any
source that could be checked, so a hint, never drawn and never a test's yardstick.
"""


@functools.cache
def read_paper_toml(name: str) -> dict[str, Any]:
    """Returns the tables in `kit/papers/data/NAME.toml`."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFact(Record):
    """One number that a paper or a public log states, or one word of a recipe."""

    series: str = field_doc("what the number is one of")
    x: str = field_doc("which one: a number on the axis, or a name")
    value: str = field_doc("as a number, or a word")
    known: Known = field_doc("how")
    source: str = field_doc("that anyone can look up")
    unit: str = field_doc("of the value", default="")
    note: str = field_doc("what to know about it", default="")

    @property
    def number(self) -> float:
        """The value as a number."""
        return float(self.value)

    @property
    def parsed(self) -> int | float | str:
        """The value as a number, whole where it is written so, or as the words that it is."""
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(self.value)
        return self.value


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of one paper, by series."""

    name: str
    facts: tuple[PaperFact, ...]

    @classmethod
    def load(cls, name: str) -> Self:
        """Returns the facts in `kit/papers/data/NAME.csv`.

        Raises:
            ConfigError: a line is no fact; the message says which.
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
        """Returns one fact of a series."""
        return {fact.x: fact for fact in self[series]}[x]

    def value(self, series: str, x: str) -> float:
        """Returns the number of one fact."""
        return self.only(series, x).number

    def fields(self, record: type[Record], model: str) -> dict[str, Any]:
        """Returns the fields of a plan or a recipe that are stated of a model: of `tensor_parallel`
        in the series `recipe_tensor_parallel`.
        """
        stated = {
            fact.series.removeprefix("recipe_"): fact.parsed
            for fact in self.facts
            if fact.x == model
        }
        names = [field.name for field in dataclasses.fields(record)]
        return {name: stated[name] for name in names if name in stated}

    def known(self, prefix: str, x: str) -> dict[str, Known]:
        """Returns how what is stated of a model is known, by the series without their prefix."""
        return {
            fact.series.removeprefix(prefix): fact.known
            for fact in self.facts
            if fact.x == x and fact.series.startswith(prefix)
        }

    def text(self, series: str, x: str) -> str:
        """Returns one fact as a table has it: a long number with separators."""
        value = self.only(series, x).value
        if value.isdigit() and len(value) > 4:
            return f"{int(value):,}"
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """A statement of a paper, checked on one layer: a number that must lie in a range."""

    claim: str
    layer: Literal["modelled", "measured"]
    value: float
    low: float = math.nan
    """End of the number's own 90 % interval, NaN where it has none; so `high`."""
    high: float = math.nan
    expected: str
    """In words."""
    within: tuple[float, ...]
    """Both ends of what is expected."""

    @property
    def verdict(self) -> str:
        """`holds` (the whole interval), `holds within the interval` (part of it), `fails`, or
        `holds` by value.
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
        """Half the range of stated numbers that would have passed, as a share of the value;
        infinite where one end is open.
        """
        least, most = self.within
        accepted = most - least
        if not math.isnan(self.low):
            accepted += self.high - self.low
        return accepted / 2 / abs(self.value)


def plain_number(value: float) -> str:
    """Returns a number as a caption or a page has it."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
