"""What goes wrong in training, done to real runs: what each fault costs in steps, in bytes and in seconds.

The rows go to results/training_faults.json. `--kills 100` is the full form (`make faults`).
"""

import dataclasses
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import kit
from cluster.process import Process
from cluster.site import Site
from cluster.state import JobError, JobState, read_history, read_state, update_state
from kit import launcher
from kit.bench.results import Row, load_average, row, write_results
from kit.checkpoint import checksum
from kit.engines.native import NativeEngine
from kit.errors import CheckpointError, ConfigError, RunError
from kit.memory_advice import changes, estimated
from kit.monitor.alerts import STRAGGLER, AlertLog
from kit.monitor.ranks import RankTimes
from kit.parallel.gradients import local
from kit.plan import Plan
from kit.run import Run
from kit.spec import ModelSpec
from kit.train import Trainer
from tests.attempts import Attempt, finished, size_of

pytestmark = pytest.mark.timeout(900)
DP2 = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2, global_batch_size=8)
ROWS: list[Row] = []
SEED = 8


@pytest.fixture(scope="module", autouse=True)
def results():
    load = load_average()
    yield
    if ROWS:
        write_results("training_faults", ROWS, command="make faults", load_before=load)


@pytest.fixture
def prepare(tmp_path, spec, recipe) -> Callable[..., Run]:
    """Returns a function that makes a run directory; its keywords change recipe and plan."""

    def prepared(name: str, plan: Plan = DP2, **changes) -> Run:
        return Run.create(tmp_path / name, spec=spec, plan=plan, recipe=recipe.replace(**changes),
                          site=Site.load("laptop"))  # fmt: skip

    return prepared


def cost(name: str, value: float, unit: str, *, at_most: float | None = None, note: str = "") -> None:
    ROWS.append(row(name, round(value, 2), unit, at_most=at_most, note=note))
    slack = 3 if unit == "s" else 1  # the row tells a missed target; a busy machine alone must not fail the test
    assert at_most is None or value <= slack * at_most, (name, value, note)


def weights(run: Run) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in run.load_model().named_parameters()}


def assert_same(ours: Run, theirs: Run) -> None:
    """Losses, gradient norms and final weights are the same, bit for bit."""
    for name in ("step", "loss", "grad_norm"):
        np.testing.assert_array_equal(ours.metrics()[name], theirs.metrics()[name], err_msg=name)
    expected = weights(theirs)
    for name, weight in weights(ours).items():
        assert np.array_equal(weight, expected[name]), name


# Killed ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Toll:
    """What kills have cost so far."""

    kills: int = 0
    in_writes: int = 0
    steps_repeated: list[int] = dataclasses.field(default_factory=list)
    steps_lost: int = 0
    bytes_lost: int = 0
    recovery_s: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Moment:
    """When an attempt is killed: inside the write of a checkpoint, after some more steps, or while it still starts."""

    writes: int | None
    """Whole checkpoints to let pass before one is hit; None: any moment."""
    steps: int
    start_s: float
    later_s: float
    """Once the moment has come: so that it is not always the beginning of a write or a step."""

    @classmethod
    def drawn(cls, draw: random.Random) -> "Moment":
        writes, steps = (draw.choice([0, 1, 1, 2]) if draw.random() < 0.5 else None), draw.choice([0, *range(50)])
        return cls(writes=writes, steps=steps, start_s=draw.uniform(0, 1), later_s=draw.uniform(0, 0.01))

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
    """Returns the checksum of every file of some checkpoints."""
    files = (file for step in steps for file in run.checkpoints.path(step).iterdir())
    return {file: zlib.crc32(file.read_bytes()) for file in files}


