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


def chunked_cross_entropy(
    x_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, *, compiled: bool = False
) -> Tensor:
    """Returns the mean negative log-likelihood of `targets_N` in nats, fp32. The logits are the
    product of `x_NH` and the transpose of `weight_VH`.

    Up to rounding, the loss and its gradients are equal to those of
    `F.cross_entropy(F.linear(x, weight).float(), targets)`. No logits are recomputed. The gradients
    are computed in the forward pass, chunk by chunk, and summed in fp32, as in Liger Kernel's
    FusedLinearCrossEntropy (arXiv 2410.10989).

    Only one backward pass is possible. fp16 is unsupported, since the loss scale is known only in
    the backward pass. With `compiled`, all operations on logits are compiled into one kernel, which
    halves the time of these operations on a CPU.
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
                # The gradient of the summed loss by the logits is softmax - one-hot. At a target of
                # probability p it is p - 1, which expm1 computes from log p with one rounding.
                d_RV.scatter_(1, targets_N[chunk, None], log_p_R1.expm1().to(d_RV.dtype))
                torch.mm(d_RV, weight_VH, out=dx_NH[chunk])
                dweight_VH = _add_product(dweight_VH, d_RV.T, x_NH[chunk])
            del d_RV  # The memory is freed before the logits of the next chunk are allocated.
        ctx.gradients = dx_NH, dweight_VH
        return loss / len(x_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # The stored gradients are scaled in place. They are removed, so that a second backward pass
        # fails instead of scaling them again.
        dx_NH, dweight_VH = ctx.gradients
        ctx.gradients = None
        share = dloss / len(dx_NH)
        return dx_NH.mul_(share), dweight_VH.mul_(share).to(dx_NH.dtype), None, None, None


def _softmax_in_place(logits_RV: Tensor, targets_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (probabilities of all tokens of the vocabulary, fp32 logarithms of the probabilities
    of the targets). The probabilities overwrite the logits to save memory.
    """
    log_p_RV = logits_RV.log_softmax(-1, dtype=torch.float32)
    return torch.exp(log_p_RV, out=logits_RV), log_p_RV.gather(1, targets_R1)


def _softmax(logits_RV: Tensor, targets_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (probabilities of all tokens of the vocabulary, fp32 logarithms of the probabilities
    of the targets). This version is compiled. The compiled function does not write the logarithms
    of all probabilities to memory.
    """
    log_p_RV = logits_RV.log_softmax(-1, dtype=torch.float32)
    return log_p_RV.exp().to(logits_RV.dtype), log_p_RV.gather(1, targets_R1)


@functools.cache
def _compiled_softmax() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
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
