"""Fixtures for faults that are injected into real training runs.

`make faults` uses `--kills 100`.
"""

from collections.abc import Callable

import pytest

from kit.config.plan import Plan
from kit.run import Run
from tests.bench.results import load_average, write_results
from tests.support.attempts import finished
from tests.support.fault_cost import DP2, ROWS
from tests.support.workers import local_run


@pytest.fixture(scope="package", autouse=True)
def results(pytestconfig):
    """Writes the measured costs of the faults after all tests of this folder."""
    load = load_average()
    yield
    if ROWS:
        command = f"pytest tests/faults --kills {pytestconfig.getoption('--kills')}"
        write_results("training_faults", ROWS, command=command, load_before=load)


@pytest.fixture
def prepare(tmp_path, spec, recipe) -> Callable[..., Run]:
    """Returns a function that prepares a run directory. Keywords change recipe and plan."""

    def prepared(name: str, plan: Plan = DP2, **changes) -> Run:
        return local_run(tmp_path / name, spec, plan, recipe.replace(**changes))

    return prepared


@pytest.fixture(scope="package")
def with_checkpoints(tmp_path_factory, spec, recipe) -> Run:
    """A finished run with checkpoints of steps 10, 20 and 30, as the reference."""
    short = recipe.replace(num_steps=30, checkpoint_every=10, keep_last=3)
    run = local_run(tmp_path_factory.mktemp("runs") / "run", spec, DP2, short)
    finished(run)
    return run