def live(run: Run, number: int, draw: random.Random, toll: Toll, *, kill: bool) -> bool:
    """Runs one attempt, kills it at a random moment or in mid-write, and returns whether it had finished."""
    metrics = run.directory / "metrics.jsonl"
    steps, before = run.checkpoints.steps(), metrics.read_bytes() if metrics.exists() else b""
    kept = contents(run, steps)
    attempt = Attempt(run, number)
    moment, recovered = Moment.drawn(draw), None
    while not attempt.is_over():
        elapsed = time.monotonic() - attempt.started
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
    toll.bytes_lost += len(before) - len(os.path.commonprefix([before, metrics.read_bytes() if before else b""]))
    changed = [file for file, value in kept.items() if file.exists() and zlib.crc32(file.read_bytes()) != value]
    toll.bytes_lost += sum(map(size_of, changed))
    if not over:
        recorded = [json.loads(line)["step"] for line in metrics.read_bytes().split(b"\n")[:-1]] if recovered else []
        toll.steps_repeated.append(max(0, max(recorded, default=0) - max(run.checkpoints.steps(), default=0)))
    return over


def test_killed_at_random_moments_and_in_checkpoint_writes(prepare, request):
    kills, draw, toll = request.config.getoption("--kills"), random.Random(SEED), Toll()
    unbroken = prepare("unbroken")
    finished(unbroken)
    for name in itertools.count():
        run = prepare(f"killed{name}")
        number = 1
        while not live(run, number, draw, toll, kill=toll.kills < kills):
            number += 1
        assert_same(run, unbroken)
        assert not list(run.checkpoints.directory.glob("*.*")), "parts of checkpoints are left"
        if toll.kills >= kills:
            break
        shutil.rmtree(run.directory)
    every = unbroken.recipe.checkpoint_every
    note = (
        f"{toll.kills} kills of 2 ranks, {toll.in_writes} of them inside a checkpoint write; {name + 1} runs, each bit "
    )
    cost("SIGKILL: steps lost beyond the last complete checkpoint", toll.steps_lost, "", at_most=0,
         note=note + "for bit as if unbroken")  # fmt: skip
    cost("SIGKILL: bytes lost of checkpoints and metrics", toll.bytes_lost, "", at_most=0)
    assert every is not None
    # One checkpoint may be due and another still on its way to the disk.
    cost("SIGKILL: most steps to repeat", max(toll.steps_repeated), "", at_most=2 * every,
         note=f"a checkpoint every {every} steps")  # fmt: skip
    cost("SIGKILL: seconds to the next step, median", statistics.median(toll.recovery_s), "s",
         note=f"at most {max(toll.recovery_s):.1f} s; without the start of Python and torch")  # fmt: skip


def test_killed_and_resumed_with_everything(prepare):
    """The whole way once: supervisor killed, found lost, resumed by the user's command."""
    run = prepare("whole", num_steps=5000, checkpoint_every=10)
    launcher.submit(run)
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
    cost("SIGKILL of the supervisor: `kit resume` to the next step", time.monotonic() - start, "s", at_most=60,
         note="start of Python and torch included")  # fmt: skip
    again.job.cancel()
    again.job.wait(timeout_s=30)
    assert f"resumed from step {newest}" in again.job.logs()


# Damaged checkpoints --------------------------------------------------------------------------------------------------


