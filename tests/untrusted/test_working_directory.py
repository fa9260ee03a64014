"""Commands in a working directory whose files have the names of Python modules. None of these files
is imported.

Each command, and each module that can be started, runs as a separate process. In the working
directory, another user has put a file for every module of Python and of this environment.
"""

import importlib.metadata
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from cluster.interpreter import module_command, source_command
from kit.cli.app import app
from kit.interop.weights.hugging_face import export_run
from kit.model import build_decoder
from kit.run import Run
from tests.support.foreign_logs import ARGUMENTS, head, line
from tests.support.hostile import finished_run, leaves, save_checkpoint, write_task
from tests.support.nxd_files import write_nxd
from tests.support.sources import ROOT, nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.name != "posix", reason="needs /bin/sh"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]
KIT = str(Path(sys.executable).with_name("kit"))
LIMIT_S = 300
PIECES = "import kit.data.corpus; kit.data.corpus.PIECE_BYTES = 1000; "
"""Python statements that make the build of a small dataset start several worker processes, because
each piece of text is short.
"""
SAMPLE = 3
"""Number of randomly chosen commands that run without --thorough. The commands in ALWAYS run too.
"""


class Row(NamedTuple):
    """One command, with its expected exit code and number of Python processes."""

    words: str
    code: int = 0
    """Expected exit code of the command."""
    pythons: int = 1
    """Smallest number of Python processes that the command must have started."""


COMMANDS = [
    Row("doctor", pythons=3),
    Row("doctor --deep", pythons=4),
    Row("bench --out OUT/mine.toml", pythons=2),
    Row("bench --apply RUN"),
    Row("site init OUT/mine.toml --local", pythons=1),
    Row("data build OUT/data --source TEXT --vocab-size 300", pythons=3),
    Row(
        "launch OUT/run --model RUN/spec.json --recipe RUN/recipe.json --data DATA --steps 2"
        " --plan RUN/plan.json --batch 2",
        pythons=2,
    ),
    Row(
        "launch OUT/run --model RUN/spec.json --recipe RUN/recipe.json --data DATA --steps 2"
        " --plan RUN/plan.json --batch 2 --set plan.compile=true",
        pythons=2,
    ),
    Row("resume RUN --steps 41", pythons=2),
    Row("checkpoint RUN", code=1),
    Row("stop RUN", code=1),
    Row("stop RUN --now", code=1),
    Row("status RUN"),
    Row("status RUN --why"),
    Row("watch RUN"),
    Row("watch RUN --html OUT/page.html"),
    Row("logs RUN"),
    Row("runs FOLDER"),
    Row("runs FOLDER --compare run"),
    Row("figure RUN --out OUT/figure.png"),
    Row("figure hlat-loss --run RUN --out OUT/paper.svg"),
    Row("plan gpt-1.4b --site frontier --devices 8 --batch 64"),
    Row("plan RUN --rehearse --site frontier --set plan.data_parallel=8"),
    Row("validate"),
    Row("calibrate RUN"),
    Row("eval RUN --tasks heldout --limit 2 --set batch_tokens=256"),
    Row("eval MODEL --tasks TASK --limit 2 -o OUT"),
    Row("eval-data OUT/benchmarks", code=1, pythons=2),
    Row("generate RUN a --tokens 1"),
    Row("generate MODEL a --tokens 1"),
    Row("export RUN --format csv --out OUT/steps.csv"),
    Row("export RUN --format parquet --out OUT/steps.parquet"),
    Row("export RUN --format hf --out OUT/hf"),
    Row("average RUN --last 2 --out OUT/average"),
    Row("export RUN --format tensorboard"),
    Row("export RUN --format wandb"),
    Row("import LOG --out OUT/imported --site lumi --format megatron"),
    Row("import NXD --out OUT/hf --model RUN/spec.json"),
]
"""Each command of the kit, with arguments that keep its work short."""
ALWAYS = ("data build", "eval-data", "resume")
MODULES = {
    "kit": "status RUN",
    "kit.data": "",
    "kit.demo": "--help",
    "kit.train": "--help",
    "kit.engines.deepspeed.probe": "",
    "kit.estimate.choose.memory_advice": "RUN",
    "kit.measure.collectives": "--help",
    "kit.measure.gemm": "",
    "kit.measure.node_check": "--help",
    "cluster.kubernetes": "",
    "cluster.local.supervisor": "RUN",
    "cluster.login.answer": "",
    "cluster.sandbox": "status",
    "cluster.sandbox.keeper": "",
    "cluster.slurm.container": ".",
    "cluster.slurm.rank": "true",
    "cluster.slurm.supervisor": "",
}
"""Modules that can be started with `python -m`. Value: arguments with which the module ends
soon.
"""
HOW: dict[str, Callable[..., tuple[str, ...]]] = {
    "python -P -m": module_command,
    "start.py": source_command,
    "python -m": lambda module, *words: (sys.executable, "-m", module, *words),
}


