"""Memory of one training step: bytes per device, by term and by pipeline device, for any number of
layouts at once.

What a device holds. T = b s / c tokens of a micro-batch on one device; r c ranks share ZeRO's
shards; q = t with sequence parallelism, else 1 (other letters: layouts.py).

- weights, gradients, optimizer: bytes per parameter of a `Convention`, divided by r c from ZeRO
  stage 3, 2, 1 on (ZeRO, arXiv 1910.02054, section 5). Under a pipeline gradients stay whole at any
  stage: engines sum them over all micro-batches and reduce once.
- activations: what each layer keeps of each micro-batch in flight (`activations.py`), and the
  messages to the next stage for as long as they may be under way.
- embedding_logits: what only the first and last stage keep: mask of the embedding's dropout, inputs
  of the final norm and of the output projection, fp32 logits (Korthikanti et al., arXiv 2205.05198,
  section 4.3).
- workspace: one layer made again for its backward pass and its gradients, or the copies of the
  logits that the loss needs, whichever is larger: the logits are gone when the first layer's
  backward pass begins. Where the loss is computed in chunks: those of one chunk, the gradient of
  its input, and where there are several the sum of that of the output projection (fp32).
- buffers: pipeline messages, gathered weights and whole gradients of ZeRO, key/value blocks of
  context parallelism.
- late, in the place of activations that are gone: the gradients of a single micro-batch, where the
  code base makes them anew each time; the copy in which sums of gradients are reduced. Counted in
  the workspace where they are larger.
- reserve: everything not modelled (`out_of_memory.py`).
"""

import dataclasses
from typing import Any

import numpy as np

from cluster.record import ConfigError, Record, field_doc
from kit.estimate.theory.activations import KIT, Kernels, in_flight, layer_activations
from kit.estimate.theory.layouts import EXCHANGES, SCHEDULES, Array, Layouts
from kit.estimate.theory.out_of_memory import RESERVE, Reserve

