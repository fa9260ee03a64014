"""Asynchronous devices, which compute a step while the host launches the next step. Metrics equal
the metrics of a synchronous run, and bad steps are handled one step late. In these tests the CPU is
treated as an asynchronous device.
"""

import math
import os
import re
from collections.abc import Callable

import pytest

from cluster.state import JobState, read_state, read_taken_request, write_request
from kit.data import Samples
from kit.trainer import loop
from kit.trainer.loop import Trainer
from kit.trainer.requests import Requests
from tests.faults.test_bad_steps import ALONE, poison
from tests.support.attempts import Attempt, before_each_launch, finished, lines_of
from tests.support.fault_cost import assert_same

pytestmark = pytest.mark.timeout(900)


def ahead(*then: Callable[[int], None]) -> Callable[[int], None]:
    """Returns a fault injector, which each rank calls before training. It makes the trainer treat
    the CPU as an asynchronous device, and calls the injectors in `then`.
    """

    def sabotage(rank: int) -> None:
        loop.ASYNCHRONOUS_DEVICES = ("cpu",)
        launch = Trainer._launch_step

        def told(self):
            launch(self)
            finished = self.step - len(self.launched)
            print(f"launched {self.step}, finished {finished}", flush=True)

        Trainer._launch_step = told
        for other in then:
            other(rank)

    return sabotage


def crash(step: int) -> Callable[[int], None]:
    """Returns a fault injector that makes the launch of one step raise an exception."""

    def failing(trainer: Trainer) -> None:
        if trainer.step + 1 == step:
            raise ValueError("launch failed")

    return lambda _: before_each_launch(failing)


SETTINGS = {"num_steps": 30, "checkpoint_every": 10, "keep_last": 3, "validation_every": 7}


@pytest.fixture
def straight(prepare):
    """A finished run without asynchronous steps, as the reference."""
    run = prepare("straight", **SETTINGS)
    finished(run)
    return run


def test_asynchronous_results_equal_synchronous_results(prepare, straight):
    """The host reads the results of a step one step late. Before a validation and a checkpoint, the
    host reads the results at once.
    """
    late = prepare("late", **SETTINGS)
    log = finished(late, 1, ahead()).log()
    # The results are one step late, except before a validation and a checkpoint.
    for said in ("launched 6, finished 4", "launched 8, finished 7", "launched 11, finished 10"):
        assert said in log
    assert_same(late, straight)
    ours, theirs = ([r.get("validation_loss") for r in lines_of(run)] for run in (late, straight))
    assert ours == theirs and ours[6] is not None
    saved = [row["step"] for row in lines_of(late) if row.get("checkpoint_s")]
    assert saved == [11, 21], "what a save costs the next step"


@pytest.mark.thorough
def test_killed_asynchronous_run_resumes_identically(prepare, straight):
    killed = prepare("killed", **SETTINGS)
    attempt = Attempt(killed, 1, ahead())
    attempt.until_step(14)
    attempt.kill()
    finished(killed, 2, ahead())
    assert_same(killed, straight)


@pytest.mark.parametrize(
    ("step", "launched"), [(10, 10), (13, 14)], ids=["at a checkpoint", "between"]
)
def test_bad_step_stops_run_before_the_next_checkpoint(prepare, step, launched):
    """The run stops one step after the bad step. At a step with a checkpoint, the run stops at the
    bad step itself.
    """
    run = prepare("bad", ALONE, num_steps=30, checkpoint_every=5)
    attempt = Attempt(run, 1, ahead(poison(step, rank=0)))
    assert attempt.wait() == [os.EX_CONFIG]
    said = attempt.log()
    assert f"stopped at step {step}: the gradient norm is nan" in said
    assert f"launched {launched}," in said and f"launched {launched + 1}," not in said
    told = lines_of(run)  # The metrics do not contain the step after the bad step.
    assert [row["step"] for row in told] == list(range(1, step + 1))
    assert math.isnan(told[-1]["grad_norm"]) and run.checkpoints.steps()[-1] == (step - 1) // 5 * 5


def test_roll_back_drops_no_step_after_the_bad_step(prepare):
    """The roll-back at step 13 drops three updates: those of steps 11, 12 and 13, after the
    checkpoint of step 10.
    """
    run = prepare("back", ALONE, num_steps=20, checkpoint_every=10, on_nan="roll_back")
    finished(run, 1, ahead(poison(13, rank=0)))
    assert [row["step"] for row in lines_of(run) if row.get("skipped")] == [13]
    assert lines_of(run)[12]["skipped"] == 3, "not the step after it too"


def torn(step: int) -> Callable[[int], None]:
    """Returns a fault injector that makes the read of one step's data fail."""

    def sabotage(_: int) -> None:
        batch = Samples.batch

        def failing(self, first_sample, count):
            if first_sample == (step - 1) * count:
                raise OSError("the disk is gone")
            return batch(self, first_sample, count)

        Samples.batch = failing

    return sabotage


@pytest.mark.parametrize("sabotage", [ahead(crash(8)), torn(8)], ids=["launch", "data read ahead"])
def test_failed_launch_keeps_rows_of_earlier_steps(prepare, sabotage):
    """The rows of earlier steps are kept when the launch of a step fails, and when its data cannot
    be read ahead.
    """
    run = prepare("failed", ALONE, num_steps=30)
    assert Attempt(run, 1, sabotage).wait() == [1]
    assert [row["step"] for row in lines_of(run)] == list(range(1, 8))


@pytest.mark.parametrize(
    ("every_s", "steps"),
    [(1e9, loop.REQUESTS_MAX_STEPS), (0.0, 1)],
    ids=["now and then", "slow steps"],
)
def test_all_ranks_agree_on_requests_at_the_same_steps(prepare, every_s, steps):
    run = prepare("asked", num_steps=100_000, checkpoint_every=None)

    def counted(_: int) -> None:
        loop.REQUESTS_EVERY_S, take = every_s, Requests.take

        def looked(self, request, step):
            print(f"look for {request} after step {step}", flush=True)
            return take(self, request, step)

        Requests.take = looked

    attempt = Attempt(run, 1, counted)
    attempt.until_step(3)
    write_request(run.directory, "checkpoint")
    attempt.until_step(3 + 2 * loop.REQUESTS_MAX_STEPS)
    taken = read_taken_request(run.directory, "checkpoint")
    write_request(run.directory, "stop")
    assert attempt.wait() == [0, 0]
    looks = [int(step) for step in re.findall(r"look for stop after step (\d+)", attempt.log())]
    # Requests are checked after step 1 and step 2, because the first step may compile and its time
    # is not used. Then they are checked every `steps` steps.
    assert looks == [1, *range(2, looks[-1] + 1, steps)]
    stopped, state = read_taken_request(run.directory, "stop"), read_state(run.directory)
    assert taken and stopped and run.checkpoints.steps() == [taken.step, stopped.step]
    assert state and state.state is JobState.STOPPING
    assert state.step == stopped.step == looks[-1]
