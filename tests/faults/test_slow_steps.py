"""Training steps that are slowed in a known part. `kit status --why` names this part."""

import json
import mmap
import time

import numpy as np
import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from cluster.site import Site
from kit.cli.app import app
from kit.engines.native import NativeEngine
from kit.monitor.speed import PASSES, WAITS, compare_speed
from kit.run import Run
from kit.trainer.batches import Batches
from kit.trainer.loop import Trainer
from tests.support.attempts import before_each_launch, finished, lines_of
from tests.support.fault_cost import DP2
from tests.support.runs import new_run

pytestmark = pytest.mark.timeout(900)
EACH, STALL_S = 10, 0.15
"""Number of steps of each case, and shortest stall in seconds. On a busy machine, a stall is as
long as the median healthy step."""
CASES = {
    "slow data loader": "waiting for data",
    "slow optimizer": "the optimizer",
    "slow product on all ranks": PASSES,
    "slow product on rank 1": WAITS,
    "slow all-reduce": WAITS,
    "slow send of gradients": WAITS,
}


BURNT = memoryview(mmap.mmap(-1, 2 * 8)).cast("q")
"""Number of calls of `burn` by each rank. The memory is shared between the forked ranks."""


def burn(rank: int, seconds: float) -> None:
    """Keeps the core busy for some seconds of CPU time, and then until the other rank has done so
    too. Neither rank then waits for the other in a collective.
    """
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    BURNT[rank] += 1
    while BURNT[1 - rank] < BURNT[rank]:
        pass


def sabotage(rank: int) -> None:
    """Fault injector that slows groups of EACH steps. Each group has another slow part. The first
    group is not slowed.
    """
    cases, case_now, stall_s = ["none", *CASES], "none", STALL_S
    launches: list[float] = []

    def launch(trainer: Trainer) -> None:
        nonlocal case_now, stall_s
        case_now = cases[trainer.step // EACH]
        if case_now == "none":
            launches.append(time.monotonic())
            stall_s = max(STALL_S, float(np.median(np.diff(launches))) if launches[1:] else 0.0)

    def slowed(owner: object, name: str, case: str, wait) -> None:
        real = getattr(owner, name)

        def patched(*args, **kwargs):
            if case_now == case:
                wait()
            return real(*args, **kwargs)

        setattr(owner, name, patched)

    before_each_launch(launch)
    passes = NativeEngine, "_forward_backward"
    slowed(Batches, "local_batch", "slow data loader", lambda: time.sleep(4 * stall_s))
    slowed(NativeEngine, "_update", "slow optimizer", lambda: burn(rank, stall_s))
    slowed(*passes, "slow product on all ranks", lambda: burn(rank, stall_s))
    if rank == 1:
        slowed(*passes, "slow product on rank 1", lambda: time.sleep(4 * stall_s))
    slowed(dist, "all_reduce", "slow all-reduce", lambda: time.sleep(stall_s))
    slowed(*passes, "slow send of gradients", lambda: time.sleep(2 * stall_s))


@pytest.fixture(scope="module")
def cases(tmp_path_factory, spec, recipe) -> dict[str, Run]:
    """One run for each case, by name of the case. Its metrics are the rows of the group of steps in
    one real run.
    """
    folder = tmp_path_factory.mktemp("runs")
    settings = recipe.replace(num_steps=EACH * (1 + len(CASES)))
    settings = settings.replace(checkpoint_every=None, validation_every=None)

    def create(name: str) -> Run:
        site = Site.load("laptop").with_measured_peak("fp32", 4e10, "test")
        return new_run(folder / name, spec=spec, plan=DP2, recipe=settings, site=site)

    real = create("real")
    finished(real, 1, sabotage)
    rows = lines_of(real)
    runs = {}
    for number, name in enumerate(["none", *CASES]):
        run = runs[name] = create(name.replace(" ", "-"))
        own = rows[number * EACH : (number + 1) * EACH]
        (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return runs


@pytest.mark.parametrize("name", CASES)
def test_compare_speed_names_the_slow_part(cases, name: str) -> None:
    found = compare_speed(cases[name])
    assert found.verdict.startswith("slower than expected"), found.verdict
    said = found.verdict, found.parts_s
    assert found.slow_part == CASES[name] and CASES[name] in found.verdict, said


def test_step_parts_add_up_and_are_in_status(cases) -> None:
    """The case has healthy steps. `kit status --why` reports the time of each part of a step."""
    run: Run = cases["none"]
    metrics = run.metrics()
    parts = "data_s", "forward_backward_s", "reduction_s", "optimizer_s"
    phases = sum(metrics[name] for name in parts)
    assert (phases <= metrics["step_time_s"] + 1e-5).all()
    # Another process may take the core between two parts of a step, so the median over the steps is
    # checked.
    assert np.median(phases / metrics["step_time_s"]) > 0.8
    told = CliRunner().invoke(app, ["status", str(run.directory), "--why", "--json"])
    assert "forward and backward pass" in json.loads(told.output)["pace"]["parts_s"]