def torn(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def bit_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def with_checkpoints(tmp_path_factory, spec, recipe) -> Run:
    """A finished run with checkpoints of steps 10, 20 and 30."""
    short = recipe.replace(num_steps=30, checkpoint_every=10, keep_last=3)
    run = Run.create(tmp_path_factory.mktemp("runs") / "run", spec=spec, plan=DP2, recipe=short,
                     site=Site.load("laptop"))  # fmt: skip
    finished(run)
    return run


@pytest.fixture
def damaged(with_checkpoints, tmp_path) -> Run:
    """The same after step 20: its newest checkpoint is to be damaged."""
    shutil.copytree(with_checkpoints.directory, tmp_path / "damaged")
    run = Run.open(tmp_path / "damaged")
    shutil.rmtree(run.checkpoints.path(30))
    return run


@pytest.mark.parametrize(
    ("damage", "which"),
    [(torn, "*.distcp"), (bit_flipped, "*.distcp"), (bit_flipped, ".metadata"), (bit_flipped, "manifest.json")],
)
def test_damaged_checkpoint_is_found_kept_and_the_one_before_is_used(with_checkpoints, damaged, damage, which):
    folder = damaged.checkpoints.path(20)
    damage(min(folder.glob(which)))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    attempt = finished(damaged, 2)
    assert attempt.resumed_from() == 10 and damaged.checkpoints.steps() == [10, 20, 30]
    assert_same(damaged, with_checkpoints)
    kept = {file.name: file.read_bytes() for file in folder.with_suffix(".damaged-2").iterdir()}
    assert kept == before
    said = "the checkpoint of step 20 is damaged and kept as step_00000020.damaged-2"
    assert f"WARNING: {said}" in attempt.log() and "went on from step 10" in attempt.log()
    assert any(said in event.reason for event in read_history(damaged.directory))
    state = read_state(damaged.directory)
    assert state is not None and said in state.notice
    alerts = AlertLog(damaged.directory / "alerts.jsonl").alerts
    assert [(alert.kind, alert.level) for alert in alerts] == [("checkpoint", "error")]
    lost = sum(map(len, before.values())) - sum(map(len, kept.values()))
    name = f"checkpoint {damage.__name__.replace('_', ' ')} ({which}): bytes lost"
    cost(name, lost, "", at_most=0, note="found by size or checksum, kept aside, the one before is used, said so")


def test_run_without_a_sound_checkpoint_is_not_begun_anew(damaged):
    for step in (10, 20):
        bit_flipped(min(damaged.checkpoints.path(step).glob("*.distcp")))
    attempt = Attempt(damaged, 2)
    assert attempt.wait() == [os.EX_CONFIG] * 2
    assert "are damaged, nothing was changed" in attempt.log()
    assert damaged.checkpoints.steps() == [10, 20]


def test_damaged_checkpoint_is_not_evaluated(damaged):
    bit_flipped(max(damaged.checkpoints.path(20).glob("*.distcp")))
    with pytest.raises(CheckpointError, match="distcp is damaged: its checksum"):
        damaged.load_model(20)
    torn(max(damaged.checkpoints.path(20).glob("*.distcp")))
    with pytest.raises(CheckpointError, match="but its manifest says"):
        damaged.load_model(20)


def test_checkpoint_without_checksums_is_still_read(damaged, with_checkpoints):
    """As the kit wrote them before it had checksums."""
    file = damaged.checkpoints.path(20) / "manifest.json"
    old = json.loads(file.read_text())
    for name in ("checksums", "skipped", "recent_losses"):
        del old[name]
    file.write_text(json.dumps(old))
    assert finished(damaged, 2).resumed_from() == 20
    assert_same(damaged, with_checkpoints)


def test_verification_is_fast(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20) * 64)
    start = time.perf_counter()
    assert checksum(file) == zlib.crc32(file.read_bytes())
    rate = file.stat().st_size / (time.perf_counter() - start) / 1e6
    cost("verification of a checkpoint, each rank", rate, "MB/s",
         note="CRC-32, file in the page cache; ranks read side by side; a core that others use too")  # fmt: skip
    assert rate > 50


# Steps that go wrong --------------------------------------------------------------------------------------------------


def poison(step: int, *, rank: int, value: float = math.nan) -> Callable[[int], None]:
    """Returns a sabotage: one rank's gradient of one weight is not finite at one step."""

    def sabotage(here: int) -> None:
        engine_step, one_step, now = NativeEngine._forward_backward, Trainer._one_step, {}

        def forward_backward(self, inputs, targets):
            loss = engine_step(self, inputs, targets)
            if now["step"] == step and here == rank:
                gradient = next(p.grad for p in self.parameters() if p.grad is not None)
                local(gradient).fill_(value)
            return loss

        def remembered(self):
            now["step"] = self.step + 1
            return one_step(self)

        NativeEngine._forward_backward, Trainer._one_step = forward_backward, remembered

    return sabotage


