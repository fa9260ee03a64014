"""HLAT's Llama, made of NxD's layers. Weights have the names of HLAT's checkpoints, which are
Hugging Face's names with fused matrices.

Shape letters are those of `kit.model`: B micro-batch, T sequence, H hidden size, D head size, N
heads, K key/value heads, F feed-forward, V vocabulary. With tensor parallelism, N, K, F and V count
only this rank's part. With sequence parallelism, T counts only this rank's part, and the order is
[T, B, H]. `kit.engines.neuron.weights` defines what each tensor rank holds. Source:
github.com/awslabs/HLAT, 70b/modeling_llama_nxd.py, and arXiv 2404.10630.
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
"""Attention score of tokens that a token may not attend to. HLAT uses this number, since minus
infinity gives NaN in some cases of bf16 rounding."""


class NxdLlama(nn.Module):
    """The complete model, as `initialize_parallel_model` needs it: maps tokens and targets to the
    mean loss in nats.

    The loss is multiplied by `loss_scale`. Without a pipeline, the scale is 1 / number of
    micro-batches. In a pipeline it is 1, since NxD itself divides by this number.
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
        """Returns the loss. In a pipeline, returns (loss, logits), since NxD is configured for
        these two outputs.

        Both inputs are token numbers of shape [B, T]. `labels` are the next tokens of `input_ids`.
        """
        logits_BTV = self.lm_head(self.model(input_ids))
        loss = self.loss(logits_BTV, labels)
        return (loss, logits_BTV) if self.is_pipelined else loss


class NxdStack(nn.Module):
    """Embedding, all blocks and the final norm."""

    def __init__(self, spec: ModelSpec, plan: Plan, weights: RankWeights) -> None:
        super().__init__()
        self.embed_tokens = weights.embedding("embedding.tokens.weight")
        self.enter = NxdTurn(weights.nxd, weights.nxd.cut_sequence)
        # The rotary table is computed on the CPU, where fp32 represents positions of several
        # thousand exactly. On the device, fp32 may be cast to bf16.
        rotary_2TD = rotary_table(spec, spec.sequence_length, torch.device("cpu"))
        self.layers = nn.ModuleList(
            NxdBlock(spec, plan, weights, f"layers.{i}", rotary_2TD) for i in range(spec.num_layers)
        )
        self.norm = weights.unsplit(NxdNorm(spec, plan), "norm.weight")
        self.leave = NxdTurn(weights.nxd, weights.nxd.whole_sequence)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.enter(self.embed_tokens(input_ids))
        for layer in self.layers:
            x = layer(x)
        return self.leave(self.norm(x))


class NxdTurn(nn.Module):
    """Converts activations of the whole sequence, [B, T, H], into this rank's part of the sequence,
    [T, B, H], or back. Without sequence parallelism, the activations are returned unchanged.
    """

    def __init__(self, nxd: Nxd, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.nxd = nxd
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(x) if self.nxd.sequence_parallel else x


class NxdNorm(nn.Module):
    """Root-mean-square norm (RMSNorm) over the hidden size."""

    def __init__(self, spec: ModelSpec, plan: Plan) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.statistics = statistics_dtype(plan)
        self.weight = nn.Parameter(torch.ones(spec.hidden_size, dtype=weight_dtype(plan)))
        # If this attribute is True, NxD sums the weight's gradient over the parts of the sequence.
        self.weight.sequence_parallel_enabled = plan.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.statistics)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


class NxdCoreAttention(nn.Module):
    """Attention after the projections: softmax(Q K^T / sqrt(D)) V. A separate module, because
    selective recomputation computes this part again in the backward pass.
    """

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
    """Causal self-attention. One fused layer computes query, key and value."""

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
        """Splits the features of a projection into heads. Returns shape [B, heads, T, D]. T is the
        whole sequence even with sequence parallelism, since the projection layer has gathered the
        sequence.
        """
        order = (1, 2, 0, 3) if self.nxd.sequence_parallel else (0, 2, 1, 3)
        return x.unflatten(-1, (-1, self.head_size)).permute(order)


class NxdGate(nn.Module):
    """The product silu(gate) * up. A separate module, because selective recomputation computes this
    product again. The product is cheap, and its result is as large as the widest activations.
    """

    def forward(self, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        return F.silu(gate_BTF) * up_BTF


class NxdFeedForward(nn.Module):
    """The feed-forward layer down(silu(gate(x)) * up(x)). One fused layer computes gate and up."""

    def __init__(self, weights: RankWeights, name: str) -> None:
        super().__init__()
        self.gate_up_proj = weights.column(f"{name}.gate.weight", f"{name}.up.weight")
        self.gate = NxdGate()
        self.down_proj = weights.row(f"{name}.down.weight")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.gate(gate, up))


class NxdBlock(nn.Module):
    """One transformer block with norms before attention and feed-forward. Pipeline stages consist
    of whole blocks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        weights: RankWeights,
        name: str,
        rotary_2TD: Tensor,
    ) -> None:
        super().__init__()
        self.input_layernorm = weights.unsplit(NxdNorm(spec, plan), f"{name}.attention_norm.weight")
        self.self_attn = NxdAttention(spec, plan, weights, f"{name}.attention", rotary_2TD)
        self.post_attention_layernorm = weights.unsplit(
            NxdNorm(spec, plan), f"{name}.feed_forward_norm.weight"
        )
        self.mlp = NxdFeedForward(weights, f"{name}.feed_forward")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class NxdLoss(nn.Module):
    """Mean cross-entropy of logits that are split over the vocabulary. The loss is computed in
    fp32, as in both recipes of HLAT.
    """

    def __init__(self, nxd: Nxd, scale: float) -> None:
        super().__init__()
        self.nxd = nxd
        self.scale = scale

    def forward(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        # NxD overwrites its logits, so they are copied.
        logits_NV = logits_BTV.flatten(0, 1).to(torch.float32, copy=True)
        return (
            self.nxd.cross_entropy(logits=logits_NV, targets=labels_BT.flatten()).mean()
            * self.scale
        )


LEAVES = (NxdTurn, NxdNorm, NxdLoss)
"""Modules that NxD's tracer calls as a whole, in addition to blocks and NxD's own layers."""
RECOMPUTED = {"none": (), "selective": (NxdCoreAttention, NxdGate), "full": (NxdBlock,)}
"""Maps each value of `Plan.recompute` to the classes of the modules that the backward pass computes
again."""


def weight_dtype(plan: Plan) -> torch.dtype:
    """Returns the data type of weights and matrix products."""
    return torch.bfloat16 if plan.precision == "bf16" else torch.float32


def statistics_dtype(plan: Plan) -> torch.dtype:
    """Returns the data type of norms and softmax. It is fp32, as in HLAT's 70B recipe. The
    exception is bf16 at ZeRO stage 0, HLAT's 7B recipe, which computes everything except the loss
    in bf16.
    """
    return torch.bfloat16 if plan.precision == "bf16" and plan.zero_stage == 0 else torch.float32
