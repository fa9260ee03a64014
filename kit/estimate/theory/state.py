"""Bytes of weights, gradients and optimizer states on a device, after ZeRO shards them. This module
does not import torch.

Symbols: h hidden size, f feed-forward size, V vocabulary size, s sequence length, A width of all
query heads together, K width of all key heads together, t tensor parallel, p pipeline parallel, c
context parallel, r data parallel degree.
"""

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from cluster.record import Record, field_doc
from kit.config.plan import Precision
from kit.engines.capabilities import EngineName, capabilities_of
from kit.estimate.theory.activations import Kernels
from kit.estimate.theory.layer import layer_params
from kit.estimate.theory.layouts import Array, Layouts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convention(Record):
    """Bytes per parameter of weights, gradients and optimizer states, as a paper or a program
    counts them.
    """

    name: str = field_doc(
        "label: the paper, program or kind of training with these numbers of bytes, and their sum"
    )
    weights: float = field_doc("bytes per parameter of the weights used in matrix products")
    gradients: float | None = field_doc(
        "bytes per parameter of gradients. None: the column gradient_bytes of each layout is used",
        default=None,
    )
    optimizer: float = field_doc("bytes per parameter of master weights and moments")


ROUND_ELEMENTS = 2**26
"""Value of `kit.parallel.whole_matrices.ROUND_ELEMENTS`, whose module imports torch."""
CONVENTIONS = {
    # Weights are bf16, and the layout determines the bytes of a gradient. The optimizer has an fp32
    # master weight and two fp32 moments (ZeRO paper, arXiv 1910.02054, section 3.1).
    "mixed_precision": Convention(name="mixed-precision Adam, 16 or 18 B", weights=2, optimizer=12),
    # Frontier paper, arXiv 2312.12705. The parts of its memory table (weight 2 + master copy 4,
    # gradient 4, one moment 4) add up to 14 bytes.
    "frontier_14": Convention(
        name="Frontier paper, sum of its parts, 14 B", weights=6, gradients=4, optimizer=4
    ),
    # The text of the Frontier paper (arXiv 2312.12705) says 24 bytes. The 10 bytes that its memory
    # table does not explain are counted as optimizer states.
    "frontier_24": Convention(
        name="Frontier paper, as stated, 24 B", weights=6, gradients=4, optimizer=14
    ),
    # The scripts of the HLAT 7B model set XLA_USE_BF16, which turns every fp32 tensor into a bf16
    # tensor: weight, gradient and two moments.
    "pure_bf16": Convention(name="pure bf16, 8 B", weights=2, gradients=2, optimizer=4),
    # DeepSpeed's BF16_Optimizer keeps each bf16 gradient and its fp32 sum.
    "deepspeed_bf16": Convention(
        name="DeepSpeed BF16_Optimizer, 20 B", weights=2, gradients=6, optimizer=12
    ),
    "fp32": Convention(name="fp32 weights and AdamW, 16 B", weights=4, optimizer=8),
    # Memory of ZeRO 1 in DeepSpeed before 0.13.2 after a step that was skipped for overflow
    # (runtime/zero/stage_1_and_2.py at 0.10.0). Adam's moments exist, since
    # `initialize_optimizer_states` makes them before the first step. Gradients do not exist, since
    # `step` frees them. The fp16 copy of the gradients of this rank's shard still exists, because
    # `_link_all_hp_params` gave each weight a reference to the dictionary that `step` replaces.
    "deepspeed_fp16_skipped": Convention(
        name="after a skipped step, 16 B", weights=2, gradients=0, optimizer=14
    ),
}


def convention_of(precision: Precision, engine: EngineName, zero_stage: int) -> Convention:
    """Returns the bytes per parameter of weights, gradients and optimizer states that an engine
    needs in a precision.

    In bf16 without ZeRO, the neuron engine keeps neither fp32 master weights nor fp32 sums of
    gradients. In fp32, every engine keeps one copy of each weight.
    """
    if precision == "fp32":
        return CONVENTIONS["fp32"]
    is_pure = (
        capabilities_of(engine).pure_bf16_without_zero and precision == "bf16" and zero_stage == 0
    )
    return CONVENTIONS["pure_bf16" if is_pure else "mixed_precision"]


