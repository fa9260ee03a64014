"""The loss of the output projection, a chunk of tokens at a time, so that not all logits exist at once.

Logits of 16,384 tokens over a vocabulary of 50,000 are 11 GB with their copies, more than the rest of a small model.
Shape letters: N tokens, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOGITS_AT_ONCE = 2**25
"""128 MiB in fp32: enough rows to keep a GPU busy (670 at a vocabulary of 50,000), little beside its memory."""


def chunked_cross_entropy(x_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
    """Returns the mean negative log-likelihood of `targets_N` in nats, fp32, under the logits x W^T.

    Equals `F.cross_entropy(F.linear(x, weight).float(), targets)`, and its gradients, up to rounding. Nothing is
    computed twice: gradients are made in the forward pass, chunk by chunk, and summed in fp32, as by Liger Kernel's
    FusedLinearCrossEntropy (arXiv 2410.10989). One backward pass only, and not for fp16: its loss scale would come
    too late.
    """
    gradients = torch.is_grad_enabled() and (x_NH.requires_grad or weight_VH.requires_grad)
    return _ChunkedCrossEntropy.apply(x_NH, weight_VH, targets_N, gradients)  # type: ignore[return-value]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, gradients: bool) -> Tensor:
        rows = max(1, LOGITS_AT_ONCE // len(weight_VH))
        dx_NH, dweight_VH = torch.empty_like(x_NH if gradients else x_NH[:0]), None
        loss = x_NH.new_zeros((), dtype=torch.float32)
        for start in range(0, len(x_NH), rows):
            chunk = slice(start, start + rows)
            log_p_RV = F.linear(x_NH[chunk], weight_VH).log_softmax(-1, dtype=torch.float32)
            loss -= log_p_RV.gather(1, targets_N[chunk, None]).sum()
            if gradients:
                d_RV = _by_logits(log_p_RV, targets_N[chunk], len(x_NH)).to(x_NH.dtype)
                torch.mm(d_RV, weight_VH, out=dx_NH[chunk])
                dweight_VH = _add_product(dweight_VH, d_RV.T, x_NH[chunk])
                del d_RV
            del log_p_RV  # else it lives on beside the next chunk's
        ctx.gradients = dx_NH, dweight_VH
        return loss / len(x_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dx_NH, dweight_VH), ctx.gradients = ctx.gradients, None  # scaled in place: a second backward pass must fail
        return dx_NH.mul_(dloss), dweight_VH.mul_(dloss).to(dx_NH.dtype), None, None


def _by_logits(log_p_RV: Tensor, targets_R: Tensor, count: int) -> Tensor:
    """Returns the gradient of the mean over `count` tokens by these logits, (softmax - one-hot) / N, in place."""
    d_RV = log_p_RV.exp_()
    minus_R1 = d_RV.new_full((len(targets_R), 1), -1.0)
    return d_RV.scatter_add_(1, targets_R[:, None], minus_R1).div_(count)


def _add_product(total_VH: Tensor | None, left_VR: Tensor, right_RH: Tensor) -> Tensor:
    """Returns the sum of a matrix product and, in fp32, of those before it."""
    if total_VH is None:
        return left_VR @ right_RH
    if right_RH.dtype in (torch.float32, torch.float64):
        return total_VH.addmm_(left_VR, right_RH)
    return total_VH.float().add_(left_VR @ right_RH)
