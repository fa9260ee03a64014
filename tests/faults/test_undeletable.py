"""Old checkpoints that cannot be deleted, as on NFS while a process has a file of the checkpoint
open.
"""

import errno
import os
from pathlib import Path

from cluster.state import read_state
from kit.config.plan import Plan
from kit.run.alerts import AlertLog
from tests.support.attempts import Attempt
from tests.support.workers import local_run

ONE_RANK = Plan(micro_batch_size=2, global_batch_size=2)


def hold_folders_open(rank: int) -> None:
    """Fault injector: the rank can delete files of an old checkpoint, but not its folder."""
    rmdir = os.rmdir

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if "deleting" in str(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        rmdir(path, dir_fd=dir_fd)

    os.rmdir = refuse


def left_over(directory: Path) -> list[Path]:
    return list((directory / "checkpoints").glob("*.deleting*"))


def test_undeletable_checkpoint_ends_no_training(tmp_path, spec, recipe) -> None:
    asked = recipe.replace(
        num_steps=8, warmup_steps=2, decay_steps=20, checkpoint_every=2, keep_last=1
    )
    run = local_run(tmp_path / "run", spec, ONE_RANK, asked)
    attempt = Attempt(run, 1, hold_folders_open)
    assert attempt.wait() == [0], attempt.log()
    assert run.checkpoints.steps() == [8]
    names = sorted(folder.name.partition(".")[0] for folder in left_over(run.directory))
    assert names == ["step_00000002", "step_00000004", "step_00000006"]
    told = [line for line in attempt.log().splitlines() if "cannot be deleted" in line]
    assert len(told) == 1 and "Directory not empty" in told[0], "one warning per attempt"
    state = read_state(run.directory)
    assert state is not None and "cannot be deleted" in state.notice
    alerts = AlertLog(run.directory / "alerts.jsonl").alerts
    assert [(alert.kind, alert.level) for alert in alerts] == [("disk", "warning")]

    run = local_run(tmp_path / "run", spec, ONE_RANK, asked.replace(num_steps=10))
    attempt = Attempt(run, 2, hold_folders_open)
    assert attempt.wait() == [0], "a run with such a folder resumes"
    run = local_run(tmp_path / "run", spec, ONE_RANK, asked.replace(num_steps=12))
    assert Attempt(run, 3).wait() == [0]
    assert run.checkpoints.steps() == [12] and not left_over(run.directory)
