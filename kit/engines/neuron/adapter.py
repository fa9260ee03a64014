"""All calls of neuronx_distributed (NxD) and torch_xla in the kit. Only this file imports these
packages.

All arguments are passed by keyword, since new parameters were inserted into the middle of several
signatures between NxD 0.9 and 0.17. `initialize_parallel_model` takes the model as `model_fn`, a
function without arguments: newer versions would read a first positional argument as a switch.
`fuse_qkv` is always passed, since its default value was reversed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from kit.engines.neuron.probe import require_nxd
from kit.errors import ConfigError


def start_xla_process_group() -> torch.device:
    """Joins the process group of backend `xla`, which reads the environment variables that torchrun
    sets. Returns this rank's device.

    Raises:
        ConfigError: The number of ranks that XLA sees differs from the size of the process group.
            XLA's collectives would then not connect all ranks.
    """
    require_nxd(here=True)
    import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]
    import torch_xla.distributed.xla_backend  # noqa: F401  # pyright: ignore[reportMissingImports]  # registers it
    import torch_xla.runtime as xr  # pyright: ignore[reportMissingImports]

    dist.init_process_group("xla")
    device = xm.xla_device()
    if xr.world_size() != dist.get_world_size():
        raise ConfigError(
            f"XLA sees a world of {xr.world_size()} ranks, the process group has"
            f" {dist.get_world_size()}: gradients would be summed over the ranks of XLA only. Start"
            " the ranks by torchrun, whose environment variables torch_neuronx reads."
        )
    return device


class Nxd:
    """Imports NxD's packages and makes all calls to them. The process group must exist.

    Args:
        sequence_parallel: whether activations between layers are split along the sequence. Their
            shape is then [T, B, H] instead of [B, T, H] (sequence length, micro-batch, hidden
            size).
        dtype: data type of the weights of all layers that this object makes.
    """

    def __init__(self, *, sequence_parallel: bool, dtype: torch.dtype) -> None:
        import neuronx_distributed as nxd  # pyright: ignore[reportMissingImports]
        import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]
        from neuronx_distributed.modules import qkv_linear  # pyright: ignore[reportMissingImports]
        from neuronx_distributed.parallel_layers import (  # pyright: ignore[reportMissingImports]
            layers,
            loss_functions,
            mappings,
            parallel_state,
        )
        from torch_neuronx.utils import get_platform_target  # pyright: ignore[reportMissingImports]

        self.platform: str = get_platform_target()
        self._nxd = nxd
        self._xm = xm
        self._layers = layers
        self._qkv = qkv_linear
        self._losses = loss_functions
        self._mappings = mappings
        self._state = parallel_state
        self.sequence_parallel = sequence_parallel
        self.dtype = dtype

    # Building -------------------------------------------------------------------------------------

    def config(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns NxD's configuration for `arguments`. Also makes NxD's process groups. The ranks
        of a tensor parallel group have consecutive numbers, except for groups of four ranks on
        Trn1.
        """
        return self._nxd.neuronx_distributed_config(**arguments)

    def model(self, *, config: dict[str, Any], build: Callable[[], nn.Module]) -> Any:
        """Returns NxD's wrapper of the model that `build` returns. The wrapped model is split into
        pipeline stages, and its weights are on this rank's device.
        """
        return self._nxd.initialize_parallel_model(nxd_config=config, model_fn=build)

    def optimizer(
        self,
        *,
        config: dict[str, Any],
        parameters: list[Parameter],
        holders: Sequence[int],
        limit: float | None,
        **defaults: Any,
    ) -> Any:
        """Returns NxD's wrapper of torch's AdamW. If the configuration turns on ZeRO 1, the
        optimizer states are sharded over the replicas.

        In each step, NxD sums the gradients over sequence parts and replicas and then calls AdamW.
        Within this call, a hook of the kit clips the gradients before the update. NxD's own
        clipping is off for two reasons. It would compute the norm in the weights' bf16, which gave
        a norm that was 5 % too small. It would also count each copy of a key/value head.

        Args:
            config: result of `Nxd.config`.
            parameters: parameters of this rank.
            holders: for each parameter, the number of tensor ranks that hold an equal part. The
                squared norm of the parameter is divided by this number.
            limit: largest gradient norm. If None, gradients are not clipped.
            defaults: options of AdamW.
        """
        groups = [
            self._state.get_tensor_model_parallel_group(),
            self._state.get_pipeline_model_parallel_group(),
        ]
        if config["optimizer_config"]["zero_one_enabled"]:
            groups.append(self._state.get_data_parallel_group())

        def adamw(parts: Any, **named: Any) -> torch.optim.Optimizer:
            # Without ZeRO 1 `parts` are the parameters. With ZeRO 1 they are this replica's shards
            # of the parameters.
            made = torch.optim.AdamW(parts, **named)
            made.register_step_pre_hook(lambda *_: self._clip(made, holders, limit, groups))
            return made

        return self._nxd.initialize_parallel_optimizer(
            nxd_config=config, optimizer_class=adamw, parameters=parameters, **defaults
        )

    def step(self, *, optimizer: Any) -> Tensor:
        """Runs an optimizer step and returns the gradient norm before clipping, a tensor of shape
        [1].
        """
        optimizer.step()
        return self._norm

    @torch.no_grad()
    def _clip(
        self,
        adamw: torch.optim.Optimizer,
        holders: Sequence[int],
        limit: float | None,
        groups: list,
    ) -> None:
        """Scales gradients so that their norm over all ranks is at most `limit`. Norm and scaling
        are computed in fp32.
        """
        held = [p for group in adamw.param_groups for p in group["params"]]
        gradients = [
            (p.grad, ranks) for p, ranks in zip(held, holders, strict=True) if p.grad is not None
        ]
        square = torch.zeros(1, dtype=torch.float32, device=held[0].device)
        for gradient, ranks in gradients:
            square += gradient.float().square().sum() / ranks
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(square, group=group)
        self._norm = square.sqrt()
        if limit is not None:
            factor = (limit / (self._norm + 1e-6)).clamp(max=1.0)
            for gradient, _ in gradients:
                # The factor has one dimension: multiplying a bf16 gradient by such a tensor is
                # computed in fp32.
                gradient.mul_(factor)

    def tracing(self) -> list[Any]:
        """Returns the Python modules whose functions NxD's tracer must call as a whole, without
        tracing the operations inside the functions.
        """
        return [self._mappings]

    # Layers ---------------------------------------------------------------------------------------

    def column(
        self, *, inputs: int, outputs: int, fused: int = 1, gathered: bool = False
    ) -> nn.Module:
        """Returns a linear layer that is split over its output features (tensor parallelism).

        Args:
            inputs: number of input features.
            outputs: number of output features, over all ranks and all fused matrices.
            fused: number of matrices that the layer contains side by side. Each rank holds its part
                of each matrix.
            gathered: whether the input has already been gathered to the whole sequence. Only needed
                if activations are split along the sequence, since the layer would otherwise gather
                its input.
        """
        sequence_parallel = self.sequence_parallel and not gathered
        layer = self._layers.ColumnParallelLinear(
            input_size=inputs,
            output_size=outputs,
            bias=False,
            gather_output=False,
            stride=fused,
            dtype=self.dtype,
            init_method=_leave,
            sequence_parallel_enabled=sequence_parallel,
        )
        if not sequence_parallel:
            # From 0.11 on, NxD casts the gradient of the layer's input to `reduce_dtype`, sums the
            # cast copy over the ranks, and returns the gradient without the sum. If `reduce_dtype`
            # is the gradient's own dtype, no copy is made, and the returned gradient is correct.
            layer.reduce_dtype = self.dtype
        return layer

    def row(self, *, inputs: int, outputs: int) -> nn.Module:
        """Returns a linear layer that is split over its input features. The input is this rank's
        part of the output of a layer that `column` made.
        """
        return self._layers.RowParallelLinear(
            input_size=inputs,
            output_size=outputs,
            bias=False,
            input_is_parallel=True,
            dtype=self.dtype,
            init_method=_leave,
            sequence_parallel_enabled=self.sequence_parallel,
        )

    def query_key_value(self, *, inputs: int, query: int, key: int, copies: int) -> nn.Module:
        """Returns a layer with three outputs: query, key and value. `query` is the number of query
        features over all ranks, and `key` the number of key features. Each part of the key and
        value matrices is held by `copies` ranks.
        """
        return self._qkv.GQAQKVColumnParallelLinear(
            input_size=inputs,
            output_sizes=[query, key],
            bias=False,
            gather_output=False,
            dtype=self.dtype,
            init_method=_leave,
            sequence_parallel_enabled=self.sequence_parallel,
            kv_size_multiplier=copies,
            fuse_qkv=False,
        )

    def embedding(self, *, rows: int, features: int) -> nn.Module:
        """Returns an embedding whose weight is split over the vocabulary. Each rank receives the
        full output. `rows` is the vocabulary size, and `features` the hidden size.
        """
        return self._layers.ParallelEmbedding(
            num_embeddings=rows, embedding_dim=features, dtype=self.dtype, init_method=_leave
        )

    def initialise(self, module: nn.Module) -> None:
        """Makes a layer of NxD mark its weights as tensor parallel, as NxD's gradient norm
        requires. Other modules are not changed.

        NxD's layers set these marks only when they initialise their weights on a real device. The
        kit builds models on the meta device, so it repeats the initialisation call later.
        """
        for name in ("init_weight_cpu", "initialize_weight_biases"):
            if hasattr(module, name):
                getattr(module, name)()

    def cross_entropy(self, *, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the negative log-likelihood of each token in nats. `logits` are split over the
        vocabulary, and NxD overwrites them.
        """
        return self._losses.parallel_cross_entropy(vocab_parallel_logits=logits, target=targets)

    def cut_sequence(self, x_BTH: Tensor) -> Tensor:
        """Returns this rank's part of the sequence. The input has shape [B, T, H], and the result
        has shape [T / tensor ranks, B, H].
        """
        return self._mappings.scatter_to_sequence_parallel_region(
            input_=x_BTH.transpose(0, 1).contiguous()
        )

    def whole_sequence(self, x_TBH: Tensor) -> Tensor:
        """Returns the whole sequence, [B, T, H], gathered from all tensor ranks. In the backward
        pass the gradient is split without a sum over the ranks. Therefore the next layer must
        either be computed equally by all tensor ranks, or sum the gradients of its input itself.
        """
        whole_TBH = self._mappings.gather_from_sequence_parallel_region(
            input_=x_TBH, to_model_parallel=False
        )
        return whole_TBH.transpose(0, 1).contiguous()

    # Ranks ----------------------------------------------------------------------------------------

    @functools.cached_property
    def data_rank(self) -> int:
        """Index of the data-parallel replica that this rank belongs to."""
        return self._state.get_data_parallel_rank()

    @functools.cached_property
    def tensor_rank(self) -> int:
        """Index of this rank in its tensor parallel group. It is also the index of the part that
        this rank holds of each split matrix.
        """
        return self._state.get_tensor_model_parallel_rank()

    def sum_over_replicas(self, x: Tensor) -> Tensor:
        """Sums `x` over the replicas in place. Returns `x`."""
        dist.all_reduce(x, group=self._state.get_data_parallel_group())
        return x

    # Steps and checkpoints ------------------------------------------------------------------------

    def mark_step(self) -> None:
        """Ends a graph of Torch-XLA. The operations recorded so far are compiled, if the graph is
        new, and executed.

        Do not read the value of a weight before this call. Reading a weight compiles a separate
        graph for this weight, and Torch-XLA 2.9 can confuse two such graphs
        (github.com/pytorch/xla/issues/8353).
        """
        self._xm.mark_step()

    def save(
        self, *, folder: str, tag: str, model: Any, optimizer: Any, is_sharded: bool, content: dict
    ) -> None:
        """Starts writing a checkpoint in the background. Returns once all tensors are copied. All
        ranks must call it.

        NxD copies tensors of the device at once, but reads tensors in host memory only when it
        writes them. AdamW's step counter is in host memory, so on a slow disk the file could
        contain the counter of a later step. Therefore this function copies the tensors in host
        memory first.
        """
        self._nxd.save_checkpoint(
            checkpoint_dir_str=folder,
            tag=tag,
            model=model,
            optimizer=_host_tensors_copied(optimizer.state_dict()),
            zero1_optimizer=is_sharded,
            user_content=content,
            async_save=True,
        )

    def finish_saving(self) -> None:
        """Waits until the checkpoint is complete on all ranks. All ranks must call it."""
        self._nxd.finalize_checkpoint()

    def load(self, *, folder: str, tag: str, model: Any, optimizer: Any | None) -> None:
        """Loads a checkpoint into model and optimizer. All ranks must call it.

        NxD is called twice: first for the model, then for the optimizer. The sharded optimizer sets
        its master weights from the model when it is loaded. Since NxD 0.17, one call for both would
        load the optimizer first, which would then set its master weights from the old weights of
        the model.
        """
        self._nxd.load_checkpoint(path=folder, tag=tag, model=model)
        if optimizer is not None:
            self._nxd.load_checkpoint(path=folder, tag=tag, optimizer=optimizer)
            optimizer.zero_grad()  # Loading leaves gradients of zero, which this call removes.

    def restart_master_weights(self, *, optimizer: Any) -> None:
        """Rebuilds the sharded optimizer from the model's weights: master weights equal the
        weights, and moments are zero. HLAT does this when the number of replicas has changed.
        """
        # The wrapped optimizer is torch_xla's ZeroRedundancyOptimizer.
        optimizer.optimizer.init_zero()


def _host_tensors_copied(state: Any) -> Any:
    """Returns the state with a copy in place of each tensor in host memory. Dictionaries and lists
    are rebuilt, so the input is not changed.
    """
    if isinstance(state, dict):
        return {name: _host_tensors_copied(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_host_tensors_copied(value) for value in state]
    return state.clone() if isinstance(state, Tensor) and state.device.type == "cpu" else state


def _leave(weight: Tensor) -> None:
    """Leaves a weight uninitialised, as `init_method` of NxD's layers. The kit sets the initial
    weights later, so that they do not depend on the layout.
    """
