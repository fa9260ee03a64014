"""One number of a rehearsal, and the limit that it is held to."""

import dataclasses
from typing import Literal

from cluster.site import Fact
from kit.show.results import format_value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
    """What a job needs of something, and how that is known."""

    stage: str
    what: str
    value: float | None
    """None: not known."""
    unit: str = ""
    limit: float | None = None
    """The highest value that fits."""
    limit_source: str = ""
    """Where the limit is from; without one, what nobody has stated. Empty: it needs none."""
    known: Literal["run", "counted", "modelled"] = "counted"
    """`run`: the real code did it; `counted`: from what the code does, times how many;
    `modelled`: by equations."""
    note: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether it is within its limit; None without one."""
        return None if self.limit is None or self.value is None else self.value <= self.limit

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table: stage, what, value, limit, whether it fits, how it is known,
        note.
        """
        value = "not known" if self.value is None else format_value(self.value, self.unit)
        limit = "not known" if self.limit_source else ""
        if self.limit is not None:
            limit = f"≤ {format_value(self.limit, self.unit)}"
        verdict = {True: "yes", False: "NO", None: ""}[self.fits]
        return self.stage, self.what, value, limit, verdict, self.known, self.note

    def within(self, fact: Fact | None, name: str, unit: float = 1.0) -> "Count":
        """Returns the count held to what a site file states as `name`, in multiples of `unit`."""
        if fact is None:
            return dataclasses.replace(self, limit_source=f"{name} is not stated")
        return dataclasses.replace(self, limit=fact.value / unit, limit_source=fact.source)
