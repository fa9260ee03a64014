"""Output projection and cross-entropy loss, computed together in chunks of tokens.

Logits of 16,384 tokens over a vocabulary of 50,000 need 11 GB with their copies. This is more than
the rest of a small model needs. With chunks, only the logits of one chunk exist at a time. The last
letters of a tensor's name are its dimensions: N tokens, R tokens of a chunk, H hidden, V
vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kit.config.plan import logits_at_once


class ZLoss:
    """The z-loss: weight x mean over the tokens of log(Z)^2, where Z is the denominator of the
    softmax. It keeps logits from drifting (PaLM, arXiv 2204.02311, section 5).

    The loss of each micro-batch contains it. `take` returns it alone, so that both are metrics.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.parts: list[Tensor] = []
        """Z-losses of the micro-batches since the last call of `take`."""

    def add(self, log_z_N: Tensor) -> Tensor:
        """Returns the z-loss of a micro-batch, and stores it for `take`. `log_z_N` has log(Z) of
        each token.
        """
        z_loss = self.weight * log_z_N.square().mean()
        self.parts.append(z_loss.detach())
        return z_loss

    def take(self) -> Tensor | None:
        """Returns the mean z-loss of the micro-batches since the last call, or None if there were
        none.
        """
        parts, self.parts = self.parts, []
        return torch.stack(parts).mean() if parts else None


def chunked_cross_entropy(
    x_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    compiled: bool = False,
    soft_cap: float | None = None,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """Returns the mean negative log-likelihood of `targets_N` in nats, fp32. The logits are the
    product of `x_NH` and the transpose of `weight_VH`.

    Up to rounding, the loss and its gradients are equal to those of
    `F.cross_entropy(F.linear(x, weight).float(), targets)`. No logits are recomputed. The gradients
    are computed in the forward pass, chunk by chunk, and summed in fp32, as in Liger Kernel's
    FusedLinearCrossEntropy (arXiv 2410.10989).

    Only one backward pass is possible. fp16 is unsupported, since the loss scale is known only in
    the backward pass. With `compiled`, all operations on logits are compiled into one kernel, which
    halves the time of these operations on a CPU. With a `soft_cap` c, logits x are replaced by
    c tanh(x / c). If `z_loss` is given, the result contains it.
    """
    gradients = torch.is_grad_enabled() and (x_NH.requires_grad or weight_VH.requires_grad)
    z_weight = 0.0 if z_loss is None else z_loss.weight
    options = (gradients, compiled, soft_cap, z_weight)
    found: Any = _ChunkedCrossEntropy.apply(x_NH, weight_VH, targets_N, *options)
    loss, added = found
    if z_loss is not None:
        z_loss.parts.append(added)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        gradients: bool,
        compiled: bool,
        soft_cap: float | None,
        z_weight: float,
    ) -> tuple[Tensor, Tensor]:
        rows = _rows(len(weight_VH), x_NH.device)
        dx_NH = torch.empty_like(x_NH if gradients else x_NH[:0])
        dweight_VH = None
        loss = x_NH.new_zeros((), dtype=torch.float32)
        log_z_squares = x_NH.new_zeros((), dtype=torch.float32)
        for start in range(0, len(x_NH), rows):
            chunk = slice(start, start + rows)
            targets_R1 = targets_N[chunk, None]
            softmax = _compiled_softmax() if compiled and gradients else _softmax_in_place
            logits_RV = F.linear(x_NH[chunk], weight_VH)
            slope_RV = None
            if soft_cap is not None:
                share_RV = torch.tanh(logits_RV / soft_cap)
                slope_RV = 1 - share_RV.square()
                logits_RV = soft_cap * share_RV
            d_RV, log_p_R1, log_z_R1 = softmax(logits_RV, targets_R1, z_weight)
            del logits_RV
            loss -= log_p_R1.sum()
            if z_weight:
                log_z_squares += log_z_R1.square().sum()
            if gradients:
                # The gradient of the summed loss by the logits is softmax - one-hot. At a target of
                # probability p it is p - 1, which expm1 computes from log p with one rounding.
                d_R1 = log_p_R1.expm1()
                if z_weight:
                    d_R1 += _z_factor(log_z_R1, z_weight) * log_p_R1.exp()
                d_RV.scatter_(1, targets_R1, d_R1.to(d_RV.dtype))
                if slope_RV is not None:
                    d_RV *= slope_RV
                torch.mm(d_RV, weight_VH, out=dx_NH[chunk])
                dweight_VH = _add_product(dweight_VH, d_RV.T, x_NH[chunk])
            del d_RV  # The memory is freed before the logits of the next chunk are allocated.
        ctx.gradients = dx_NH, dweight_VH
        z_loss = z_weight * log_z_squares / len(x_NH)
        ctx.mark_non_differentiable(z_loss)
        loss = loss / len(x_NH)
        return (loss + z_loss if z_weight else loss), z_loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dloss: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        # The stored gradients are scaled in place. They are removed, so that a second backward pass
        # fails instead of scaling them again.
        dx_NH, dweight_VH = ctx.gradients
        ctx.gradients = None
        share = dloss / len(dx_NH)
        dweight_VH = dweight_VH.mul_(share).to(dx_NH.dtype)
        return dx_NH.mul_(share), dweight_VH, None, None, None, None, None


