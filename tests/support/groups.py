"""Runs the tests in groups, several at a time: `python -m tests.support.groups test`, or `quick`.

The output of a group is printed when the group has ended. After a failure the remaining groups
still run. Further arguments select groups by name.
"""

import argparse
import dataclasses
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

POLL_S = 0.2
"""Seconds between two checks whether a running group has ended."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Tests that run in one pytest process."""

    paths: tuple[str, ...] = ("tests",)
    ignored: tuple[str, ...] = ()
    keywords: str = ""
    """Expression for pytest's option `-k`, which selects tests by name."""

    def command(self, *options: str) -> list[str]:
        """Returns the command that runs the group. Output is unbuffered, so that the output of a
        killed group is not lost.
        """
        command = [sys.executable, "-u", "-m", "pytest", "-q", *options, *self.paths]
        command += [f"--ignore={path}" for path in self.ignored]
        if self.keywords:
            command += ["-k", self.keywords]
        return command


FAULTS = ("tests/cluster/test_faults.py",)
RANKS = ("tests/parallel", "tests/engines", "tests/faults", "tests/test_train.py")
VIEWS = ("tests/browser", "tests/interop", "tests/monitor", "tests/evaluate", "tests/papers")
NOTEBOOKS = ("tests/test_notebooks.py",)
README = ("tests/test_readme.py",)
LATER_NOTEBOOKS = "04_ or 05_ or 06_ or 07_"
"""Notebooks that together take as long as all other notebooks and the README."""
TEST = {
    "faults": Group(FAULTS),
    "launching": Group(("tests/cluster",), FAULTS),
    "ranks": Group(RANKS),
    "notebooks": Group(README + NOTEBOOKS, keywords=f"not ({LATER_NOTEBOOKS})"),
    "later-notebooks": Group(NOTEBOOKS, keywords=LATER_NOTEBOOKS),
    "rest": Group(ignored=("tests/cluster", *README, *NOTEBOOKS, *RANKS, *VIEWS)),
    "views": Group(VIEWS),
}
"""Groups of `make test`, in the order in which they start."""
TEST_AT_A_TIME = 4
"""Number of groups that run at a time. The groups `faults` and `launching` mostly wait, for Slurm
and for its detection of lost nodes. Two groups that compute therefore run beside them. With six
groups, a test got an eighth of a core on a slow machine, and exceeded time limits that are meant
for hangs."""
MODELS = (
    "tests/cluster",
    "tests/parallel",
    "tests/engines",
    "tests/trainer",
    "tests/interop",
    "tests/evaluate",
    "tests/data",
    "tests/model",
    "tests/run",
    "tests/truth",
)
QUICK = {"models": Group(MODELS), "rest": Group(ignored=MODELS)}
"""Groups of `make quick`. `tests/support/quick.py` skips tests that start processes or are slow."""
QUICK_AT_A_TIME = 2
CHECK = ["make", "--no-print-directory", "check"]
"""Command that checks format, lint and types of the source code."""


@dataclasses.dataclass
class Running:
    """A running command, the file with its output, and its start time in seconds of the monotonic
    clock.
    """

    process: subprocess.Popen[bytes]
    output: IO[Any]
    began: float


def run_groups(commands: Mapping[str, Sequence[str]], at_a_time: int) -> list[str]:
    """Runs commands, given by name, at most `at_a_time` at once. Returns the names of the commands
    that failed.

    If SIGTERM or an error ends this process, the running commands are terminated too. Ctrl-C
    reaches the commands from the terminal, so this process only waits for their end.
    """
    waiting = dict(commands)
    running: dict[str, Running] = {}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                name = next(iter(waiting))
                running[name] = _started(waiting.pop(name))
            time.sleep(POLL_S)
            for name, group in list(running.items()):
                code = group.process.poll()
                if code is None:
                    continue
                del running[name]
                _print_ended(name, group, code)
                if code != 0:
                    failed.append(name)
    except KeyboardInterrupt:
        raise
    except BaseException:
        for group in running.values():
            group.process.terminate()
        raise
    finally:
        for group in running.values():
            group.process.wait()
    return failed


def _started(command: Sequence[str]) -> Running:
    output = tempfile.TemporaryFile()
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    return Running(process, output, time.monotonic())


def _print_ended(name: str, group: Running, code: int) -> None:
    """Prints name, result, duration and output of a group that has ended."""
    result = "passed" if code == 0 else f"failed with exit code {code}"
    print(f"==== {name}: {result} after {time.monotonic() - group.began:.0f} s", flush=True)
    with group.output:
        group.output.seek(0)
        sys.stdout.buffer.write(group.output.read())
    sys.stdout.flush()


def main() -> int:
    """Runs the groups that are named on the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.groups")
    parser.add_argument("tests", choices=("test", "quick"), help="set of tests")
    parser.add_argument("names", nargs="*", metavar="GROUP", help="groups of the set; default: all")
    options = parser.parse_args()
    if options.tests == "test":
        groups, others, arguments = TEST, {"check": CHECK}, ["--durations=25"]
        at_a_time = TEST_AT_A_TIME
    else:
        groups, others, arguments = QUICK, {}, ["--quick", "--durations=5"]
        at_a_time = QUICK_AT_A_TIME
    names = options.names or [*groups, *others]
    if unknown := [name for name in names if name not in groups and name not in others]:
        parser.error(f"{', '.join(unknown)}: unknown. Groups: {', '.join([*groups, *others])}.")
    # By default all pytest processes of a user share one folder and remove old files of each other
    # there. That fails if a test run was killed while a file system was mounted in it. The folder
    # has a short name, since paths of sockets have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kit-"))
    commands = others | {
        name: group.command(f"--basetemp={folder / name}", *arguments)
        for name, group in groups.items()
    }
    commands = {name: commands[name] for name in names}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    failed = run_groups(commands, at_a_time)
    if failed:
        print(f"Failed: {', '.join(failed)}. Files of the tests: {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print(f"Passed: {', '.join(commands)}.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
