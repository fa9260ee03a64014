"""Run directories on a full or failing disk: start of attempts, state.json, status and logs."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import directory_handle, local
from cluster.attempts import (
    AttemptOutcome,
    claim_attempt,
    claimed,
    next_attempt,
    record_end,
    write_end,
)
from cluster.directory_handle import RunDirectory
from cluster.files import RESERVE, RESERVE_BYTES, append_lines
from cluster.job import read_status
from cluster.process import Process
from cluster.state import (
    JobState,
    last_attempt,
    log_path,
    read_exit,
    read_history,
    read_state,
    record_event,
    update_state,
    write_request,
)
from cluster.submission import submit
from tests.cluster.jobs import LAPTOP, job_spec
from tests.support.disks import fill

ROOT = Path(local.__file__).parents[2]


@pytest.fixture
def run_dir(mount_memory):
    """A run directory whose first attempt is running, on a file system of 2 MB."""
    run_dir = mount_memory("size=2m") / "run"
    claim_attempt(run_dir)
    update_state(run_dir, attempt=1, state=JobState.RUNNING, step=7, heartbeat=time.time())
    return run_dir


@pytest.fixture
def filler(run_dir):
    """Path of a file on the disk of the run. Tests fill the disk by writing this file."""
    return run_dir.parent / "filler"


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("word", [b"word ", b"\xff"], ids=["text", "six times as long in JSON"])
def test_end_of_attempt_is_recorded_on_a_full_disk(run_dir, filler, word):
    log_path(run_dir, 1, 0).write_bytes(20_000 * word)
    fill(filler)
    outcome = AttemptOutcome(78, "rank 0 ended with code 78", failing_rank=0)
    record_end(RunDirectory(run_dir), 1, outcome)
    report, state = read_exit(run_dir), read_state(run_dir)
    assert report is not None and report.reason.startswith(outcome.reason)
    assert report.reason.endswith("; No space left on device") and len(report.log_tail) > 16_000
    assert state is not None and (state.state, state.reason) == (JobState.FAILED, report.reason)
    assert read_history(run_dir)[-1].state is JobState.FAILED
    filler.unlink()
    assert claim_attempt(run_dir) == 2
    assert (run_dir / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES


def test_end_of_attempt_is_recorded_over_quota(tmp_path, monkeypatch):
    claim_attempt(tmp_path)
    write = Path.replace

    def replace(part, file):
        if (tmp_path / RESERVE).exists():
            raise OSError(code, os.strerror(code))
        return write(part, file)

    monkeypatch.setattr(Path, "replace", replace)
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_end(tmp_path, 1, AttemptOutcome(1, "because"))
    code = errno.EDQUOT
    write_end(tmp_path, 1, AttemptOutcome(1, "because"))
    report = read_exit(tmp_path)
    assert report is not None and report.reason == f"because; {os.strerror(code)}"


def test_next_attempt_begins_completely_or_not_at_all(run_dir, filler):
    """Checked with different amounts of free space, from 0 bytes to 40 kB more than the reserve
    file of the run directory.
    """
    write_request(run_dir, "checkpoint")
    begun, reserve = set(), {run_dir / RESERVE: None}
    for leave in range(0, RESERVE_BYTES + 40_000, 4096):
        fill(filler, leave)
        before, attempt = contents(run_dir), last_attempt(run_dir)
        try:
            assert next_attempt(run_dir, attempt, "it was killed") == attempt + 1
        except OSError as error:
            assert error.errno == errno.ENOSPC
            assert {**contents(run_dir), **reserve} == {**before, **reserve}, leave
        else:
            begun.add(leave)
            state = read_state(run_dir)
            assert state is not None and state.attempt == attempt + 1
            assert log_path(run_dir, attempt + 1, 0).parent.is_dir()
            assert len((run_dir / RESERVE).read_bytes()) == RESERVE_BYTES
        filler.unlink()
    assert begun and min(begun) >= RESERVE_BYTES


def test_launch_on_a_full_disk_leaves_no_attempt(mount_memory):
    disk = mount_memory("size=1m")
    fill(disk / "filler")
    with pytest.raises(OSError, match="No space left"), claimed(disk / "run", {}):
        pass
    assert not list(disk.rglob("attempt_*"))


FILL = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.support.disks import fill
filler = Path(sys.argv[1])
"""


