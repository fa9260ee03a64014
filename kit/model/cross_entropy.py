"""The loss of the output projection, a chunk of tokens at a time, so that not all logits exist at
once.

Logits of 16,384 tokens over a vocabulary of 50,000 are 11 GB with their copies, more than the rest
of a small model. Shape letters: N tokens, R tokens of a chunk, H hidden, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kit.config.plan import logits_at_once


def chunked_cross_entropy(
    x_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, *, compiled: bool = False
) -> Tensor:
    """Returns the mean negative log-likelihood of `targets_N` in nats, fp32, under the logits x
    W^T.

    Equals `F.cross_entropy(F.linear(x, weight).float(), targets)`, and its gradients, up to
    rounding. Nothing is computed twice: gradients are made in the forward pass, chunk by chunk, and
    summed in fp32, as by Liger Kernel's FusedLinearCrossEntropy (arXiv 2410.10989). One backward
    pass only, and not for fp16: its loss scale would come too late. `compiled` makes one kernel of
    what is done with logits: half the time of that on a CPU.
    """
    gradients = torch.is_grad_enabled() and (x_NH.requires_grad or weight_VH.requires_grad)
    return _ChunkedCrossEntropy.apply(x_NH, weight_VH, targets_N, gradients, compiled)  # type: ignore[return-value]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        gradients: bool,
        compiled: bool,
    ) -> Tensor:
        rows = _rows(len(weight_VH), x_NH.device)
        dx_NH = torch.empty_like(x_NH if gradients else x_NH[:0])
        dweight_VH = None
        loss = x_NH.new_zeros((), dtype=torch.float32)
        for start in range(0, len(x_NH), rows):
            chunk = slice(start, start + rows)
            softmax = _compiled_softmax() if compiled and gradients else _softmax_in_place
            d_RV, log_p_R1 = softmax(F.linear(x_NH[chunk], weight_VH), targets_N[chunk, None])
            loss -= log_p_R1.sum()
            if gradients:
                # By the logits, times N: softmax - one-hot. Its -(1 - p) is rounded only once.
                d_RV.scatter_(1, targets_N[chunk, None], log_p_R1.expm1().to(d_RV.dtype))
                torch.mm(d_RV, weight_VH, out=dx_NH[chunk])
                dweight_VH = _add_product(dweight_VH, d_RV.T, x_NH[chunk])
            del d_RV  # else it lives on beside the next chunk's
        ctx.gradients = dx_NH, dweight_VH
        return loss / len(x_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # Scaled in place: a second backward pass must fail.
        dx_NH, dweight_VH = ctx.gradients
        ctx.gradients = None
        share = dloss / len(dx_NH)
        return dx_NH.mul_(share), dweight_VH.mul_(share).to(dx_NH.dtype), None, None, None


def _softmax_in_place(logits_RV: Tensor, targets_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the probabilities in the memory of the logits, and in fp32 the logarithm of those
    of the targets.
    """
    log_p_RV = logits_RV.log_softmax(-1, dtype=torch.float32)
    return torch.exp(log_p_RV, out=logits_RV), log_p_RV.gather(1, targets_R1)


def _softmax(logits_RV: Tensor, targets_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same; compiled, it has no logarithms in memory."""
    log_p_RV = logits_RV.log_softmax(-1, dtype=torch.float32)
    return log_p_RV.exp().to(logits_RV.dtype), log_p_RV.gather(1, targets_R1)


@functools.cache
def _compiled_softmax() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(_softmax, dynamic=False)  # two sizes, whole chunks and the last


def _rows(vocab_size: int, device: torch.device) -> int:
    """Returns how many tokens a chunk has."""
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    rows = max(1, logits_at_once(memory) // vocab_size)
    if rows > 128:
        rows -= rows % 128  # whole tiles of a GPU's matrix product
    return rows


def _add_product(total_VH: Tensor | None, left_VR: Tensor, right_RH: Tensor) -> Tensor:
    """Returns the sum of a matrix product and, in fp32, of those before it."""
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
    """Whether a product of this dtype is added to an fp32 sum as it is made: on GPUs, not by
    every version of torch.
    """
    total = torch.ones(16, 16, device=device)
    ones = total.to(dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())
