"""Memory of one training step: bytes per device, by term and by pipeline device, for any number of layouts at once.

What a device holds, in the order of `TERMS`. T = b s / c tokens of a micro-batch on one device; r' = r c ranks share
ZeRO's shards; q = t with sequence parallelism, else 1 (other letters: layouts.py).

- weights, gradients, optimizer: bytes per parameter of a `Convention`, divided by r' from ZeRO stage 3, 2, 1 on
  (ZeRO, arXiv 1910.02054, section 5). Under a pipeline gradients stay whole at any stage: engines sum them over all
  micro-batches and reduce once.
- activations: per layer and micro-batch, by tensor (Korthikanti et al., arXiv 2205.05198, table 2 and equations 1 to
  6, with grouped heads and gated feed-forward counted from shapes), times the micro-batches in flight.
- embedding_logits: what only the first and last stage keep: dropout mask of the embedding, input of the final norm
  and of the output projection, fp32 logits (ibid., section 4.3).
- workspace: one layer made again for its backward pass plus its gradients, or the gradients of the logits, whichever
  is larger, since the two are never there together.
- buffers: pipeline messages, gathered weights and whole gradients of ZeRO, key/value blocks of context parallelism.
- reserve: everything not modelled (`Reserve`).
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from cluster.record import ConfigError, Record, field_doc
from kit.estimate.layouts import RECOMPUTE, SCHEDULES, Array, Layouts

TERMS = ("weights", "gradients", "optimizer", "activations", "embedding_logits", "workspace", "buffers")
_NONE, _SELECTIVE, _FULL = (RECOMPUTE.index(name) for name in ("none", "selective", "full"))
_CODE = {name: SCHEDULES.index(name) for name in SCHEDULES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convention(Record):
    """Bytes per parameter: how a paper or a program counts the model state."""

    name: str = field_doc("where it comes from")
    weights: float = field_doc("bytes of the weights used in matrix products")
    gradients: float | None = field_doc("bytes of a gradient; none: as each layout says", default=None)
    optimizer: float = field_doc("bytes of master weights and moments")


CONVENTIONS = {
    # bf16 weight; fp32 (or bf16) gradient; fp32 master weight and two moments: ZeRO paper, section 3.1.
    "mixed_precision": Convention(name="mixed precision Adam, 16 or 18 B", weights=2, optimizer=12),
    # Frontier paper, arXiv 2312.12705: the parts of its memory table (weights 2 + master copy 4, gradient 4, one
    # moment 4) add up to 14 ...
    "frontier_14": Convention(name="Frontier paper, sum of its parts, 14 B", weights=6, gradients=4, optimizer=4),
    # ... while its text says 24; what the parts leave out is counted as optimizer here.
    "frontier_24": Convention(name="Frontier paper, as stated, 24 B", weights=6, gradients=4, optimizer=14),
    # DeepSpeed's BF16_Optimizer keeps the bf16 gradient beside its fp32 sum.
    "deepspeed_bf16": Convention(name="DeepSpeed BF16_Optimizer, 20 B", weights=2, gradients=6, optimizer=12),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels(Record):
    """What a code base keeps for the backward pass beyond the shapes of the model."""

    dropout: bool = field_doc("keeps masks of dropout, in models without gate")
    score_bytes: float = field_doc("kept of one attention score where attention is not fused, dropout not counted")
    norm_bytes: float = field_doc("kept of one input of an RMSNorm that is not fused")
    fused_gate: bool = field_doc("silu(gate) * up is one kernel, so silu(gate) is not kept")
    selective: Literal["attention", "elementwise"] = field_doc(
        "what selective recompute makes again: the core of attention, or all but matrix products and attention"
    )
    gathered_inputs: bool = field_doc("sequence parallelism keeps whole inputs of matrix products, not their parts")
    gathered_logits: bool = field_doc("each tensor parallel rank computes the loss over the whole vocabulary")
    logit_bytes: float = field_doc("of one logit at the peak of the loss: bf16, fp32, softmax, gradient")


MEGATRON = Kernels(dropout=True, score_bytes=2, norm_bytes=8, fused_gate=True, selective="attention", gathered_inputs=False, gathered_logits=False, logit_bytes=10)
KIT = Kernels(dropout=False, score_bytes=2, norm_bytes=8, fused_gate=False, selective="elementwise", gathered_inputs=True, gathered_logits=False, logit_bytes=10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes by term of one pipeline device, for each layout."""

    weights: Array
    gradients: Array
    optimizer: Array
    activations: Array
    embedding_logits: Array
    workspace: Array
    buffers: Array

    @property
    def total(self) -> Array:
        """Sum of the terms, reserve not included."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.embedding_logits + self.workspace + self.buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reserve(Record):
    """What a device uses as a function of what is modelled, and how sure that is: four fitted numbers.

    used = factor x modelled + extra_bytes: CUDA or HIP context, communication library, fragmentation, temporaries.
    Probability of running out = 1 / (1 + (capacity / used)^sharpness).
    """

    factor: float = field_doc("of the modelled bytes")
    extra_bytes: float = field_doc("of a device, whatever it holds")
    sharpness: float = field_doc("odds of running out change by this power of used / capacity")
    source: str = field_doc("rows that it was fitted to")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 <= self.factor <= 2 or self.extra_bytes < 0 or self.sharpness <= 0:
            raise ConfigError(
                f"reserve: factor {self.factor:.3g}, extra_bytes {self.extra_bytes:.3g} or sharpness "
                f"{self.sharpness:.3g} is not allowed. Give a factor from 0.5 to 2, bytes from 0 and a power above 0."
            )

    def used_bytes(self, modelled_bytes: Array) -> Array:
        """Returns bytes that a device shows as used."""
        return self.factor * modelled_bytes + self.extra_bytes

    def out_of_memory_probability(self, modelled_bytes: Array, device_bytes: float) -> Array:
        """Returns the probability, 0 to 1, that a run with these modelled bytes stops for lack of memory."""
        return 1 / (1 + (device_bytes / self.used_bytes(modelled_bytes)) ** self.sharpness)


RESERVE = Reserve(factor=1.08, extra_bytes=6e9, sharpness=20.0, source="placeholder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device of many layouts: on the first and on the last pipeline device, one of which is the heaviest.

    With equal stages no device between them holds more than the first: it has as many layers, no embedding, and no
    more micro-batches in flight.
    """

    first: StageMemory
    last: StageMemory
    reserve: Reserve

    @property
    def modelled_bytes(self) -> Array:
        """Bytes of the heaviest device, reserve not included."""
        return np.maximum(self.first.total, self.last.total)

    @property
    def used_bytes(self) -> Array:
        """Bytes of the heaviest device, reserve included: what a monitor would show."""
        return self.reserve.used_bytes(self.modelled_bytes)

    def out_of_memory_probability(self, device_bytes: float) -> Array:
        """Returns the probability, 0 to 1, of running out on devices of `device_bytes`."""
        return self.reserve.out_of_memory_probability(self.modelled_bytes, device_bytes)

    def terms(self, stage: Literal["first", "last", "heaviest"] = "heaviest") -> dict[str, Array]:
        """Returns bytes by term, `reserve` last; their sum is that stage's `used_bytes`."""
        first, last = self.first.total, self.last.total
        use_last = {"first": first != first, "last": last == last, "heaviest": last > first}[stage]
        terms = {name: np.where(use_last, getattr(self.last, name), getattr(self.first, name)) for name in TERMS}
        total = np.where(use_last, last, first)
        return terms | {"reserve": self.reserve.used_bytes(total) - total}


