"""Every layout trains as one process does. Losses and gradient norms have a relative difference of
at most 1e-5.
"""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.native import NativeEngine
from tests.support.parity import (
    ALL,
    BATCH,
    RECIPE,
    TOLERANCE,
    assert_trains_in_bf16,
    batches,
    compare,
    differences,
    fit,
    make_plan,
    skip_if_refused,
    some_thorough,
    train,
)
from tests.support.workers import run_ranks

PP2 = {"pipeline_parallel": 2}
INTERLEAVED = {**PP2, "schedule": "interleaved", "virtual_stages": 2}
ZERO_BUBBLE = {**PP2, "schedule": "zero_bubble", "virtual_stages": 2}
ZBV = {**PP2, "schedule": "zbv", "virtual_stages": 2}
SP = {"tensor_parallel": 2, "sequence_parallel": True}

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
    "DP4, ZeRO 3, recompute selective": {
        "data_parallel": 4,
        "zero_stage": 3,
        "recompute": "selective",
    },
    "DP4, ZeRO 1 over 2": {"data_parallel": 4, "zero_stage": 1, "shard_size": 2},
    "DP4, ZeRO 2 over 2": {"data_parallel": 4, "zero_stage": 2, "shard_size": 2},
    "DP4, ZeRO 3 over 2": {"data_parallel": 4, "zero_stage": 3, "shard_size": 2},
    "PP2, GPipe": {**PP2, "schedule": "gpipe"},
    "PP2, 1F1B": PP2,
    "PP2, interleaved, recompute full of 1": {
        **INTERLEAVED,
        "recompute": "full",
        "recompute_layers": 1,
    },
    "PP2, interleaved": INTERLEAVED,
    "PP2, zero bubble": ZERO_BUBBLE,
    "PP2, ZBV": ZBV,
    "PP4, 1F1B": {"pipeline_parallel": 4},
    "PP4, 1F1B, 2 micro-batches": {"pipeline_parallel": 4, "micro_batch_size": 4},
    "PP2 x DP2, ZeRO 3": {**PP2, "data_parallel": 2, "zero_stage": 3},
    "TP2 x PP2 x DP2": ALL,
    "TP2 x PP2 x DP2, SP, ZeRO 1": {**ALL, "sequence_parallel": True, "zero_stage": 1},
    "TP2 x PP2 x DP2, ZeRO 3, interleaved": {**ALL, **INTERLEAVED, "zero_stage": 3},
    "TP2 x DP4, SP, ZeRO 3 over 2": {**SP, "data_parallel": 4, "zero_stage": 3, "shard_size": 2},
    "TP2 x PP2 x DP2, SP, ZeRO 2, ZBV": {**ALL, **ZBV, "sequence_parallel": True, "zero_stage": 2},
}
GPT_LAYOUTS = (
    "TP2 + SP",
    "DP2, ZeRO 3",
    "PP2, 1F1B",
    "PP2, ZBV",
    "TP2 x PP2 x DP2",
    "TP2 x PP2 x DP2, SP, ZeRO 1",
)
EIGHT = tuple(name for name, changes in LAYOUTS.items() if make_plan(changes).num_devices == 8)
IN_FP32 = ("TP2 x PP2 x DP2, ZeRO 3, interleaved",)
IN_BF16 = (
    "TP2 + SP, recompute full",
    "DP2, ZeRO 1",
    "DP2, ZeRO 2",
    "DP2, ZeRO 3",
    "DP4, ZeRO 3 over 2",
    "PP2, interleaved",
    "PP2, ZBV",
    "PP2 x DP2, ZeRO 3",
)
"""Names of layouts that `make test` trains in bf16. In fp32, `make test` trains all layouts below
eight ranks, and of the layouts with eight ranks only IN_FP32. `make faults` trains all layouts."""


UNEVEN = {
    "6 layers, PP4 x 2, interleaved": (6, {**INTERLEAVED, "pipeline_parallel": 4}),
    "6 layers, PP4, 1F1B, recompute full": (6, {"pipeline_parallel": 4, "recompute": "full"}),
    "6 layers, PP4 x 2, zero bubble": (6, {**ZERO_BUBBLE, "pipeline_parallel": 4}),
    "6 layers, PP2 x 2, ZBV": (6, ZBV),
    "2 layers, PP2 x DP2, ZeRO 3, interleaved": (
        2,
        {**INTERLEAVED, "data_parallel": 2, "zero_stage": 3},
    ),
    "2 layers, TP2 x PP4, SP": (2, {**SP, "pipeline_parallel": 4}),
}
"""Layouts in which the number of stages does not divide the number of layers, by name. Value:
(number of layers, changes of the plan). Embedding and loss each count as one layer in the
distribution over stages."""


