"""The decoder as DeepSpeed takes it: whole, or as a list of layers for its PipelineModule; cut
for tensor ranks.
"""

import functools
from collections.abc import Callable

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from kit.engines.deepspeed.start import quiet
from kit.model import Block, Decoder, initial_weight, make_norm, rotary_table
from kit.parallel.groups import unbound_device
from kit.parallel.linear import copy_to_ranks, cut, split_dim, split_layers
from kit.plan import Plan
from kit.spec import ModelSpec


class Layers:
    """Makes the layers of one model, as one rank of `group` holds them, of those that share each
    matrix.

    No group: one rank has it whole. No seed of the initial weights: they stay unset (a checkpoint
    follows).
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        group: ProcessGroup | None,
        device: torch.device,
        seed: int | None,
    ) -> None:
        self.spec, self.plan, self.group, self.device, self.seed = spec, plan, group, device, seed
        self.rotary = functools.cache(self._rotary)

    def decoder(self) -> Decoder:
        """Returns all layers as one module."""
        with torch.device("meta"):
            decoder = Decoder(self.spec, recompute=self.plan.recompute)
        self.fill(decoder)
        decoder.tie()
        return decoder

    def pipeline(self, loss: Callable[[Tensor, Tensor], Tensor]) -> PipelineModule:
        """Returns this rank's stage: an equal share of the blocks; the embedding comes first,
        norm and output last.
        """
        spec, plan = self.spec, self.plan
        blocks = [LayerSpec(BlockLayer, self, number) for number in range(spec.num_layers)]
        output = functools.partial(nn.Linear, spec.hidden_size, spec.vocab_size, bias=False)
        norm = functools.partial(make_norm, spec)
        ends = LayerSpec(TokenLayer, self), LayerSpec(PartLayer, self, "output", output)
        if spec.tied_embeddings:
            tie = functools.partial(
                TiedLayerSpec, "tokens", TokenLayer, self, tied_weight_attr=TokenLayer.WEIGHT
            )
            ends = tie(), tie(forward_fn=TokenLayer.logits)
        positions = [LayerSpec(PositionLayer, self)] if spec.positions == "learned" else []
        topology = PipeModelDataParallelTopology(
            num_pp=plan.pipeline_parallel, num_mp=plan.tensor_parallel, num_dp=plan.data_parallel
        )
        layers = [ends[0], *positions, *blocks, LayerSpec(PartLayer, self, "norm", norm), ends[1]]
        # It makes 950 groups for 3,072 ranks; autograd must not see that it broadcasts the tied
        # weight.
        with quiet(), unbound_device(), torch.no_grad():
            return PipelineModule(
                layers, topology=topology, loss_fn=loss, partition_method="type:BlockLayer"
            )

    def fill(self, module: nn.Module) -> None:
        """Cuts a meta module for this rank, gives it memory and, with a seed, its initial weights.

        It must name its weights as the whole decoder does.
        """
        if self.group is not None:
            split_layers(module, self.group)
        module.to_empty(device=self.device)
        for name, parameter in module.named_parameters():
            dim = split_dim(name) if self.group is not None else None
            # By these marks DeepSpeed knows what it must add up over the tensor ranks for the
            # gradient norm.
            for mark in ("model_parallel", "tensor_model_parallel"):
                setattr(parameter, mark, dim is not None)
            if self.seed is not None:
                shape = list(parameter.shape)
                if dim is not None and self.group is not None:
                    shape[dim] *= self.group.size()
                whole = initial_weight(self.spec, name, torch.Size(shape), self.seed, self.device)
                parameter.data.copy_(cut(whole, name, self.group))

    def _rotary(self) -> Tensor | None:
        if self.spec.positions != "rotary":
            return None
        return rotary_table(self.spec, self.spec.sequence_length, self.device)


class PipelineLayer(nn.Module):
    """A part of the decoder that takes what the part before returns.

    Its weights have their global names.
    """


class TokenLayer(PipelineLayer):
    """The token embedding; with tied embeddings the output projection too, on the last stage."""

    WEIGHT = "embedding.tokens.weight"

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        with torch.device("meta"):
            tokens = nn.Embedding(layers.spec.vocab_size, layers.spec.hidden_size)
            self.embedding = nn.ModuleDict({"tokens": tokens})
        self.group = layers.group
        layers.fill(self)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.embedding["tokens"](tokens_BT)

    def logits(self, x_BTH: Tensor) -> Tensor:
        """Returns logits of this rank's part of the vocabulary."""
        x_BTH = x_BTH if self.group is None else copy_to_ranks(x_BTH, self.group)
        return F.linear(x_BTH, self.get_parameter(self.WEIGHT))


class BlockLayer(PipelineLayer):
    """One transformer block."""

    def __init__(self, layers: Layers, number: int) -> None:
        super().__init__()
        self.number, self.rotary = str(number), layers.rotary
        with torch.device("meta"):
            self.layers = nn.ModuleDict({self.number: Block(layers.spec, layers.plan.recompute)})
        layers.fill(self)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.layers[self.number](x_BTH, self.rotary())


class PartLayer(PipelineLayer):
    """A part that needs nothing but what the part before returns: the final norm, or the output
    projection where it has a weight of its own.
    """

    def __init__(self, layers: Layers, name: str, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.name = name
        with torch.device("meta"):
            self.add_module(name, build())
        layers.fill(self)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.get_submodule(self.name)(x_BTH)


class PositionLayer(PipelineLayer):
    """Learned positions."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        with torch.device("meta"):
            positions = nn.Embedding(layers.spec.sequence_length, layers.spec.hidden_size)
            self.embedding = nn.ModuleDict({"positions": positions})
        layers.fill(self)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return x_BTH + self.embedding["positions"](
            torch.arange(x_BTH.shape[1], device=x_BTH.device)
        )
