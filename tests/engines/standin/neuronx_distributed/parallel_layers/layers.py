"""Cut layers of the stand-in. As in NxD, a weight is known to be cut only once `init_weight_cpu` was called."""

import torch
from torch import nn
from torch.nn import functional as F

from kit.parallel.linear import copy_to_ranks, sum_over_ranks
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
        assert self.weight.device.type == "cpu" and not hasattr(self.weight, "tensor_model_parallel")
        nn.init.constant_(self.weight, float("nan"))  # to be filled
        self.weight.tensor_model_parallel = True


def whole(x, is_sequence_parallel):
    """Returns the input of a column layer: gradients of it are added up."""
    if is_sequence_parallel:
        return mappings.Mapping.apply(x, mappings.gather, mappings.reduce_scatter)
    return copy_to_ranks(x, tensor_group())


class ColumnParallelLinear(Layer):
    def __init__(self, **arguments):
        super().__init__("ColumnParallelLinear", arguments)
        assert not arguments["bias"] and not arguments["gather_output"]
        self.weight = nn.Parameter(
            torch.empty(arguments["output_size"] // self.size, arguments["input_size"], dtype=self.dtype)
        )

    def forward(self, x):
        return F.linear(whole(x, self.is_sequence_parallel), self.weight)


class RowParallelLinear(Layer):
    def __init__(self, **arguments):
        super().__init__("RowParallelLinear", arguments)
        assert not arguments["bias"] and arguments["input_is_parallel"]
        self.weight = nn.Parameter(
            torch.empty(arguments["output_size"], arguments["input_size"] // self.size, dtype=self.dtype)
        )

    def forward(self, x):
        y = F.linear(x, self.weight)
        if self.is_sequence_parallel:
            return mappings.Mapping.apply(y, mappings.reduce_scatter, mappings.gather)
        return sum_over_ranks(y, tensor_group())


class ParallelEmbedding(Layer):
    def __init__(self, **arguments):
        super().__init__("ParallelEmbedding", arguments)
        self.rows = arguments["num_embeddings"] // self.size
        self.weight = nn.Parameter(torch.empty(self.rows, arguments["embedding_dim"], dtype=self.dtype))

    def forward(self, tokens):
        first = tensor_group().rank() * self.rows
        mine = (tokens >= first) & (tokens < first + self.rows)
        found = F.embedding((tokens - first).masked_fill(~mine, 0), self.weight) * mine.unsqueeze(-1)
        return sum_over_ranks(found, tensor_group())
