"""Loss function of the simulated NxD."""

import torch
import torch.distributed as dist

from kit.parallel.linear import sum_over_ranks
from neuronx_distributed.parallel_layers.parallel_state import tensor_group
from tests.engines.signatures import recorded


@recorded("neuronx_distributed.parallel_layers.loss_functions")
def parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0):
    """Returns the cross-entropy of each row. The logits have shape [N, V / ranks], with N rows and
    vocabulary size V.
    """
    group, logits = tensor_group(), vocab_parallel_logits
    peak = logits.detach().amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak.unsqueeze(-1)
    first = group.rank() * logits.shape[-1]
    mine = (target >= first) & (target < first + logits.shape[-1])
    own = (
        shifted.gather(-1, (target - first).masked_fill(~mine, 0).unsqueeze(-1)).squeeze(-1) * mine
    )
    return torch.log(sum_over_ranks(shifted.exp().sum(-1), group)) - sum_over_ranks(own, group)
