"""Cold start: from `git clone` to the first loss by phase, as `make demo` does it, with the
caches as they are.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from kit.errors import RunError
from kit.show.results import Row, row

ROOT = Path(__file__).parents[2]
FIRST_STEP = """
import sys
from pathlib import Path
from tests.benchmarks.startup import LAYOUTS, first_step_s
from kit.data import Dataset
print(first_step_s(Path(sys.argv[1]), LAYOUTS["1 process"], Dataset.open(sys.argv[2])))
"""


def measure(workplace: Path, *, install: bool = True, text_bytes: int | None = None) -> list[Row]:
    """Returns the seconds of each phase, and of all together.

    Args:
        workplace: an empty folder; the clone and its environment lie there, several GB.
        install: False skips what a package index has to answer, and uses the Python that runs this.
        text_bytes: of the data set; default: that of the demo.

    Raises:
        RunError: this is no clone, or a phase failed; with its last words.
    """
    if not (ROOT / ".git").exists():
        raise RunError(
            f"{ROOT} is no clone of the repository. Run this in one: it is cloned again."
        )
    clone, python = workplace / "clone", sys.executable
    phases = {"git clone": _timed(["git", "clone", "--quiet", str(ROOT), str(clone)], workplace)}
    if install:
        python = str(clone / ".venv/bin/python")
        phases["virtual environment"] = _timed([sys.executable, "-m", "venv", ".venv"], clone)
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            "constraints.txt",
        ]
        phases["packages, by pip"] = _timed([*pip, "-e", ".[notebooks]"], clone)
    size = [] if text_bytes is None else ["--max-megabytes", str(text_bytes / 1e6)]
    phases["data set"] = _timed([python, "-m", "kit", "data", "build", "data/demo", *size], clone)
    torch_s = _timed([python, "-c", "import torch"], clone)
    begun = time.perf_counter()
    first_s = float(
        _output([python, "-c", FIRST_STEP, "runs/first", "data/demo"], clone).split()[-1]
    )
    phases["Python of the launcher"] = max(0.0, time.perf_counter() - begun - first_s)
    phases["launch to first loss"] = first_s
    note = f"of that `import torch` {torch_s:.1f} s"
    return [
        *(
            row(name, spent, "s", note=note if name == "launch to first loss" else "")
            for name, spent in phases.items()
        ),
        row(
            "from `git clone` to the first loss",
            sum(phases.values()),
            "s",
            at_most=300.0 if install else None,
        ),
    ]


def _timed(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    _output(command, folder)
    return time.perf_counter() - start


def _output(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RunError(f"`{' '.join(command[:4])} ...` failed: {words}")
    return done.stdout
