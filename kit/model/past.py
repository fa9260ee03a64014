"""Attention masks other than the causal mask (`Past`), and attention within documents."""

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
except ModuleNotFoundError:  # torch 2.9, the last for Trainium, where this kernel is not called
    varlen_attn = None
    DOCUMENT_KERNELS = set()
    DOCUMENT_ARGUMENTS = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
    """Tokens that each token attends to, if these are not all earlier tokens of its row.

    One of the two fields is set.
    """

    mask_BTT: Tensor | None = None
    """Mask that is True where a token (second dimension) attends to a token (third dimension)."""
    begins_N: Tensor | None = None
    """Positions at which documents begin, as `document_begins` returns them."""

    @classmethod
    def within_documents(
        cls, tokens_BT: Tensor, end: int, *, device: torch.device, has_kernel: bool = False
    ) -> Self:
        """Returns the `Past`, on `device`, of tokens that attend only to themselves and earlier
        tokens of their document. The token `end` ends a document.

        With a kernel for documents, `tokens_BT` should be in host memory. Then the host does not
        wait for a GPU that still computes earlier micro-batches.
        """
        if has_kernel:
            begins_N = document_begins(tokens_BT, end)
            if device.type == "cuda" and begins_N.device.type == "cpu":
                begins_N = begins_N.pin_memory()
            return cls(begins_N=begins_N.to(device, non_blocking=True))
        tokens_BT = tokens_BT.to(device, non_blocking=True)
        ends_BT = tokens_BT == end
        document_BT = ends_BT.cumsum(1) - ends_BT.long()  # `end` belongs to the document it ends
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        same_BTT = document_BT[:, :, None] == document_BT[:, None]
        return cls(mask_BTT=same_BTT & (positions_T <= positions_T[:, None]))


def has_document_kernel(device: torch.device, precision: str, *, has_grouped_heads: bool) -> bool:
    """Returns whether torch has a kernel for attention within documents. It has one for 16-bit
    formats on NVIDIA's GPUs, and since torch 2.12 also for grouped query heads.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if varlen_attn is None or not is_nvidia or precision == "fp32":
        return False
    return not has_grouped_heads or "enable_gqa" in DOCUMENT_ARGUMENTS


def document_begins(tokens_BT: Tensor, end: int) -> Tensor:
    """Returns the positions at which documents begin in the concatenated rows, and at the end the
    total number of tokens, int32.

    A document begins with each row, and after each token `end`. The total is repeated as the start
    of empty documents until the number of entries is a power of two, so that a compiled block gets
    few different shapes.
    """
    # Tokens should be in host memory. On a GPU `nonzero` waits until the GPU is done.
    begins_BT = tokens_BT.roll(1, dims=1) == end
    begins_BT[:, 0] = True
    found_N = begins_BT.flatten().nonzero()[:, 0].int()
    entries = 1 << len(found_N).bit_length()
    return F.pad(found_N, (0, entries - len(found_N)), value=tokens_BT.numel())


def attend_within_documents(
    q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, begins_N: Tensor
) -> Tensor:
    """Returns y_BNTD, the result of attention of each token to itself and to earlier tokens of its
    document. No mask is written to memory.
    """
    num_rows, num_heads, length, _ = q_BNTD.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTD, k_BKTD, v_BKTD))
    # Torch 2.10 names causal attention differently, and 2.11 has no grouped heads.
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in DOCUMENT_ARGUMENTS:
        options = {"window_size": (-1, 0)}
    if num_heads != k_BKTD.shape[1]:
        options["enable_gqa"] = True
    assert varlen_attn is not None  # callers check `has_document_kernel`
    y = varlen_attn(q, k, v, begins_N, begins_N, length, length, **options)
    assert isinstance(y, Tensor)  # without auxiliary results, which come only on request
    return y.unflatten(0, (num_rows, length)).transpose(1, 2)
