"""A few steps of a plan, and how far they are from the native engine's on one process: the
measure of every engine.

`python -m tests.support.parity_table` prints it for all engines and layouts.
"""

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import build_engine
from kit.engines.neuron.configuration import needed_environment
from tests.support.workers import run_ranks

STEPS, BATCH, TOLERANCE = 6, 8, 1e-5
"""In so many steps a tenth of the weight decay too little moves the gradient norm by 5e-5."""
REPEATS, LARGE_STEP = 18, 4e-3
"""Of `overfit`: a third of the steps, four times as large, tell lost master weights (3 %) nearly
as 60 did (5 %)."""
SAME_LEARNING = 0.01
"""Of the loss after these steps in bf16. Rounding, which each CPU does in its own way, moves it by
up to 0.0025; a sum over ranks that is lost, as in NxD, by 0.2."""
RECIPE = Recipe(
    data="none", num_steps=STEPS, learning_rate=1e-3, min_learning_rate=0, gradient_clip=0.5
)
CPU = torch.device("cpu")
ALL = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2}

Trained = tuple[float, list[tuple[float, float]]]
"""The validation loss before training, then (loss, gradient norm) of each step."""


def make_plan(changes: dict[str, Any], engine: str = "native") -> Plan:
    """Returns a plan of two micro-batches, in a pipeline of four: each stage has its own work."""
    count = 4 if "pipeline_parallel" in changes else 2
    size = BATCH // (count * changes.get("data_parallel", 1))
    given = {"micro_batch_size": size, "global_batch_size": BATCH, "engine": engine}
    return Plan.from_dict(given | changes)


def some_thorough(layouts: Iterable[str], thorough: Collection[str], *before: str) -> list:
    """Returns parameters of a test: names of layouts, behind what they have in common, some of
    which are trained with --thorough only.
    """
    return [
        pytest.param(*before, name, marks=pytest.mark.thorough if name in thorough else ())
        for name in layouts
    ]


def fit(spec: ModelSpec, plan: Plan) -> ModelSpec:
    """Returns the model with no more blocks than it takes: each is paid for on every rank."""
    return spec.replace(num_layers=max(2, plan.num_stages))


def build(spec: ModelSpec, plan: Plan, recipe: Recipe = RECIPE, *, initialise: bool = True) -> Any:
    """Returns the plan's engine, in a worker process, whose environment it sets."""
    device = CPU
    if plan.engine == "neuron":
        from torch_xla.core.xla_model import xla_device  # pyright: ignore[reportMissingImports]

        os.environ.update(needed_environment(plan))
        device = xla_device()
    return build_engine(spec, plan, recipe, device, initialise=initialise)


def batches(spec: ModelSpec, plan: Plan, data_rank: int, steps: int = STEPS) -> list[torch.Tensor]:
    """Returns one replica's part of each step's batch."""
    share = plan.global_batch_size // plan.data_parallel
    shape = (steps, plan.global_batch_size, spec.sequence_length + 1)
    whole = torch.randint(0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return list(whole[:, data_rank * share :][:, :share])


def train(spec: ModelSpec, plan: Plan, recipe: Recipe = RECIPE) -> Trained:
    """Returns what this rank says of the recipe's steps."""
    engine = build(spec, plan, recipe)
    mine = batches(spec, plan, engine.data_rank, recipe.num_steps)
    return engine.validation_loss(mine[0]), [engine.train_step(samples, 1e-3) for samples in mine]


def compare(
    layout: dict,
    engine: str,
    spec: ModelSpec,
    native_run: Callable,
    recipe: Recipe = RECIPE,
    run: Callable = run_ranks,
) -> dict[str, float]:
    """Returns `differences` of an engine's layout and the native engine on one process."""
    plan = make_plan(layout, engine)
    spec = fit(spec, plan)
    found = run(plan.num_devices, train, spec, plan, recipe)
    return differences(found, native_run(spec, recipe))


def overfit(spec: ModelSpec, plan: Plan) -> list[tuple[float, float]]:
    """Returns what this rank says of steps on one batch, which sum up what gradients lack."""
    engine = build(spec, plan)
    samples = batches(spec, plan, engine.data_rank)[0]
    return [engine.train_step(samples, LARGE_STEP) for _ in range(REPEATS)]


def assert_trains_in_bf16(
    layout: dict[str, Any],
    engine: str,
    spec: ModelSpec,
    one_process: Callable,
    run: Callable = run_ranks,
) -> None:
    """Holds a layout in bf16 to the native engine on one process: the gradient, and its effect.

    The loss of a few steps on random tokens would not do: it hardly moves, whatever gradients are.
    """
    # micro-batches; the order of more of them is for fp32 to prove.
    count = 4 if layout.get("schedule") == "zbv" else 2
    size = BATCH // (count * layout.get("data_parallel", 1))
    plan = make_plan({"micro_batch_size": size, **layout, "precision": "bf16"}, engine)
    spec = fit(spec, plan)
    per_rank = run(plan.num_devices, overfit, spec, plan)
    assert_agreed(per_rank)
    steps, expected = per_rank[0], one_process(overfit, spec, make_plan({"precision": "bf16"}))
    found = [abs(steps[0][1] / expected[0][1] - 1), abs(steps[-1][0] / expected[-1][0] - 1)]
    assert expected[-1][0] < 0.6 * expected[0][0], "too few steps to tell"
    assert found[0] < 1e-3 and found[1] < SAME_LEARNING, found


def differences(per_rank: list[Trained], reference: Trained) -> dict[str, float]:
    """Returns the largest relative differences of loss, gradient norm and validation loss."""
    assert_agreed(per_rank)
    (held_out, steps), (expected_held_out, expected) = per_rank[0], reference
    pairs = [*zip(steps, expected, strict=True)]
    return {
        "loss": max(abs(a[0] - b[0]) / b[0] for a, b in pairs),
        "grad_norm": max(abs(a[1] - b[1]) / b[1] for a, b in pairs),
        "validation": abs(held_out - expected_held_out) / expected_held_out,
    }


def assert_agreed(per_rank: list) -> None:
    assert all(said == per_rank[0] for said in per_rank), "ranks disagree about loss or norm"
