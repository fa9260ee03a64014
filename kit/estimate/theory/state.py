"""Model state: bytes of weights, gradients and optimizer on a device, with the sharding of ZeRO.
No torch.

Symbols are those of `layouts.py`.
"""

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from cluster.record import Record, field_doc
from kit.config.plan import Precision
from kit.engines.capabilities import EngineName, capabilities_of
from kit.estimate.theory.activations import Kernels
from kit.estimate.theory.layouts import Array, Layouts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convention(Record):
    """Bytes per parameter of weights, gradients and optimizer, as a paper or a program counts
    them.
    """

    name: str = field_doc("paper or program, and total bytes")
    weights: float = field_doc("bytes of the weights used in matrix products")
    gradients: float | None = field_doc(
        "bytes of a gradient. None: gradient_bytes of each layout", default=None
    )
    optimizer: float = field_doc("bytes of master weights and moments")


CONVENTIONS = {
    # The weight is bf16, and the gradient has the bytes of the layout. The optimizer has an fp32
    # master weight and two moments (ZeRO paper, arXiv 1910.02054, section 3.1).
    "mixed_precision": Convention(name="mixed-precision Adam, 16 or 18 B", weights=2, optimizer=12),
    # Frontier paper, arXiv 2312.12705. The parts of its memory table (weight 2 + master copy 4,
    # gradient 4, one moment 4) add up to 14 bytes.
    "frontier_14": Convention(
        name="Frontier paper, sum of its parts, 14 B", weights=6, gradients=4, optimizer=4
    ),
    # The text of the Frontier paper says 24 bytes. The 10 bytes that its table does not explain are
    # counted as optimizer.
    "frontier_24": Convention(
        name="Frontier paper, as stated, 24 B", weights=6, gradients=4, optimizer=14
    ),
    # XLA_USE_BF16, which HLAT's 7B scripts set, turns every fp32 tensor into a bf16 tensor: weight,
    # gradient and two moments.
    "pure_bf16": Convention(name="pure bf16, 8 B", weights=2, gradients=2, optimizer=4),
    # DeepSpeed's BF16_Optimizer holds each bf16 gradient and its fp32 sum.
    "deepspeed_bf16": Convention(
        name="DeepSpeed BF16_Optimizer, 20 B", weights=2, gradients=6, optimizer=12
    ),
    "fp32": Convention(name="fp32 weights and AdamW, 16 B", weights=4, optimizer=8),
    # State of ZeRO 1 in DeepSpeed before 0.13.2 after a step that was skipped for overflow
    # (runtime/zero/stage_1_and_2.py at 0.10.0). Adam's moments exist, since
    # `initialize_optimizer_states` makes them before the first step. Gradients do not exist (`step`
    # frees them). The fp16 copy of the gradients of this rank's shard still exists, because
    # `_link_all_hp_params` gave each weight a reference to the dictionary that `step` replaces.
    "deepspeed_fp16_skipped": Convention(
        name="after a skipped step, 16 B", weights=2, gradients=0, optimizer=14
    ),
}


def convention_of(precision: Precision, engine: EngineName, zero_stage: int) -> Convention:
    """Returns the bytes per parameter that a plan's engine needs in the plan's precision.

    In bf16 the neuron engine without ZeRO has neither master weights nor fp32 sums of gradients. In
    fp32 every engine has one copy of each weight.
    """
    if precision == "fp32":
        return CONVENTIONS["fp32"]
    is_pure = (
        capabilities_of(engine).pure_bf16_without_zero and precision == "bf16" and zero_stage == 0
    )
    return CONVENTIONS["pure_bf16" if is_pure else "mixed_precision"]


