"""Links that another user has left where a command writes: the target of a link is not changed."""

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.attempts import claim_attempt, claimed
from cluster.state import JobError, ask
from kit.papers import FIGURES
from kit.show.style import new_figure, save_figure
from tests.untrusted import hostile
from tests.untrusted.hostile import finished_run

PRECIOUS = b"three years of work"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one run of this user."""
    finished_run(tmp_path / "runs" / "one")
    return tmp_path / "runs"


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Path], Path]:
    """A function that puts a link to a file of this user under a name, and returns that file."""

    def link(name: Path) -> Path:
        target = tmp_path / f"thesis-{name.name}"
        target.write_bytes(PRECIOUS)
        name.symlink_to(target)
        return target

    return link


OUTPUTS = {
    "runs FOLDER --compare one": "compare.png",
    "figure FOLDER/one": "one/figure.png",
    "figure FOLDER/one --out FOLDER/loss.SVG": "loss.SVG",
    "figure FOLDER/one --out FOLDER/loss.pdf": "loss.pdf",
    f"figure {next(iter(FIGURES))} --out FOLDER/paper.png": "paper.csv",
    "export FOLDER/one --format csv --overwrite": "one/export.csv",
}
"""File that each command writes in FOLDER."""


@pytest.mark.parametrize("words", OUTPUTS)
def test_output_replaces_planted_link(words: str, runs: Path, plant: Callable) -> None:
    file = runs / OUTPUTS[words]
    target = plant(file)
    said = hostile.kit(*words.replace("FOLDER", str(runs)).split())
    assert said.code == 0, said.text
    assert target.read_bytes() == PRECIOUS
    assert not file.is_symlink() and file.stat().st_size > 100
    assert not list(file.parent.glob(f".{file.name}.*")), "a temporary file is left"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_compare_refuses_folder_of_another_user(runs: Path, tmp_path: Path) -> None:
    os.chown(runs, hostile.STRANGER, hostile.STRANGER)
    said = hostile.kit("runs", runs, "--compare", "one")
    assert said.code == 1 and "--out" in said.text
    assert not (runs / "compare.png").exists()
    out = tmp_path / "mine.png"
    assert hostile.kit("runs", runs, "--compare", "one", "--out", out).code == 0
    assert out.stat().st_size > 1000


def test_csv_cells_are_no_formulas(tmp_path: Path) -> None:
    rows = [{"run": '=HYPERLINK("http://evil")', "loss": -1.5}, {"run": "@SUM(1)", "loss": -2}]
    with new_figure(height=2) as (figure, _):
        save_figure(figure, rows, [tmp_path / "table.csv"])
    with (tmp_path / "table.csv").open() as stream:
        cells = [cell for row in csv.reader(stream) for cell in row]
    assert cells == ["run", "loss", '\'=HYPERLINK("http://evil")', "-1.5", "'@SUM(1)", "-2"]


LINKED = ("control", "ranks", "checkpoints", "logs", "eval")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
@pytest.mark.parametrize("name", LINKED)
def test_linked_folder_of_another_user_is_refused(name: str, runs: Path, tmp_path: Path) -> None:
    run, folder, target = runs / "one", runs / "one" / name, tmp_path / "precious"
    if folder.exists():
        folder.rename(target)
    target.mkdir(exist_ok=True)
    (target / "request_checkpoint").write_text("mine")
    folder.symlink_to(target)
    os.chown(folder, hostile.STRANGER, hostile.STRANGER, follow_symlinks=False)
    before = hostile.tree(target)
    for write in (lambda: ask(run, "stop"), lambda: claim_attempt(run)):
        with pytest.raises(JobError, match=f"{name}: it is a link that nobody made"):
            write()
    with pytest.raises(JobError), claimed(run, {"job.json": "{}"}):
        pass
    assert hostile.tree(target) == before
    os.chown(folder, 0, 0, follow_symlinks=False)
    ask(run, "stop")
    assert claim_attempt(run) == 2, "the owner's links are followed"
