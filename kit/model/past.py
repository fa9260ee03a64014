"""Attention in which a token does not attend to all earlier tokens of its row (`Past`), for example
only to tokens of its document.
"""

import dataclasses
import inspect
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kit.torch_private import document_attention

try:
    from torch.nn.attention.varlen import varlen_attn

    DOCUMENT_KERNELS = {document_attention()}
    DOCUMENT_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)
except ModuleNotFoundError:
    # Torch 2.9 does not have this module. It is the last version for Trainium, where the kernel is
    # not called.
    varlen_attn = None
    DOCUMENT_KERNELS = set()
    DOCUMENT_ARGUMENTS = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
    """Description of the tokens to which each token attends, if these are not simply all earlier
    tokens of its row. Exactly one of the two fields is set.
    """

    mask_BTT: Tensor | None = None
    """Boolean mask: True if the token of the second dimension attends to the token of the third
    dimension. Or, after `with_additive_mask`, the number that is added to the score of both tokens:
    0 or minus infinity."""
    begins_N: Tensor | None = None
    """Positions at which documents begin in the concatenated rows (result of `document_begins`).
    Tokens attend only to earlier tokens of their document."""

    @classmethod
    def within_documents(
        cls, tokens_BT: Tensor, end: int, *, device: torch.device, has_kernel: bool = False
    ) -> Self:
        """Returns a `Past` on `device` with which each token attends only to itself and to earlier
        tokens of its document. `end` is the token that ends a document.

        `has_kernel` is whether the kernel for documents is used (`has_document_kernel`). If so,
        `tokens_BT` should be in host memory. Otherwise the host would wait for a GPU that still
        computes earlier micro-batches.
        """
        if has_kernel:
            begins_N = document_begins(tokens_BT, end)
            if device.type == "cuda" and begins_N.device.type == "cpu":
                begins_N = begins_N.pin_memory()
            return cls(begins_N=begins_N.to(device, non_blocking=True))
        tokens_BT = tokens_BT.to(device, non_blocking=True)
        ends_BT = tokens_BT == end
        # The number of a token's document. The token `end` belongs to the document that it ends.
        document_BT = ends_BT.cumsum(1) - ends_BT.long()
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        same_BTT = document_BT[:, :, None] == document_BT[:, None]
        return cls(mask_BTT=same_BTT & (positions_T <= positions_T[:, None]))

    def with_additive_mask(self, dtype: torch.dtype) -> Self:
        """Returns a `Past` with a mask that is added to attention scores, in the dtype of the
        queries. The result is unchanged if there is no mask.

        From a Boolean mask, attention makes an additive mask in each layer, and autograd saves each
        for the backward pass: 128 MiB per layer in bf16 at 8,192 tokens. All layers share the mask
        of the result.
        """
        if self.mask_BTT is None or self.mask_BTT.dtype != torch.bool:
            return self
        return dataclasses.replace(self, mask_BTT=additive_mask(self.mask_BTT, dtype))


def additive_mask(mask_BTT: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 where a Boolean mask is True, and minus infinity elsewhere."""
    zeros_BTT = torch.zeros(mask_BTT.shape, dtype=dtype, device=mask_BTT.device)
    return zeros_BTT.masked_fill(~mask_BTT, -torch.inf)


def has_document_kernel(device: torch.device, precision: str, *, has_grouped_heads: bool) -> bool:
    """Returns whether torch has a kernel for attention within documents on this device. The kernel
    exists on NVIDIA GPUs for 16-bit formats. Grouped query heads are supported from torch 2.12 on.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if varlen_attn is None or not is_nvidia or precision == "fp32":
        return False
    return not has_grouped_heads or "enable_gqa" in DOCUMENT_ARGUMENTS


def document_begins(tokens_BT: Tensor, end: int) -> Tensor:
    """Returns the positions, int32, at which documents begin in the concatenated rows. The total
    number of tokens follows as the last entry.

    A document begins at the start of each row, and after each token `end`. The total is repeated as
    the start of empty documents until the number of entries is a power of two. A compiled block
    then has inputs of only few different shapes.
    """
    # Tokens should be in host memory. On a GPU, `nonzero` waits until the GPU has no work left.
    begins_BT = tokens_BT.roll(1, dims=1) == end
    begins_BT[:, 0] = True
    found_N = begins_BT.flatten().nonzero()[:, 0].int()
    entries = 1 << len(found_N).bit_length()
    return F.pad(found_N, (0, entries - len(found_N)), value=tokens_BT.numel())


def attend_softly_capped(
    q_BNTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    mask_BTT: Tensor | None,
    *,
    scale: float | None,
    soft_cap: float,
) -> Tensor:
    """Returns the result of attention, y_BNTD, with scores x replaced by c tanh(x / c) for the soft
    cap c (Gemma 2, arXiv 2408.00118). Torch has no fused kernel for it without compilation, so the
    scores are written to memory.

    `mask_BTT` is added to the scores (`additive_mask`). If it is None, each token attends to all
    earlier tokens of its row. If `scale` is None, scores are divided by the square root of the head
    size.
    """
    num_heads, length, head_size = q_BNTD.shape[1:]
    repeats = num_heads // k_BKTD.shape[1]
    k_BNTD = k_BKTD.repeat_interleave(repeats, dim=1)
    v_BNTD = v_BKTD.repeat_interleave(repeats, dim=1)
    if mask_BTT is None:
        past_1TT = torch.ones(1, length, length, dtype=torch.bool, device=q_BNTD.device).tril()
        mask_BTT = additive_mask(past_1TT, q_BNTD.dtype)
    factor: float = head_size**-0.5 if scale is None else scale
    share_BNTT = torch.tanh(q_BNTD @ k_BNTD.transpose(2, 3) * (factor / soft_cap))
    scores_BNTT = soft_cap * share_BNTT + mask_BTT[:, None]
    return scores_BNTT.softmax(-1, dtype=torch.float32).to(v_BNTD.dtype) @ v_BNTD


def attend_within_documents(
    q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, begins_N: Tensor
) -> Tensor:
    """Returns the result of attention, y_BNTD, in which each token attends to itself and to earlier
    tokens of its document. No mask is written to memory.
    """
    num_rows, num_heads, length, _ = q_BNTD.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTD, k_BKTD, v_BKTD))
    # Torch 2.10 has the argument `is_causal`, later versions have `window_size`. Grouped heads are
    # passed only if needed, since torch 2.11 does not have `enable_gqa`.
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in DOCUMENT_ARGUMENTS:
        options = {"window_size": (-1, 0)}
    if num_heads != k_BKTD.shape[1]:
        options["enable_gqa"] = True
    assert varlen_attn is not None  # Callers have checked `has_document_kernel`.
    y = varlen_attn(q, k, v, begins_N, begins_N, length, length, **options)
    # The function returns a tuple only if auxiliary results are requested.
    assert isinstance(y, Tensor)
    return y.unflatten(0, (num_rows, length)).transpose(1, 2)
