"""Trains a few steps with a plan, and compares the results with the native engine on one process.
All engines are tested with this comparison.

`python -m tests.support.parity_table` prints the differences for all engines and layouts.
"""

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import build_engine, check_engine
from kit.engines.neuron.configuration import needed_environment
from kit.errors import ConfigError
from tests.support.workers import run_ranks

STEPS, BATCH, TOLERANCE = 6, 8, 1e-5
"""Number of steps, global batch size in sequences, and largest allowed relative difference. If the
weight decay is 10 % too small, the gradient norm differs by 5e-5 after these steps.
"""
REPEATS, LARGE_STEP = 18, 4e-3
"""Number of steps and learning rate of `overfit`. Lost master weights change the loss by 3 %. Three
times as many steps at a quarter of the learning rate show hardly more (5 %)."""
SAME_LEARNING = 0.01
"""Largest relative difference of the last loss of `overfit` in bf16. Rounding differs between CPUs
and changes this loss by up to 0.0025. A missing all-reduce, as in NxD, changes this loss by 0.2."""
RECIPE = Recipe(
    data="none", num_steps=STEPS, learning_rate=1e-3, min_learning_rate=0, gradient_clip=0.5
)
CPU = torch.device("cpu")
ALL = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2}

Trained = tuple[float, list[tuple[float, float]]]
"""Training results: (validation loss before training, list of (loss, gradient norm) for
each step).
"""


def make_plan(changes: dict[str, Any], engine: str = "native") -> Plan:
    """Returns a plan with two micro-batches per step. With a pipeline, the plan has four
    micro-batches, so that the stages work on different micro-batches at the same time.
    """
    count = 4 if "pipeline_parallel" in changes else 2
    size = BATCH // (count * changes.get("data_parallel", 1))
    given = {"micro_batch_size": size, "global_batch_size": BATCH, "engine": engine}
    return Plan.from_dict(given | changes)


def some_thorough(layouts: Iterable[str], thorough: Collection[str], *before: str) -> list:
    """Returns test parameters for the named layouts. Layouts in `thorough` are trained only with
    --thorough. `before` are parameters that precede each name.
    """
    return [
        pytest.param(*before, name, marks=pytest.mark.thorough if name in thorough else ())
        for name in layouts
    ]


def fit(spec: ModelSpec, plan: Plan) -> ModelSpec:
    """Returns the model with the fewest layers that the plan allows, because each layer takes time
    on every rank.
    """
    return spec.replace(num_layers=max(2, plan.num_stages))


def build(spec: ModelSpec, plan: Plan, recipe: Recipe = RECIPE, *, initialise: bool = True) -> Any:
    """Returns the engine of a plan in a worker process. Sets the environment variables that the
    engine needs.
    """
    device = CPU
    if plan.engine == "neuron":
        from torch_xla.core.xla_model import xla_device  # pyright: ignore[reportMissingImports]

        os.environ.update(needed_environment(plan))
        device = xla_device()
    return build_engine(spec, plan, recipe, device, initialise=initialise)


def batches(spec: ModelSpec, plan: Plan, data_rank: int, steps: int = STEPS) -> list[torch.Tensor]:
    """Returns one data-parallel replica's sequences of each step's global batch."""
    share = plan.global_batch_size // plan.data_parallel
    shape = (steps, plan.global_batch_size, spec.sequence_length + 1)
    whole = torch.randint(0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return list(whole[:, data_rank * share :][:, :share])


def train(spec: ModelSpec, plan: Plan, recipe: Recipe = RECIPE) -> Trained:
    """Trains the recipe's steps on this rank, and returns the training results."""
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
    """Trains a layout with an engine. Returns its differences from the native engine on one
    process, as the function `differences` computes them.
    """
    plan = make_plan(layout, engine)
    spec = fit(spec, plan)
    found = run(plan.num_devices, train, spec, plan, recipe)
    return differences(found, native_run(spec, recipe))


def overfit(spec: ModelSpec, plan: Plan) -> list[tuple[float, float]]:
    """Trains REPEATS steps on one batch, so that errors of the gradient add up. Returns (loss,
    gradient norm) of each step.
    """
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
    """Asserts that a layout trains in bf16 as the native engine on one process: equal first
    gradient norm, and equal loss after repeated steps on one batch.

    The loss of a few steps on random tokens hardly depends on the gradients, so it would not show
    an error.
    """
    # Number of micro-batches. The fp32 tests check the order of more micro-batches.
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
    """Returns the largest relative differences of loss, gradient norm and validation loss between
    the ranks' results and the reference.
    """
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


def skip_if_refused(plan: Plan) -> None:
    """Skips the running test if the kit refuses the plan on the installed torch release."""
    try:
        check_engine(plan)
    except ConfigError as error:
        pytest.skip(str(error))
