"""Evaluation of a run's checkpoints by Slurm jobs, with one job for each checkpoint."""

import json
import time
from collections.abc import Callable

import kit
from cluster.state import JobState
from kit.config.plan import Plan
from kit.evaluate import EvalReport
from kit.evaluate.follow import follow_run
from tests.support.waiting import eventually

NODES = "NodeName=node[1-4]"


def test_each_checkpoint_is_scored_by_its_own_job(sandbox, site, spec, recipe, tmp_path):
    """`follow_run` is interrupted and called again. The second call finds the jobs of the first
    call and submits no new jobs.
    """
    short = recipe.replace(num_steps=40)
    plan = Plan(global_batch_size=4)
    run = kit.launch(tmp_path / "run", spec=spec, plan=plan, recipe=short, site=site)
    assert run.job.wait(240).state is JobState.DONE, run.job.logs()
    sandbox.run("scontrol", "update", NODES, "State=drain", "Reason=held")
    first = follow_run(run, ("heldout",), submit=True, poll_s=0.2, idle=interrupt)
    assert list(first) == [], "ended before a job was done"
    jobs = run.directory / "eval" / "jobs"
    numbers = {folder.name: slurm_number(folder) for folder in jobs.iterdir()}
    found = list(follow_run(run, ("heldout",), submit=True, poll_s=0.2, idle=release(sandbox)))
    # The jobs of the two checkpoints may end in any order.
    assert sorted((one.step, one.scored) for one in found) == [(20, True), (40, True)]
    assert {folder.name: slurm_number(folder) for folder in jobs.iterdir()} == numbers
    for step in (20, 40):
        report = EvalReport.read(run.directory / "eval" / f"step_{step:08d}.json")
        assert report.step == step and report["heldout"].metric("bits_per_byte").value > 0
    assert eventually(lambda: not sandbox.run("squeue", "--noheader").strip(), 30)


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def release(sandbox) -> Callable[[float], None]:
    """Returns a function that sleeps for some seconds. Its first call also puts the drained nodes
    back into service, so that jobs start only after the second `follow_run` has found them.
    """
    drained = [NODES]

    def wait(seconds: float) -> None:
        while drained:
            sandbox.run("scontrol", "update", drained.pop(), "State=resume")
        time.sleep(seconds)

    return wait


def slurm_number(folder) -> str:
    return json.loads((folder / "state.json").read_text())["scheduler_job"]["id"]