@pytest.fixture(autouse=True)
def runs_on_this_torch(request: pytest.FixtureRequest) -> None:
    """Skips a layout if the kit refuses it on the installed torch release."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    name = params.get("layout")
    if name is None:
        return
    changes = LAYOUTS[name] if name in LAYOUTS else UNEVEN[name][1]
    skip_if_refused(make_plan(changes))


@pytest.mark.parametrize(
    "layout", some_thorough(UNEVEN, [name for name in UNEVEN if "TP2" in name])
)
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_uneven_stages_equal_one_process(
    family, layout, llama_spec, gpt_spec, native_run, run_standing
):
    layers, changes = UNEVEN[layout]
    spec, plan = {"llama": llama_spec, "gpt": gpt_spec}[family], make_plan(changes)
    spec = spec.replace(num_layers=layers)
    parts = [len(plan.stage_layers(spec, stage)) for stage in range(plan.num_stages)]
    assert parts[0] == parts[-1] == parts[1] - 1 and sum(parts) == layers
    # Three steps are enough, because the split into stages does not affect the optimizer.
    few = RECIPE.replace(num_steps=3)
    found = run_standing(plan.num_devices, train, spec, plan, few)
    found = differences(found, native_run(spec, few))
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *some_thorough(LAYOUTS, {*EIGHT} - {*IN_FP32}, "llama"),
        *some_thorough(GPT_LAYOUTS, EIGHT, "gpt"),  # GPT models have tied embeddings.
    ],
)
def test_layout_equals_one_process(family, layout, llama_spec, gpt_spec, native_run, run_standing):
    spec = {"llama": llama_spec, "gpt": gpt_spec}[family]
    found = compare(LAYOUTS[layout], "native", spec, native_run, run=run_standing)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "TP2 + SP"),
        ("llama", "DP2, ZeRO 3"),
        ("llama", "PP2, zero bubble"),
        ("gpt", "PP2, ZBV"),
        pytest.param("gpt", "TP2 x PP2 x DP2", marks=pytest.mark.thorough),
    ],
)
def test_layout_with_z_loss_equals_one_process(
    family, layout, llama_spec, gpt_spec, native_run, run_standing
):
    """The weight of the z-loss is so large that without it the gradient norm differs by more than a
    hundred times the tolerance.
    """
    spec = {"llama": llama_spec, "gpt": gpt_spec}[family]
    recipe = RECIPE.replace(z_loss=0.1)
    found = compare(LAYOUTS[layout], "native", spec, native_run, recipe, run=run_standing)
    assert max(found.values()) <= TOLERANCE, found
    plan = make_plan(LAYOUTS[layout])
    numbers = run_standing(plan.num_devices, first_numbers, fit(spec, plan), plan, recipe)
    assert all(rank == numbers[0] for rank in numbers)
    with_z, without = numbers[0]
    assert with_z["loss"] == pytest.approx(without["loss"], rel=1e-6), "the loss has no z-loss"
    assert with_z["z_loss"] == pytest.approx(0.1 * math.log(spec.vocab_size) ** 2, rel=0.01)
    assert abs(with_z["grad_norm"] / without["grad_norm"] - 1) > 100 * TOLERANCE


def first_numbers(spec: ModelSpec, plan: Plan, recipe: Recipe) -> list[dict[str, float]]:
    """Returns the numbers of the first step with the recipe, and with the recipe without z-loss."""
    found = []
    for each in (recipe, recipe.replace(z_loss=0.0)):
        engine = NativeEngine(spec, plan, each, torch.device("cpu"))
        samples = batches(spec, plan, engine.data_rank)[0]
        found.append(engine.begin_step(samples, 1e-3).numbers())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", some_thorough(LAYOUTS, {*LAYOUTS} - {*IN_BF16}))
def test_bf16_gradients_equal_one_process(layout, llama_spec, one_process, run_standing):
    assert_trains_in_bf16(LAYOUTS[layout], "native", llama_spec, one_process, run_standing)


def test_shard_replicas_are_summed_once_per_step(llama_spec, run_standing):
    """Gradients are summed over the replicas of a shard once per step, independent of the number of
    micro-batches. Under ZeRO 3, each micro-batch is reduced only inside its shard group.
    """
    layout = LAYOUTS["DP4, ZeRO 3 over 2"]
    plans = [make_plan({**layout, "global_batch_size": size}) for size in (4, 16)]
    few, many = run_standing(4, _sums_over_copies, llama_spec, plans)[0]
    assert few == many > 0


def _sums_over_copies(spec: ModelSpec, plans: list[Plan]) -> list[int]:
    """Runs one training step of each plan. Returns for each plan the number of all-reduces that sum
    gradients over the replicas of a shard.
    """
    sum_up, sizes, found = dist.all_reduce, [], []

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return sum_up(tensor, *args, **kwargs)

    for plan in plans:
        engine = NativeEngine(spec, plan, RECIPE, torch.device("cpu"))
        sizes.clear()
        with patch.object(dist, "all_reduce", counted):
            engine.train_step(batches(spec, plan, engine.data_rank)[0], 1e-3)
        # All-reduces of one number belong to the loss and the gradient norm.
        found.append(sum(size > 1 for size in sizes))
    return found


def test_bf16_loss_follows_fp32(llama_spec, native_run):
    found = compare({"precision": "bf16"}, "native", llama_spec, native_run)
    assert 0 < found["loss"] < 1e-3, found


def test_clipping_bounds_the_gradient_norm(llama_spec):
    """A gradient that is clipped to a norm of 0.01 has this norm afterwards."""
    before, after = run_ranks(1, _clipped_norms, llama_spec)[0]
    assert before > 0.05
    assert after == pytest.approx(0.01, rel=1e-3)


def _clipped_norms(spec: ModelSpec) -> tuple[float, float]:
    recipe = Recipe(data="none", num_steps=1, gradient_clip=0.01)
    engine = NativeEngine(spec, make_plan({}), recipe, torch.device("cpu"))
    batch = torch.randint(0, spec.vocab_size, (BATCH, spec.sequence_length + 1))
    norm = engine.train_step(batch, 1e-3)[1]
    gradients = torch.cat([p.grad.flatten() for p in engine.parameters() if p.grad is not None])
    return norm, gradients.norm().item()
