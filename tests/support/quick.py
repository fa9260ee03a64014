"""Selection of the tests that `make quick` (`pytest --quick`) skips. The selection is automatic, so
a new test needs no mark.

Skipped before they start: tests with fixtures for Slurm, a browser or a separate environment, and
all of `tests/faults`, which use real runs. A test is skipped while it runs if it starts Python, a
job or more than two ranks. Long tests that only compute have the mark `slow`.
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
"""Prefixes of the names of programs whose start takes seconds. The supervisors of jobs are started
by setsid.
"""
MOST_RANKS = 2
THREAD = "pytest.PytestUnhandledThreadExceptionWarning"
SKIP_REASONS: list[list[str]] = []
"""Stack with one list per phase (set-up or call) of a test that runs with --quick. Each list has
the reasons why the test must be skipped."""


def leaves_out(item: pytest.Item) -> bool:
    """Returns whether `make quick` skips a test, as far as fixtures, marks and folder
    decide this.
    """
    has_fixture = not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
    is_marked = any(item.get_closest_marker(mark) for mark in MARKS)
    return has_fixture or is_marked or item.path.parent.name in FOLDERS


class Quick:
    """Pytest plugin for the option `--quick`."""

    def __init__(self) -> None:
        sys.addaudithook(_refuse_programs)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # ^If a thread of the test starts a refused program, the exception ends this thread.
        # Pytest's warning about the end of the thread is then ignored.
        for item in items:
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{THREAD}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        return (yield from _skipped_if_refused())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        return (yield from _skipped_if_refused())


def refuse(reason: str) -> None:
    """Skips the running test, even if its code catches the exception or another thread
    raised it.
    """
    SKIP_REASONS[-1].append(reason)
    pytest.skip(reason)


def refuse_many(ranks: int) -> None:
    """Skips the running test if it starts more ranks than `make quick` allows."""
    if SKIP_REASONS and ranks > MOST_RANKS:
        refuse(f"more than {MOST_RANKS} ranks are not quick")


def _skipped_if_refused() -> Iterator[None]:
    SKIP_REASONS.append([])
    try:
        return (yield)
    finally:
        if reasons := SKIP_REASONS.pop():
            pytest.skip(reasons[0])


def _refuse_programs(event: str, arguments: tuple[Any, ...]) -> None:
    if SKIP_REASONS and event == "subprocess.Popen":
        program = os.path.basename(os.fsdecode(arguments[0]))
        if program.startswith(PROGRAMS):
            refuse(f"starting {program} is not quick")
