"""Ranks that are slow, that hang, or that run out of memory."""

import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.heartbeats import read_rank_heartbeats
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.native import NativeEngine
from kit.estimate.choose.memory_advice import estimate_options, memory_saving_changes
from kit.monitor.ranks import RankTimes
from kit.run import Run
from kit.trainer import heartbeat
from tests.support.attempts import Attempt, before_each_launch, finished
from tests.support.fault_cost import DP2, cost

pytestmark = pytest.mark.timeout(900)


def overworked(here: int) -> None:
    """Fault injector: rank 1 computes 0.2 s longer per step than rank 0, and both ranks write a
    heartbeat after each step. `here` is the rank.
    """
    heartbeat.BEAT_EVERY_S = 0.0
    forward_backward = NativeEngine._forward_backward

    def slower(self, samples):
        until = time.thread_time() + 0.2 * here
        while time.thread_time() < until:
            pass
        return forward_backward(self, samples)

    NativeEngine._forward_backward = slower


def test_slow_rank_is_found_while_others_wait(prepare):
    run = prepare("slow", num_steps=10_000)
    attempt, ranks = Attempt(run, 1, overworked), RankTimes(run.directory, 2, 1)
    start = None
    while (slowest := ranks.slowest) is None or not slowest.is_sure:
        assert not attempt.is_over() and time.monotonic() - attempt.started < 240, attempt.log()
        if ranks.read_heartbeats() and start is None:
            start = time.monotonic()
        time.sleep(0.02)
    attempt.kill()
    assert start is not None and slowest.rank == 1
    note = f"the rank takes {str(slowest).partition(' takes ')[2]}"
    name = "slow rank: time until the monitor names the rank"
    cost(name, time.monotonic() - start, "s", at_most=60, note=note)


def gathered(here: int) -> None:
    """Fault injector that lowers the limit for many ranks to 1, so that rank 0 gathers the
    heartbeats of both ranks.
    """
    heartbeat.MAX_RANKS_WITH_FILES, heartbeat.GATHER_EVERY_S = 1, 0.0


def test_rank_0_gathers_heartbeats_of_many_ranks(prepare):
    """Rank 0 writes one file with the heartbeats of all ranks, at most every ten seconds. Other
    ranks write no heartbeat files.
    """
    run = prepare("gathered", num_steps=12)
    finished(run, 1, gathered)
    beats = read_rank_heartbeats(run.directory, 1)
    assert [(beat.rank, beat.step) for beat in beats] == [(0, 12), (1, 12)]
    for beat in beats:
        assert beat.work_s and len(beat.parts_s) == 5 and beat.own_s and 0 < beat.own_s < 10
    assert [file.name for file in (run.directory / "ranks").iterdir()] == ["all.jsonl"]


def test_hung_rank_ends_the_attempt_and_is_named(prepare, request):
    is_full = request.config.getoption("--kills") >= 100
    run = prepare("hung", num_steps=100_000, hung_after_s=40.0 if is_full else 3.0)
    attempt = Attempt(run)
    attempt.until_step(30)
    os.kill(attempt.pids[1], signal.SIGSTOP)
    start, newest = time.monotonic(), run.checkpoints.steps()[-1]
    while 0 not in attempt.codes:
        attempt.is_over()
        assert time.monotonic() - start < 90, attempt.log()
        time.sleep(0.01)
    took = time.monotonic() - start
    attempt.kill()
    assert attempt.codes[0] == 1
    last = attempt.log().strip().splitlines()[-1]
    hung = r"Hung: no step for \d+ s after step \d+: rank 1 no longer answers\."
    assert re.fullmatch(hung, last), attempt.log()
    assert "Current thread" in attempt.log() or "Thread 0x" in attempt.log()
    note = f"hung_after_s {run.recipe.hung_after_s:g}"
    name = "hung rank: time until the attempt ends and names the rank"
    cost(name, took, "s", at_most=60, note=note)
    again = run.recipe.replace(num_steps=run.metrics().summary()["step"] + 5)
    again.write(run.directory / "recipe.json")
    assert (finished(Run.open(run.directory), 2).resumed_from() or 0) >= newest


@pytest.mark.thorough
def test_job_continues_after_all_ranks_are_paused(prepare):
    run = prepare("thawed", num_steps=150, hung_after_s=1.0)
    attempt = Attempt(run)
    attempt.until_step(30)
    for number, pause_s in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.0)):
        for pid in attempt.pids:
            os.kill(pid, number)
        time.sleep(pause_s)
    assert attempt.wait() == [0, 0], attempt.log()


def starved(_: int) -> None:
    """Fault injector: before the third step, the memory of this process is limited to 64 MB above
    its present use, and the step is made to need gigabytes.

    The need is that large because inherited memory, and memory that other tests have freed, would
    otherwise be enough.
    """

    def limited(trainer: Any) -> None:
        if trainer.step == 2:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (64 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            plan = trainer.plan.replace(micro_batch_size=2**17, global_batch_size=2**18)
            trainer.plan = trainer.batches.plan = trainer.engine.plan = plan

    before_each_launch(limited)


def test_out_of_memory_error_gives_planners_advice(prepare):
    run = prepare("starved", DP2.replace(micro_batch_size=4), num_steps=10)
    attempt = Attempt(run, 1, starved)
    start = time.monotonic()
    codes = attempt.wait()
    ended = [rank for rank in (0, 1) if codes[rank] == os.EX_CONFIG]
    assert ended, attempt.log()
    last = attempt.log(ended[0]).strip().splitlines()[-1]
    assert last.startswith("Out of memory. Estimated need of a device: ")
    for advice in ("--set plan.micro_batch_size=2", f"`kit resume {run.directory} --set"):
        assert advice in last
    took_s = time.monotonic() - start
    name = "out of memory: time from the start of the attempt to its error message, which has the"
    name += " planner's advice"
    cost(name, took_s, "s", at_most=60)


def test_memory_saving_changes_need_less_memory():
    """The changes of the plan are those that the out-of-memory error suggests, each with an
    estimate of its memory need.
    """
    spec = ModelSpec.preset("gpt-22b")
    plan = Plan(tensor_parallel=2, data_parallel=4, micro_batch_size=4, global_batch_size=64)
    plan = plan.replace(precision="bf16")
    now, *options = estimate_options(
        spec, plan, [{}, *memory_saving_changes(spec, plan)], Site.load("frontier").device
    )
    assert {"micro_batch_size": 2} in [option.changes for option in options]
    assert all(option.used_bytes < now.used_bytes for option in options)
    assert all(plan.replace(**option.changes).check(spec) is None for option in options)
