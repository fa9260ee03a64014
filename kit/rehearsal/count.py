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
    is_limited: bool = False
    """Whether it should have a limit: without one, nobody knows whether it fits."""
    known: Literal["run", "counted", "modelled"] = "counted"
    """`run`: the real code did it; `counted`: from what the code does, times how many;
    `modelled`: by equations."""
    note: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether it is within its limit; None without one."""
        return None if self.limit is None or self.value is None else self.value <= self.limit

    @property
    def text(self) -> str:
        """The value for people."""
        return "not known" if self.value is None else format_value(self.value, self.unit)

    @property
    def limit_text(self) -> str:
        """The limit for people."""
        if self.limit is None:
            return "not known" if self.is_limited else ""
        return f"≤ {format_value(self.limit, self.unit)}"

    def within(self, fact: Fact | None, *, share: float = 1.0, unit: float = 1.0) -> "Count":
        """Returns the count held to a share of what a site file states, in multiples of `unit`."""
        if fact is None:
            return dataclasses.replace(self, is_limited=True)
        limit = share * fact.value / unit
        return dataclasses.replace(self, limit=limit, limit_source=fact.source, is_limited=True)