def test_no_restart_after_a_crash_on_a_full_disk(mount_memory):
    disk = mount_memory("size=2m")
    words = ("-S", "-c", f"{FILL}fill(filler); os.kill(os.getpid(), 9)", str(disk / "filler"))
    job = job_spec(disk / "run", sys.executable, *words, num_processes=1)
    status = submit(job, LAPTOP).wait(60)
    assert status.state is JobState.FAILED and status.attempt == 1
    killed = "rank 0 was killed by SIGKILL (often: out of memory); not started again: "
    assert status.reason.startswith(killed) and "; the disk is full: " in status.reason
    assert status.reason.count("No space left on device") == 1
    assert last_attempt(disk / "run") == 1


def test_status_reports_a_full_disk_unless_done(run_dir, filler):
    """The full disk is reported for a running, a lost and a failed run."""
    lost = {"process": Process.current().replace(start_ticks=1)}
    for change in ({}, lost, {"state": JobState.FAILED}):
        update_state(run_dir, attempt=1, lost_node=None, **change)
        assert "full" not in read_status(run_dir).reason
        fill(filler, 4096)
        assert read_status(run_dir).reason.endswith("; the disk is full: 4,096 bytes free")
        filler.unlink()
    write_end(run_dir, 1, AttemptOutcome(0, "done"))
    fill(filler)
    assert read_status(run_dir).reason == "done"


def test_truncated_history_line_loses_no_other_line(run_dir, filler):
    state = read_state(run_dir)
    assert state is not None
    fill(filler)
    # 60 lines do not fit into the free space of the last 4 KiB block of the file.
    for number in range(60):
        record_event(run_dir, state.replace(reason=f"{number}"))
    filler.unlink()
    record_event(run_dir, state.replace(reason="room again"))
    lines, history = (run_dir / "history.jsonl").read_bytes().splitlines(), read_history(run_dir)
    assert history[-1].reason == "room again" and len(history) == len(lines) - 1
    for line in (b"1\n", b"2", b"3\n"):
        append_lines(run_dir / "new.jsonl", line)
    assert (run_dir / "new.jsonl").read_bytes() == b"1\n2\n3\n"


def test_process_survives_a_log_on_a_full_disk(run_dir, filler):
    code = f"""{FILL}
import traceback
from cluster.files import ignore_output_errors
ignore_output_errors()
print('before', flush=True)
fill(filler)
try: 1 / 0
except ZeroDivisionError: traceback.print_exc()
for _ in range(9):
    print('lost ' * 1000, flush=True)
    print('lost ' * 1000, file=sys.stderr)
filler.unlink()
print('\u00e4fter')"""
    with (run_dir / "log").open("ab") as log:
        command = [sys.executable, "-S", "-c", code, str(filler)]
        assert subprocess.run(command, stdout=log, stderr=log).returncode == 0
    text = (run_dir / "log").read_text()
    assert text.startswith("before\n") and text.endswith("äfter\n") and text.count("lost") < 2000


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_unreadable_state_is_not_overwritten(tmp_path, monkeypatch, code):
    """A state.json that cannot be read at the moment may still name a running process and a
    scheduler job.
    """
    claim_attempt(tmp_path)
    before = (tmp_path / "state.json").read_bytes()
    open_file = os.open

    def refuse(path, flags, *more, **named):
        if str(path).endswith("state.json"):
            raise OSError(code, os.strerror(code), str(path))
        return open_file(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        update_state(tmp_path, attempt=1, state=JobState.RUNNING, step=8)
    monkeypatch.undo()
    assert (tmp_path / "state.json").read_bytes() == before


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_end_of_attempt_is_recorded_after_disk_errors(tmp_path, monkeypatch, code):
    claim_attempt(tmp_path)
    monkeypatch.setattr(directory_handle, "RETRY_DELAYS_S", (0.01,) * 5)
    replace = Path.replace
    failures = [OSError(code, os.strerror(code))] * 3

    def fail_at_first(path, target):
        if failures:
            raise failures.pop()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail_at_first)
    record_end(RunDirectory(tmp_path), 1, AttemptOutcome(1, "rank 0 ended with code 1"))
    report, state = read_exit(tmp_path), read_state(tmp_path)
    assert report is not None and report.reason == "rank 0 ended with code 1"
    assert state is not None and state.state is JobState.FAILED
