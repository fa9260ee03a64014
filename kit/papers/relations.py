"""Relations: what a paper observes in words, checked on modelled or measured numbers."""

import dataclasses
import math
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """A statement of a paper, checked on one layer: a number that must lie in a range."""

    claim: str
    layer: Literal["modelled", "measured"]
    value: float
    low: float
    """End of the number's own 90 % interval; so `high`."""
    high: float
    expected: str
    """In words."""
    at_least: float = -math.inf
    at_most: float = math.inf

    @property
    def verdict(self) -> str:
        """`holds` (the whole interval), `holds within the interval` (part of it), `fails`, or
        `holds` by value.
        """
        low, high = (self.value, self.value) if math.isnan(self.low) else (self.low, self.high)
        if self.at_least <= low and high <= self.at_most:
            return "holds"
        return (
            "holds within the interval"
            if low <= self.at_most and self.at_least <= high
            else "fails"
        )

    def row(self) -> dict[str, Any]:
        """Returns the relation as a row of a table."""
        return {
            "claim": self.claim,
            "layer": self.layer,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "expected": self.expected,
            "verdict": self.verdict,
        }
