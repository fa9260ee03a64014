"""Plans that the planner's search returns train without changes on real processes."""

import numpy as np
import pytest
import torch

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.native import NativeEngine
from kit.estimate.choose.candidates import candidates
from tests.support.workers import run_ranks

BATCH = 8


def two_steps(spec: ModelSpec, plans: list[Plan]) -> list[tuple[float, float]]:
    """Returns (loss of the second step, gradient norm of the first step) for each plan."""
    shape, seeded = (BATCH, spec.sequence_length + 1), torch.Generator().manual_seed(0)
    batch = torch.randint(0, spec.vocab_size, shape, generator=seeded)
    results = []
    for plan in plans:
        engine = NativeEngine(spec, plan, Recipe(data="none", num_steps=2), torch.device("cpu"))
        share = BATCH // plan.data_parallel
        mine = batch[engine.data_rank * share : (engine.data_rank + 1) * share]
        _, norm = engine.train_step(mine, 1e-2)
        results.append((engine.train_step(mine, 1e-2)[0], norm))
    return results


@pytest.mark.slow
def test_search_plans_train_unchanged(llama_spec):
    """Trains a random plan for each combination of parallel degrees on four processes in bf16. Loss
    and gradient norm must be close to those of one process in fp32.
    """
    layouts = candidates(llama_spec, 4, BATCH)
    drawn = [layouts.plan(int(i)) for i in np.random.default_rng(7).permutation(len(layouts))]
    degrees = {(p.tensor_parallel, p.pipeline_parallel, p.data_parallel): p for p in drawn}
    plans = list(degrees.values())
    assert len(plans) == 5, "TP2 or 1 with PP2, PP4, and DP"
    alone = Plan(global_batch_size=BATCH, micro_batch_size=BATCH)
    [[(loss, norm)]] = run_ranks(1, two_steps, llama_spec, [alone])
    for plan, result in zip(plans, run_ranks(4, two_steps, llama_spec, plans)[0], strict=True):
        assert result == pytest.approx((loss, norm), rel=0.02), plan
