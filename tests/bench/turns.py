"""Timing of several functions in turns. The functions alternate, so that the load of other programs
affects all equally. Ratios are computed within a round, and the median over rounds is the result.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kit.show.results import Row, format_value, row

MANY_ROUNDS = 20
"""Smallest number of rounds for which quartiles are reported instead of minimum and maximum. With
many rounds, minimum and maximum mainly show the load of other programs."""


def take_turns(ways: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[Any]]:
    """Calls each function of `ways` in turn with the number of the round. Returns a dict from the
    function's name to its results, one per round.
    """
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            found[name].append(way(number))
    return found


def median_row(
    name: str, values: Sequence[float], unit: str, *, note: str = "", **limit: float | None
) -> Row:
    """Returns a row with the median over rounds. The keyword arguments `limit` are passed to `row`.

    The note has the minimum and maximum, or the quartiles for at least MANY_ROUNDS rounds.
    """
    many = len(values) >= MANY_ROUNDS
    low, high = statistics.quantiles(values)[::2] if many else (min(values), max(values))
    ends = f"{'middle half ' if many else ''}{format_value(low, '')} to {format_value(high, '')}"
    told = f"{note}{'; ' if note else ''}median of {len(values)} rounds, {ends}"
    return row(name, statistics.median(values), unit, note=told, **limit)


def ratio_row(
    name: str, longer: Sequence[float], shorter: Sequence[float], **limit: float | None
) -> Row:
    """Returns a row with the median over rounds of the ratio `longer` / `shorter`. `limit` has the
    limits that `row` takes as keyword arguments.
    """
    ratios = [one / other for one, other in zip(longer, shorter, strict=True)]
    return median_row(name, ratios, "x", **limit)
