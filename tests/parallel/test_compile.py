"""Compiled blocks train as eager ones, whatever is recomputed and however the model is cut."""

import functools
import warnings

import pytest
import torch

from tests.support.parity import (
    RECIPE,
    TOLERANCE,
    differences,
    fit,
    make_plan,
    some_thorough,
    train,
)
from tests.support.workers import run_ranks

LAYOUTS = {
    "recompute full": {"recompute": "full"},
    "TP2": {"tensor_parallel": 2},
    "TP2 + SP, recompute full": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "recompute": "full",
    },
    "DP2, ZeRO 3, recompute full": {"data_parallel": 2, "zero_stage": 3, "recompute": "full"},
}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Workers are forked from this process, so that one import of what compiles serves them all."""
    ones = torch.ones(2, 2, requires_grad=True)
    torch.compile(lambda x: (x @ x).sum(), backend="aot_eager")(ones)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("layout", some_thorough(LAYOUTS, {"TP2"}))
def test_compiled_llama_equals_eager(layout, llama_spec):
    plan = make_plan({**LAYOUTS[layout], "compile": True})
    spec = fit(llama_spec, plan)
    # In a build for GPUs autograd's threads may have started here. Then a fork cannot train.
    method = "fork" if torch.version.cuda is None else "spawn"
    ranks = run_ranks(plan.num_devices, compiled, spec, plan, method=method)
    eager = run_ranks(1, train, spec, make_plan({}), RECIPE, method=method)[0]
    found = differences([trained for trained, _ in ranks], eager)
    assert max(found.values()) <= TOLERANCE, found
    # One graph for training and one without gradients, and the loss's: no block, no step compiled
    # its own.
    graphs = 2 if plan.tensor_parallel > 1 else 3
    assert [found for _, found in ranks] == [graphs] * len(ranks)


def compiled(spec, plan):
    """Returns what this rank says of the steps, and how many graphs were compiled.

    The tracing and the graphs of both passes are those of a GPU; only no kernels are written, which
    would cost minutes of C++.
    """
    from torch._dynamo.utils import counters

    counters.clear()  # another test may have compiled in the process that this one is forked from
    warnings.simplefilter("default")  # those that torch raises while it traces are no errors
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    trained = train(spec, plan, RECIPE)
    return trained, counters["stats"]["unique_graphs"]
