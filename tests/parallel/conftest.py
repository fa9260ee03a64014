"""Ranks that the tests of a module share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import quick
from tests.workers import StandingRanks


@pytest.fixture(scope="module")
def run_standing() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks` on ranks that stay until the module's tests are done."""
    standing: dict[int, StandingRanks] = {}

    def run(num_ranks: int, function: Callable, *args: Any) -> list[Any]:
        quick.refuse_many(num_ranks)
        if num_ranks not in standing:
            standing[num_ranks] = StandingRanks(num_ranks)
        try:
            return standing[num_ranks].run(function, *args)
        except BaseException:
            standing.pop(num_ranks).close()
            raise

    yield run
    for ranks in standing.values():
        ranks.close()
