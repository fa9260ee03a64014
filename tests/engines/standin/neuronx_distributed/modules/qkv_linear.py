"""Simulated NxD layer that computes query, key and value together, with copies of key/value
heads.
"""

import torch
from torch import nn
from torch.nn import functional as F

from kit.parallel.linear import copy_to_ranks
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.parallel_state import kv_group, tensor_group
from tests.engines.signatures import check

WEIGHTS = ("weight_q", "weight_k", "weight_v")


class GQAQKVColumnParallelLinear(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        check("neuronx_distributed.modules.qkv_linear.GQAQKVColumnParallelLinear", arguments)
        assert (
            not arguments["fuse_qkv"] and not arguments["bias"] and not arguments["gather_output"]
        )
        self.is_sequence_parallel = arguments["sequence_parallel_enabled"]
        copies, (query, key), ranks = (
            arguments["kv_size_multiplier"],
            arguments["output_sizes"],
            tensor_group().size(),
        )
        assert ranks % copies == 0 and key * copies % ranks == 0
        self.group = kv_group(copies)
        sizes = (query // ranks, key * copies // ranks, key * copies // ranks)
        for name, size in zip(WEIGHTS, sizes, strict=True):
            weight = torch.empty(size, arguments["input_size"], dtype=arguments["dtype"])
            setattr(self, name, nn.Parameter(weight))

    def initialize_weight_biases(self):
        for name in WEIGHTS:
            weight = getattr(self, name)
            assert weight.device.type == "cpu" and not hasattr(weight, "tensor_model_parallel")
            nn.init.constant_(weight, float("nan"))
            weight.tensor_model_parallel = True

    def forward(self, x):
        if self.is_sequence_parallel:
            x = mappings.Mapping.apply(x, mappings.gather, mappings.reduce_scatter)
        else:
            x = copy_to_ranks(x, tensor_group())
        key, value = (
            copy_to_ranks(weight, self.group) for weight in (self.weight_k, self.weight_v)
        )
        return F.linear(x, self.weight_q), F.linear(x, key), F.linear(x, value)
