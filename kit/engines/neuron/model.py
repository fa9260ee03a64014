"""HLAT's Llama, of NxD's layers, under the names of its checkpoints (those of Hugging Face, with
fused matrices).

Shape letters as in `kit.model`; under tensor parallelism N, K, F, V are this rank's part, and with
sequence parallelism T is, in the order [T, B, H]. What tensor ranks hold is in
`kit.engines.neuron.weights`. Source: github.com/awslabs/HLAT, 70b/modeling_llama_nxd.py, and arXiv
2404.10630.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.neuron.adapter import Nxd
from kit.engines.neuron.weights import RankWeights
from kit.model import rotary_table, rotate

MASKED = -10_000.0
"""Added where a token may not look: HLAT's number; minus infinity gives NaN in some of bf16's
rounding."""


class NxdLlama(nn.Module):
    """The whole model, as `initialize_parallel_model` takes it; tokens and targets in, mean loss in
    nats out.

    The loss is multiplied by `loss_scale`: 1 / micro-batches where NxD does not divide by them
    itself.
    """

    def __init__(
        self, spec: ModelSpec, plan: Plan, weights: RankWeights, loss_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.is_pipelined = plan.pipeline_parallel > 1
        self.model = NxdStack(spec, plan, weights)
        self.lm_head = weights.column("output.weight", gathered=True)
        self.loss = NxdLoss(weights.nxd, loss_scale)

    def forward(self, input_ids: Tensor, labels: Tensor):
        """Returns the loss; in a pipeline (loss, logits), as NxD's specification of outputs has it.

        Both are [B, T]; labels are the next token of each.
        """
        logits_BTV = self.lm_head(self.model(input_ids))
        loss = self.loss(logits_BTV, labels)
        return (loss, logits_BTV) if self.is_pipelined else loss


class NxdStack(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, spec: ModelSpec, plan: Plan, weights: RankWeights) -> None:
        super().__init__()
        self.embed_tokens = weights.embedding("embedding.tokens.weight")
        self.enter = NxdTurn(weights.nxd, weights.nxd.cut_sequence)
        # On the CPU: only its fp32 holds positions up to the thousands whatever is cast on the
        # device.
        rotary_2TD = rotary_table(spec, spec.sequence_length, torch.device("cpu"))
        self.layers = nn.ModuleList(
            NxdBlock(spec, plan, weights, f"layers.{i}", rotary_2TD) for i in range(spec.num_layers)
        )
        self.norm = weights.whole_on_all(NxdNorm(spec, plan), "norm.weight")
        self.leave = NxdTurn(weights.nxd, weights.nxd.whole_sequence)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.enter(self.embed_tokens(input_ids))
        for layer in self.layers:
            x = layer(x)
        return self.leave(self.norm(x))


class NxdTurn(nn.Module):
    """Between whole activations [B, T, H] and those that blocks hand on, one way or the other."""

    def __init__(self, nxd: Nxd, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.nxd = nxd
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(x) if self.nxd.sequence_parallel else x


class NxdNorm(nn.Module):
    """RMSNorm."""

    def __init__(self, spec: ModelSpec, plan: Plan) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.statistics = statistics_dtype(plan)
        self.weight = nn.Parameter(torch.ones(spec.hidden_size, dtype=weight_dtype(plan)))
        # By this mark NxD adds up over the tensor ranks what each saw of the sequence.
        self.weight.sequence_parallel_enabled = plan.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.statistics)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


class NxdCoreAttention(nn.Module):
    """softmax(Q K^T / sqrt(D)) V: what selective recomputation computes again."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.statistics = statistics_dtype(plan)

    def forward(self, q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor) -> Tensor:
        length = q_BNTD.shape[-2]
        scores_BNTS = q_BNTD @ k_BNTD.transpose(2, 3) / math.sqrt(q_BNTD.shape[-1])
        future_TS = torch.ones((length, length), device=q_BNTD.device).triu(diagonal=1).bool()
        scores_BNTS = scores_BNTS.masked_fill(future_TS, MASKED)
        return scores_BNTS.softmax(-1, dtype=self.statistics).to(q_BNTD.dtype) @ v_BNTD


