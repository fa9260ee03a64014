"""Memory of one training step in bytes per device, for many layouts at once. The memory is the sum
of several terms.

Symbols: h hidden size, V vocabulary size, L layers, s sequence length, b micro-batch size, t tensor
parallel, p pipeline parallel, c context parallel, r data parallel degree. T = b s / c is the number
of tokens of a micro-batch on one device. K is the width of all key heads together. q = t with
sequence parallelism, otherwise 1. ZeRO shards over r c ranks. The terms of a device are:

- weights, gradients, optimizer: bytes per parameter of a `Convention`. ZeRO divides weights by r c
  in stage 3, gradients from stage 2 on, and optimizer states from stage 1 on (ZeRO, arXiv
  1910.02054, section 5). With a pipeline, gradients are not sharded in any stage, since engines sum
  them over all micro-batches and reduce them once.
- activations: tensors that each layer saves for each micro-batch in flight (`activations.py`), and
  messages to the next stage for as long as the transfer may last.
- embedding_logits: tensors that only the first and last stage save. These are the mask of the
  embedding's dropout, inputs of the final norm and of the output projection, and fp32 logits
  (Korthikanti et al., arXiv 2205.05198, section 4.3).
- workspace: the larger of two. One is a recomputed layer and its gradients. The other is the copies
  of logits that the loss needs, which are freed before the first backward pass of a layer begins.
  If the loss is computed in chunks, it needs the copies of one chunk and the gradient of its input.
  With several chunks it also needs the fp32 sum of gradients of the output projection.
- buffers: pipeline messages, gathered weights and unsharded gradients of ZeRO, key/value blocks of
  context parallelism, the mask of attention windows.
- late bytes: memory allocated after activations are freed. These are the gradients of a single
  micro-batch, if the code base allocates gradients anew in each step, and the copy in which sums of
  gradients are reduced, or the buffers of Muon. Where they exceed the freed activations, they count
  as workspace.
- reserve: everything that is not modelled (`out_of_memory.py`).
"""

import dataclasses
import functools
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cluster.record import ConfigError
from kit.estimate.theory.activations import (
    KIT,
    MEGATRON_CORE,
    TORCHTITAN,
    Kernels,
    LayerActivations,
    microbatches_in_flight,
)
from kit.estimate.theory.layouts import (
    EXCHANGES,
    SCHEDULES,
    Array,
    Layouts,
    cast_bytes,
    transformer_engine,
)
from kit.estimate.theory.out_of_memory import CORE_RESERVE, RESERVE, Reserve
from kit.estimate.theory.state import CONVENTIONS, Convention, ModelState

STATE = ("weights", "gradients", "optimizer")
DYNAMIC = ("activations", "embedding_logits", "workspace", "buffers")
TERMS = (*STATE, *DYNAMIC)
_GPIPE = SCHEDULES.index("gpipe")
_ZBV = SCHEDULES.index("zbv")


class CodeBase(NamedTuple):
    """Properties of a trainer on which time and memory depend: its kernels, its memory reserve, and
    its pipeline schedules.
    """

    kernels: Kernels
    reserve: Reserve
    schedules: tuple[str, ...] = SCHEDULES
    """Names of the pipeline schedules that the trainer supports."""
    is_torch: bool = False
    """Whether the trainer shards with torch's FSDP2 and compiles blocks with torch.compile. If
    false, the trainer uses Transformer Engine."""

    def columns(self, precision: str, has_blocks: bool) -> dict[str, Any]:
        """Returns the columns of `Layouts` that the trainer and the precision determine, as a dict
        from column to value. `has_blocks` is whether the device supports block-scaled formats.

        In Megatron-Core, the reduction of gradients and the gathering of weights overlap with
        computation. The examples of Megatron-LM (examples/llama) set `--overlap-grad-reduce
        --overlap-param-gather`, but not `--tp-comm-overlap`.
        """
        if self.is_torch:
            cast = cast_bytes(precision, is_native=True)
            return {"native": True, "compiled": True, "cast_bytes": cast}
        return transformer_engine(precision, has_blocks) | {"data_overlap": True}


