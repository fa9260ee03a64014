"""Every command, on a run in which another user has replaced one file or folder.

Each command runs in a process of a user without privileges (the viewer). The run belongs to another
user and is writable by everybody, or it belongs to the viewer and the other user has planted a file
in it. The viewer's own files, to which planted links point, must not change. The dataset of the run
and a Hugging Face folder are tested in the same way.
"""

import os
import random
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster import heartbeats
from kit import launcher
from kit.interop.weights.hugging_face import export_run
from tests.support import hostile
from tests.support.hostile import (
    STRANGER,
    Calls,
    in_a_child,
    open_to_all,
    save_checkpoint,
    tree,
    write_task,
)
from tests.untrusted.planted import whole_run
from tests.untrusted.test_strangers_runs import COMMANDS, Looks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs two users"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:This process"),
]
VIEWER = 12345
"""Number of the user who runs the commands, called the viewer."""
WALL_S, MORE_BYTES = 20.0, 300 << 20
"""Limits of one command: wall seconds, and bytes of additional memory."""
SECRET = "the diary of the viewer"
MADE = """
login.json import.json hook.py notes.txt .state.lock .launch.lock .login.lock login_seen.json
figure.png export.csv export.parquet export.hf monitor control/request_stop submit.sh
control/taken_stop logs/attempt_02 logs/attempt_02_supervisor.log logs/attempt_01_supervisor.log
checkpoints/step_00000060 tensorboard tensorboard/attempt_01 wandb profile env.json
checkpoints/step_00000040.deleting eval/step_00000040.samples
""".split()
"""Files and folders that a run may have, but that are missing in the run of this test. The test
plants files at these paths too.
"""
LIVE = """
live stop RUN
live checkpoint RUN
live watch RUN
live logs RUN --follow
"""
"""Commands with additional effects while the job of a run is running. They are tested on runs that
belong to the user who calls the command.
"""
OF_A_MODEL = """
look generate MODEL a --tokens 1
look eval MODEL --tasks TASK --limit 2 -o OUT/report.json
look launch OUT/run --model RUN/spec.json --plan RUN/plan.json --recipe RUN/recipe.json --data DATA --init-from MODEL
"""  # noqa: E501
"""Commands that read a folder with a Hugging Face model."""
SAMPLE = 60
"""Number of pairs (case, command) that are tested without --thorough."""
EACH = 5
"""Number of commands that are tested on each case with --thorough. The commands differ between
kinds of planted files, so that in total every command is tested on every path."""
PARTS = 6


def link(target: str) -> Callable[[Path, Path], Any]:
    return lambda path, mine: path.symlink_to(mine / target)


def move(path: Path, mine: Path) -> None:
    """Moves a file or folder into the folder with the viewer's files, and puts a link in
    its place.
    """
    target = mine / "moved"
    if path.with_name(f"{path.name}.aside").exists():
        path.with_name(f"{path.name}.aside").rename(target)
        hostile.open_to_all(target, VIEWER)
    else:
        target.mkdir()
        os.chown(target, VIEWER, VIEWER)
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "link to a file": link("thesis.tex"),
    "link to a folder": link("folder"),
    "link to a copy": move,
    "link to /dev/zero": lambda path, mine: path.symlink_to("/dev/zero"),
    "link to /dev/tty": lambda path, mine: path.symlink_to("/dev/tty"),
    "pipe": lambda path, mine: os.mkfifo(path, 0o666),
    "unreadable": lambda path, mine: None,
    "missing": lambda path, mine: None,
}


class Case(NamedTuple):
    """One test case: whether the viewer owns the run, which path is replaced, and by what kind of
    file.
    """

    is_own: bool
    path: str
    kind: str

    def __str__(self) -> str:
        return f"{'own' if self.is_own else 'other'} run, {self.path}: {self.kind}"