STATE = ("weights", "gradients", "optimizer")
DYNAMIC = ("activations", "embedding_logits", "workspace", "buffers")
TERMS = (*STATE, *DYNAMIC)
_GPIPE, _ZBV = SCHEDULES.index("gpipe"), SCHEDULES.index("zbv")


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
    # After a step skipped for overflow, ZeRO 1 of DeepSpeed before 0.13.2
    # (runtime/zero/stage_1_and_2.py at 0.10.0) has Adam's moments, made before the first step
    # (`initialize_optimizer_states`), no gradients (`step`), but still the fp16 copy of those of
    # its part: `_link_all_hp_params` gave each weight the dictionary that `step` replaces.
    "deepspeed_fp16_skipped": Convention(
        name="after a skipped step, 16 B", weights=2, gradients=0, optimizer=14
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes by term of one pipeline device for each layout, or of each pipeline device of one
    layout.
    """

    params: Array
    """Weights that the device holds, sharing among replicas aside."""
    bytes_per_param: dict[str, Array]
    """Of weights, gradients and optimizer, sharing among replicas included."""
    activations: Array
    embedding_logits: Array
    workspace: Array
    buffers: Array

    @property
    def state(self) -> Array:
        """Weights, gradients and optimizer: allocated once, before the first step."""
        return self.params * self.bytes_per_param["state"]

    def term(self, name: str) -> Array:
        """Returns the bytes of one of `TERMS`."""
        return self.params * self.bytes_per_param[name] if name in STATE else getattr(self, name)

    @property
    def dynamic(self) -> Array:
        """The other terms: allocated and freed in every step."""
        return self.activations + self.embedding_logits + self.workspace + self.buffers

    @property
    def total(self) -> Array:
        """Sum of the terms, reserve not included."""
        return self.state + self.dynamic

    def with_reserve(self, reserve: Reserve) -> dict[str, Array]:
        """Returns bytes by term, `reserve` last; their sum is what a device uses."""
        left = reserve.used_bytes(self.state, self.dynamic) - self.total
        return {name: self.term(name) for name in TERMS} | {"reserve": left}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device of many layouts, on the pipeline devices of which one is the heaviest."""

    first: StageMemory
    last: StageMemory
    second: StageMemory | None
    """Only where some layout has fewer layers on its first and last stage."""
    reserve: Reserve

    @property
    def used_bytes(self) -> Array:
        """Bytes of the heaviest device, reserve included: what a monitor shows."""
        used = np.maximum(self._used(self.first), self._used(self.last))
        return used if self.second is None else np.maximum(used, self._used(self.second))

    def out_of_memory_probability(self, device_bytes: float) -> Array:
        """Returns the probability, 0 to 1, of running out on devices of `device_bytes`."""
        return self.reserve.out_of_memory_probability(self.used_bytes, device_bytes)

    def terms(self) -> dict[str, Array]:
        """Returns bytes of the heaviest device by term, `reserve` last; their sum is what it
        uses.
        """
        stages = [each for each in (self.first, self.last, self.second) if each is not None]
        used = np.stack(np.broadcast_arrays(*(self._used(each) for each in stages)))
        heaviest = used.argmax(axis=0)[None]
        columns = [each.with_reserve(self.reserve) for each in stages]
        return {
            name: np.take_along_axis(
                np.stack([np.broadcast_to(column[name], used.shape[1:]) for column in columns]),
                heaviest,
                axis=0,
            )[0]
            for name in columns[0]
        }

    def _used(self, stage: StageMemory) -> Array:
        return self.reserve.used_bytes(stage.state, stage.dynamic)


def memory(
    layouts: Layouts,
    *,
    kernels: Kernels = KIT,
    convention: Convention = CONVENTIONS["mixed_precision"],
    reserve: Reserve = RESERVE,
) -> Memory:
    """Returns the bytes that each layout needs on its first, last and heaviest pipeline device.

    With equal stages no device holds more than the first or the last: those between have as many
    layers, no embedding, and no more micro-batches in flight. Layers that do not divide over p are
    taken as embedding and output each in the place of a layer, where that makes them divide (BLOOM,
    Llama 3), else rounded up. `kernels` is what the code base keeps; flash attention, fused norms
    and the width of gradients are in `layouts`.
    """
    stages = _Stages(layouts, kernels, convention)
    p, zbv = layouts.pipeline_parallel, layouts.schedule == _ZBV
    first = stages.memory(0.0, is_first=True, is_last=(p == 1) | zbv)
    last = stages.memory(p - 1, is_first=p == 1, is_last=(p == 1) | ~zbv)
    second = stages.memory(1.0, is_first=False, is_last=False) if np.any(stages.balanced) else None
    return Memory(first=first, last=last, second=second, reserve=reserve)


def memory_by_stage(
    layouts: Layouts,
    *,
    layers: Array | None = None,
    kernels: Kernels = KIT,
    convention: Convention = CONVENTIONS["mixed_precision"],
) -> StageMemory:
    """Returns the bytes on every pipeline device of one layout, arrays of shape
    (pipeline_parallel,).

    `layers` are the transformer layers on each device, where they are not equal; the rest as in
    `memory`.

    Raises:
        ConfigError: more than one layout, or `layers` does not have one number per pipeline device.
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
    return _Stages(layouts, kernels, convention).memory(
        index, is_first=index == 0, is_last=is_last, layers=layers
    )


class _Stages:
    """What the pipeline devices of a layout have in common, and the memory of each."""

    def __init__(self, layouts: Layouts, kernels: Kernels, convention: Convention) -> None:
        x = self.layouts = layouts
        self.kernels, self.layer = kernels, layer_activations(layouts, kernels)
        self.tokens = x.micro_batch_size * x.sequence_length / x.context_parallel
        self.piped = x.pipeline_parallel > 1
        # GPT-style: LayerNorm, biases, learned positions.
        self.plain = 1 - x.gated.astype(x.hidden_size.dtype)
        per_stage = np.ceil(x.num_layers / (x.pipeline_parallel * x.virtual_stages))
        self.layers = per_stage * x.virtual_stages
        self.balanced = per_stage * x.pipeline_parallel * x.virtual_stages == x.num_layers + 2
        self.block_params, self.embedding_params, self.head_params = self._params()
        self.sent, self.messages = self._messages()
        # Under ZeRO 3 the output, used last and first, stays gathered
        # (`kit.parallel.data.shard_ends`).
        output = 2 * x.hidden_size * x.vocab_size / x.tensor_parallel
        self.output = np.where(x.zero_stage == 3, output, 0 * output) * kernels.fully_sharded
        self.kept_logits, self.loss = self._logits()
        self.bytes_per_param, self.gathered, self.late, self.made = self._shares(convention)

    def _params(self) -> tuple[Array, Array, Array]:
        """Returns the weights of a layer, of what the first device has beside its layers, and of
        what the last has.
        """
        x, h, f, plain = (
            self.layouts,
            self.layouts.hidden_size,
            self.layouts.ffn_hidden_size,
            self.plain,
        )
        kv = h * (x.num_kv_heads / x.num_heads)
        matrices = h * (2 * h + 2 * kv) + (3 - plain) * h * f + plain * (h + 2 * kv + f)
        norms, table = (2 + 4 * plain) * h, h * x.vocab_size / x.tensor_parallel
        has_own_table = self.piped | np.logical_not(x.tied_embeddings)
        positions = plain * h * x.sequence_length
        head = (
            table * has_own_table
            + (1 + plain) * h
            + positions * (self.piped & self.kernels.tied_positions)
        )
        return matrices / x.tensor_parallel + norms, table + positions, head

    def _messages(self) -> tuple[Array, Array]:
        """Returns bytes of what is on its way to the next stage, per token, and of the buffers
        to send and receive.
        """
        x, h, t = self.layouts, self.layouts.hidden_size, self.layouts.tensor_parallel
        buffers = np.where(self.piped, 8 * h / self.layer.sequence, 0.0) * self.tokens
        # Round a ring: keys and values that compute and those that arrive; all to all: query, key,
        # value, result.
        kv = h * (x.num_kv_heads / x.num_heads)
        context = np.where(x.context_exchange == EXCHANGES.index("ring"), 8 * kv, 4 * (h + kv)) / t
        buffers += (x.context_parallel > 1) * context * self.tokens
        # Cut over tensor ranks, as Megatron and DeepSpeed send.
        return (
            np.where(self.piped, 2 * h / t, 0.0),
            buffers,
        )

    def _logits(self) -> tuple[Array, Array]:
        """Returns bytes per token of the last device: logits kept for the backward pass, and the
        loss's workspace.
        """
        x, kernels, vocab = self.layouts, self.kernels, self.layouts.vocab_size
        logits = vocab / (1.0 if kernels.gathered_logits else x.tensor_parallel)
        at_once = np.minimum(vocab, kernels.chunk_logits / self.tokens)
        summed = np.where(at_once < vocab, 4 * x.hidden_size * vocab / self.tokens, 0.0)
        chunk = kernels.chunk_logit_bytes * at_once + summed + 2 * x.hidden_size
        chunked = (kernels.chunk_logits > 0) & ~self.piped & (x.tensor_parallel == 1)
        return np.where(chunked, 0.0, 4 * logits), np.where(
            chunked, chunk, (kernels.logit_bytes - 4) * logits
        )

    def _shares(self, convention: Convention) -> tuple[dict[str, Array], Array, Array, Array]:
        """Returns bytes per parameter with ZeRO's sharing, bytes beside its shards, late ones, and
        a block's gradients.

        Late ones are per parameter and come when activations are gone.
        """
        x, kernels = self.layouts, self.kernels
        gradient = x.gradient_bytes
        if convention.gradients is not None:
            gradient = np.full_like(gradient, convention.gradients)
        shard = 1 / x.num_shards
        none, cut = 0 * shard, ~self.piped & (x.zero_stage >= 2)
        single = ~self.piped & (x.num_microbatches == 1) & kernels.fully_sharded
        weights = convention.weights * np.where(
            x.zero_stage == 3, none if kernels.fully_sharded else shard, 1.0
        )
        late = np.where(single, gradient * np.where(x.zero_stage >= 1, shard, 1.0) - weights, none)
        late = np.where(x.zero_stage == 1, late + kernels.reduction_bytes, late)
        copy = 0.0 if convention.gradients is not None else kernels.gradient_copy_bytes
        gradients = np.where(single, none, gradient * np.where(cut, shard, 1.0))
        gradients = np.where(x.zero_stage < 3, gradients + copy, gradients)
        optimizer = convention.optimizer * np.where(x.zero_stage >= 1, shard, 1.0)
        state = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        state["state"] = weights + gradients + optimizer
        # Stage 3 gathers the weights of two blocks at a time. One block's gradients are whole where
        # they are reduced as they come; fully_shard makes them in bf16 and adds them to their sums
        # block by block.
        gathered = np.where(x.zero_stage == 3, 4 * self.block_params, none) + np.where(
            cut, kernels.bucket_bytes, none
        )
        made = 2.0 if kernels.fully_sharded else 0.0
        return (
            state,
            gathered,
            late,
            np.where(cut | single, gradient, none + made) * self.block_params,
        )

    def memory(
        self, stage: Any, *, is_first: Any, is_last: Any, layers: Array | None = None
    ) -> StageMemory:
        """Returns the terms of pipeline device `stage`; arguments broadcast against the layouts."""
        x, tokens, residual = (
            self.layouts,
            self.tokens,
            self.layouts.hidden_size / self.layer.sequence,
        )
        if layers is None:  # embedding and output each in the place of one, where that is how
            layers = self.layers - self.balanced * np.add(is_first, is_last, dtype=tokens.dtype)
        params = layers * self.block_params + np.where(is_last, self.head_params, 0.0)
        params = params + np.where(is_first, self.embedding_params, 0.0)
        flying = in_flight(x, stage)
        head = np.where(is_last, 4 * residual + self.kept_logits, 0.0)
        # All forward passes come first, the others' one at a time.
        gpipe = self.piped & (x.schedule == _GPIPE)
        ends = head * np.where(gpipe, x.num_microbatches, 1.0)
        if self.kernels.dropout:
            ends = ends + np.where(is_first, self.plain * residual * flying, 0.0)
        activations = tokens * flying * (layers * self.layer.kept + self.sent)
        again = tokens * (self.layer.workspace - head) + self.made
        workspace = np.maximum(again, tokens * np.where(is_last, self.loss, 0.0))
        return StageMemory(
            params=params,
            bytes_per_param=self.bytes_per_param,
            activations=activations,
            embedding_logits=tokens * ends,
            workspace=np.maximum(
                workspace, self.late * params + self.made - activations - tokens * ends
            ),
            buffers=self.messages + self.gathered + np.where(is_last, self.output, 0.0),
        )
