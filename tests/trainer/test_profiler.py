"""Profiling: the steps in `recipe.profile_steps` are recorded, only on the ranks in
`profile_ranks`.
"""

import gzip
import json
from pathlib import Path

import pytest

from cluster.state import write_request
from kit.config.plan import Plan
from kit.run import Run
from tests.support.attempts import Attempt
from tests.support.workers import local_run

DP2 = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2, global_batch_size=8)


def recorded(trace: Path) -> int:
    """Returns the number of optimizer steps in a profiler trace file."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(event["name"].startswith("Optimizer.step#") for event in events)


@pytest.fixture
def prepared(tmp_path, spec, recipe):
    """Returns a function that prepares a run of two ranks, or its continuation. Keywords change the
    recipe.
    """

    def get(**changes) -> Run:
        asked = recipe.replace(checkpoint_every=None, warmup_steps=0, decay_steps=9, **changes)
        return local_run(tmp_path / "run", spec, DP2, asked)

    return get


@pytest.mark.slow
def test_profile_steps_are_recorded_on_named_ranks(prepared):
    """A resumed run may profile other steps. Only steps after its checkpoint are recorded."""
    run = prepared(num_steps=8, profile_steps=(3, 5), profile_ranks=(1,))
    assert Attempt(run).wait() == [0, 0]
    folder = run.directory / "profile"
    files = [str(file.relative_to(folder)) for file in folder.rglob("*.*")]
    assert files == ["step_3/rank_00001.trace.json.gz"]
    assert recorded(folder / "step_3" / "rank_00001.trace.json.gz") == 3, "no more and no less"
    assert run.metrics()["step"].tolist() == list(range(1, 9))

    run = prepared(num_steps=12, profile_steps=(7, 10))
    attempt = Attempt(run, 2)
    assert attempt.wait() == [0, 0], attempt.log()
    assert recorded(folder / "step_9" / "rank_00000.trace.json.gz") == 2, "from where it resumed"
    assert len([*folder.iterdir()]) == 2
    assert Attempt(prepared(num_steps=13, profile_steps=None), 3).wait() == [0, 0]
    assert len([*folder.iterdir()]) == 2


@pytest.mark.slow
def test_profiling_tolerates_early_end_and_disk_errors(prepared):
    """If a run ends before the last profiled step, the trace has the steps until then. If the trace
    cannot be written, the run logs a message and continues.
    """
    run = prepared(num_steps=5, profile_steps=(4, 90))
    assert Attempt(run).wait() == [0, 0]
    assert recorded(run.directory / "profile" / "step_4" / "rank_00000.trace.json.gz") == 2

    run = prepared(num_steps=100_000, profile_steps=(8, 9))
    # A file in place of the folder makes the write of the trace fail.
    (run.directory / "profile" / "step_8").touch()
    attempt = Attempt(run, 2)
    attempt.until_step(12)
    write_request(run.directory, "stop")
    assert attempt.wait() == [0, 0] and "rank 0: its profile was not written" in attempt.log()
