"""Timing in turns: alternating the contestants spreads other load over all of them. Ratios are
taken within a round, and the median round counts.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kit.show.results import Row, format_value, row

MANY_ROUNDS = 20
"""Number of rounds from which quartiles are reported instead of minimum and maximum. With many
rounds the extremes show other load on the machine."""


def take_turns(ways: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[Any]]:
    """Calls each function of `ways` in turn with the number of the round. Returns results by name,
    one per round.
    """
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            found[name].append(way(number))
    return found


def median_row(
    name: str, values: Sequence[float], unit: str, *, note: str = "", **limit: float | None
) -> Row:
    """Returns a row with the median over rounds. `limit` is the limit of `row`.

    The note has the range, or the quartiles from MANY_ROUNDS rounds on.
    """
    many = len(values) >= MANY_ROUNDS
    low, high = statistics.quantiles(values)[::2] if many else (min(values), max(values))
    ends = f"{'half of them ' if many else ''}{format_value(low, '')} to {format_value(high, '')}"
    told = f"{note}{'; ' if note else ''}median of {len(values)} rounds, {ends}"
    return row(name, statistics.median(values), unit, note=told, **limit)


def ratio_row(
    name: str, longer: Sequence[float], shorter: Sequence[float], **limit: float | None
) -> Row:
    """Returns a row with the median of `longer` / `shorter` within a round. `limit` is the limit of
    `row`.
    """
    ratios = [one / other for one, other in zip(longer, shorter, strict=True)]
    return median_row(name, ratios, "x", **limit)
