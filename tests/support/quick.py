"""What `make quick` (`pytest --quick`) leaves out, by itself, so that a new test needs no mark.

Whatever needs Slurm, a browser or an environment of its own is left out by its fixtures, and all of
`tests/faults`, which are real runs. A test that starts a Python or a job, or more than two ranks,
is skipped when it does so. What only computes and is long is marked `slow`.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

FIXTURES = {"browser", "slurm_cluster", "reader_python"}
MARKS = ("slow", "download", "neuron")
FOLDERS = ("faults",)
PROGRAMS = ("python", "setsid", "node")
"""How the names of programs begin that cost seconds; setsid starts the supervisors of jobs."""
MOST_RANKS = 2
THREAD = "pytest.PytestUnhandledThreadExceptionWarning"
RUNNING: list[list[str]] = []
"""Of the test that runs with --quick: what it was refused, as reasons to skip it."""


def leaves_out(item: pytest.Item) -> bool:
    """Returns whether a test is none of `make quick`, as far as can be told before it runs."""
    has_fixture = not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
    is_marked = any(item.get_closest_marker(mark) for mark in MARKS)
    return has_fixture or is_marked or item.path.parent.name in FOLDERS


class Quick:
    """The plugin of `--quick`."""

    def __init__(self) -> None:
        sys.addaudithook(_refuse_programs)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:  # a thread that was refused a program ends by an exception
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{THREAD}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        return (yield from _skipped_if_refused())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        return (yield from _skipped_if_refused())


def refuse(reason: str) -> None:
    """Skips the running test, also where its code or a thread of it holds the exception back."""
    RUNNING[-1].append(reason)
    pytest.skip(reason)


def refuse_many(ranks: int) -> None:
    """Refuses more ranks than `make quick` starts."""
    if RUNNING and ranks > MOST_RANKS:
        refuse(f"more than {MOST_RANKS} ranks are not quick")


def _skipped_if_refused() -> Iterator[None]:
    RUNNING.append([])
    try:
        return (yield)
    finally:
        if reasons := RUNNING.pop():
            pytest.skip(reasons[0])


def _refuse_programs(event: str, arguments: tuple[Any, ...]) -> None:
    if RUNNING and event == "subprocess.Popen":
        program = os.path.basename(os.fsdecode(arguments[0]))
        if program.startswith(PROGRAMS):
            refuse(f"starting {program} is not quick")