def garble(*steps: int) -> Callable[[int], None]:
    """Returns a sabotage: the batches of some steps hold random tokens, as a damaged shard does."""

    def sabotage(_: int) -> None:
        batch = Trainer._batch

        def garbled(self, samples, first):
            tokens = batch(self, samples, first)
            if samples is self.samples and first // self.plan.global_batch_size + 1 in steps:
                return torch.randint(0, 300, tokens.shape, generator=torch.Generator().manual_seed(first))
            return tokens

        Trainer._batch = garbled

    return sabotage


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradient_that_is_not_finite_stops_before_anything_is_overwritten(prepare, value):
    run = prepare("stopped", num_steps=30, checkpoint_every=5)
    attempt = Attempt(run, 1, poison(10, rank=1, value=value))
    assert attempt.wait() == [os.EX_CONFIG] * 2
    assert run.checkpoints.steps() == [5], "the checkpoint that is due at the bad step is not written"
    metrics = run.metrics()
    assert metrics["step"].tolist() == list(range(1, 11)) and not math.isfinite(metrics["grad_norm"][-1])
    assert re.search(r"RunError: stopped at step 10: the gradient norm is (nan|inf)\. The checkpoint of step 5 is from",
                     attempt.log())  # fmt: skip
    cost(f"{value} gradient, stop: steps lost beyond the last checkpoint", 0 if run.checkpoints.steps() == [5] else 5,
         "", at_most=0, note="stopped at step 10, checkpoint of step 5 intact")  # fmt: skip


