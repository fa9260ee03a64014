"""A disk that is full under the whole run directory: for a while, for good, and with a kill."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import kit
from cluster.state import JobError, JobState, last_attempt, read_exit, read_history, read_taken
from kit.errors import RunError
from kit.run import Run
from kit.trainer import background, heartbeat, loop
from kit.trainer.loop import Trainer
from tests.support.attempts import Attempt, before_each_launch, finished, lines_of
from tests.support.disks import fill
from tests.support.fault_cost import DP2, assert_same, cost
from tests.support.workers import local_run

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
SETTINGS = {"num_steps": 30, "checkpoint_every": 10, "keep_last": 3}


@pytest.fixture
def prepare_small(mount_memory, spec, recipe) -> Callable[..., Run]:
    """Returns a function that makes a run on a disk of 16 MB; its keywords change the recipe."""
    disk = mount_memory("size=16m")

    def prepared(**changes) -> Run:
        return local_run(disk / "run", spec, DP2, recipe.replace(**{**SETTINGS, **changes}))

    return prepared


def full_between(
    run: Run, full_at: int, then: Callable[[Trainer, Path], None]
) -> Callable[[int], None]:
    """Returns a sabotage: the disk is full from the launch of a step on, and `then` is asked before
    each that follows.

    Each rank beats at each step, and says something; rank 0 has a warning to tell, and a request to
    take.
    """
    filler = run.directory.parent / "filler"

    def sabotage(rank: int) -> None:
        heartbeat.BEAT_EVERY_S = loop.REQUESTS_EVERY_S = 0.0
        background.PASS_EVERY_S = 0.01

        def meddle(trainer: Trainer) -> None:
            if rank == 0 and trainer.step + 1 == full_at:
                trainer.checkpoints.finish()  # else the save of an earlier step fails
                fill(filler)
                # Afterwards: the background would take it at once, while there is room.
                (run.directory / "control").mkdir()
                (run.directory / "control" / "request_checkpoint").touch()
                trainer.notices.add("hook", f"told on a full disk {'.' * 5000}", full_at)
            if trainer.step + 1 >= full_at:
                print("." * 5000, flush=True)
                if rank == 0:
                    then(trainer, filler)

        before_each_launch(meddle)

    return sabotage


def assert_each_step_is_told_once(run: Run) -> None:
    assert [line["step"] for line in lines_of(run)] == list(range(1, 31))


def test_disk_that_is_full_for_a_while_costs_no_step(prepare_small, with_checkpoints):
    run = prepare_small()

    def free_at_18(trainer: Trainer, filler: Path) -> None:
        if trainer.step + 1 == 18:
            filler.unlink()

    finished(run, 1, full_between(run, 12, free_at_18))
    assert_each_step_is_told_once(run)
    assert_same(run, with_checkpoints)
    taken = read_taken(run.directory, "checkpoint")
    assert taken is not None and taken.step is not None
    assert 18 <= taken.step <= 30, "a request waits for room"
    assert run.checkpoints.steps() == sorted({10, 20, 30, taken.step})[-3:]
    lost, note = 30 - len(run.metrics()["step"]), "rows wait in memory; bit for bit as if unbroken"
    cost("disk full under the run for 6 steps: steps lost", lost, at_most=0, note=note)


def test_what_waits_is_written_though_room_comes_as_late_as_the_last_checkpoint(
    prepare_small, with_checkpoints
):
    run = prepare_small(checkpoint_every=None)

    def free_for_the_checkpoint(trainer: Trainer, filler: Path) -> None:
        save = trainer._save
        trainer._save = lambda: (filler.unlink(missing_ok=True), save())  # type: ignore[method-assign]

    finished(run, 1, full_between(run, 12, free_for_the_checkpoint))
    assert_each_step_is_told_once(run)
    assert_same(run, with_checkpoints)


def test_rows_that_wait_when_a_rank_is_killed_are_lost_as_its_steps_are(
    prepare_small, with_checkpoints
):
    run = prepare_small()

    def kill_at_18(trainer: Trainer, filler: Path) -> None:
        if trainer.step + 1 == 18:
            os.kill(os.getpid(), signal.SIGKILL)

    attempt = Attempt(run, 1, full_between(run, 12, kill_at_18))
    while 0 not in attempt.codes:
        attempt.is_over()
    attempt.kill()
    assert run.metrics()["step"].max() < 17
    (run.directory.parent / "filler").unlink()
    again = finished(run, 2)
    assert again.resumed_from() == 10
    assert_same(run, with_checkpoints)
    assert run.metrics()["attempt"][10:].tolist() == [2] * 20


HOOK = """
import time
from pathlib import Path
from tests.support.disks import fill

def on_step(state):
    if state.rank == 0 and state.step == 16 and not Path({mark!r}).exists():
        Path({mark!r}).touch()
        while not Path({saved!r}).exists():
            time.sleep(0.01)
        fill(Path({filler!r}))
    return {{}}
"""
"""Fills the disk once, when the checkpoint before is complete."""


def test_disk_that_stays_full_ends_the_run_aloud_and_resume_goes_on(
    prepare_small, with_checkpoints, tmp_path
):
    """The whole way once: supervisor, status and the user's commands."""
    run, filler = prepare_small(), tmp_path / "mounted-0" / "filler"
    hook = tmp_path / "hook.py"
    saved = run.checkpoints.path(10) / "manifest.json"
    files = {"mark": tmp_path / "filled", "filler": filler, "saved": saved}
    code = HOOK.format(**{name: str(file) for name, file in files.items()})
    hook.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    recipe = run.recipe.replace(hook=str(hook))
    run = kit.launch(run.directory, spec=run.spec, plan=run.plan, recipe=recipe)
    status = run.job.wait(120)
    report = read_exit(run.directory)
    assert status.state is JobState.FAILED is read_history(run.directory)[-1].state, status
    assert "; No space left on device; the disk is full: " in status.reason, status
    assert report is not None and (report.attempt, report.rc) == (1, os.EX_CONFIG)
    assert re.search(r"ended with code 78.*No space left on device$", report.reason)
    assert run.checkpoints.steps() == [10] and last_attempt(run.directory) == 1
    assert not list((run.directory / "logs").glob("attempt_02*"))
    with pytest.raises((RunError, JobError), match="no space left"):
        kit.resume(run.directory)
    assert read_exit(run.directory) == report and last_attempt(run.directory) == 1, "not begun"
    took_s = report.time - (tmp_path / "filled").stat().st_mtime
    note = status.reason.replace(f"{tmp_path}/mounted-0/", "")
    cost("disk full under the run for good: failed and said so", took_s, "s", at_most=60, note=note)
    filler.unlink()
    kit.resume(run.directory)
    status = run.job.wait(120)
    assert status.state is JobState.DONE and "full" not in status.reason, run.job.logs()
    assert "resumed from step 10" in run.job.logs()
    assert_same(run, with_checkpoints)
