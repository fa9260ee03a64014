"""A run that is killed at any moment loses no complete checkpoint, and ends with the same results
as an uninterrupted run.
"""

import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import time
import zlib
from pathlib import Path

import pytest

import kit
from cluster.state import read_state
from kit import launcher
from kit.run import Run
from tests.support.attempts import Attempt, size_of
from tests.support.fault_cost import assert_same, cost

pytestmark = pytest.mark.timeout(3600)
"""Time limit of a test, for a hundred kills on a busy machine. A single attempt that hangs is ended
after `HANG_S` seconds.
"""
HANG_S = 300
"""Seconds after which an attempt counts as hanging. An attempt normally takes a few seconds."""
SEED = 8


@dataclasses.dataclass
class Toll:
    """Costs that all kills have caused so far: repeated and lost steps, lost bytes, and recovery
    times.
    """

    kills: int = 0
    in_writes: int = 0
    steps_repeated: list[int] = dataclasses.field(default_factory=list)
    steps_lost: int = 0
    bytes_lost: int = 0
    recovery_s: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Moment:
    """Random moment at which an attempt is killed: inside the write of a checkpoint, after a number
    of further steps, or early in the attempt.
    """

    writes: int | None
    """Number of further complete checkpoints, after which the kill hits the next write. If None,
    the kill is not tied to a write."""
    steps: int
    start_s: float
    later_s: float
    """Seconds of delay before the kill, so that kills do not always hit the beginning of a write or
    a step."""

    @classmethod
    def drawn(cls, draw: random.Random) -> "Moment":
        return cls(
            writes=draw.choice([0, 1, 1, 2]) if draw.random() < 0.5 else None,
            steps=draw.choice([0, *range(50)]),
            start_s=draw.uniform(0, 1),
            later_s=draw.uniform(0, 0.01),
        )

    def has_come(self, run: Run, size: int, before: list[int], elapsed_s: float) -> bool:
        if self.writes is not None:
            every, steps = run.recipe.checkpoint_every or 0, run.checkpoints.steps()
            passed = max(steps, default=0) - max(before, default=0) >= self.writes * every
            return passed and any(run.checkpoints.directory.glob("*.partial-*"))
        if self.steps == 0:
            return elapsed_s > self.start_s
        file = run.directory / "metrics.jsonl"
        return size_of(file) > size and file.read_bytes()[size:].count(b"\n") >= self.steps


def contents(run: Run, steps: list[int]) -> dict[Path, int]:
    """Returns the checksum of each file in the checkpoints of the given steps."""
    files = (file for step in steps for file in run.checkpoints.path(step).iterdir())
    return {file: zlib.crc32(file.read_bytes()) for file in files}


def live(run: Run, number: int, draw: random.Random, toll: Toll, *, kill: bool) -> bool:
    """Runs one attempt. If `kill` is True, kills the attempt at a random moment or inside a write.
    Returns whether the attempt had ended before the kill.
    """
    metrics = run.directory / "metrics.jsonl"
    steps, before = run.checkpoints.steps(), metrics.read_bytes() if metrics.exists() else b""
    kept = contents(run, steps)
    attempt = Attempt(run, number)
    moment, recovered = Moment.drawn(draw), None
    while not attempt.is_over():
        elapsed = time.monotonic() - attempt.started
        assert elapsed < HANG_S, attempt.log()
        if recovered is None and size_of(metrics) > len(before) + 1:
            recovered = elapsed
        if kill and moment.has_come(run, len(before), steps, elapsed):
            time.sleep(moment.later_s)
            break
        time.sleep(0.001)
    over = attempt.is_over()
    attempt.kill()
    assert not over or set(attempt.codes.values()) == {0}, attempt.log()
    if not over:
        toll.kills += 1
        toll.in_writes += any(run.checkpoints.directory.glob("*.partial-*"))
    if number > 1 and recovered is not None:
        toll.recovery_s.append(recovered)
    resumed = attempt.resumed_from()
    if steps and resumed is not None:
        toll.steps_lost += max(0, steps[-1] - resumed)
    after = metrics.read_bytes() if size_of(metrics) else b""
    toll.bytes_lost += len(before) - len(os.path.commonprefix([before, after]))
    here = {file: value for file, value in kept.items() if file.exists()}
    changed = [file for file, value in here.items() if zlib.crc32(file.read_bytes()) != value]
    toll.bytes_lost += sum(map(size_of, changed))
    if not over:
        lines = after.split(b"\n")[:-1] if recovered else []
        recorded = max((json.loads(line)["step"] for line in lines), default=0)
        saved = max(run.checkpoints.steps(), default=0)
        toll.steps_repeated.append(max(0, recorded - saved))
    return over