def test_table_of_commands_is_complete() -> None:
    names = dict(leaves(typer.main.get_command(app))).keys()
    rows = {
        " ".join(row.words.split()[: 2 if row.words.split()[0] in ("data", "site") else 1])
        for row in COMMANDS
    }
    assert rows == names


def test_table_of_modules_is_complete() -> None:
    found = set()
    for file in nodes():
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if file.name == "__main__.py":
            found.add(name.removesuffix(".__main__"))
        elif '\nif __name__ == "__main__":' in file.read_text():
            found.add(name)
    assert found - {"cluster.start"} == MODULES.keys()


# The working directory ----------------------------------------------------------------------------


def module_names() -> set[str]:
    """Returns the names of all modules of Python's standard library and of this environment."""
    installed = {name for name in importlib.metadata.packages_distributions() if "/" not in name}
    names = {*sys.stdlib_module_names} | installed
    return {name for name in names if name.isidentifier()} | {"sitecustomize", "usercustomize"}


class Place:
    """A hostile working directory, and the paths of the files that the commands need."""

    def __init__(self, folder: Path, words: dict[str, Path]) -> None:
        self.words = words
        self.folder = folder / "shared"
        self.out = folder / "out"
        self.canaries = folder / "canaries"
        self.started = folder / "started"
        for made in (self.folder, self.out, self.canaries, self.started):
            made.mkdir()
        self.canary = f"open({str(self.canaries)!r} + '/' + __name__, 'w').close()\n"
        for name in module_names() - {"kit", "cluster"}:
            self.plant(name)
        os.mkfifo(self.folder / "matplotlibrc")
        hook = folder / "hook"
        hook.mkdir()
        record = f"open({str(self.started)!r} + f'/{{os.getpid()}}', 'w').write(str(sys.orig_argv))"
        (hook / "sitecustomize.py").write_text(f"import os, sys\n{record}\n")
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(hook),
            "HOME": str(folder / "home"),
            "XDG_CONFIG_HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "PIP_NO_INDEX": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.environment.pop("KIT_RUN_DIR", None)

    def plant(self, name: str) -> None:
        """Plants a module with the given name. About half of the planted modules are packages."""
        if len(name) % 2 or name in ("kit", "cluster"):
            (self.folder / name).mkdir()
            (self.folder / name / "__init__.py").write_text(self.canary)
        else:
            (self.folder / f"{name}.py").write_text(self.canary)

    def filled(self, words: str) -> list[str]:
        """Returns the words of a command, with placeholders such as RUN and OUT replaced by
        paths.
        """
        found = []
        for word in words.split():
            first, slash, rest = word.partition("/")
            path = self.words.get(first, self.out if first == "OUT" else first)
            found.append(f"{path}{slash}{rest}")
        return found

    def run(self, command: tuple[str, ...] | list[str]) -> subprocess.CompletedProcess[str]:
        """Runs a command in the hostile working directory, and waits for its end."""
        how: dict[str, Any] = {"cwd": self.folder, "env": self.environment, "text": True}
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, **how
        )

    def imported(self) -> list[str]:
        """Returns the names of the planted modules that were imported."""
        return sorted(file.name for file in self.canaries.iterdir())

    def pythons(self) -> list[str]:
        """Returns the command lines of the Python processes that have started."""
        return [file.read_text() for file in self.started.iterdir()]


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory, spec, tiny_dataset) -> dict[str, Path]:
    """Files and folders that the commands read, by placeholder. The placeholders are used in the
    rows of COMMANDS.
    """
    folder = tmp_path_factory.mktemp("needed")
    run = finished_run(
        folder / "runs" / "run", spec.replace(num_layers=1), str(tiny_dataset.directory)
    )
    save_checkpoint(run, 20)
    save_checkpoint(run)
    export_run(run, None, folder / "model")
    text = tiny_dataset.directory.parent / "text.jsonl"
    sources = folder / "text"
    sources.mkdir()
    for number in range(3):
        shutil.copy(text, sources / f"{number}.jsonl")
    steps = line(1, 346.65) + line(2, 346.65)
    log = head(ARGUMENTS, vocabulary=51200, engine_micro_batch=2) + steps
    (folder / "train.log").write_text(log)
    write_nxd(build_decoder(run.spec), folder / "nxd", tensor=2, pipeline=1)
    return {
        "RUNS": folder / "runs",
        "MODEL": folder / "model",
        "DATA": tiny_dataset.directory,
        "TEXT": sources,
        "LOG": folder / "train.log",
        "TASK": write_task(folder),
        "NXD": folder / "nxd",
    }


