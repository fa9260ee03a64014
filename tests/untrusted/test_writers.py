"""Other users who can write into a run directory could run programs as its owner. A launch warns
about such a directory.
"""

import grp
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.files import other_writers
from kit import launcher
from tests.support import hostile
from tests.support.hostile import STRANGER, finished_run


@pytest.fixture
def resumed(tmp_path: Path, spec, tiny_dataset, monkeypatch) -> Callable[[int, bool], str]:
    """Returns a function that sets the mode of a run directory and resumes the run, with or without
    a hook. The function returns the output of `kit resume`.
    """
    run = finished_run(tmp_path / "run", spec, str(tiny_dataset.directory))
    hook = tmp_path / "hook.py"
    hook.write_text("def on_step(step): return {}\n")
    monkeypatch.setattr(launcher, "submit", lambda prepared: prepared.run)

    def resume(mode: int, has_hook: bool) -> str:
        recipe = run.recipe.replace(hook=str(hook) if has_hook else None)
        recipe.write(run.directory / "recipe.json")
        run.directory.chmod(mode)
        said = hostile.kit("resume", run.directory, "--steps", "99")
        assert said.code == 0, said.text
        return " ".join(said.text.split())

    return resume


def test_resume_warns_of_other_writers(resumed: Callable[[int, bool], str]) -> None:
    said = resumed(0o777, True)
    assert "WARNING: all users may write in" in said and "chmod -R go-w" in said
    assert "WARNING" not in resumed(0o755, True)
    assert "WARNING" not in resumed(0o777, False), "there is no program in it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the group to any")
def test_other_writers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o775)
    os.chown(tmp_path, 0, STRANGER)
    assert other_writers(tmp_path) == f"group {grp.getgrgid(STRANGER).gr_name}"
    os.chown(tmp_path, 0, 0)
    assert other_writers(tmp_path) is None, "the group of the owner alone"
    members = grp.struct_group(("root", "x", 0, ["root", "mallory"]))
    monkeypatch.setattr(grp, "getgrgid", lambda number: members)
    assert other_writers(tmp_path) == "group root"
    tmp_path.chmod(0o755)
    assert other_writers(tmp_path) is None
