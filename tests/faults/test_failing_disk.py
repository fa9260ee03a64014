"""A file system that is slow or fails for some seconds under a launched run. Training continues, or
the run ends and can be resumed without loss.

File system calls of the supervisor and the ranks fail inside the C library
(`tests/support/failing_disk.c`), so no code of the kit is changed.
"""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kit
from cluster.process import Process
from cluster.state import JobState, last_attempt, read_state, read_taken_request, write_request
from kit.config.plan import Plan
from kit.run import Run
from kit.run.alerts import AlertLog
from tests.support.attempts import finished, lines_of
from tests.support.failing_disk import FailingDisk, Fault, compile_library, compiler
from tests.support.fault_cost import assert_same
from tests.support.waiting import eventually, processes
from tests.support.workers import local_run

pytestmark = [pytest.mark.timeout(600)]
ONE = Plan(micro_batch_size=2, global_batch_size=2)
SEED = 20261128
"""Random seed for the sample of faults that `make test` tries. `make faults` tries all faults."""
FAULT_S = 1.5
"""Seconds for which operations on monitoring files fail, longer than the time between two
heartbeats.
"""
MONITORING: list[Fault] = [
    ("rename", errno.EIO, 0, "ranks/*"),
    ("rename", errno.ESTALE, 0, "ranks/*"),
    ("rename", errno.EIO, 0, "state.json"),
    ("rename", errno.ESTALE, 0, "state.json"),
    ("rename", errno.ENOTEMPTY, 0, "state.json"),
    ("open", errno.EIO, 0, ".state.lock"),
    ("open", errno.ESTALE, 0, ".state.lock"),
    ("open", errno.EIO, 0, "ranks/.*"),
    ("open", errno.ENOSPC, 0, ".state.json.*"),
    ("write", errno.EIO, 0, "metrics.jsonl"),
    ("write", errno.ESTALE, 0, "metrics.jsonl"),
    ("write", errno.ENOSPC, 0, "metrics.jsonl"),
    ("write", errno.EIO, 0, ".state.json.*"),
    ("open", errno.EIO, 0, "control/*"),
    ("rename", errno.ESTALE, 0, "control/*"),
    ("open", 0, 2000, "*"),
    ("rename", 0, 2000, "*"),
    ("write", 0, 2000, "metrics.jsonl"),
]
REPORT: list[Fault] = [
    ("open", errno.EIO, 0, "alerts.jsonl"),
    ("write", errno.EIO, 0, "logs/*"),
]
"""Faults of alerts.jsonl and the logs, in which faults of other monitoring files are reported."""
CHECKPOINTS: list[Fault] = [
    ("rename", errno.EIO, 0, "checkpoints/step_*"),
    ("rename", errno.ESTALE, 0, "checkpoints/step_*"),
    ("rename", errno.ENOTEMPTY, 0, "checkpoints/step_*"),
    ("rename", errno.EIO, 0, "checkpoints/*/manifest.json"),
    ("rmdir", errno.ENOTEMPTY, 0, "checkpoints/*"),
    ("rmdir", errno.EIO, 0, "checkpoints/*"),
    ("fsync", errno.EIO, 0, "checkpoints*"),
    ("fsync", errno.ESTALE, 0, "checkpoints*"),
    ("open", errno.EIO, 0, "checkpoints/*"),
    ("open", errno.ESTALE, 0, "checkpoints/*"),
    ("write", errno.EIO, 0, "checkpoints/*"),
    ("rename", 0, 2000, "checkpoints/*"),
    ("fsync", 0, 2000, "checkpoints*"),
    ("open", 0, 500, "checkpoints/*"),
]


def fault_name(fault: Fault) -> str:
    call, code, delay_ms, pattern = fault
    return f"{call}-{errno.errorcode[code] if code else f'{delay_ms} ms'}-{pattern}"