CODE_BASES = {
    "megatron-core": CodeBase(MEGATRON_CORE, CORE_RESERVE, schedules=("1f1b", "interleaved")),
    "torchtitan": CodeBase(TORCHTITAN, RESERVE, is_torch=True),
}
"""Maps names for `kit plan --code-base` to trainers that are not engines of the kit. Sources of the
schedules: megatron/core/pipeline_parallel/schedules.py and torch.distributed.pipelining."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one pipeline device for many layouts, or of all pipeline devices of one layout.
    Arrays have one element per layout or per pipeline device.
    """

    params: Array
    """Number of weights on the device, before ZeRO shards them."""
    bytes_per_param: dict[str, Array]
    """Maps `weights`, `gradients` and `optimizer` to their bytes per weight on the device, after
    ZeRO shards them."""
    state_bytes: Array
    """Bytes of weights, gradients and optimizer states together. They are allocated once, before
    the first step."""
    activations: Array
    embedding_logits: Array
    workspace: Array
    buffers: Array

    def term(self, name: str) -> Array:
        """Returns the bytes of the term `name`, one of `TERMS`, e.g. `activations`."""
        return self.params * self.bytes_per_param[name] if name in STATE else getattr(self, name)

    @property
    def dynamic_bytes(self) -> Array:
        """Bytes that are allocated and freed in every step: activations, tensors of embedding and
        logits, workspace and buffers.
        """
        return self.activations + self.embedding_logits + self.workspace + self.buffers

    @property
    def total_bytes(self) -> Array:
        """Bytes of all terms together, without the reserve for memory that is not modelled."""
        return self.state_bytes + self.dynamic_bytes

    def with_reserve(self, reserve: Reserve) -> dict[str, Array]:
        """Returns a dict from term to bytes on the device. The last term is `reserve`, the memory
        that is not modelled. The sum is the memory in use on the device.
        """
        left = reserve.used_bytes(self.state_bytes, self.dynamic_bytes) - self.total_bytes
        return {name: self.term(name) for name in TERMS} | {"reserve": left}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of many layouts in bytes per device. The memory is computed for two or three pipeline
    devices of each layout. One of them is the device that needs most memory.
    """

    stages: tuple[StageMemory, ...]
    """Memory of the first and of the last pipeline device. If some layout has fewer layers on these
    two devices than on others, the memory of the second pipeline device follows as third
    element."""
    reserve: Reserve

    @property
    def used_bytes(self) -> Array:
        """Bytes in use on the device that needs most memory, one element per layout. The reserve
        for memory that is not modelled is included.
        """
        return functools.reduce(np.maximum, map(self._used, self.stages))

    def out_of_memory_probability(self, device_bytes: float) -> Array:
        """Returns the probability, 0 to 1, that each layout runs out of memory on devices with
        `device_bytes` of memory.
        """
        return self.reserve.out_of_memory_probability(self.used_bytes, device_bytes)

    def terms(self) -> dict[str, Array]:
        """Returns a dict from term to bytes on the device that needs most memory, with one element
        per layout. The last term is `reserve`. The sum of all terms is `used_bytes`.
        """
        used = np.stack(np.broadcast_arrays(*map(self._used, self.stages)))
        columns = [each.with_reserve(self.reserve) for each in self.stages]
        terms = {}
        for name in columns[0]:
            values = np.stack([np.broadcast_to(each[name], used.shape[1:]) for each in columns])
            terms[name] = np.take_along_axis(values, used.argmax(axis=0)[None], axis=0)[0]
        return terms

    def _used(self, stage: StageMemory) -> Array:
        return self.reserve.used_bytes(stage.state_bytes, stage.dynamic_bytes)


def memory(
    layouts: Layouts,
    *,
    kernels: Kernels = KIT,
    convention: Convention = CONVENTIONS["mixed_precision"],
    reserve: Reserve = RESERVE,
) -> Memory:
    """Returns the memory of each layout in bytes per device. It is computed for the first and the
    last pipeline device, and for the second device if this may have more layers. One of these
    devices needs most memory.

    If all pipeline devices have equally many layers, the second device is not computed. The devices
    between the first and the last have no embedding, and no more micro-batches in flight than the
    first.

    Some models (BLOOM, Llama 3) count the embedding and the output as one layer each when layers
    are distributed. The first and the last device then have one layer fewer than the second. This
    is assumed if the number of pipeline devices divides the number of layers plus 2, but not the
    number of layers. In all other cases, the number of layers per device is rounded up.

    `kernels` describes the training code. Flash attention, fused norms and the bytes of gradients
    are in `layouts`. `convention` has the bytes per parameter.
    """
    devices = _PipelineDevices(layouts, kernels, convention)
    p = layouts.pipeline_parallel
    zbv = layouts.schedule == _ZBV
    stages = [
        devices.stage_memory(0.0, is_first=True, is_last=(p == 1) | zbv),
        devices.stage_memory(p - 1, is_first=p == 1, is_last=(p == 1) | ~zbv),
    ]
    if np.any(devices.counts_ends_as_layers):
        stages.append(devices.stage_memory(1.0, is_first=False, is_last=False))
    return Memory(stages=tuple(stages), reserve=reserve)


def memory_by_stage(
    layouts: Layouts,
    *,
    layers: Array | None = None,
    kernels: Kernels = KIT,
    convention: Convention = CONVENTIONS["mixed_precision"],
) -> StageMemory:
    """Returns the memory of every pipeline device of one layout. The arrays have one element per
    pipeline device.

    `layers` has the number of transformer layers on each device. If None, layers are distributed
    equally over the devices, and the embedding and the output may count as one layer each
    (`memory`). `kernels` describes the training code. `convention` has the bytes per parameter.

    Raises:
        ConfigError: `layouts` has more than one layout, or `layers` does not have one number per
            pipeline device.
    """
    if len(layouts) != 1:
        raise ConfigError(
            f"memory_by_stage: got {len(layouts)} layouts. Select one: layouts.select([i])."
        )
    count = int(layouts.pipeline_parallel.item())
    if layers is not None and np.shape(layers) != (count,):
        raise ConfigError(
            f"memory_by_stage.layers: {np.shape(layers)} is not allowed. Give {count} numbers."
        )
    index = np.arange(count, dtype=float)
    is_last = np.where((layouts.schedule == _ZBV) & (count > 1), index == 0, index == count - 1)
    return _PipelineDevices(layouts, kernels, convention).stage_memory(
        index, is_first=index == 0, is_last=is_last, layers=layers
    )


@dataclasses.dataclass(frozen=True)
class _PipelineDevices(ModelState):
    """Computes the memory of any pipeline device of a layout (`stage_memory`). The properties are
    values that are equal on all devices of a layout.
    """

    @cached_property
    def layer(self) -> LayerActivations:
        """Activations that one layer saves, in bytes per token of a micro-batch."""
        return LayerActivations(self.layouts, self.kernels)

    @cached_property
    def counts_ends_as_layers(self) -> Array:
        """Whether the embedding and the output count as one layer each when layers are distributed
        over pipeline devices.
        """
        x = self.layouts
        return x.max_layers_per_device * x.pipeline_parallel == x.num_layers + 2

    @cached_property
    def head_bytes(self) -> Array:
        """Bytes per token that the last pipeline device saves outside its layers: inputs of the
        final norm and of the output projection (4 h / q), and fp32 logits (4 V / t). Here h is the
        hidden size, V the vocabulary size, t the tensor parallel degree, and the sequence is split
        over q ranks. If the loss is computed in chunks, no logits are saved.
        """
        logit_bytes = np.where(self._has_chunked_loss, 0.0, 4 * self._logits_per_token)
        return 4 * self.layer.residual_size + logit_bytes

    @cached_property
    def loss_bytes(self) -> Array:
        """Bytes per token that the computation of the loss needs in addition to the saved fp32
        logits. They are further copies of the logits.

        If the loss is computed in chunks, they are the copies of the logits of one chunk, and the
        gradient of the chunk's input (2 bytes x hidden size). With several chunks, the fp32 sum of
        gradients of the output projection is added. It has 4 bytes x hidden size x vocabulary size
        for all tokens together.
        """
        x = self.layouts
        kernels = self.kernels
        vocab_size = self.layouts.vocab_size
        at_once = np.minimum(vocab_size, kernels.chunk_logits / x.tokens)
        summed = np.where(at_once < vocab_size, 4 * x.hidden_size * vocab_size / x.tokens, 0.0)
        chunk = kernels.chunk_logit_bytes * at_once + summed + 2 * x.hidden_size
        copies = (kernels.logit_bytes - 4) * self._logits_per_token
        return np.where(self._has_chunked_loss, chunk, copies)

    @cached_property
    def _has_chunked_loss(self) -> Array:
        """Whether the loss is computed in chunks of tokens. This needs training code that computes
        chunks, and a layout without tensor and pipeline parallelism.
        """
        whole = ~self.has_pipeline & (self.layouts.tensor_parallel == 1)
        return (self.kernels.chunk_logits > 0) & whole

    @property
    def _logits_per_token(self) -> Array:
        """Number of logits per token on one device: vocabulary size / tensor parallel degree, or
        the vocabulary size if the training code gathers the logits on each rank.
        """
        if self.kernels.gathered_logits:
            return self.layouts.vocab_size
        return self.layouts.vocab_size / self.layouts.tensor_parallel

    @cached_property
    def message_bytes(self) -> Array:
        """Bytes of the buffers with which a device sends and receives activations.

        A pipeline needs 8 T h / q bytes, with T tokens, hidden size h and sequence split over q
        ranks. Ring context parallelism needs 8 T K / t bytes, with width K of all key heads and
        tensor parallel degree t. These buffers hold the keys and values in use, and the next keys
        and values, which arrive meanwhile. All-to-all context parallelism needs 4 T (A + K) / t
        bytes for query, key, value and result, with width A of all query heads.
        """
        x = self.layouts
        pipeline = np.where(self.has_pipeline, 8 * x.hidden_size / x.residual_shards, 0.0)
        is_ring = x.context_exchange == EXCHANGES.index("ring")
        context = np.where(is_ring, 8 * x.kv_size, 4 * (x.attention_size + x.kv_size))
        context = (x.context_parallel > 1) * (context / x.tensor_parallel)
        return pipeline * x.tokens + context * x.tokens

    @cached_property
    def window_mask_bytes(self) -> Array:
        """Bytes of the mask of attention windows: 2 s^2 in bf16, with sequence length s. All layers
        share one mask (`kit.model.past.Past.with_additive_mask`). Code bases with kernels for
        attention windows have no mask.
        """
        x = self.layouts
        return np.where(x.native & (x.local_share > 0), 2 * x.sequence_length**2, 0.0)

    @cached_property
    def gathered_output_bytes(self) -> Array:
        """Bytes of the gathered output projection under ZeRO 3: 2 x hidden size x vocabulary size /
        tensor parallel degree. The output projection runs last in the forward pass and first in the
        backward pass, so its weights stay gathered between the two passes
        (`kit.parallel.data.shard_ends`). If the training code does not use `fully_shard`, the value
        is 0.
        """
        x = self.layouts
        output = 2 * x.hidden_size * x.vocab_size / x.tensor_parallel
        return np.where(x.zero_stage == 3, output, 0.0) * self.kernels.fully_sharded

    def stage_memory(
        self, stage: Any, *, is_first: Any, is_last: Any, layers: Any = None
    ) -> StageMemory:
        """Returns the memory of the pipeline device with number `stage`. `is_first` and `is_last`
        say whether this device has the embedding and the output. `layers` is the number of layers
        of this device. The arguments may be arrays with one element per layout.
        """
        x = self.layouts
        layer = self.layer
        tokens = self.layouts.tokens
        if layers is None:
            num_ends = np.add(is_first, is_last, dtype=tokens.dtype)
            layers = x.max_layers_per_device - self.counts_ends_as_layers * num_ends
        params = self.params(layers, is_first, is_last)
        in_flight = microbatches_in_flight(x, stage)
        # Messages to the next stage are split over tensor ranks, as in Megatron and DeepSpeed.
        sent = np.where(self.has_pipeline, 2 * x.hidden_size / x.tensor_parallel, 0.0)
        layers_on_device = layers * (1 - x.offloaded_layers / x.num_layers)
        activations = tokens * in_flight * (layers_on_device * layer.saved_bytes + sent)
        # GPipe computes all forward passes first, so the logits of all micro-batches are saved.
        held_heads = np.where(self.has_pipeline & (x.schedule == _GPIPE), x.num_microbatches, 1.0)
        head = np.where(is_last, self.head_bytes, 0.0)
        ends = head * held_heads
        if self.kernels.dropout:
            ends = ends + np.where(is_first, x.plain * layer.residual_size * in_flight, 0.0)
        ends = tokens * ends
        recomputed = tokens * (layer.workspace_bytes - head) + self.block_gradient_bytes
        loss = tokens * np.where(is_last, self.loss_bytes, 0.0)
        late = self.late_bytes_per_param * params + self.block_gradient_bytes - activations - ends
        bytes_per_param = self.bytes_per_param
        state_bytes = params * self.state_bytes_per_param
        if np.any(x.muon):
            saved = self.muon_saved_bytes(layers)
            optimizer = bytes_per_param["optimizer"] - saved / params
            bytes_per_param = bytes_per_param | {"optimizer": optimizer}
            state_bytes = state_bytes - saved
            late = np.maximum(late, self.muon_late_bytes(layers) - activations - ends)
        gathered_output = np.where(is_last, self.gathered_output_bytes, 0.0)
        return StageMemory(
            params=params,
            bytes_per_param=bytes_per_param,
            state_bytes=state_bytes,
            activations=activations,
            embedding_logits=ends,
            workspace=np.maximum(np.maximum(recomputed, loss), late),
            buffers=(
                self.message_bytes + self.gathering_bytes + gathered_output + self.window_mask_bytes
            ),
        )