def _z_factor(log_z_R1: Tensor, z_weight: float) -> Tensor:
    """Returns the factor f for which f x softmax is the gradient of the z-loss by the logits:
    2 x weight x log(Z), with the denominator Z of the softmax.
    """
    return 2 * z_weight * log_z_R1


def _softmax_in_place(
    logits_RV: Tensor, targets_R1: Tensor, z_weight: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors: probabilities of all tokens of the vocabulary, fp32 logarithms of the
    probabilities of the targets, and fp32 logarithms of the softmax's denominator. The
    probabilities overwrite the logits to save memory.

    With a z-loss, the probabilities are multiplied by 1 + `_z_factor`. They then have the gradients
    of both losses, except at the targets.
    """
    log_p_RV = logits_RV.log_softmax(-1, dtype=torch.float32)
    log_p_R1 = log_p_RV.gather(1, targets_R1)
    log_z_R1 = logits_RV.gather(1, targets_R1).float() - log_p_R1
    if not z_weight:
        return torch.exp(log_p_RV, out=logits_RV), log_p_R1, log_z_R1
    # The product is computed in fp32, since 1 + a small factor is 1 in bf16.
    p_RV = log_p_RV.exp_().mul_(1 + _z_factor(log_z_R1, z_weight))
    return logits_RV.copy_(p_RV), log_p_R1, log_z_R1


def _softmax(
    logits_RV: Tensor, targets_R1: Tensor, z_weight: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of `_softmax_in_place`. This version is compiled. The compiled function
    does not write the logarithms of all probabilities to memory.
    """
    log_p_RV = logits_RV.log_softmax(-1, dtype=torch.float32)
    log_p_R1 = log_p_RV.gather(1, targets_R1)
    log_z_R1 = logits_RV.gather(1, targets_R1).float() - log_p_R1
    p_RV = log_p_RV.exp()
    if z_weight:
        p_RV = p_RV * (1 + _z_factor(log_z_R1, z_weight))
    return p_RV.to(logits_RV.dtype), log_p_R1, log_z_R1


@functools.cache
def _compiled_softmax() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]:
    # Shapes may be static, since only two occur: that of whole chunks, and that of the last chunk.
    return torch.compile(_softmax, dynamic=False)


def _rows(vocab_size: int, device: torch.device) -> int:
    """Returns the number of tokens per chunk. On a GPU it depends on the size of its memory."""
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    rows = max(1, logits_at_once(memory) // vocab_size)
    if rows > 128:
        rows -= rows % 128  # GPUs compute matrix products in tiles of up to 128 rows.
    return rows


def _add_product(total_VH: Tensor | None, left_VR: Tensor, right_RH: Tensor) -> Tensor:
    """Returns `total_VH` + `left_VR` x `right_RH`, in fp32 or fp64. If `total_VH` is None, returns
    the product in the dtype of its operands. `total_VH` may be overwritten.
    """
    if total_VH is None:
        return left_VR @ right_RH
    if right_RH.dtype in (torch.float32, torch.float64):
        return total_VH.addmm_(left_VR, right_RH)
    total_VH = total_VH.float()
    if _adds_to_fp32(right_RH.device, right_RH.dtype):
        return torch.addmm(total_VH, left_VR, right_RH, out_dtype=torch.float32, out=total_VH)
    return total_VH.add_(left_VR @ right_RH)


@functools.cache
def _adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch can add a matrix product of this dtype to an fp32 sum in one kernel.
    Only some versions of torch can, and only on GPUs.
    """
    total = torch.ones(16, 16, device=device)
    ones = total.to(dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())