def test_random_kills_lose_no_checkpoint(prepare, unbroken, request):
    """About half of the kills hit the write of a checkpoint. Each run ends bit-identical to an
    uninterrupted run.
    """
    kills, draw, toll = request.config.getoption("--kills"), random.Random(SEED), Toll()
    for number_of_runs in itertools.count(1):
        run, number = prepare(f"killed{number_of_runs}"), 1
        while not live(run, number, draw, toll, kill=toll.kills < kills):
            number += 1
        assert_same(run, unbroken)
        assert not list(run.checkpoints.directory.glob("*.*")), "parts of checkpoints are left"
        if toll.kills >= kills:
            break
        shutil.rmtree(run.directory)
    every = unbroken.recipe.checkpoint_every
    name = "SIGKILL: steps trained again although a complete checkpoint contained them"
    note = f"{number_of_runs} runs with 2 ranks were killed {toll.kills} times in all,"
    note += f" {toll.in_writes} times during a checkpoint write; each of the {number_of_runs}"
    note += " ended bit for bit equal to an uninterrupted run"
    cost(name, toll.steps_lost, at_most=0, note=note)
    cost("SIGKILL: lost bytes of checkpoints and metrics", toll.bytes_lost, at_most=0)
    assert every is not None
    # The limit is two checkpoint intervals, because a checkpoint may be due while the previous
    # write is not complete.
    repeated, note = max(toll.steps_repeated), f"a checkpoint every {every} steps"
    name = "SIGKILL: largest number of steps to repeat after one kill"
    cost(name, repeated, at_most=2 * every, note=note)
    note = f"at most {max(toll.recovery_s):.1f} s; without the start of Python and torch"
    middle_s = statistics.median(toll.recovery_s)
    name = "SIGKILL: median time from the start of the next attempt to its first step"
    cost(name, middle_s, "s", note=note)


def test_resume_after_the_supervisor_was_killed(prepare):
    """Tested with the user's commands: the supervisor is killed, the status of the job is "lost",
    and `kit resume` continues from the newest checkpoint.
    """
    run = prepare("whole", num_steps=5000, checkpoint_every=10)
    launcher.submit(launcher.draft(run))
    deadline = time.monotonic() + 120
    while not run.checkpoints.steps():
        assert time.monotonic() < deadline, run.job.logs()
        time.sleep(0.01)
    state = read_state(run.directory)
    assert state is not None and state.process is not None
    os.kill(state.process.pid, signal.SIGKILL)
    run.job.wait(timeout_s=30)
    newest, start = run.checkpoints.steps()[-1], time.monotonic()
    again = kit.resume(run.directory)
    while (again.metrics().summary().get("attempt") or 0) < 2:
        assert time.monotonic() - start < 120, again.job.logs()
        time.sleep(0.05)
    name = "SIGKILL of the supervisor: `kit resume` to the end of the next step"
    note = "includes the start of Python and torch"
    cost(name, time.monotonic() - start, "s", at_most=60, note=note)
    again.job.cancel()
    again.job.wait(timeout_s=30)
    assert f"resumed from step {newest}" in again.job.logs()