def memory(
    layouts: Layouts,
    *,
    kernels: Kernels = MEGATRON,
    convention: Convention = CONVENTIONS["mixed_precision"],
    reserve: Reserve = RESERVE,
) -> Memory:
    """Returns the bytes that each layout needs on its first, last and heaviest pipeline device.

    Layers that do not divide over the stages are rounded up.

    Args:
        layouts: any number of them.
        kernels: what the code base keeps; flash attention, fused norms and the width of gradients are in `layouts`.
        convention: bytes per parameter.
        reserve: for everything not modelled.
    """
    shared = _Shared(layouts, kernels, convention)
    first = shared.stage(0.0, is_first=True, is_last=shared.folded)
    last = shared.stage(layouts.pipeline_parallel - 1, is_first=layouts.pipeline_parallel == 1, is_last=~shared.zbv)
    return Memory(first=first, last=last, reserve=reserve)


def memory_by_stage(
    layouts: Layouts,
    *,
    layers: Array | None = None,
    kernels: Kernels = MEGATRON,
    convention: Convention = CONVENTIONS["mixed_precision"],
) -> StageMemory:
    """Returns the bytes on every pipeline device of one layout, [pipeline_parallel] per term.

    Args:
        layouts: exactly one.
        layers: transformer layers on each device, where they are not equal.
        kernels: as in `memory`.
        convention: as in `memory`.

    Raises:
        ConfigError: more than one layout, or `layers` does not have one number per pipeline device.
    """
    if len(layouts) != 1:
        raise ConfigError(f"memory_by_stage: got {len(layouts)} layouts. Select one: layouts.select([i]).")
    stages = int(layouts.pipeline_parallel.item())
    if layers is not None and np.shape(layers) != (stages,):
        raise ConfigError(f"memory_by_stage.layers: {np.shape(layers)} numbers for {stages} pipeline devices.")
    shared = _Shared(layouts, kernels, convention)
    if layers is not None:
        shared.layers = np.asarray(layers, dtype=float)
    index = np.arange(stages, dtype=float)
    is_last = np.where(shared.zbv, index == 0, index == stages - 1)
    memory = shared.stage(index, is_first=index == 0, is_last=is_last)
    return StageMemory(**{name: np.broadcast_to(getattr(memory, name), (stages,)) for name in TERMS})


