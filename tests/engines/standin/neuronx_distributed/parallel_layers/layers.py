"""Layers of the simulated NxD whose weights are split over tensor ranks.

As in the real NxD, a weight counts as split only after `init_weight_cpu` was called.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from kit.parallel.linear import sum_over_ranks
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.parallel_state import tensor_group
from tests.engines.signatures import check

NAME = "neuronx_distributed.parallel_layers.layers"


class Layer(nn.Module):
    def __init__(self, name, arguments):
        super().__init__()
        check(f"{NAME}.{name}", arguments)
        self.size, self.dtype = tensor_group().size(), arguments["dtype"]
        self.is_sequence_parallel = arguments.get("sequence_parallel_enabled", False)

    def init_weight_cpu(self):
        assert self.weight.device.type == "cpu" and not hasattr(
            self.weight, "tensor_model_parallel"
        )
        # NaN, so that a test fails if the weight is never initialised.
        nn.init.constant_(self.weight, float("nan"))
        self.weight.tensor_model_parallel = True


class Whole(torch.autograd.Function):
    """Autograd function that converts a gradient of another dtype and loses the sum over ranks. The
    real NxD has this behaviour since version 0.11.
    """

    @staticmethod
    def forward(ctx, x, reduce_dtype):
        ctx.reduce_dtype = reduce_dtype
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if tensor_group().size() > 1:
            dist.all_reduce(gradient.to(ctx.reduce_dtype), group=tensor_group())
        return gradient, None


class ColumnParallelLinear(Layer):
    def __init__(self, **arguments):
        super().__init__("ColumnParallelLinear", arguments)
        assert not arguments["bias"] and not arguments["gather_output"]
        self.reduce_dtype = torch.float32
        shape = arguments["output_size"] // self.size, arguments["input_size"]
        self.weight = nn.Parameter(torch.empty(shape, dtype=self.dtype))

    def forward(self, x):
        if self.is_sequence_parallel:
            return F.linear(
                mappings.Mapping.apply(x, mappings.gather, mappings.reduce_scatter), self.weight
            )
        return F.linear(Whole.apply(x, self.reduce_dtype), self.weight)


class RowParallelLinear(Layer):
    def __init__(self, **arguments):
        super().__init__("RowParallelLinear", arguments)
        assert not arguments["bias"] and arguments["input_is_parallel"]
        shape = arguments["output_size"], arguments["input_size"] // self.size
        self.weight = nn.Parameter(torch.empty(shape, dtype=self.dtype))

    def forward(self, x):
        y = F.linear(x, self.weight)
        if self.is_sequence_parallel:
            return mappings.Mapping.apply(y, mappings.reduce_scatter, mappings.gather)
        return sum_over_ranks(y, tensor_group())


class ParallelEmbedding(Layer):
    def __init__(self, **arguments):
        super().__init__("ParallelEmbedding", arguments)
        self.rows = arguments["num_embeddings"] // self.size
        self.weight = nn.Parameter(
            torch.empty(self.rows, arguments["embedding_dim"], dtype=self.dtype)
        )

    def forward(self, tokens):
        first = tensor_group().rank() * self.rows
        mine = (tokens >= first) & (tokens < first + self.rows)
        found = F.embedding((tokens - first).masked_fill(~mine, 0), self.weight) * mine.unsqueeze(
            -1
        )
        return sum_over_ranks(found, tensor_group())
