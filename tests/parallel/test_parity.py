"""Every layout must train as one process does: ten steps, loss and gradient norm within 1e-5."""

import pytest
import torch

from kit.engines.native import NativeEngine
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec
from tests.workers import run_ranks

STEPS, BATCH = 10, 16
TOLERANCE = 1e-5
PP2 = {"pipeline_parallel": 2}
INTERLEAVED = {**PP2, "schedule": "interleaved", "virtual_stages": 2}
ZERO_BUBBLE = {**PP2, "schedule": "zero_bubble", "virtual_stages": 2}
ZBV = {**PP2, "schedule": "zbv", "virtual_stages": 2}
SP = {"tensor_parallel": 2, "sequence_parallel": True}
ALL = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2}

LAYOUTS = {
    "recompute selective": {"recompute": "selective"},
    "recompute full": {"recompute": "full"},
    "TP2": {"tensor_parallel": 2},
    "TP2 + SP": SP,
    "TP2 + SP, recompute full": {**SP, "recompute": "full"},
    "DP2, ZeRO 0": {"data_parallel": 2},
    "DP2, ZeRO 1": {"data_parallel": 2, "zero_stage": 1},
    "DP2, ZeRO 2": {"data_parallel": 2, "zero_stage": 2},
    "DP2, ZeRO 3": {"data_parallel": 2, "zero_stage": 3},
    "DP4, ZeRO 3, recompute selective": {"data_parallel": 4, "zero_stage": 3, "recompute": "selective"},
    "PP2, GPipe": {**PP2, "schedule": "gpipe"},
    "PP2, 1F1B": PP2,
    "PP2, 1F1B, recompute full": {**PP2, "recompute": "full"},
    "PP2, interleaved": INTERLEAVED,
    "PP2, zero bubble": ZERO_BUBBLE,
    "PP2, ZBV": ZBV,
    "PP4, 1F1B": {"pipeline_parallel": 4},
    "PP4, 1F1B, 2 micro-batches": {"pipeline_parallel": 4, "micro_batch_size": 8},
    "PP2 x DP2, ZeRO 3": {**PP2, "data_parallel": 2, "zero_stage": 3},
    "TP2 x PP2 x DP2": ALL,
    "TP2 x PP2 x DP2, SP, ZeRO 1": {**ALL, "sequence_parallel": True, "zero_stage": 1},
    "TP2 x PP2 x DP2, ZeRO 3, interleaved": {**ALL, **INTERLEAVED, "zero_stage": 3},
    "TP2 x PP2 x DP2, SP, ZeRO 2, ZBV": {**ALL, **ZBV, "sequence_parallel": True, "zero_stage": 2},
}
GPT_LAYOUTS = ("TP2 + SP", "DP2, ZeRO 3", "PP2, 1F1B", "PP2, ZBV", "TP2 x PP2 x DP2", "TP2 x PP2 x DP2, SP, ZeRO 1")


def train(spec: ModelSpec, plan: Plan) -> tuple[float, list[tuple[float, float]]]:
    """Returns this rank's validation loss before training, then (loss, gradient norm) of each step."""
    recipe = Recipe(data="none", num_steps=STEPS, learning_rate=1e-3, min_learning_rate=0, gradient_clip=0.5)
    engine = NativeEngine(spec, plan, recipe, torch.device("cpu"))
    generator, share = torch.Generator().manual_seed(0), BATCH // plan.data_parallel
    steps, held_out = [], None
    for _ in range(STEPS):
        batch = torch.randint(0, spec.vocab_size, (BATCH, spec.sequence_length + 1), generator=generator)
        mine = batch[engine.data_rank * share : (engine.data_rank + 1) * share]
        if held_out is None:
            held_out = engine.validation_loss(mine)
        steps.append(engine.train_step(mine, 1e-3))
    assert held_out is not None
    return held_out, steps


def make_plan(changes: dict) -> Plan:
    micro = 2 if "pipeline_parallel" in changes else 4
    return Plan.from_dict({"micro_batch_size": micro, "global_batch_size": BATCH, **changes})


def largest_difference(layout: dict, spec: ModelSpec, reference) -> dict[str, float]:
    """Returns the largest relative differences of a layout's loss, gradient norm and validation loss."""
    plan = make_plan(layout)
    per_rank = run_ranks(plan.num_devices, train, spec, plan)
    assert all(result == per_rank[0] for result in per_rank), "ranks disagree about loss or gradient norm"
    (held_out, steps), (expected_held_out, expected) = per_rank[0], reference
    return {
        "loss": max(abs(a[0] - b[0]) / b[0] for a, b in zip(steps, expected, strict=True)),
        "grad_norm": max(abs(a[1] - b[1]) / b[1] for a, b in zip(steps, expected, strict=True)),
        "validation": abs(held_out - expected_held_out) / expected_held_out,
    }


@pytest.fixture(scope="module")
def references(llama_spec, gpt_spec):
    return {spec.name: run_ranks(1, train, spec, make_plan({}))[0] for spec in (llama_spec, gpt_spec)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama_layout_equals_one_process(layout, llama_spec, references, record_property):
    differences = largest_difference(LAYOUTS[layout], llama_spec, references[llama_spec.name])
    record_property("differences", differences)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("layout", GPT_LAYOUTS)
def test_gpt_layout_with_tied_embeddings_equals_one_process(layout, gpt_spec, references):
    differences = largest_difference(LAYOUTS[layout], gpt_spec, references[gpt_spec.name])
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("layout", ["DP2, ZeRO 1", "TP2 x PP2 x DP2, SP, ZeRO 1"])
def test_bf16_follows_fp32(layout, llama_spec, references):
    differences = largest_difference({**LAYOUTS[layout], "precision": "bf16"}, llama_spec, references[llama_spec.name])
    assert 0 < differences["loss"] < 1e-3, differences


def test_training_lowers_the_loss_on_a_repeated_batch(llama_spec):
    first, last = run_ranks(1, _overfit, llama_spec)[0]
    assert last < 0.5 * first


def test_clipping_bounds_the_update(llama_spec):
    """A batch's gradient clipped to 0.01 has the same direction and that norm."""
    before, after = run_ranks(1, _clipped_norms, llama_spec)[0]
    assert before > 0.05
    assert after == pytest.approx(0.01, rel=1e-3)


def _overfit(spec: ModelSpec) -> tuple[float, float]:
    recipe = Recipe(data="none", num_steps=60)
    engine = NativeEngine(spec, make_plan({}), recipe, torch.device("cpu"))
    batch = torch.randint(0, spec.vocab_size, (BATCH, spec.sequence_length + 1))
    losses = [engine.train_step(batch, 1e-2)[0] for _ in range(60)]
    return losses[0], losses[-1]


def _clipped_norms(spec: ModelSpec) -> tuple[float, float]:
    recipe = Recipe(data="none", num_steps=1, gradient_clip=0.01)
    engine = NativeEngine(spec, make_plan({}), recipe, torch.device("cpu"))
    batch = torch.randint(0, spec.vocab_size, (BATCH, spec.sequence_length + 1))
    norm = engine.train_step(batch, 1e-3)[1]
    gradients = torch.cat([p.grad.flatten() for p in engine.parameters() if p.grad is not None])
    return norm, gradients.norm().item()
