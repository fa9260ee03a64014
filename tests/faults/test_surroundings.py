"""Faults around a run: jumps of the clock, run directories that are read-only or removed,
concurrent launches, and orphan ranks.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kit
from cluster.state import JobState, read_state, update_state
from kit.errors import RunError
from kit.run import Run
from kit.trainer.loop import Trainer
from tests.support.attempts import Attempt, before_each_launch, finished
from tests.support.fault_cost import DP2, assert_same, cost

pytestmark = pytest.mark.timeout(900)


def jumpy(offsets: dict[int, float]) -> Callable[[int], None]:
    """Returns a fault injector that shifts the wall clock. `offsets` maps a step to the offset in
    seconds that applies from this step on.
    """

    def sabotage(_: int) -> None:
        now, offset = time.time, [0.0]

        def stepped(trainer: Trainer) -> None:
            offset[0] = offsets.get(trainer.step, offset[0])

        before_each_launch(stepped)
        time.time = lambda: now() + offset[0]

    return sabotage


def test_clock_jump_changes_only_recorded_times(prepare, with_checkpoints):
    settings = {"num_steps": 30, "checkpoint_every": 10, "keep_last": 3, "hung_after_s": 5.0}
    run = prepare("jumpy", **settings)
    finished(run, 1, jumpy({5: 7200.0, 12: -7200.0, 20: 0.0}))
    assert_same(run, with_checkpoints)
    metrics = run.metrics()
    assert (np.diff(metrics["time"]) < -7000).any(), "the clock did jump"
    assert (metrics["step_time_s"] > 0).all() and metrics["step_time_s"].max() < 60
    assert run.checkpoints.steps() == [10, 20, 30]


def test_heartbeats_continue_after_clock_is_set_back(prepare):
    run = prepare("back", num_steps=100_000)
    attempt = Attempt(run, 1, jumpy({5: -7200.0}))
    seen: set[int] = set()
    start = time.monotonic()
    while len(seen) < 4:
        state = read_state(run.directory)
        if state is not None and state.step:
            seen.add(state.step)
        assert time.monotonic() - start < 60 and not attempt.is_over(), attempt.log()
        time.sleep(0.05)
    attempt.kill()
    mean_s = (time.monotonic() - start) / 4
    note = "metrics are in order, step times are unchanged, no rank counts as hung"
    name = "clock set back two hours: mean time between two heartbeats"
    cost(name, mean_s, "s", at_most=10, note=note)


def test_launch_refuses_read_only_run_directory(spec, recipe, mount_memory):
    # A read-only mount, because root ignores the permissions of a directory.
    read_only = mount_memory("ro,size=1m")
    start = time.monotonic()
    told = "run cannot be written: Read-only file system. Use another run directory"
    with pytest.raises(RunError, match=told):
        kit.launch(read_only / "run", spec=spec, plan=DP2, recipe=recipe)
    took_s = time.monotonic() - start
    name = "read-only run directory: time until the launch is refused"
    cost(name, took_s, "s", at_most=5, note="no process has started")


LAUNCH = """
import sys, kit
from pathlib import Path
from kit.config.recipe import Recipe
here, plan = Path(sys.argv[1]), kit.Plan(global_batch_size=int(sys.argv[2]))
spec, recipe = kit.ModelSpec.read(here / "spec.json"), Recipe.read(here / "recipe.json")
print("ready", flush=True)
sys.stdin.readline()
kit.launch(here / "twice", spec=spec, plan=plan, recipe=recipe)
"""


def test_one_of_two_concurrent_launches_is_refused(prepare, tmp_path, spec, recipe):
    """The refused launch has another plan. This plan must not be written to the files of the
    accepted launch.
    """
    directory = tmp_path / "twice"
    (tmp_path / "spec.json").write_text(spec.to_json())
    (tmp_path / "recipe.json").write_text(recipe.replace(num_steps=100_000).to_json())
    command, piped = [sys.executable, "-c", LAUNCH, str(tmp_path)], subprocess.PIPE

    def started(batch: str) -> subprocess.Popen[str]:
        words = [*command, batch]
        return subprocess.Popen(words, stdin=piped, stdout=piped, stderr=piped, text=True)

    launches = {batch: started(batch) for batch in ("8", "16")}
    try:
        for launch in launches.values():
            assert launch.stdout and launch.stdout.readline() == "ready\n"
        start = time.monotonic()
        for launch in launches.values():
            assert launch.stdin
            launch.stdin.write("go\n")
            launch.stdin.flush()
        said = {batch: launch.communicate(timeout=180)[1] for batch, launch in launches.items()}
        won = [batch for batch, launch in launches.items() if launch.returncode == 0]
        assert len(won) == 1, said
        (loser,) = (text for batch, text in said.items() if batch not in won)
        assert "is being launched by another process" in loser or "is in use: attempt 1" in loser
        assert Run.open(directory).plan.global_batch_size == int(won[0])
        name = "two launches of one directory at once: time until one is accepted and one refused"
        cost(name, time.monotonic() - start, "s", at_most=60)
    finally:
        for launch in launches.values():
            launch.kill()
            launch.communicate()
        if directory.exists():
            job = Run.open(directory).job
            job.cancel()
            job.wait(timeout_s=30)


def inode(file: Path) -> int:
    """Returns the inode number of a file, or 0 if the file is missing."""
    return file.stat().st_ino if file.exists() else 0


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
def test_ranks_end_when_run_directory_is_removed(prepare, replaced):
    """The ranks have no supervisor, like the ranks of a pod, or of a node that has lost its
    network. If a new directory has the path of the run directory, the ranks write nothing into it.
    """
    run = prepare("gone", num_steps=100_000, checkpoint_every=3)
    attempt = Attempt(run)
    attempt.until_step(5)
    # The directory is removed just after each rank has written a heartbeat, so that no rank is
    # writing at this moment.
    beats = ["state.json", *(f"ranks/rank_{rank:05d}.json" for rank in range(2))]
    waiting = {run.directory / name: inode(run.directory / name) for name in beats}
    while waiting := {file: old for file, old in waiting.items() if inode(file) == old}:
        time.sleep(0.001)
    run.directory.rename(run.directory.with_name("aside"))
    if replaced:
        run.directory.mkdir()
    start = time.monotonic()
    codes = attempt.wait()
    assert os.EX_CONFIG in codes and 0 not in codes
    logs = (run.directory.with_name("aside") / "logs").rglob("*.log")
    said = "".join(log.read_text() for log in logs)
    assert ("is another directory now" if replaced else "was deleted or renamed") in said
    assert not list(run.directory.glob("*")) and run.directory.exists() == replaced
    took_s = time.monotonic() - start
    cost("run directory deleted: time until the ranks end", took_s, "s", at_most=30)


def test_orphan_rank_of_older_attempt_ends(prepare):
    """After a newer attempt has started, the orphan rank writes neither state.json nor a
    checkpoint.
    """
    run = prepare("orphan", num_steps=100_000, checkpoint_every=None)
    attempt = Attempt(run)
    attempt.until_step(5)
    start = time.monotonic()
    update_state(run.directory, attempt=2, state=JobState.STARTING)
    assert os.EX_CONFIG in attempt.wait()
    assert "is a left-over of attempt 1; end it" in attempt.log()
    state = read_state(run.directory)
    assert state is not None and state.attempt == 2 and run.checkpoints.steps() == []
    name = "rank of an older attempt that still runs: time until it ends by itself"
    cost(name, time.monotonic() - start, "s", at_most=60)
