"""Non-finite losses and gradients, and loss spikes. The run stops, skips steps, or rolls back to a
checkpoint.
"""

import math
import os
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import kit
from kit.engines.native import NativeEngine
from kit.parallel.gradients import local
from kit.run.alerts import AlertLog
from kit.trainer.batches import Batches
from tests.support.attempts import Attempt, before_each_launch, finished, lines_of
from tests.support.fault_cost import DP2, assert_same, cost
from tests.support.workers import local_run

pytestmark = pytest.mark.timeout(900)


ALONE = kit.Plan(micro_batch_size=8, global_batch_size=8)
"""Plan with one rank for spikes, which are found only after many steps. Tests of other faults use
several ranks."""


def poison(step: int, *, rank: int, value: float = math.nan) -> Callable[[int], None]:
    """Returns a fault injector that sets the gradient of one weight on one rank to `value` (NaN or
    infinite) at one step.
    """

    def sabotage(here: int) -> None:
        engine_step, now = NativeEngine._forward_backward, {}

        def forward_backward(self, samples):
            loss = engine_step(self, samples)
            if now["step"] == step and here == rank:
                gradient = next(p.grad for p in self.parameters() if p.grad is not None)
                local(gradient).fill_(value)
            return loss

        NativeEngine._forward_backward = forward_backward
        before_each_launch(lambda trainer: now.update(step=trainer.step + 1))

    return sabotage


def garble(*steps: int) -> Callable[[int], None]:
    """Returns a fault injector that replaces the batches of the given steps by random tokens, as
    from a damaged data file.
    """

    def sabotage(_: int) -> None:
        read = Batches._read

        def garbled(self, first):
            tokens = read(self, first)
            if first // self.plan.global_batch_size + 1 in steps:
                generator = torch.Generator().manual_seed(first)
                return torch.randint(0, 300, tokens.shape, generator=generator)
            return tokens

        Batches._read = garbled

    return sabotage


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_gradient_stops_before_checkpoint(prepare, value):
    """The checkpoint that is due at the bad step is not written. The previous checkpoint
    remains.
    """
    run = prepare("stopped", num_steps=30, checkpoint_every=5)
    attempt = Attempt(run, 1, poison(10, rank=1, value=value))
    assert attempt.wait() == [os.EX_CONFIG] * 2
    assert run.checkpoints.steps() == [5], "that which is due at the bad step is not written"
    metrics = run.metrics()
    assert metrics["step"].tolist() == list(range(1, 11))
    assert not math.isfinite(metrics["grad_norm"][-1])
    said = (
        rf"RunError: stopped at step 10: the gradient norm is {value}\. The checkpoint of step 5 is"
    )
    assert re.search(said, attempt.log())
    note = "the run stopped at step 10, where a checkpoint was due, and the checkpoint of step 5 is"
    note += " complete"
    fault = "NaN" if math.isnan(value) else "infinite"
    name = f"{fault} gradient, reaction `stop`: number of checkpoints that are lost or contain the"
    name += " bad update"
    cost(name, 0, at_most=0, note=note)


LAYOUTS = {
    "DP2": DP2.replace(zero_stage=0),
    "ZeRO1": DP2,
    "ZeRO3": DP2.replace(zero_stage=3),
    "TP2": DP2.replace(data_parallel=1, zero_stage=0, tensor_parallel=2),
    "PP2": DP2.replace(data_parallel=1, zero_stage=0, pipeline_parallel=2),
}


SHORT = {"num_steps": 8, "warmup_steps": 2, "checkpoint_every": None, "on_nan": "skip"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, spec, recipe) -> kit.Run:
    """A run that skips the update of step 4, because rank 0 had a NaN gradient."""
    folder = tmp_path_factory.mktemp("runs") / "reference"
    run = local_run(folder, spec, LAYOUTS["DP2"], recipe.replace(**SHORT))
    finished(run, 1, poison(4, rank=0))
    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_update_is_skipped_by_all_ranks(prepare, reference, layout):
    run = prepare(layout, LAYOUTS[layout], **SHORT)
    finished(run, 1, poison(4, rank=1))
    rows = lines_of(run)
    assert [row.get("skipped", 0) for row in rows] == [0, 0, 0, 1, 0, 0, 0, 0]
    # Without sharding, the metrics have the gradient norm of rank 0, on which no fault was
    # injected.
    assert layout == "DP2" or not math.isfinite(rows[3]["grad_norm"])
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert run.checkpoints.manifest(8).skipped == 1
    (alert,) = AlertLog(run.directory / "alerts.jsonl").alerts
    assert alert.kind == "guard" and "its update was dropped" in alert.message
    np.testing.assert_allclose(run.metrics()["loss"], reference.metrics()["loss"], rtol=1e-5)
    assert reference.metrics()["loss"][4] != pytest.approx(reference.metrics()["loss"][3], rel=1e-6)


FAULTS = {
    ("on_nan", "skip"): (poison(13, rank=0), 1),
    ("on_nan", "roll_back"): (poison(13, rank=0), 3),
    ("on_spike", "skip"): (garble(102, 103), 2),
    ("on_spike", "roll_back"): (garble(102), 2),
}


@pytest.mark.parametrize(("field", "answer"), FAULTS)
def test_skip_and_roll_back_resume_bit_identically(prepare, field, answer):
    """The second run is killed after the fault, and resumes from a checkpoint before the fault (or
    after it, if the kill comes late). Metrics and manifest record the skipped updates.
    """
    is_nan, (sabotage, dropped) = field == "on_nan", FAULTS[field, answer]
    last, cut, every, plan = (30, 14, 10, DP2) if is_nan else (110, 104, 50, ALONE)
    settings = {"checkpoint_every": every, "decay_steps": last, field: answer}
    straight = prepare("straight", plan, num_steps=last, **settings)
    finished(straight, 1, sabotage)
    broken = prepare("broken", plan, num_steps=last, **settings)
    attempt = Attempt(broken, 1, sabotage)
    attempt.until_step(cut)  # This step is just after the fault and before the next checkpoint.
    attempt.kill()
    finished(broken, 2, sabotage)
    assert_same(broken, straight)
    rows = lines_of(straight)
    manifest = straight.checkpoints.manifest(last)
    assert manifest.skipped == sum(row.get("skipped", 0) for row in rows) == dropped
    assert manifest.samples == last * straight.plan.global_batch_size, "no batch is forgotten"
    fault = "NaN gradient" if is_nan else "loss spike"
    name = f"{fault}, reaction `{answer}`: number of dropped updates"
    note = "recorded in metrics and manifest; a run that was killed after the fault and resumed"
    note += " equals, bit for bit, a run with this fault that was not killed"
    cost(name, dropped, note=note)


def test_ten_bad_steps_in_a_row_stop_the_run(prepare):
    run = prepare("hopeless", num_steps=40, checkpoint_every=5, on_nan="skip")

    def sabotage(rank: int) -> None:
        for step in range(7, 30):
            poison(step, rank=0)(rank)

    attempt = Attempt(run, 1, sabotage)
    assert attempt.wait() == [os.EX_CONFIG] * 2
    assert "10 bad steps in a row" in attempt.log() and run.metrics()["step"][-1] == 16
