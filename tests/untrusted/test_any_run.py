"""Runs with arbitrary file contents. Every view shows the run, or gives the reason why it
cannot.
"""

import math
import random
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import heartbeats
from tests.support.hostile import in_a_child
from tests.untrusted import planted
from tests.untrusted.planted import RECORDS, SLOW, VIEWS

pytestmark = pytest.mark.slow

MUTATIONS, ALL_MUTATIONS = 300, 5000


@pytest.fixture(autouse=True)
def judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a silent heartbeat count as old at once. Otherwise each case would wait 5 s as soon as
    the template run is older than 30 s. The wait is tested in tests/cluster.
    """
    monkeypatch.setattr(heartbeats, "_enough_s", lambda state: 0.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.whole_run(tmp_path_factory.mktemp("template") / "run").directory


def assert_no_fault(
    template: Path,
    folder: Path,
    cases: dict[str, Callable[[Path], Any]],
    others: planted.Views = SLOW,
) -> None:
    """Asserts that no view has a fault on changed copies of a run. Each copy is read by the quick
    views and by one view of `others`, in turn. The unchanged run comes first and is read by all
    views.
    """

    def faults() -> list[str]:
        # Memory is limited, so that a view that reads without end fails without harm to this
        # machine.
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 30), resource.RLIM_INFINITY))
        # Warnings about an overflow of twice 1e308, or about a label that is too long for its
        # figure, are no faults.
        warnings.simplefilter("ignore")
        found = []
        # This first read imports all modules, which exceeds the limits of a view.
        planted.faults(shutil.copytree(template, folder / "imports" / "run"), {**VIEWS, **others})
        for number, (name, change) in enumerate({"as it is": lambda run: None, **cases}.items()):
            directory = shutil.copytree(template, folder / str(number) / "run")
            done, turn = change(directory), list(others)[number % len(others)]
            views = {**VIEWS, turn: others[turn]} if number else {**VIEWS, **others}
            faults = planted.faults(directory, views)
            found += [f"{name} {done or ''}: {fault}" for fault in faults]
            shutil.rmtree(directory.parent)
        return found

    found = in_a_child(faults)
    assert not found, f"{len(found)} faults:\n" + "\n".join(found)


def every_number(value: Any, new: Any) -> Any:
    """Returns a JSON value in which all numbers are replaced by `new`."""
    if isinstance(value, dict):
        return {key: every_number(inner, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [every_number(inner, new) for inner in value]
    return new if isinstance(value, int | float) and not isinstance(value, bool) else value


def mutations(numbers: range) -> dict[str, Callable[[Path], Any]]:
    """Returns a dict with one case per number. The number is the random seed of the changes to the
    run.
    """
    mutate = planted.mutate
    return {f"mutation {n}": lambda run, n=n: mutate(run, random.Random(n)) for n in numbers}


KINDS = "a pipe", "a link to /dev/zero", "a link to it", "a terabyte of nothing", "a folder", "gone"
CONTENTS = "no text", "10**5000", "a deep list"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *CONTENTS])
def test_views_survive_special_files(template: Path, tmp_path: Path, kind: str) -> None:
    names = (*RECORDS, *planted.OTHERS, *planted.FOLDERS)
    cases = {name: lambda run, name=name: planted.plant(run, name, kind) for name in names}
    assert_no_fault(template, tmp_path, cases)


@pytest.mark.parametrize(
    "number", [2_000_000_000, 2**63, 10**400, math.nan, math.inf, 0], ids=lambda n: f"{n!r:.20}"
)
def test_views_survive_extreme_numbers(template: Path, tmp_path: Path, number: float) -> None:
    def change(run: Path, name: str) -> None:
        planted.rewrite(run / name, lambda value: every_number(value, number))

    names = [name for name in RECORDS if (template / name).exists()]
    cases = {name: lambda run, name=name: change(run, name) for name in names}
    assert_no_fault(template, tmp_path, cases)


def test_views_survive_random_mutations(template: Path, tmp_path: Path) -> None:
    assert_no_fault(template, tmp_path, mutations(range(MUTATIONS)))


@pytest.mark.thorough
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
def test_views_survive_thousands_of_mutations(template: Path, tmp_path: Path, part: int) -> None:
    size = ALL_MUTATIONS // 10
    numbers = range(part * size, (part + 1) * size)
    assert_no_fault(template, tmp_path, mutations(numbers), {**SLOW, **planted.DRAWN})
