"""`make test` and `make quick` run each test once, in groups, and continue after a failure."""

import re
from pathlib import Path

import pytest

from tests.support.groups import QUICK, TEST, Group, run_groups
from tests.support.sources import ROOT


def contains(group: Group, file: str) -> bool:
    """Returns whether a file belongs to a group by its paths. Keywords of the group are ignored."""
    selected, ignored = (
        any(Path(file).is_relative_to(path) for path in paths)
        for paths in (group.paths, group.ignored)
    )
    return selected and not ignored


@pytest.mark.parametrize("groups", [TEST, QUICK], ids=["test", "quick"])
def test_groups_contain_each_file_once(groups: dict[str, Group]) -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = str(path.relative_to(ROOT))
        names = [name for name, group in groups.items() if contains(group, file)]
        has_two = groups is TEST and file == "tests/test_notebooks.py"
        assert len(names) == (2 if has_two else 1), f"{file} is in {names}"


def test_groups_name_files_that_exist() -> None:
    for group in (*TEST.values(), *QUICK.values()):
        assert all((ROOT / path).exists() for path in (*group.paths, *group.ignored))


def test_groups_split_the_notebooks_by_keywords() -> None:
    later = TEST["later-notebooks"].keywords
    assert TEST["notebooks"].keywords == f"not ({later})"
    names = [path.stem for path in (ROOT / "notebooks").glob("0*.ipynb")]
    assert all(any(stem in name for name in names) for stem in re.findall(r"\d\d_", later))


def test_groups_continue_after_a_failure(capfdbinary) -> None:
    """The output of a group is printed as one block when the group has ended."""
    commands = {
        "first": ["sh", "-c", "echo one; sleep 1; echo two; exit 3"],
        "second": ["sh", "-c", "echo three"],
        "third": ["sh", "-c", "echo four >&2; exit 1"],
    }
    assert sorted(run_groups(commands, 2)) == ["first", "third"]
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines.index("two") == lines.index("one") + 1
    (first,) = (line for line in lines if line.startswith("==== first"))
    assert first.startswith("==== first: failed with exit code 3 after ")
    assert {"three", "four"} < {*lines}


def test_groups_limit_concurrent_commands(tmp_path: Path) -> None:
    script = (
        f"mkdir {tmp_path}/$1 && ls {tmp_path} | grep -c running >>{tmp_path}/log; "
        f"sleep 0.3; rmdir {tmp_path}/$1"
    )
    commands = {f"{n}": ["sh", "-c", script, "sh", f"running-{n}"] for n in range(5)}
    assert run_groups(commands, 2) == []
    counts = [int(count) for count in (tmp_path / "log").read_text().split()]
    assert len(counts) == 5 and max(counts) == 2