@dataclasses.dataclass(frozen=True)
class ModelState:
    """Computes the number of weights on a device, and the bytes per weight of weights, gradients
    and optimizer states. Arrays have one element per layout.
    """

    layouts: Layouts
    kernels: Kernels
    convention: Convention

    @cached_property
    def has_pipeline(self) -> Array:
        """Whether the layout has more than one pipeline device."""
        return self.layouts.pipeline_parallel > 1

    @cached_property
    def block_params(self) -> Array:
        """Number of weights of one layer on a device: (h (2 A + 2 K) + 3 h f) / t in matrices, or 2
        h f instead of 3 h f without a gate. Here h is the hidden size, A the width of all query
        heads, K the width of all key heads, f the feed-forward size and t the tensor parallel
        degree. Biases and norm weights are added.
        """
        x = self.layouts
        hidden_size = self.layouts.hidden_size
        attention = hidden_size * (2 * x.attention_size + 2 * x.kv_size)
        feed_forward = (3 - x.plain) * hidden_size * x.ffn_hidden_size
        split = attention + feed_forward + x.split_vectors
        return split / x.tensor_parallel + x.unsplit_vectors

    @cached_property
    def embedding_params(self) -> Array:
        """Number of weights of the first pipeline device outside its layers: the embedding (hidden
        size x vocabulary size / tensor parallel degree), and learned positions (hidden size x
        sequence length) if the model has them.
        """
        return self._table_params + self._position_params

    @cached_property
    def output_params(self) -> Array:
        """Number of weights of the last pipeline device outside its layers: the output projection
        and the final norm.

        An output projection that is tied to the embedding is counted only if the embedding is on
        another pipeline device. In this case learned positions are counted too, if the training
        code ties them (`Kernels.tied_positions`).
        """
        x = self.layouts
        output = self._table_params * (self.has_pipeline | np.logical_not(x.tied_embeddings))
        norm = x.where(x.has_layernorm, 2.0, 1.0) * x.hidden_size
        are_tied = self.has_pipeline & self.kernels.tied_positions
        return output + norm + self._position_params * are_tied

    @cached_property
    def _position_params(self) -> Array:
        """Number of weights of learned positions: hidden size x sequence length, or 0."""
        x = self.layouts
        return x.where(x.has_learned_positions, 1.0, 0.0) * x.hidden_size * x.sequence_length

    @cached_property
    def _table_params(self) -> Array:
        """Number of weights of the token embedding on one device: hidden size x vocabulary size /
        tensor parallel degree.
        """
        x = self.layouts
        return x.hidden_size * x.vocab_size / x.tensor_parallel

    def params(self, layers: Array, is_first: Any, is_last: Any) -> Array:
        """Returns the number of weights of a pipeline device with `layers` layers, before ZeRO
        shards them. `is_first` and `is_last` say whether this device has the embedding and the
        output.
        """
        params = layers * self.block_params + np.where(is_last, self.output_params, 0.0)
        return params + np.where(is_first, self.embedding_params, 0.0)

    @cached_property
    def gradient_bytes(self) -> Array:
        """Bytes of one accumulated gradient. If `convention` states no number for gradients, the
        column `gradient_bytes` of the layouts is used.
        """
        own = self.layouts.gradient_bytes
        stated = self.convention.gradients
        if stated is None:
            return own
        return np.full_like(own, stated)

    @cached_property
    def shard_fraction(self) -> Array:
        """Share of a sharded tensor, 0 to 1, that a rank holds. It is 1 / (data x context parallel
        degree) with ZeRO over all replicas, 1 / `shard_size` with ZeRO over groups of replicas, or
        1 without ZeRO.
        """
        return np.where(self.layouts.zero_stage >= 1, 1 / self.layouts.num_shards, 1.0)

    @cached_property
    def shards_gradients(self) -> Array:
        """Whether ZeRO shards gradients: in stages 2 and 3 of layouts without a pipeline."""
        return ~self.has_pipeline & (self.layouts.zero_stage >= 2)

    @cached_property
    def has_late_gradients(self) -> Array:
        """Whether gradients use memory that activations have freed. This is so for a single
        micro-batch without a pipeline, if the training code uses `fully_shard`, which allocates
        gradients anew in each step.
        """
        single = ~self.has_pipeline & (self.layouts.num_microbatches == 1)
        return single & self.kernels.fully_sharded

    @cached_property
    def bytes_per_param(self) -> dict[str, Array]:
        """Maps `weights`, `gradients` and `optimizer` to their bytes per weight on a device, after
        ZeRO shards them.

        FSDP2 (`Kernels.fully_sharded`) keeps no bf16 weights in ZeRO stage 3. Training code that
        keeps a copy of unsharded gradients (`Kernels.gradient_copy_bytes`) has this copy in stages
        0 to 2.
        """
        zero_stage = self.layouts.zero_stage
        convention = self.convention
        gathered = 0.0 if self.kernels.fully_sharded else self.shard_fraction
        weights = self.layouts.where(zero_stage == 3, gathered, 1.0)
        sums = self.gradient_bytes * np.where(self.shards_gradients, self.shard_fraction, 1.0)
        sums = np.where(self.has_late_gradients, 0.0, sums)
        copy = self.kernels.gradient_copy_bytes if convention.gradients is None else 0.0
        return {
            "weights": convention.weights * weights * self.layouts.weight_bytes / 2,
            "gradients": np.where(zero_stage < 3, sums + copy, sums),
            "optimizer": convention.optimizer * self.shard_fraction,
        }

    def muon_saved_bytes(self, layers: Array) -> Array:
        """Returns the bytes of optimizer state by which a pipeline device with `layers` layers
        needs less memory with Muon than with AdamW: one fp32 moment of each matrix.
        """
        x = self.layouts
        matrices = layers * layer_params(x) / x.tensor_parallel
        return x.muon * 4.0 * self.shard_fraction * matrices

    def muon_late_bytes(self, layers: Array) -> Array:
        """Returns the bytes that the update of Muon needs on a pipeline device with `layers`
        layers, after activations are freed. They are counted from the kit's source.

        A rank has its shards of all updates, 2 bytes per element. In addition it has five buffers
        for the matrices of a round: shards that arrive, whole matrices, their orthogonalisation,
        and results that leave and arrive (`kit.parallel.whole_matrices`). A round has at most
        ROUND_ELEMENTS elements on a rank, but at least one matrix.
        """
        x = self.layouts
        matrices = layers * layer_params(x)
        ranks = x.tensor_parallel * x.context_parallel * x.data_parallel
        largest = x.hidden_size * np.maximum(x.hidden_size, x.ffn_hidden_size)
        in_round = np.maximum(largest, np.minimum(matrices / ranks, ROUND_ELEMENTS))
        own = self.shard_fraction * matrices / x.tensor_parallel
        return x.muon * (2.0 * own + 10.0 * in_round)

    @cached_property
    def state_bytes_per_param(self) -> Array:
        """Bytes per weight on a device for weights, gradients and optimizer states together."""
        return (
            self.bytes_per_param["weights"]
            + self.bytes_per_param["gradients"]
            + self.bytes_per_param["optimizer"]
        )

    @cached_property
    def late_bytes_per_param(self) -> Array:
        """Bytes per weight that are allocated after activations are freed.

        They are the gradients of a single micro-batch, less the bf16 weights, whose memory the
        gradients reuse. ZeRO 1 adds the copy in which it reduces accumulated gradients.
        """
        gradients = self.gradient_bytes * self.shard_fraction - self.bytes_per_param["weights"]
        late = np.where(self.has_late_gradients, gradients, 0.0)
        reduced = late + self.kernels.reduction_bytes
        return np.where(self.layouts.zero_stage == 1, reduced, late)

    @cached_property
    def block_gradient_bytes(self) -> Array:
        """Bytes of the unsharded gradients of one transformer block, which exist for a short time.

        If gradients are reduced block by block, each gradient has `gradient_bytes` bytes. Otherwise
        only `fully_shard` needs this memory. `fully_shard` makes bf16 gradients (2 bytes each) of
        one block at a time, and adds them to the accumulated gradients.
        """
        whole = self.shards_gradients | self.has_late_gradients
        made = np.where(whole, self.gradient_bytes, 2.0 * self.kernels.fully_sharded)
        return made * self.block_params

    @cached_property
    def gathering_bytes(self) -> Array:
        """Bytes of two buffers. One has the weights of the two transformer blocks that ZeRO 3
        gathers at a time, with 2 bytes per weight. The other is the bucket in which ZeRO 2 and 3
        collect gradients.
        """
        weights = np.where(self.layouts.zero_stage == 3, 4 * self.block_params, 0.0)
        return weights + self.layouts.where(self.shards_gradients, self.kernels.bucket_bytes, 0.0)
