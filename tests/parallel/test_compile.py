"""Compiled blocks train like eager blocks, in every recompute mode and layout."""

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
    """Imports torch's compiler once in this process, from which the ranks are forked."""
    ones = torch.ones(2, 2, requires_grad=True)
    torch.compile(lambda x: (x @ x).sum(), backend="aot_eager")(ones)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("layout", some_thorough(LAYOUTS, {"TP2"}))
def test_compiled_llama_equals_eager(layout, llama_spec):
    plan = make_plan({**LAYOUTS[layout], "compile": True})
    spec = fit(llama_spec, plan)
    # In a CUDA build of torch, threads of autograd may already run in this process. A process that
    # is forked then cannot train.
    method = "fork" if torch.version.cuda is None else "spawn"
    ranks = run_ranks(plan.num_devices, compiled, spec, plan, method=method)
    eager = run_ranks(1, train, spec, make_plan({}), RECIPE, method=method)[0]
    found = differences([trained for trained, _ in ranks], eager)
    assert max(found.values()) <= TOLERANCE, found
    # One graph is compiled for training, one for evaluation without gradients, and one for the
    # loss. Further blocks and steps compile no graph.
    graphs = 2 if plan.tensor_parallel > 1 else 3
    assert [found for _, found in ranks] == [graphs] * len(ranks)


def compiled(spec, plan):
    """Returns (losses and gradient norms of this rank, number of compiled graphs).

    Tracing and the graphs of both passes are the same as on a GPU. No kernels are generated,
    because compiling their C++ code would take minutes.
    """
    from torch._dynamo.utils import counters

    # The parent process may have compiled graphs in another test, which the counters include.
    counters.clear()
    warnings.simplefilter("default")  # Torch's own warnings during tracing are not errors.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    trained = train(spec, plan, RECIPE)
    return trained, counters["stats"]["unique_graphs"]