LAYOUTS = {
    "DP2": DP2.replace(zero_stage=0),
    "ZeRO1": DP2,
    "ZeRO3": DP2.replace(zero_stage=3),
    "TP2": DP2.replace(data_parallel=1, zero_stage=0, tensor_parallel=2),
    "PP2": DP2.replace(data_parallel=1, zero_stage=0, pipeline_parallel=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_update_is_dropped_on_every_layout_and_by_all_ranks(prepare, layout):
    run = prepare(layout, LAYOUTS[layout], num_steps=8, warmup_steps=2, checkpoint_every=None, on_nan="skip")
    finished(run, 1, poison(4, rank=1))
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("skipped", 0) for row in rows] == [0, 0, 0, 1, 0, 0, 0, 0]
    # Without sharing, each replica has a norm of its own, and the metrics hold that of rank 0, which saw no fault.
    assert layout == "DP2" or not math.isfinite(rows[3]["grad_norm"])
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert run.checkpoints.manifest(8).skipped == 1
    (alert,) = AlertLog(run.directory / "alerts.jsonl").alerts
    assert alert.kind == "guard" and "its update was dropped" in alert.message
    reference = prepare("reference", LAYOUTS["DP2"], num_steps=8, warmup_steps=2, checkpoint_every=None, on_nan="skip")
    finished(reference, 1, poison(4, rank=0))
    np.testing.assert_allclose(run.metrics()["loss"], reference.metrics()["loss"], rtol=1e-5)
    assert reference.metrics()["loss"][4] != pytest.approx(reference.metrics()["loss"][3], rel=1e-6)


@pytest.mark.parametrize(
    ("answer", "steps", "sabotage"),
    [("skip", {"on_nan": "skip"}, poison(13, rank=0)), ("roll back", {"on_nan": "roll_back"}, poison(13, rank=0)),
     ("skip", {"on_spike": "skip"}, garble(102, 103)), ("roll back", {"on_spike": "roll_back"}, garble(102))],
    ids=["nan-skip", "nan-roll_back", "spike-skip", "spike-roll_back"],
)  # fmt: skip
def test_answered_fault_is_recorded_and_the_resumed_run_is_bit_for_bit_the_same(prepare, answer, steps, sabotage):
    """The second run ends right after the fault, and goes on from a checkpoint before it or after it."""
    last, cut = (30, 14) if "on_nan" in steps else (110, 104)
    settings = {"checkpoint_every": 10 if "on_nan" in steps else 50, "decay_steps": last, **steps}
    straight = prepare("straight", num_steps=last, **settings)
    finished(straight, 1, sabotage)
    broken = prepare("broken", num_steps=last, **settings)
    attempt = Attempt(broken, 1, sabotage)
    while broken.metrics().summary()["step"] < cut:  # just after the fault, before the next checkpoint
        assert not attempt.is_over(), attempt.log()
    attempt.kill()
    finished(broken, 2, sabotage)
    assert_same(broken, straight)
    rows = [json.loads(line) for line in (straight.directory / "metrics.jsonl").read_text().splitlines()]
    dropped = sum(row.get("skipped", 0) for row in rows)
    expected = {"nan skip": 1, "nan roll back": 3, "spike skip": 2, "spike roll back": 2}
    expected = expected[f"{'nan' if 'on_nan' in steps else 'spike'} {answer}"]
    manifest = straight.checkpoints.manifest(last)
    assert manifest.skipped == dropped == expected
    assert manifest.samples == last * straight.plan.global_batch_size, "every batch is accounted for"
    what = "NaN" if "on_nan" in steps else "loss spike"
    cost(f"{what}, {answer}: updates dropped", dropped, "",
         note="recorded in metrics and manifest; killed after it and resumed, bit for bit the same")  # fmt: skip


def test_skipping_without_end_stops(prepare):
    run = prepare("hopeless", num_steps=40, checkpoint_every=5, on_nan="skip")

    def sabotage(rank: int) -> None:
        for step in range(7, 30):
            poison(step, rank=0)(rank)

    attempt = Attempt(run, 1, sabotage)
    assert attempt.wait() == [os.EX_CONFIG] * 2
    assert "10 bad steps in a row" in attempt.log() and run.metrics()["step"][-1] == 16


def test_answers_that_an_engine_cannot_give_are_refused_before_anything_starts(spec, recipe, tmp_path):
    plan = DP2.replace(engine="deepspeed")
    with pytest.raises(ConfigError, match="recipe.on_spike: 'roll_back' is not allowed with plan.engine 'deepspeed'"):
        kit.launch(tmp_path / "run", spec=spec, plan=plan, recipe=recipe.replace(on_spike="roll_back"))
    assert not (tmp_path / "run").exists()


# Ranks that are slow, hang, or run out of memory ----------------------------------------------------------------------


def overworked(here: int) -> None:
    """A sabotage: rank 1 computes 0.2 s longer than the other."""
    forward_backward = NativeEngine._forward_backward

    def slower(self, inputs, targets):
        until = time.thread_time() + 0.2 * here
        while time.thread_time() < until:
            pass
        return forward_backward(self, inputs, targets)

    NativeEngine._forward_backward = slower


def test_slow_rank_is_named_though_all_wait_for_it(prepare):
    run = prepare("slow", num_steps=10_000)
    attempt, ranks = Attempt(run, 1, overworked), RankTimes(run.directory, 2)
    start = None
    while (slowest := ranks.slowest()) is None or slowest.ratio < STRAGGLER:
        assert not attempt.is_over() and time.monotonic() - attempt.started < 90, attempt.log()
        if ranks.look(1) and start is None:
            start = time.monotonic()
        time.sleep(0.02)
    attempt.kill()
    assert start is not None and slowest.rank == 1
    cost("slow rank: named after", time.monotonic() - start, "s", at_most=60, note=str(slowest).partition(" takes ")[2])


def test_hung_rank_ends_the_attempt_and_is_named(prepare, request):
    is_full = request.config.getoption("--kills") >= 100
    run = prepare("hung", num_steps=100_000, **({} if is_full else {"hung_after_s": 3.0}))
    attempt = Attempt(run)
    while not attempt.is_over() and run.metrics().summary()["step"] < 30:
        time.sleep(0.01)
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
    assert re.fullmatch(r"Hung: no step for \d+ s after step \d+: rank 1 no longer answers\.", last), attempt.log()
    assert "Current thread" in attempt.log() or "Thread 0x" in attempt.log()
    cost(
        "hung rank: attempt ended, rank named", took, "s", at_most=60, note=f"hung_after_s {run.recipe.hung_after_s:g}"
    )
    again = run.recipe.replace(num_steps=run.metrics().summary()["step"] + 5)
    again.write(run.directory / "recipe.json")
    assert (finished(Run.open(run.directory), 2).resumed_from() or 0) >= newest


def test_whole_job_that_was_frozen_and_thawed_goes_on(prepare):
    run = prepare("thawed", num_steps=150, hung_after_s=1.0)
    attempt = Attempt(run)
    while not attempt.is_over() and run.metrics().summary()["step"] < 30:
        time.sleep(0.005)
    for number, pause_s in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.0)):
        for pid in attempt.pids:
            os.kill(pid, number)
        time.sleep(pause_s)
    assert attempt.wait() == [0, 0], attempt.log()