def sampled(faults: list[Fault], count: int) -> list:
    """Returns all faults as test parameters. `make test` tries a sample of `count` faults, `make
    faults` tries all.
    """
    quick = random.Random(SEED).sample(faults, count)
    marks = {False: [pytest.mark.thorough], True: []}
    return [
        pytest.param(fault, id=fault_name(fault), marks=marks[fault in quick]) for fault in faults
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("the library that makes calls fail is C, and there is no gcc here")
    return compile_library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def disk(library: Path, tmp_path: Path) -> FailingDisk:
    return FailingDisk(library, tmp_path / "rules")


@pytest.fixture
def launch(disk, tmp_path, spec, recipe) -> Iterator[Callable[..., Run]]:
    """Returns a function that launches a run on the failing disk. Keywords change the recipe. After
    the test, runs are cancelled.
    """
    runs: list[Run] = []

    def launched(**changes) -> Run:
        asked = recipe.replace(warmup_steps=2, decay_steps=1000, **changes)
        with disk.preloaded():
            runs.append(kit.launch(tmp_path / "run", spec=spec, plan=ONE, recipe=asked))
        return runs[-1]

    yield launched
    for run in runs:
        if not run.job.status().state.is_final:
            run.job.cancel()


def last_step(run: Run) -> int:
    return int(run.metrics().summary()["step"])


def until(run: Run, condition: Callable[[], object], what: str, limit_s: float = 120.0) -> None:
    assert eventually(condition, limit_s), f"{what}: {run.job.status()}\n{run.job.logs()[-3000:]}"


def until_step(run: Run, step: int) -> None:
    def reached() -> bool:
        status = run.job.status()
        assert not status.state.is_final, f"{status}\n{run.job.logs()[-3000:]}"
        return last_step(run) >= step

    until(run, reached, f"step {step}")


def steps_per_s(run: Run, begin: float, end: float) -> float:
    """Returns the number of steps per second that ended between two times."""
    ended_at = run.metrics()["time"]
    return float(np.sum((ended_at >= begin) & (ended_at < end))) / (end - begin)


def test_monitoring_faults_end_no_attempt(launch, disk, request):
    """A single run meets all faults of monitoring files one after the other."""
    faults = MONITORING
    if not request.config.getoption("--thorough"):
        faults = random.Random(SEED).sample(MONITORING, 4)
    run = launch(num_steps=10**6, checkpoint_every=None)
    until_step(run, 5)
    for number, fault in enumerate(faults):
        before, hits = last_step(run), disk.num_hits
        disk.begin(run.directory, fault, *([] if number else REPORT))
        if fault[3].startswith("control"):
            write_request(run.directory, "checkpoint")
        until(run, lambda hits=hits: disk.num_hits > hits, f"a call with {fault_name(fault)}")
        time.sleep(FAULT_S if fault[1] else fault[2] / 1000)
        disk.end()
        until_step(run, before + 2)
        status = run.job.status()
        assert (status.state, status.attempt) == (JobState.RUNNING, 1), (fault_name(fault), status)
    run.job.stop()
    assert run.job.wait(120).state is JobState.DONE, run.job.logs()[-3000:]
    rows = lines_of(run)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "each step once"
    assert run.checkpoints.steps()[-1] == len(rows), "the stop has saved"
    disk_alerts = [
        alert for alert in AlertLog(run.directory / "alerts.jsonl").alerts if alert.kind == "disk"
    ]
    assert len(disk_alerts) == 1 and "Training continues" in disk_alerts[0].message


@pytest.mark.thorough
def test_slow_renames_do_not_slow_steps(launch, disk):
    """Each rename takes 2 s. A heartbeat needs two renames, and no training step may wait
    for them.
    """
    run = launch(num_steps=10**6, checkpoint_every=None)
    until_step(run, 5)
    begin = time.time()
    time.sleep(5)
    disk.begin(run.directory, ("rename", 0, 2000, "*"))
    middle = time.time()
    time.sleep(8)
    end = time.time()
    disk.end()
    run.job.stop()
    assert run.job.wait(120).state is JobState.DONE
    usual, slow = steps_per_s(run, begin, middle), steps_per_s(run, middle, end)
    assert slow > 0.4 * usual, "a busy machine alone may halve the speed, not more"


def test_requests_wait_for_a_failing_disk(launch, disk):
    run = launch(num_steps=10**6, checkpoint_every=None)
    until_step(run, 5)
    disk.begin(run.directory, ("rename", errno.EIO, 0, "control/taken_*"))
    write_request(run.directory, "checkpoint")
    time.sleep(2)
    assert read_taken_request(run.directory, "checkpoint") is None
    disk.end()

    def is_saved() -> bool:
        taken = read_taken_request(run.directory, "checkpoint")
        return taken is not None and run.checkpoints.steps() == [taken.step]

    until(run, is_saved, "a checkpoint at the step that the record names", 30)
    disk.begin(run.directory, ("rename", 0, 500, "*"))
    start = time.monotonic()
    run.job.stop()
    assert run.job.wait(120).state is JobState.DONE and last_attempt(run.directory) == 1
    assert time.monotonic() - start < 90


@pytest.fixture
def slow_hook(tmp_path) -> Path:
    """Path of a hook that makes each step take 0.15 s longer, so that a fault begins and ends while
    the run trains.
    """
    file = tmp_path / "hook.py"
    file.write_text("import time\n\ndef on_step(state):\n    time.sleep(0.15)\n    return {}\n")
    return file


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, spec, recipe) -> Run:
    """A finished run of 30 steps on a disk without faults, as the reference."""
    asked = recipe.replace(num_steps=30, warmup_steps=2, decay_steps=1000, checkpoint_every=5)
    run = local_run(tmp_path_factory.mktemp("undisturbed") / "run", spec, ONE, asked)
    finished(run)
    return run