def plant(case: Case, shared: Path, mine: Path) -> None:
    """Replaces the file or folder that a case names by the case's kind of file."""
    path = shared / case.path
    aside = path.with_name(f"{path.name}.aside")
    path.parent.mkdir(parents=True, exist_ok=True)
    if case.kind == "unreadable":
        if not path.exists():
            path.touch()
        path.chmod(0)
        return
    if path.exists():
        path.rename(aside)
    KINDS[case.kind](path, mine)
    if aside.is_dir():
        shutil.rmtree(aside)
    aside.unlink(missing_ok=True)
    if os.path.lexists(path):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def rows_of(case: Case) -> list[str]:
    """Returns the commands that may read the path that a case replaces. Each row is a word for the
    expected outcome, followed by a command.
    """
    if case.path.startswith("model"):
        return [*OF_A_MODEL.strip().splitlines()]
    live = LIVE.strip().splitlines() if case.is_own else []
    return [*COMMANDS.strip().splitlines(), *live]


class Commands:
    """Runs commands as the viewer on the run of a case. Returns descriptions of forbidden effects
    of each command.
    """

    def __init__(self, tmp_path: Path, template: Path, calls: Calls, dataset: Any) -> None:
        self.folder, self.template, self.calls = tmp_path, template, calls
        self.mine, self.shared = tmp_path / "mine", tmp_path / "shared"
        self.looks = Looks(self.shared / "run", tmp_path, calls, "x", dataset)
        self.looks.words |= {
            "MODEL": self.shared / "model",
            "DATA": self.shared / "data",
            "TASK": write_task(tmp_path),
        }

    def import_all(self, rows: list[str]) -> None:
        """Runs each command once in this process, so that child processes have all modules already.
        As the viewer, they could not read Python's folders.
        """
        for row in sorted(set(rows)):
            self.prepare(None)
            self.kit(row, ctrl_c_after_s=1.0 if follows(row) else 60.0)

    def kit(self, row: str, ctrl_c_after_s: float) -> hostile.Said:
        """Runs the command of a row in this process, with placeholders replaced by paths."""
        words = [self.looks._filled(word) for word in row.split()[1:]]
        return hostile.kit(*words, ctrl_c_after_s=ctrl_c_after_s)

    def prepare(self, case: Case | None) -> None:
        """Creates the run, the dataset, the model and the viewer's files anew. Plants the file of
        the case, if one is given.
        """
        for folder in (self.mine, self.shared, self.looks.out, self.folder / "home"):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.template, self.shared)
        (self.mine / "folder").mkdir(parents=True)
        for file in ("thesis.tex", "folder/spec.json", "folder/notes.txt"):
            (self.mine / file).write_text(f"{SECRET}\n")
        for file in ("job.json", "recipe.json"):
            text = (self.shared / "run" / file).read_text()
            (self.shared / "run" / file).write_text(
                text.replace(str(self.template), str(self.shared))
            )
        open_to_all(self.shared, VIEWER if case is None or case.is_own else STRANGER)
        for folder in (self.looks.out, self.folder / "home"):
            folder.mkdir()
            os.chown(folder, VIEWER, VIEWER)
        open_to_all(self.mine, VIEWER)
        if case is not None:
            plant(case, self.shared, self.mine)

    def faults(self, case: Case, row: str) -> list[str]:
        """Runs one command on the run of one case. Returns descriptions of its faults."""
        self.prepare(case)
        if row.startswith("live"):
            try:
                hostile.running(self.shared / "run")
            except OSError:
                return []
        before = tree(self.mine), tree(self.shared)

        def work() -> tuple[hostile.Said, int]:
            os.chdir("/")
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 30), resource.RLIM_INFINITY))
            at_first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            said = self.kit(row, 1.0 if follows(row) else WALL_S)
            more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_first
            return said, 1024 * more

        try:
            said, more = in_a_child(work, VIEWER, limit_s=2 * WALL_S)
        except TimeoutError:
            return [f"{case}: {row}: it does not end, even by Ctrl-C"]
        # A path of the command itself that is not readable is a usage error.
        is_usage_error = case.kind == "unreadable" and case.path in ("run", "model", "data")
        found = wrong_words(said, follows(row), is_usage_error)
        found += [f"{more >> 20} MB"] if more > MORE_BYTES else []
        changed = {name for name, _ in before[1].items() ^ tree(self.shared).items()}
        if case.is_own:
            changed = {name for name in changed if name.split("/")[0] != "run"}
        found += [f"it changed {name}" for name in sorted(changed)]
        touched = before[0].items() ^ tree(self.mine).items()
        found += [f"it changed mine/{name}" for name, _ in touched]
        calls = hostile.beyond_questions(self.calls.taken(), self.shared)
        found += [f"it called {call}" for call in calls]
        return [f"{case}: {row}: {fault}\n    {said.text[-1500:]}" for fault in found]