@pytest.fixture
def place(tmp_path: Path, needed: dict[str, Path]) -> Place:
    """A hostile working directory, with a copy of the run that a command may change."""
    runs = shutil.copytree(needed["RUNS"], tmp_path / "runs")
    return Place(tmp_path, {**needed, "FOLDER": runs, "RUN": runs / "run"})


def sampled(rows: list[Any], number: int, always: Callable[[Any], bool]) -> list[Any]:
    """Returns all rows as test parameters. Without --thorough, only a random sample and the rows
    selected by `always` run.
    """
    kept = random.Random(3).sample(range(len(rows)), number)
    found = []
    for index, row in enumerate(rows):
        is_kept = index in kept or always(row)
        marks = [] if is_kept else [pytest.mark.thorough]
        name = row.words if isinstance(row, Row) else " ".join(row)
        found.append(pytest.param(row, marks=marks, id=name[:60]))
    return found


@pytest.mark.parametrize("row", sampled(COMMANDS, SAMPLE, lambda row: row.words.startswith(ALWAYS)))
def test_command_imports_nothing_from_working_directory(row: Row, place: Place) -> None:
    for name in ("kit", "cluster"):
        place.plant(name)
    words = place.filled(row.words)
    command = [KIT, *words]
    if row.words.startswith("data build"):
        code = f"{PIECES}from kit.__main__ import main; main()"
        command = [sys.executable, "-P", "-c", code, *words]
    done = place.run(command)
    if row.words.startswith(("launch", "resume")):
        status = Run.open(words[1]).job.wait(LIMIT_S)
        assert status.state == "done", status.reason
    assert place.imported() == []
    assert done.returncode == row.code, done.stdout + done.stderr
    pythons = place.pythons()
    assert len(pythons) >= row.pythons, pythons


STARTS = [(how, module) for module in MODULES for how in HOW]


@pytest.mark.parametrize("start", sampled(STARTS, SAMPLE, lambda start: False))
def test_module_imports_nothing_from_working_directory(
    start: tuple[str, str], place: Place
) -> None:
    how, module = start
    # With `python -m`, Python itself imports importlib and the package of the module from the
    # working directory. The planted importlib is therefore removed.
    if how == "python -m":
        shutil.rmtree(place.folder / "importlib")
    else:
        for name in ("kit", "cluster"):
            place.plant(name)
    done = place.run(HOW[how](module, *place.filled(MODULES[module])))
    assert place.imported() == []
    assert place.pythons()
    assert "No module named" not in done.stderr
