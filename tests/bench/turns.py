"""What is timed turn by turn: other work on the machine meets all alike, ratios are taken within a
round, and the median counts.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kit.show.results import Row, format_value, row

MANY_ROUNDS = 20
"""From which the middle half of them says more than the two that were met by other work."""


def take_turns(ways: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[Any]]:
    """Returns what each way returns in each round, whose number it is called with."""
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            found[name].append(way(number))
    return found


def median_row(
    name: str, values: Sequence[float], unit: str, *, note: str = "", **limit: float | None
) -> Row:
    """Returns the median of what was measured in each round, judged by a limit as `row` is.

    Its note has the range, or where the rounds are many what the middle half of them say.
    """
    many = len(values) >= MANY_ROUNDS
    low, high = statistics.quantiles(values)[::2] if many else (min(values), max(values))
    ends = f"{'half of them ' if many else ''}{format_value(low, '')} to {format_value(high, '')}"
    told = f"{note}{'; ' if note else ''}median of {len(values)} rounds, {ends}"
    return row(name, statistics.median(values), unit, note=told, **limit)


def ratio_row(
    name: str, longer: Sequence[float], shorter: Sequence[float], **limit: float | None
) -> Row:
    """Returns the median ratio of two's times within a round, judged by a limit as `row` is."""
    ratios = [one / other for one, other in zip(longer, shorter, strict=True)]
    return median_row(name, ratios, "x", **limit)