def follows(row: str) -> bool:
    """Returns whether a command runs until Ctrl-C while the job of its run is running."""
    return row.startswith("live") or "--follow" in row or "watch RUN" in row


def wrong_words(said: hostile.Said, is_ended: bool, is_usage_error: bool = False) -> list[str]:
    """Returns descriptions of faults in a command's exit code and output. `is_ended` says whether
    Ctrl-C may have ended the command. `is_usage_error` says whether the command may refuse its own
    path as not readable, with exit code 2.
    """
    found = []
    codes = (0, 1, 130) if is_ended else (0, 1)
    # The message is printed in a box, which breaks lines at any place.
    if is_usage_error and "is not readable" in re.sub(r"[\s│]+", " ", said.text):
        codes = (*codes, 2)
    if said.code not in codes:
        found.append(f"exit code {said.code}")
    if "Traceback" in said.text:
        found.append("a traceback")
    if said.code == 1 and not re.search(r"\w+Error: \S", said.text):
        found.append("no sentence")
    if SECRET in said.text:
        found.append("it printed a file of the viewer")
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, spec, tiny_dataset) -> Path:
    """A folder with a finished run that has every file, the run's dataset, and a model."""
    folder = tmp_path_factory.mktemp("template")
    shutil.copytree(tiny_dataset.directory, folder / "data")
    run = whole_run(folder / "run", spec=spec.replace(num_layers=1), data=str(folder / "data"))
    shutil.rmtree(run.directory / "checkpoints")
    save_checkpoint(run)
    export_run(run, None, folder / "model")
    return folder


@pytest.fixture
def commands(tmp_path: Path, template: Path, tiny_dataset, monkeypatch) -> Commands:
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, "viewer")
    calls = Calls(tmp_path / "bin", tmp_path)
    monkeypatch.setenv("PATH", f"{calls.bin}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(launcher, "submit", lambda prepared: prepared.run)
    # A silent heartbeat counts as old at once, instead of after a wait of 5 s. The wait is tested
    # in tests/cluster.
    monkeypatch.setattr(heartbeats, "_enough_s", lambda state: 0.0)
    return Commands(tmp_path, template, calls, tiny_dataset)


def pairs(template: Path) -> list[tuple[Case, str]]:
    """Returns pairs (case, command) in random order, EACH commands for each case."""
    paths = [str(path.relative_to(template)) for path in sorted(template.rglob("*"))]
    paths += [f"run/{name}" for name in MADE]
    dice, found = random.Random(0), []
    for is_own in (False, True):
        for path in paths:
            rows = rows_of(Case(is_own, path, ""))
            dice.shuffle(rows)
            for number, kind in enumerate(KINDS):
                chosen = [rows[(number * EACH + turn) % len(rows)] for turn in range(EACH)]
                found += [(Case(is_own, path, kind), row) for row in dict.fromkeys(chosen)]
    dice.shuffle(found)
    return found


def assert_no_fault(commands: Commands, chosen: list[tuple[Case, str]]) -> None:
    commands.import_all([row for _, row in chosen])
    faults = [fault for case, row in chosen for fault in commands.faults(case, row)]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)


def test_commands_survive_a_sample_of_planted_files(commands: Commands, template: Path) -> None:
    assert_no_fault(commands, pairs(template)[:SAMPLE])


@pytest.mark.thorough
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_commands_survive_all_planted_files(commands: Commands, template: Path, part: int) -> None:
    assert_no_fault(commands, pairs(template)[part::PARTS])