@dataclasses.dataclass(frozen=True)
class ModelState:
    """Number of weights on a device, and bytes per weight of weights, gradients and optimizer."""

    layouts: Layouts
    kernels: Kernels
    convention: Convention

    @cached_property
    def has_pipeline(self) -> Array:
        """Whether the layout has a pipeline (p > 1), bool."""
        return self.layouts.pipeline_parallel > 1

    @cached_property
    def block_params(self) -> Array:
        """Number of weights of one layer on a device: (h (2 h + 2 K) + 3 h f) / t, and two norms of
        h.

        GPT-style layers have 2 h f instead of 3 h f. They also have (h + 2 K + f) / t biases of
        column-split matrices, and 4 h other biases.
        """
        x = self.layouts
        plain = self.layouts.plain
        hidden_size = self.layouts.hidden_size
        attention = hidden_size * (2 * hidden_size + 2 * x.kv_size)
        feed_forward = (3 - plain) * hidden_size * x.ffn_hidden_size
        biases = plain * (hidden_size + 2 * x.kv_size + x.ffn_hidden_size)
        norms = (2 + 4 * plain) * hidden_size
        return (attention + feed_forward + biases) / x.tensor_parallel + norms

    @cached_property
    def embedding_params(self) -> Array:
        """Number of weights of the first device outside its layers: the embedding, h V / t, and
        learned positions of GPT-style models, h s.
        """
        x = self.layouts
        return self._table_params + x.plain * x.hidden_size * x.sequence_length

    @cached_property
    def output_params(self) -> Array:
        """Number of weights of the last device outside its layers: the output projection, the final
        norm, and learned positions under a pipeline if the code base ties them. A tied output
        projection is counted only under a pipeline, where the embedding is on another device.
        """
        x = self.layouts
        plain = self.layouts.plain
        positions = plain * x.hidden_size * x.sequence_length
        output = self._table_params * (self.has_pipeline | np.logical_not(x.tied_embeddings))
        norm = (1 + plain) * x.hidden_size
        return output + norm + positions * (self.has_pipeline & self.kernels.tied_positions)

    @cached_property
    def _table_params(self) -> Array:
        """Number of weights of the embedding on one device: h V / t."""
        x = self.layouts
        return x.hidden_size * x.vocab_size / x.tensor_parallel

    def params(self, layers: Array, is_first: Any, is_last: Any) -> Array:
        """Returns the number of weights of a device with `layers` layers."""
        params = layers * self.block_params + np.where(is_last, self.output_params, 0.0)
        return params + np.where(is_first, self.embedding_params, 0.0)

    @cached_property
    def gradient_bytes(self) -> Array:
        """Bytes of one gradient, by the convention, or by each layout if the convention states
        none.
        """
        own = self.layouts.gradient_bytes
        stated = self.convention.gradients
        if stated is None:
            return own
        return np.full_like(own, stated)

    @cached_property
    def shard_fraction(self) -> Array:
        """Share of a sharded state that a rank holds: 1 / (r c), 1 / `shard_size` if hybrid, or 1
        without ZeRO.
        """
        return np.where(self.layouts.zero_stage >= 1, 1 / self.layouts.num_shards, 1.0)

    @cached_property
    def shards_gradients(self) -> Array:
        """Whether ZeRO shards gradients, bool: from stage 2 on, without a pipeline."""
        return ~self.has_pipeline & (self.layouts.zero_stage >= 2)

    @cached_property
    def has_late_gradients(self) -> Array:
        """Whether gradients use memory that activations have freed, bool. This holds for a single
        micro-batch without a pipeline, if the code base allocates gradients anew in each step.
        """
        single = ~self.has_pipeline & (self.layouts.num_microbatches == 1)
        return single & self.kernels.fully_sharded

    @cached_property
    def bytes_per_param(self) -> dict[str, Array]:
        """Bytes per weight of weights, gradients and optimizer, after ZeRO shards them.

        Fully sharded code (FSDP2) has no bf16 weights in stage 3. Code that holds a copy of
        unsharded gradients (`gradient_copy_bytes`) has this copy up to stage 2.
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

    @cached_property
    def state_bytes_per_param(self) -> Array:
        """Bytes per weight of weights, gradients and optimizer together."""
        return (
            self.bytes_per_param["weights"]
            + self.bytes_per_param["gradients"]
            + self.bytes_per_param["optimizer"]
        )

    @cached_property
    def late_bytes_per_param(self) -> Array:
        """Bytes per weight that are allocated after activations are freed: gradients of a single
        micro-batch less the bf16 weights, whose memory they reuse, and the copy in which ZeRO 1
        reduces sums of gradients.
        """
        gradients = self.gradient_bytes * self.shard_fraction - self.bytes_per_param["weights"]
        late = np.where(self.has_late_gradients, gradients, 0.0)
        reduced = late + self.kernels.reduction_bytes
        return np.where(self.layouts.zero_stage == 1, reduced, late)

    @cached_property
    def block_gradient_bytes(self) -> Array:
        """Bytes of the unsharded gradients of one block.

        If gradients are reduced block by block, they have `gradient_bytes` each. Otherwise only
        `fully_shard` needs such memory: it makes bf16 gradients (2 bytes) and adds them to their
        sums block by block.
        """
        whole = self.shards_gradients | self.has_late_gradients
        made = np.where(whole, self.gradient_bytes, 2.0 * self.kernels.fully_sharded)
        return made * self.block_params

    @cached_property
    def gathering_bytes(self) -> Array:
        """Bytes of the two blocks that ZeRO 3 gathers at a time, 2 per weight, and of the bucket in
        which ZeRO 2 and 3 collect gradients.
        """
        weights = np.where(self.layouts.zero_stage == 3, 4 * self.block_params, 0.0)
        return weights + self.layouts.where(self.shards_gradients, self.kernels.bucket_bytes, 0.0)
