"""The kit's decoder for DeepSpeed: as one module, or as a list of layers for PipelineModule. The
weights are split over the tensor parallel ranks.
"""

import functools
from collections.abc import Callable

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.deepspeed.start import quiet
from kit.model import Block, Decoder, initial_weight, make_norm, rotary_table
from kit.parallel.groups import unbound_device
from kit.parallel.linear import copy_to_ranks, rank_part, split_dim, split_layers

EMBEDDING_NAME = "embedding.tokens"
"""Name of the token embedding in the complete decoder."""


class LayerBuilder:
    """Builds the layers of a model for this rank. `group` has the tensor parallel ranks over which
    each matrix is split.

    If `group` is None, this rank holds unsplit matrices. `seed` is the seed of the initial weights.
    If `seed` is None, the weights stay unset until a checkpoint is loaded.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        group: ProcessGroup | None,
        device: torch.device,
        seed: int | None,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.group = group
        self.device = device
        self.seed = seed
        self.rotary = functools.cache(self._rotary)

    def decoder(self) -> Decoder:
        """Returns the complete decoder as one module, for training without a pipeline."""
        with torch.device("meta"):
            decoder = Decoder(self.spec, recompute=self.plan.recompute)
        self.fill(decoder)
        decoder.tie()
        return decoder

    def pipeline(self, loss: Callable[[Tensor, Tensor], Tensor]) -> PipelineModule:
        """Returns this rank's pipeline stage. All stages have equal numbers of blocks. The first
        stage also has the embedding. The last stage also has the final norm and the output layer.
        """
        spec = self.spec
        plan = self.plan
        tokens = functools.partial(nn.Embedding, spec.vocab_size, spec.hidden_size)
        positions = functools.partial(nn.Embedding, spec.sequence_length, spec.hidden_size)
        block = functools.partial(Block, spec, plan.recompute)
        norm = functools.partial(make_norm, spec)
        output = functools.partial(nn.Linear, spec.hidden_size, spec.vocab_size, bias=False)
        layers = [LayerSpec(PipelineLayer, self, EMBEDDING_NAME, tokens)]
        if spec.positions == "learned":
            name = "embedding.positions"
            layers.append(LayerSpec(PipelineLayer, self, name, positions, _with_positions))
        for number in range(spec.num_layers):
            layers.append(LayerSpec(BlockLayer, self, f"layers.{number}", block, self._block))
        layers.append(LayerSpec(PipelineLayer, self, "norm", norm))
        layers.append(LayerSpec(PipelineLayer, self, "output", output))
        if spec.tied_embeddings:
            parts = "tokens", PipelineLayer, self, EMBEDDING_NAME, tokens
            tied = functools.partial(
                TiedLayerSpec, *parts, tied_weight_attr=f"{EMBEDDING_NAME}.weight"
            )
            layers[0], layers[-1] = tied(), tied(forward_fn=self._logits)
        topology = PipeModelDataParallelTopology(
            num_pp=plan.pipeline_parallel, num_mp=plan.tensor_parallel, num_dp=plan.data_parallel
        )
        # PipelineModule makes 950 process groups for 3,072 ranks. With `unbound_device`, NCCL
        # connects each group only at its first use. `no_grad` is needed because autograd must not
        # record the broadcast of the tied weight.
        with quiet(), unbound_device(), torch.no_grad():
            return PipelineModule(
                layers, topology=topology, loss_fn=loss, partition_method="type:BlockLayer"
            )

    def fill(self, module: nn.Module) -> None:
        """Splits the weights of a meta module for this rank and allocates their memory. If the
        builder has a seed, this method also sets the initial weights.

        The weights in the module must have the names that they have in the complete decoder.
        """
        # A weight that is tied has two names. It becomes two separate weights when its layers are
        # replaced, so the shapes are needed under both names.
        named = module.named_parameters(remove_duplicate=False)
        whole_shapes = {name: parameter.shape for name, parameter in named}
        if self.group is not None:
            split_layers(module, self.group)
        module.to_empty(device=self.device)
        for name, parameter in module.named_parameters():
            is_cut = self.group is not None and split_dim(name) is not None
            # DeepSpeed reads these two attributes for the gradient norm. If they are True,
            # DeepSpeed sums the squared norm of the weight's gradient over the tensor ranks.
            for mark in ("model_parallel", "tensor_model_parallel"):
                setattr(parameter, mark, is_cut)
            if self.seed is not None:
                shape = whole_shapes[name]
                whole = initial_weight(self.spec, name, shape, self.seed, self.device)
                parameter.data.copy_(rank_part(whole, name, self.group))

    def _rotary(self) -> Tensor | None:
        if self.spec.positions != "rotary":
            return None
        return rotary_table(self.spec, self.spec.sequence_length, self.device)

    def _block(self, block: nn.Module, x_BTH: Tensor) -> Tensor:
        return block(x_BTH, self.rotary())

    def _logits(self, tokens: "PipelineLayer", x_BTH: Tensor) -> Tensor:
        """Returns the logits of this rank's part of the vocabulary, computed with the weight of the
        embedding (tied embeddings).
        """
        x_BTH = x_BTH if self.group is None else copy_to_ranks(x_BTH, self.group)
        return F.linear(x_BTH, tokens.get_parameter(f"{EMBEDDING_NAME}.weight"))


class PipelineLayer(nn.Module):
    """One layer of the pipeline. Its input is the output of the previous layer.

    Args:
        layers: builder whose `fill` allocates and initialises the weights.
        name: name of the layer in the complete model, which is the prefix of its weights' names.
        build: function that makes the layer's module.
        run: function of (module, input) that returns the layer's output. By default, the module is
            called with the input.
    """

    def __init__(
        self,
        layers: LayerBuilder,
        name: str,
        build: Callable[[], nn.Module],
        run: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__,
    ) -> None:
        super().__init__()
        self.name = name
        self.run = run
        with torch.device("meta"):
            module = build()
        outer, _, inner = name.partition(".")
        if inner:
            module = nn.ModuleDict({inner: module})
        self.add_module(outer, module)
        layers.fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.get_submodule(self.name), x)


class BlockLayer(PipelineLayer):
    """One transformer block. A separate class, because DeepSpeed counts the layers of this class to
    give all stages equal numbers of blocks.
    """


def _with_positions(positions: nn.Module, x_BTH: Tensor) -> Tensor:
    return x_BTH + positions(torch.arange(x_BTH.shape[1], device=x_BTH.device))
