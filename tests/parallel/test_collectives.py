"""Number of collectives in one training step. A repeated gather or reduction would slow down every
step.
"""

import warnings

import pytest
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.parity import batches, build, make_plan

LAYERS = 4


@pytest.mark.parametrize("zero_stage, gathers", [(1, LAYERS + 2), (3, 2 * LAYERS + 2)])
def test_zero_gathers_no_weight_more_than_needed(zero_stage, gathers, llama_spec, run_standing):
    """Under ZeRO 3, each block is gathered twice per micro-batch: for the forward and for the
    backward pass. Embedding and output layer are gathered only once.
    """
    plan = {"data_parallel": 2, "zero_stage": zero_stage, "micro_batch_size": 4}
    counts = run_standing(2, collectives, llama_spec, make_plan(plan))[0]
    assert counts["_allgather_base_"] == gathers
    assert counts["_reduce_scatter_base_"] == LAYERS + 2


def test_tied_weights_are_gathered_once(gpt_spec, run_standing):
    """The tied embedding and output weights form one FSDP group with the final norm. Under ZeRO 3
    this group stays gathered until the backward pass.
    """
    plan = {"data_parallel": 2, "zero_stage": 3, "micro_batch_size": 4}
    counts = run_standing(2, collectives, gpt_spec, make_plan(plan))[0]
    assert counts["_allgather_base_"] == 2 * LAYERS + 1
    assert counts["_reduce_scatter_base_"] == LAYERS + 1


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_selective_recompute_adds_no_reductions(sequence_parallel, llama_spec, run_standing):
    """Full recomputation, in contrast, adds two sums over tensor ranks per block."""
    two_layers = llama_spec.replace(num_layers=2)
    layout = {"tensor_parallel": 2, "sequence_parallel": sequence_parallel, "micro_batch_size": 8}
    none, selective = (
        run_standing(2, collectives, two_layers, make_plan({**layout, "recompute": mode}))[0]
        for mode in ("none", "selective")
    )
    sums = ("all_reduce", "reduce_scatter_tensor")
    assert [selective.get(name, 0) for name in sums] == [none.get(name, 0) for name in sums]


def collectives(spec, plan):
    """Returns a dict from the name of each collective to the number of its calls by this rank in
    one training step.
    """
    engine = build(spec, plan)
    samples = batches(spec, plan, engine.data_rank)[0]
    engine.train_step(samples, 1e-3)
    # CommDebugMode itself prints warnings.
    with warnings.catch_warnings(action="ignore"), CommDebugMode() as mode:
        engine.train_step(samples, 1e-3)
    return {str(op).split(".")[-1]: count for op, count in mode.get_comm_counts().items()}
