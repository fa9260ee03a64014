"""Small versions of both HLAT recipes (7B and 70B). NxD trains them as the native engine does on
one process.
"""

import functools
import os

import pytest

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from tests.engines.real_nxd.closed import PLATFORM
from tests.engines.real_nxd.conftest import run_xla
from tests.support.parity import RECIPE, Trained, batches, build, differences, make_plan, train
from tests.support.workers import run_ranks

pytestmark = pytest.mark.neuron

STEPS = 20
SP2 = {"tensor_parallel": 2, "sequence_parallel": True}
ZERO = {"zero_stage": 1}
EACH, SHARED, ONE, COPIED = 4, 2, 1, 2
LAYOUTS: dict[str, tuple[int, dict]] = {
    "7B: one process": (EACH, {}),
    "7B: DP2": (EACH, {"data_parallel": 2}),
    "7B: TP2": (EACH, {"tensor_parallel": 2}),
    "7B: TP2, sequence parallel": (EACH, SP2),
    "7B: TP2, sequence parallel, recompute selective": (EACH, {**SP2, "recompute": "selective"}),
    "7B: TP2, sequence parallel, recompute full": (EACH, {**SP2, "recompute": "full"}),
    "7B: TP4, sequence parallel": (EACH, {**SP2, "tensor_parallel": 4}),
    "grouped heads: TP2": (SHARED, {"tensor_parallel": 2}),
    "70B: one process": (SHARED, ZERO),
    "70B: DP2": (SHARED, {**ZERO, "data_parallel": 2}),
    "70B: TP2, sequence parallel": (SHARED, {**SP2, **ZERO}),
    "70B: TP2 x PP2, recompute selective": (
        SHARED,
        {**ZERO, "tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "selective"},
    ),
    "70B: TP2 x PP2, sequence parallel, recompute full": (
        SHARED,
        {**ZERO, **SP2, "pipeline_parallel": 2, "recompute": "full"},
    ),
    "copied heads: TP2": (ONE, {"tensor_parallel": 2}),
    "70B: TP2, sequence parallel, copied heads": (ONE, {**SP2, **ZERO}),
    "70B: TP8, sequence parallel, four copies": (SHARED, {**SP2, **ZERO, "tensor_parallel": 8}),
}
"""Layouts by name. Value: (number of key/value heads, changes of the plan). The model has four
query heads, or one query head per tensor rank if there are more tensor ranks."""


@functools.cache
def native(spec: ModelSpec, precision: str) -> Trained:
    """Returns the losses and gradient norms of the native engine on one process."""
    return run_ranks(
        1, train, spec, make_plan({"precision": precision}), RECIPE.replace(num_steps=STEPS)
    )[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nxd_trains_as_the_native_engine(layout, precision, mha, record_property):
    num_kv_heads, changes = LAYOUTS[layout]
    plan = make_plan({**changes, "precision": precision}, "neuron")
    spec = mha.replace(
        num_kv_heads=num_kv_heads, num_heads=max(mha.num_heads, plan.tensor_parallel)
    )
    recipe = RECIPE.replace(num_steps=STEPS)
    said = run_xla(plan.num_devices, train, spec, plan, recipe)
    found = differences(said, native(spec, precision))
    record_property("differences", found)
    print(f"\n| {layout} | {precision} | {found['loss']:.0e} | {found['grad_norm']:.0e} |")
    assert found["validation"] <= (1e-6 if precision == "fp32" else 1e-4), found
    assert found["loss"] <= (1e-6 if precision == "fp32" else 1.5e-4), found
    assert found["grad_norm"] <= (1e-5 if precision == "fp32" else 0.02), found


def build_on_trn3(spec: ModelSpec, plan: Plan) -> list[str]:
    """Builds the engine for Trn3, which must fail. Returns (error of the kit's check, error of NxD
    if the kit's check is skipped).
    """
    from kit.engines.neuron import engine

    os.environ[PLATFORM], said = "trn3", []
    for _ in range(2):
        with pytest.raises(Exception) as raised:  # NxD raises a plain Exception.
            build(spec, plan)
        said.append(str(raised.value))
        engine.check_platform = lambda *_: None
    return said


def test_trn3_refuses_grouped_heads_as_nxd_does(mha):
    spec, plan = mha.replace(num_kv_heads=2), make_plan({}, "neuron")
    [[ours, theirs]] = run_xla(1, build_on_trn3, spec, plan)
    assert ours.startswith(
        "spec.num_kv_heads: 2 for num_heads 4 on engine 'neuron' is not allowed on 'trn3'"
    )
    assert theirs == "Configure kv weight initialization as per hw architecture"


def repeat_one_batch(spec: ModelSpec, plan: Plan) -> tuple[float, float]:
    """Trains 80 steps on one batch. Returns (loss of the first step, loss of the last step)."""
    engine = build(spec, plan)
    [samples, *_] = batches(spec, plan, engine.data_rank)
    losses = [engine.train_step(samples, 1e-3)[0] for _ in range(80)]
    return losses[0], losses[-1]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_tensor_parallel_4_learns_as_one_process(zero_stage, mha):
    """The final loss is compared with training on one process. With ZeRO 1, which keeps fp32
    weights, this process runs the native engine. Without ZeRO, this process runs the Neuron engine,
    which has bf16 weights only.
    """
    changes = {**SP2, "tensor_parallel": 4, "precision": "bf16", "zero_stage": zero_stage}
    alone = make_plan({"precision": "bf16"}, "native" if zero_stage else "neuron")
    run_alone = run_ranks if zero_stage else run_xla
    [(_, expected)] = run_alone(1, repeat_one_batch, mha, alone)
    found = run_xla(4, repeat_one_batch, mha, make_plan(changes, "neuron"))
    first, last = found[0]
    print(
        f"\n| {alone.engine} alone {expected:.4f} | TP4, ZeRO {zero_stage}: {first:.4f} to"
        f" {last:.4f} |"
    )
    assert last <= 1.005 * expected and last < 0.6 * first
