"""A full disk under the run directory: for some steps, permanently, and with a killed rank."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import kit
from cluster.state import (
    JobError,
    JobState,
    last_attempt,
    read_exit,
    read_history,
    read_taken_request,
)
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
    """Returns a function that prepares a run on a disk of 16 MB. Keywords change the recipe."""
    disk = mount_memory("size=16m")

    def prepared(**changes) -> Run:
        return local_run(disk / "run", spec, DP2, recipe.replace(**{**SETTINGS, **changes}))

    return prepared


def full_between(
    run: Run, full_at: int, then: Callable[[Trainer, Path], None]
) -> Callable[[int], None]:
    """Returns a fault injector that fills the disk before the launch of step `full_at`. Before this
    and each later launch, rank 0 calls `then` with the trainer and the file that fills the disk.

    While the disk is full, each rank writes a heartbeat and a log line in each step. Rank 0 also
    has a warning to write and a checkpoint request to process.
    """
    filler = run.directory.parent / "filler"

    def sabotage(rank: int) -> None:
        heartbeat.BEAT_EVERY_S = loop.REQUESTS_EVERY_S = 0.0
        background.PASS_EVERY_S = 0.01

        def meddle(trainer: Trainer) -> None:
            if rank == 0 and trainer.step + 1 == full_at:
                # Saves of earlier steps must be complete, because an unfinished save would fail on
                # the full disk.
                trainer.checkpoints.finish()
                fill(filler)
                # The request is made after the disk is full, because the background thread
                # processes a request at once while there is space.
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
    """Fails unless metrics.jsonl has each of the 30 steps exactly once."""
    assert [line["step"] for line in lines_of(run)] == list(range(1, 31))


def test_temporarily_full_disk_loses_no_step(prepare_small, with_checkpoints):
    run = prepare_small()

    def free_at_18(trainer: Trainer, filler: Path) -> None:
        if trainer.step + 1 == 18:
            filler.unlink()

    finished(run, 1, full_between(run, 12, free_at_18))
    assert_each_step_is_told_once(run)
    assert_same(run, with_checkpoints)
    taken = read_taken_request(run.directory, "checkpoint")
    assert taken is not None and taken.step is not None
    assert 18 <= taken.step <= 30, "a request waits for room"
    assert run.checkpoints.steps() == sorted({10, 20, 30, taken.step})[-3:]
    lost, note = (
        30 - len(run.metrics()["step"]),
        "rows of metrics wait in memory; the run ends bit for bit equal to an uninterrupted run",
    )
    cost("disk full for 6 steps of a run: lost steps", lost, at_most=0, note=note)


def test_disk_freed_at_last_checkpoint_loses_no_step(prepare_small, with_checkpoints):
    """Metrics rows that wait for free space are written in the end, even if the disk stays full
    until the last checkpoint.
    """
    run = prepare_small(checkpoint_every=None)

    def free_for_the_checkpoint(trainer: Trainer, filler: Path) -> None:
        save = trainer._save
        trainer._save = lambda: (filler.unlink(missing_ok=True), save())  # type: ignore[method-assign]

    finished(run, 1, full_between(run, 12, free_for_the_checkpoint))
    assert_each_step_is_told_once(run)
    assert_same(run, with_checkpoints)


def test_unwritten_rows_of_killed_rank_are_repeated(prepare_small, with_checkpoints):
    """Metrics rows that wait for free space are lost when the rank is killed. The resumed run
    repeats their steps.
    """
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
"""Hook source. The hook fills the disk once, at step 16, as soon as the checkpoint of step 10 is
complete.
"""


def test_permanently_full_disk_fails_the_run(prepare_small, with_checkpoints, tmp_path):
    """Tested with supervisor, status and the commands of a user. The status names the full disk as
    the reason. `kit.resume` is refused until there is space, and then continues the run.
    """
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
    name = "disk full until the end of a run: time until the run reports the failure"
    cost(name, took_s, "s", at_most=60, note=note)
    filler.unlink()
    kit.resume(run.directory)
    status = run.job.wait(120)
    assert status.state is JobState.DONE and "full" not in status.reason, run.job.logs()
    assert "resumed from step 10" in run.job.logs()
    assert_same(run, with_checkpoints)
