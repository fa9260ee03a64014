"""State: what a device holds of the model itself, and where ZeRO shares it. No torch.

Symbols: layouts.py.
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
    """Bytes per parameter: how a paper or a program counts the model state."""

    name: str = field_doc("where it comes from")
    weights: float = field_doc("bytes of the weights used in matrix products")
    gradients: float | None = field_doc(
        "bytes of a gradient; none: as each layout says", default=None
    )
    optimizer: float = field_doc("bytes of master weights and moments")


CONVENTIONS = {
    # bf16 weight; gradient as the layout says; fp32 master weight and two moments: ZeRO paper,
    # section 3.1.
    "mixed_precision": Convention(name="mixed-precision Adam, 16 or 18 B", weights=2, optimizer=12),
    # Frontier paper, arXiv 2312.12705: the parts of its memory table (weight 2 + master copy 4,
    # gradient 4, one moment 4) add up to 14 ...
    "frontier_14": Convention(
        name="Frontier paper, sum of its parts, 14 B", weights=6, gradients=4, optimizer=4
    ),
    # ... while its text says 24; what the parts leave out is counted as optimizer here.
    "frontier_24": Convention(
        name="Frontier paper, as stated, 24 B", weights=6, gradients=4, optimizer=14
    ),
    # XLA_USE_BF16, as HLAT's 7B scripts set it, makes every fp32 tensor a bf16 one: weight,
    # gradient, two moments.
    "pure_bf16": Convention(name="pure bf16, 8 B", weights=2, gradients=2, optimizer=4),
    # DeepSpeed's BF16_Optimizer keeps each bf16 gradient beside its fp32 sum.
    "deepspeed_bf16": Convention(
        name="DeepSpeed BF16_Optimizer, 20 B", weights=2, gradients=6, optimizer=12
    ),
    "fp32": Convention(name="fp32 weights and AdamW, 16 B", weights=4, optimizer=8),
    # After a step skipped for overflow, ZeRO 1 of DeepSpeed before 0.13.2
    # (runtime/zero/stage_1_and_2.py at 0.10.0) has Adam's moments, made before the first step
    # (`initialize_optimizer_states`), no gradients (`step`), but still the fp16 copy of those of
    # its part: `_link_all_hp_params` gave each weight the dictionary that `step` replaces.
    "deepspeed_fp16_skipped": Convention(
        name="after a skipped step, 16 B", weights=2, gradients=0, optimizer=14
    ),
}


def convention_of(precision: Precision, engine: EngineName, zero_stage: int) -> Convention:
    """Returns the bytes per parameter that a plan's engine keeps in the plan's precision.

    Engine neuron without ZeRO has neither master weights nor fp32 sums in bf16. In fp32 there is
    one copy of each weight.
    """
    if precision == "fp32":
        return CONVENTIONS["fp32"]
    is_pure = (
        capabilities_of(engine).pure_bf16_without_zero and precision == "bf16" and zero_stage == 0
    )
    return CONVENTIONS["pure_bf16" if is_pure else "mixed_precision"]


@dataclasses.dataclass(frozen=True)
class ModelState:
    """Weights of a device, and the bytes that each takes."""

    layouts: Layouts
    kernels: Kernels
    convention: Convention

    @cached_property
    def has_pipeline(self) -> Array:
        """Whether there is a pipeline, bool."""
        return self.layouts.pipeline_parallel > 1

    @cached_property
    def block_params(self) -> Array:
        """Weights of a layer: (h (2 h + 2 K) + 3 h f) / t, and two norms of h.

        GPT-style 2 h f in the place of 3 h f, biases h + 2 K + f of column-split matrices, and 4 h
        of other biases.
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
        """Weights of the first device beside its layers: the embedding, h V / t, and learned
        positions, h s.
        """
        x = self.layouts
        return self._table_params + x.plain * x.hidden_size * x.sequence_length

    @cached_property
    def output_params(self) -> Array:
        """Weights of the last device beside its layers: the output projection, unless it is the
        embedding of the same device, a norm, and learned positions if the code base ties them.
        """
        x = self.layouts
        plain = self.layouts.plain
        positions = plain * x.hidden_size * x.sequence_length
        output = self._table_params * (self.has_pipeline | np.logical_not(x.tied_embeddings))
        norm = (1 + plain) * x.hidden_size
        return output + norm + positions * (self.has_pipeline & self.kernels.tied_positions)

    @cached_property
    def _table_params(self) -> Array:
        """Weights of the embedding on one device: h V / t."""
        x = self.layouts
        return x.hidden_size * x.vocab_size / x.tensor_parallel

    def params(self, layers: Array, is_first: Any, is_last: Any) -> Array:
        """Returns the number of weights of a device with a number of layers."""
        params = layers * self.block_params + np.where(is_last, self.output_params, 0.0)
        return params + np.where(is_first, self.embedding_params, 0.0)

    @cached_property
    def gradient_bytes(self) -> Array:
        """Bytes of one gradient, by the convention or as each layout says."""
        own = self.layouts.gradient_bytes
        stated = self.convention.gradients
        if stated is None:
            return own
        return np.full_like(own, stated)

    @cached_property
    def shard_fraction(self) -> Array:
        """The part of a state that a rank has where ZeRO cuts it: 1 / (r c)."""
        return np.where(self.layouts.zero_stage >= 1, 1 / self.layouts.num_shards, 1.0)

    @cached_property
    def shards_gradients(self) -> Array:
        """Where ZeRO cuts gradients: from stage 2 on, without a pipeline; bool."""
        return ~self.has_pipeline & (self.layouts.zero_stage >= 2)

    @cached_property
    def has_late_gradients(self) -> Array:
        """Where gradients come in the place of activations: those of a single micro-batch, in code
        that makes them anew; bool.
        """
        single = ~self.has_pipeline & (self.layouts.num_microbatches == 1)
        return single & self.kernels.fully_sharded

    @cached_property
    def bytes_per_param(self) -> dict[str, Array]:
        """Of weights, gradients and optimizer, with ZeRO's sharing.

        Code that is fully sharded has no bf16 weights in stage 3; code that keeps a copy of whole
        gradients has it up to stage 2.
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
        """Weights + gradients + optimizer."""
        return (
            self.bytes_per_param["weights"]
            + self.bytes_per_param["gradients"]
            + self.bytes_per_param["optimizer"]
        )

    @cached_property
    def late_bytes_per_param(self) -> Array:
        """What comes when activations are gone: gradients of a single micro-batch, which take the
        place of bf16 weights too, and the copy in which ZeRO 1 reduces sums.
        """
        gradients = self.gradient_bytes * self.shard_fraction - self.bytes_per_param["weights"]
        late = np.where(self.has_late_gradients, gradients, 0.0)
        reduced = late + self.kernels.reduction_bytes
        return np.where(self.layouts.zero_stage == 1, reduced, late)

    @cached_property
    def block_gradient_bytes(self) -> Array:
        """Of one block, whole where they are reduced as they come; fully_shard makes them in bf16
        and adds them to their sums block by block.
        """
        whole = self.shards_gradients | self.has_late_gradients
        made = np.where(whole, self.gradient_bytes, 2.0 * self.kernels.fully_sharded)
        return made * self.block_params

    @cached_property
    def gathering_bytes(self) -> Array:
        """Weights of the two blocks that ZeRO 3 gathers at a time, 2 bytes each, and the bucket in
        which ZeRO 2 and 3 collect gradients.
        """
        weights = np.where(self.layouts.zero_stage == 3, 4 * self.block_params, 0.0)
        return weights + self.layouts.where(self.shards_gradients, self.kernels.bucket_bytes, 0.0)