@pytest.mark.parametrize("fault", sampled(CHECKPOINTS, 2))
def test_checkpoint_faults_lose_no_good_checkpoint(launch, disk, fault, undisturbed, slow_hook):
    run = launch(num_steps=30, checkpoint_every=5, keep_last=2, hook=str(slow_hook))
    until(run, lambda: run.checkpoints.steps(), "the first checkpoint")
    disk.begin(run.directory, fault)
    hits = disk.num_hits
    good = run.checkpoints.steps()[-1]
    ends_at = time.monotonic() + (30 if fault[1] else 6)
    while time.monotonic() < ends_at and not run.job.status().state.is_final:
        if disk.num_hits > hits and last_step(run) >= 20:
            break
        time.sleep(0.1)
    assert disk.num_hits > hits, "the fault was met"
    assert run.checkpoints.steps()[-1] >= good
    disk.end()
    status = run.job.wait(300)
    if status.state is not JobState.DONE:
        before = run.checkpoints.steps()[-1]
        with disk.preloaded():
            kit.resume(run.directory)
        status = run.job.wait(120)
        assert f"resumed from step {before}" in run.job.logs(), run.job.logs()[-3000:]
    assert status.state is JobState.DONE, run.job.logs()[-3000:]
    assert run.checkpoints.steps()[-1] == 30
    assert_same(run, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_restart_waits_for_a_failing_disk(launch, disk, code, slow_hook):
    """A rank is killed while state.json cannot be replaced and history.jsonl cannot be opened."""
    run = launch(num_steps=60, checkpoint_every=5, hook=str(slow_hook))
    until(run, lambda: run.checkpoints.steps(), "the first checkpoint")
    disk.begin(run.directory, ("rename", code, 0, "state.json"), ("open", code, 0, "history.jsonl"))
    os.kill(processes(str(run.directory), "RANK=0")[0], 9)
    time.sleep(5)
    disk.end()
    assert run.job.wait(120).state is JobState.DONE, run.job.logs()[-3000:]
    assert last_attempt(run.directory) == 2
    state = read_state(run.directory)
    assert state is not None and isinstance(state.process, Process)
