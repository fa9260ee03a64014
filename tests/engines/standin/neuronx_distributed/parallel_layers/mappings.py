"""Functions of the simulated NxD that split and join sequences over tensor ranks, along the first
dimension.
"""

import torch
import torch.distributed as dist

from neuronx_distributed.parallel_layers.parallel_state import tensor_group
from tests.engines.signatures import recorded

NAME = "neuronx_distributed.parallel_layers.mappings"


def split(x):
    group = tensor_group()
    return x.chunk(group.size())[group.rank()].contiguous()


def gather(x):
    group = tensor_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def reduce_scatter(x):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tensor_group())
    return split(total)


class Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


@recorded(NAME)
def scatter_to_sequence_parallel_region(input_):
    return Mapping.apply(input_, split, gather)


@recorded(NAME)
def gather_from_sequence_parallel_region(input_, to_model_parallel=True):
    return Mapping.apply(input_, gather, reduce_scatter if to_model_parallel else split)