def starved(_: int) -> None:
    """A sabotage: from the third step on this process may have 64 MB more than it has now."""
    one_step = Trainer._one_step

    def limited(self):
        if self.step == 2:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (64 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            self.plan = self.engine.plan = self.plan.replace(micro_batch_size=1024, global_batch_size=2048)
        return one_step(self)

    Trainer._one_step = limited


def test_out_of_memory_gives_the_planners_advice(prepare):
    run = prepare("starved", DP2.replace(micro_batch_size=4), num_steps=10)
    attempt = Attempt(run, 1, starved)
    start = time.monotonic()
    codes = attempt.wait()
    last = [attempt.log(rank).strip().splitlines()[-1] for rank in (0, 1) if codes[rank] == os.EX_CONFIG]
    assert last, attempt.log()
    assert last[0].startswith("Out of memory. Estimated need of a device: ")
    assert "--set plan.micro_batch_size=2" in last[0] and f"`kit resume {run.directory} --set" in last[0]
    cost("out of memory: ended with the planner's advice", time.monotonic() - start, "s", at_most=60)


def test_advice_counts_what_each_change_would_need():
    spec = ModelSpec.preset("gpt-22b")
    plan = Plan(tensor_parallel=2, data_parallel=4, micro_batch_size=4, global_batch_size=64, precision="bf16")
    now, *options = estimated(spec, plan, [{}, *changes(spec, plan)], reserved=True)
    assert {"micro_batch_size": 2} in [option.changes for option in options]
    assert all(option.used_bytes < now.used_bytes for option in options)
    assert all(plan.replace(**option.changes).check(spec) is None for option in options)


# Clocks, directories, launches ----------------------------------------------------------------------------------------


def jumpy(offsets: dict[int, float]) -> Callable[[int], None]:
    """Returns a sabotage: the wall clock is so many seconds off from some steps on."""

    def sabotage(_: int) -> None:
        now, one_step, offset = time.time, Trainer._one_step, [0.0]

        def stepped(self):
            offset[0] = offsets.get(self.step, offset[0])
            return one_step(self)

        Trainer._one_step = stepped
        time.time = lambda: now() + offset[0]

    return sabotage


def test_clock_that_jumps_changes_nothing_but_the_times_that_are_written(prepare, with_checkpoints):
    settings = {"num_steps": 30, "checkpoint_every": 10, "keep_last": 3, "hung_after_s": 5.0}
    run = prepare("jumpy", **settings)
    finished(run, 1, jumpy({5: 7200.0, 12: -7200.0, 20: 0.0}))
    assert_same(run, with_checkpoints)
    metrics = run.metrics()
    assert (np.diff(metrics["time"]) < -7000).any(), "the clock did jump"
    assert (metrics["step_time_s"] > 0).all() and metrics["step_time_s"].max() < 60
    assert run.checkpoints.steps() == [10, 20, 30]


def test_heartbeats_go_on_after_the_clock_is_set_back(prepare):
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
    cost("clock set back two hours: longest silence of the heartbeats", (time.monotonic() - start) / 4, "s", at_most=10,
         note="metrics in order, step times as before, nothing judged hung")  # fmt: skip


@pytest.fixture
def read_only(tmp_path):
    """A directory on a file system that is mounted read-only (root may write to others)."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_read_only_directory_is_told_before_anything_starts(spec, recipe, read_only):
    start = time.monotonic()
    with pytest.raises(RunError, match="run cannot be written: Read-only file system. Use another run directory"):
        kit.launch(read_only / "run", spec=spec, plan=DP2, recipe=recipe)
    cost("read-only directory: refused", time.monotonic() - start, "s", at_most=5, note="before anything starts")


def test_of_two_launches_at_the_same_moment_one_wins_and_keeps_its_settings(prepare, tmp_path, spec, recipe):
    """The loser asks for another plan, which must not reach the winner's files."""
    directory = tmp_path / "twice"
    (tmp_path / "spec.json").write_text(spec.to_json())
    (tmp_path / "recipe.json").write_text(recipe.replace(num_steps=100_000).to_json())
    code = (
        "import sys, kit; from kit.recipe import Recipe; from kit.spec import ModelSpec; from pathlib import Path\n"
        "here = Path(sys.argv[1]); plan = kit.Plan(global_batch_size=int(sys.argv[2]))\n"
        "sys.stdin.readline()\n"
        "run = kit.launch(here / 'twice', spec=ModelSpec.read(here / 'spec.json'), plan=plan,\n"
        "                 recipe=Recipe.read(here / 'recipe.json'))\n"
    )
    launches = {
        batch: subprocess.Popen([sys.executable, "-c", code, str(tmp_path), batch], stdin=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)
        for batch in ("8", "16")
    }  # fmt: skip
    time.sleep(1.0)
    start = time.monotonic()
    for launch in launches.values():
        assert launch.stdin is not None
        launch.stdin.write("go\n")
        launch.stdin.flush()
    said = {batch: launch.communicate(timeout=60)[1] for batch, launch in launches.items()}
    won = [batch for batch, launch in launches.items() if launch.returncode == 0]
    assert len(won) == 1, said
    (loser,) = (text for batch, text in said.items() if batch not in won)
    assert "is being launched by another process" in loser or "is in use: attempt 1" in loser
    assert Run.open(directory).plan.global_batch_size == int(won[0])
    cost(
        "two launches of one directory at once: one wins, the other is told", time.monotonic() - start, "s", at_most=60
    )
    job = Run.open(directory).job
    job.cancel()
    job.wait(timeout_s=30)


def test_launch_into_a_live_directory_changes_no_file(prepare):
    run = prepare("live", num_steps=100_000)
    attempt = Attempt(run)
    update_state(run.directory, attempt=1, process=Process.current())
    before = (run.directory / "plan.json").read_bytes()
    with pytest.raises(JobError, match="is in use: attempt 1"):
        kit.launch(run.directory, spec=run.spec, plan=DP2.replace(micro_batch_size=4), recipe=run.recipe)
    attempt.kill()
    assert (run.directory / "plan.json").read_bytes() == before


def test_orphan_of_an_older_attempt_ends_and_writes_nothing(prepare):
    run = prepare("orphan", num_steps=100_000, checkpoint_every=None)
    attempt = Attempt(run)
    while not attempt.is_over() and run.metrics().summary()["step"] < 5:
        time.sleep(0.01)
    start = time.monotonic()
    update_state(run.directory, attempt=2, state=JobState.STARTING)
    assert os.EX_CONFIG in attempt.wait()
    assert "is a left-over of attempt 1; end it" in attempt.log()
    state = read_state(run.directory)
    assert state is not None and state.attempt == 2 and run.checkpoints.steps() == []
    cost("orphan of an older attempt: ended by itself", time.monotonic() - start, "s", at_most=60)
