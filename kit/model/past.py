"""What tokens may look at when that is not simply all earlier tokens of their row, and attention
within documents.
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
except ModuleNotFoundError:  # torch 2.9, the last for Trainium, where none is called
    varlen_attn = None
    DOCUMENT_KERNELS = set()
    DOCUMENT_ARGUMENTS = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
    """What tokens may look at when that is not simply all earlier tokens of their row."""

    mask_BTT: Tensor | None = None  # True where a token may look
    begins_N: Tensor | None = None  # or where documents begin, as of `document_begins`

    @classmethod
    def within_documents(
        cls, tokens_BT: Tensor, end: int, *, device: torch.device, has_kernel: bool = False
    ) -> Self:
        """Returns the past, on `device`, of tokens that attend to earlier tokens of their own
        document only. The token `end` ends a document.

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
        document_BT = ends_BT.cumsum(1) - ends_BT.long()  # the end belongs to what it closes
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        same_BTT = document_BT[:, :, None] == document_BT[:, None]
        return cls(mask_BTT=same_BTT & (positions_T <= positions_T[:, None]))


def has_document_kernel(device: torch.device, precision: str, *, has_grouped_heads: bool) -> bool:
    """Returns whether torch has a kernel for attention within documents. It has one for 16-bit
    numbers on NVIDIA's GPUs, and from torch 2.12 on for grouped query heads, too.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if varlen_attn is None or not is_nvidia or precision == "fp32":
        return False
    return not has_grouped_heads or "enable_gqa" in DOCUMENT_ARGUMENTS


def document_begins(tokens_BT: Tensor, end: int) -> Tensor:
    """Returns where documents begin in rows that are put one behind the other, and the length of
    all, int32.

    A row begins one, and so does what follows the token `end`. Empty documents at the end make the
    number of entries a power of two, so that a compiled block meets few sizes.
    """
    # For tokens on a GPU `nonzero` waits until the GPU is done, so they should be in host memory.
    begins_BT = tokens_BT.roll(1, dims=1) == end
    begins_BT[:, 0] = True
    found_N = begins_BT.flatten().nonzero()[:, 0].int()
    entries = 1 << len(found_N).bit_length()
    return F.pad(found_N, (0, entries - len(found_N)), value=tokens_BT.numel())


def attend_within_documents(
    q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, begins_N: Tensor
) -> Tensor:
    """Returns y_BNTD: each token attended to itself and earlier ones of its document; no mask is
    written.
    """
    num_rows, num_heads, length, _ = q_BNTD.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTD, k_BKTD, v_BKTD))
    # Torch 2.10 names causal attention differently, and 2.11 has no grouped heads.
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in DOCUMENT_ARGUMENTS:
        options = {"window_size": (-1, 0)}
    if num_heads != k_BKTD.shape[1]:
        options["enable_gqa"] = True
    assert varlen_attn is not None  # as `has_document_kernel` says
    y = varlen_attn(q, k, v, begins_N, begins_N, length, length, **options)
    assert isinstance(y, Tensor)  # and no second result, which was not asked for
    return y.unflatten(0, (num_rows, length)).transpose(1, 2)