def in_flight(layouts: Layouts, stage: Any) -> Array:
    """Returns the most micro-batches whose activations pipeline device `stage` holds at once, in whole devices' worth.

    gpipe m; 1f1b min(m, p - i) (arXiv 2104.04473, section 2.2); interleaved ((v-1) p + 2 (p-i-1) + 1) / v, at most m
    (ibid.; p + (p-1)/v on the first); ZB-H1 min(m, p) on every device, since delayed weight gradients fill what later
    devices save (arXiv 2401.10241, section 3.1), and for v > 1 as its interleaved form; ZBV min(m, p) (ibid.).
    """
    m, p, v = layouts.num_microbatches, layouts.pipeline_parallel, layouts.virtual_stages
    code = layouts.schedule
    one_stage = np.where(code == _CODE["1f1b"], p - stage, np.where(code == _CODE["gpipe"], m, p))
    virtual = ((v - 1) * p + 2 * (p - stage - 1) + 1) / v
    many = np.where(code == _CODE["zbv"], p, virtual)
    return np.minimum(m, np.where(v > 1, many, one_stage))


class _Shared:
    """What the stages of a layout have in common."""

    def __init__(self, layouts: Layouts, kernels: Kernels, convention: Convention) -> None:
        self.layouts, self.kernels, self.convention = layouts, kernels, convention
        t, p, v = layouts.tensor_parallel, layouts.pipeline_parallel, layouts.virtual_stages
        h, f, gated = layouts.hidden_size, layouts.ffn_hidden_size, layouts.gated
        kv = h * (layouts.num_kv_heads / layouts.num_heads)
        self.zbv = layouts.schedule == _CODE["zbv"]
        self.folded = (p == 1) | self.zbv
        self.layers = np.ceil(layouts.num_layers / (p * v)) * v
        self.tokens = layouts.micro_batch_size * layouts.sequence_length / layouts.context_parallel
        self.sequence = np.where(layouts.sequence_parallel, t, 1.0)
        # Weights of one block: matrices, and for GPT-style blocks (no gate) biases and LayerNorm's second vector.
        plain = ~gated if gated.dtype == bool else gated == 0
        self.block_params = (h * (2 * h + 2 * kv) + (2 + gated) * h * f + plain * (h + 2 * kv + f)) / t
        self.block_params = self.block_params + (2 + 4 * plain) * h
        self.plain, self.table = plain, h * layouts.vocab_size / t
        self.shards = layouts.data_parallel * layouts.context_parallel
        self._activations(layouts, kernels, kv, plain)

    def _activations(self, layouts: Layouts, kernels: Kernels, kv: Array, plain: Array) -> None:
        """Bytes per token kept for one layer, and made again in its backward pass."""
        t, q, h = layouts.tensor_parallel, self.sequence, layouts.hidden_size
        f, gated, a = layouts.ffn_hidden_size, layouts.gated, layouts.num_heads
        inputs = 4 * h / (1.0 if kernels.gathered_inputs else q)  # of the query and of the feed-forward matrices
        # A fused norm keeps its input; otherwise RMSNorm keeps an fp32 copy and the fp32 normalised values.
        fused = layouts.fused_norm | plain
        norms = np.where(fused, 4.0, 2 * kernels.norm_bytes) * (h / q)
        masks = 2 * h / q * plain if kernels.dropout else 0.0
        score_bytes = kernels.score_bytes + 3 * plain if kernels.dropout else kernels.score_bytes
        core = np.where(layouts.flash_attention > 0, 4 * a, score_bytes * a * layouts.sequence_length)
        core = core / t
        heads = (4 * h + 4 * kv) / t  # query, key, value and the result of attention
        hidden = (2 + gated * (1.0 if kernels.fused_gate else 2.0)) * (2 * f / t)
        self.layer_whole = inputs + norms + masks + core + heads + hidden
        shared_input = np.where(fused, 2.0, 0.0) * (h / q)
        if kernels.selective == "attention":
            again = np.where(layouts.flash_attention > 0, 0.0, core)
            kept = self.layer_whole - again
        else:
            kept = 2 * h / q + 4 * h + heads + 2 * (1 + gated) * f / t + 4 * a / t
            again = inputs + norms - shared_input + gated * (2 * h + 2 * kv) / t + 2 * (1 + gated) * f / t
        code = layouts.recompute
        self.layer_kept = np.where(code == _NONE, self.layer_whole, np.where(code == _FULL, 2 * h / q, kept))
        again = np.where(code == _NONE, 0.0, np.where(code == _FULL, self.layer_whole - shared_input, again))
        self.layer_work = again + 4 * f / t  # beside two gradients as wide as the feed-forward block

    def stage(self, stage: Any, *, is_first: Any, is_last: Any) -> StageMemory:
        """Returns the terms of pipeline device `stage`."""
        layouts, h, q, tokens = self.layouts, self.layouts.hidden_size, self.sequence, self.tokens
        piped, zero = layouts.pipeline_parallel > 1, layouts.zero_stage
        positions = self.plain * h * layouts.sequence_length
        head = self.table * (piped | ~(layouts.tied_embeddings > 0)) + (1 + self.plain) * h
        params = self.layers * self.block_params + is_first * (self.table + positions) + is_last * head
        sharded = params / self.shards
        gradient_bytes = layouts.gradient_bytes if self.convention.gradients is None else self.convention.gradients
        flying = in_flight(layouts, stage)
        logits = tokens * layouts.vocab_size / (1.0 if self.kernels.gathered_logits else layouts.tensor_parallel)
        ends = is_first * self.plain * (h / q) * flying + is_last * (4 * h / q)
        # Held as long as a message may be under way: scattered over tensor parallel ranks, as Megatron sends it.
        handed_on = piped * (2 * h / layouts.tensor_parallel) * flying
        gathered = self.block_params * (np.where(zero == 3, 4.0, 0.0) + (zero >= 2) * ~piped * gradient_bytes)
        messages = piped * (8 * h / q) + (layouts.context_parallel > 1) * (8 * h)
        loss = is_last * (self.kernels.logit_bytes - 4) * logits
        return StageMemory(
            weights=self.convention.weights * np.where(zero == 3, sharded, params),
            gradients=gradient_bytes * np.where((zero >= 2) & ~piped, sharded, params),
            optimizer=self.convention.optimizer * np.where(zero >= 1, sharded, params),
            activations=tokens * (flying * self.layers * self.layer_kept + handed_on),
            embedding_logits=tokens * ends + is_last * 4 * logits,
            workspace=np.maximum(tokens * self.layer_work, loss),
            buffers=tokens * messages + gathered,
        )