class NxdAttention(nn.Module):
    """Causal self-attention; query, key and value from one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        weights: RankWeights,
        name: str,
        rotary_2TD: Tensor,
    ) -> None:
        super().__init__()
        self.head_size = spec.head_size
        self.is_grouped = spec.num_kv_heads < spec.num_heads
        self.nxd = weights.nxd
        self.repeats = spec.num_heads // (spec.num_kv_heads * weights.copies)
        names = [f"{name}.{which}.weight" for which in ("query", "key", "value")]
        self.qkv_proj = weights.grouped(*names) if self.is_grouped else weights.column(*names)
        self.core_attn = NxdCoreAttention(plan)
        self.o_proj = weights.row(f"{name}.output.weight")
        self.register_buffer("rotary_2TD", rotary_2TD, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.qkv_proj(x)
        if not self.is_grouped:
            projected = projected.chunk(3, dim=-1)
        q, k, v = (self._heads(part) for part in projected)
        q_BNTD = rotate(q, self.rotary_2TD)  # pyright: ignore[reportArgumentType]
        k_BKTD = rotate(k, self.rotary_2TD)  # pyright: ignore[reportArgumentType]
        k_BNTD = k_BKTD.repeat_interleave(self.repeats, dim=1)
        v_BNTD = v.repeat_interleave(self.repeats, dim=1)
        y_BNTD = self.core_attn(q_BNTD, k_BNTD, v_BNTD)
        order = (2, 0, 1, 3) if self.nxd.sequence_parallel else (0, 2, 1, 3)
        return self.o_proj(y_BNTD.permute(order).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """Returns [B, heads, T, D]; in and out of sequence parallel layers, T is whole."""
        order = (1, 2, 0, 3) if self.nxd.sequence_parallel else (0, 2, 1, 3)
        return x.unflatten(-1, (-1, self.head_size)).permute(order)


class NxdGate(nn.Module):
    """silu(gate) * up: cheap, and as large as the widest activations, so selective recomputation
    drops it too.
    """

    def forward(self, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        return F.silu(gate_BTF) * up_BTF


class NxdFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up from one layer."""

    def __init__(self, weights: RankWeights, name: str) -> None:
        super().__init__()
        self.gate_up_proj = weights.column(f"{name}.gate.weight", f"{name}.up.weight")
        self.gate = NxdGate()
        self.down_proj = weights.row(f"{name}.down.weight")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.gate(gate, up))


class NxdBlock(nn.Module):
    """One pre-norm transformer block, the unit of which pipeline stages are made."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        weights: RankWeights,
        name: str,
        rotary_2TD: Tensor,
    ) -> None:
        super().__init__()
        self.input_layernorm = weights.whole_on_all(
            NxdNorm(spec, plan), f"{name}.attention_norm.weight"
        )
        self.self_attn = NxdAttention(spec, plan, weights, f"{name}.attention", rotary_2TD)
        self.post_attention_layernorm = weights.whole_on_all(
            NxdNorm(spec, plan), f"{name}.feed_forward_norm.weight"
        )
        self.mlp = NxdFeedForward(weights, f"{name}.feed_forward")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class NxdLoss(nn.Module):
    """Mean cross-entropy of logits cut over the vocabulary, in fp32 in both recipes."""

    def __init__(self, nxd: Nxd, scale: float) -> None:
        super().__init__()
        self.nxd = nxd
        self.scale = scale

    def forward(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        logits_NV = logits_BTV.flatten(0, 1).to(torch.float32, copy=True)  # NxD changes it in place
        return (
            self.nxd.cross_entropy(logits=logits_NV, targets=labels_BT.flatten()).mean()
            * self.scale
        )


LEAVES = (NxdTurn, NxdNorm, NxdLoss)
"""Besides blocks and NxD's own layers, what NxD's tracer takes as it is."""
RECOMPUTED = {"none": (), "selective": (NxdCoreAttention, NxdGate), "full": (NxdBlock,)}


def weight_dtype(plan: Plan) -> torch.dtype:
    """Returns what weights and matrix products are in."""
    return torch.bfloat16 if plan.precision == "bf16" else torch.float32


def statistics_dtype(plan: Plan) -> torch.dtype:
    """Returns what norms and softmax are computed in: fp32, as in HLAT's 70B, but for the pure
    bf16 of its 7B.
    """
    return torch.bfloat16 if plan.precision == "bf16" and plan.zero_stage == 0 else torch.float32
