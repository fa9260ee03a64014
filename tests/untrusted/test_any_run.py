"""Whatever stands where a file of a run should be, every view shows the run or says in a
sentence why it cannot.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.untrusted.hostile import in_a_child
from tests.untrusted.planted import (
    DRAWN,
    FOLDERS,
    OTHERS,
    RECORDS,
    SLOW,
    Views,
    all_faults,
    every_number,
    mutations,
    plant,
    rewrite,
    whole_run,
)

MUTATIONS, ALL_MUTATIONS = 300, 5000


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("template") / "run").directory


def check(
    template: Path, folder: Path, cases: dict[str, Callable[[Path], Any]], others: Views = SLOW
) -> None:
    """Looks at a changed copy of a run for each case, in a child that may take only so much
    memory.
    """
    found = in_a_child(lambda: all_faults(template, cases, folder, others))
    assert not found, f"{len(found)} faults:\n" + "\n".join(found)


KINDS = (
    "a pipe",
    "a link to /dev/zero",
    "a link to it",
    "a terabyte of nothing",
    "a folder",
    "no text",
    "10**5000",
    "a deep list",
)


@pytest.mark.parametrize("kind", KINDS)
def test_special_files(template: Path, tmp_path: Path, kind: str) -> None:
    names = (*RECORDS, *OTHERS, *FOLDERS)
    check(
        template, tmp_path, {name: lambda run, name=name: plant(run, name, kind) for name in names}
    )


@pytest.mark.parametrize(
    "number", [2_000_000_000, 2**63, 10**400, math.nan, math.inf, 0], ids=lambda n: f"{n!r:.20}"
)
def test_numbers(template: Path, tmp_path: Path, number: float) -> None:
    def change(run: Path, name: str) -> None:
        rewrite(run / name, lambda value: every_number(value, number))

    cases = {
        name: lambda run, name=name: change(run, name)
        for name in RECORDS
        if (template / name).exists()
    }
    check(template, tmp_path, cases)


def test_mutated_runs(template: Path, tmp_path: Path) -> None:
    """One by its number again: `python -m tests.untrusted.planted NUMBER`."""
    check(template, tmp_path, mutations(range(MUTATIONS)))


@pytest.mark.thorough
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
def test_many_more_mutated_runs(template: Path, tmp_path: Path, part: int) -> None:
    size = ALL_MUTATIONS // 10
    check(template, tmp_path, mutations(range(part * size, (part + 1) * size)), {**SLOW, **DRAWN})
