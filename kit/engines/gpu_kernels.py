"""Which kernels torch takes: for attention, and for matrix products of what stays fp32."""

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kit.plan import Plan
from kit.spec import ModelSpec
from kit.torch_private import attention_choice

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_VERSION = 91501
"""From which cuDNN's attention is taken first on Hopper and Blackwell (compute capability 9.0 and
10.0), as by torch 2.13 of its own accord (sdp_utils.cpp, check_prefer_cudnn_attention)."""
_held = contextlib.ExitStack()  # never closed


def choose_kernels(device: torch.device, plan: Plan) -> None:
    """Chooses torch's kernels on a GPU for the life of this process.

    In bf16, matrix products of the few fp32 tensors may round their factors to TF32; a plan in fp32
    means fp32.
    """
    if device.type != "cuda":
        return
    is_nvidia = torch.version.hip is None
    if plan.precision == "bf16" and is_nvidia:
        torch.set_float32_matmul_precision("high")
    # AMD's GPUs have no cuDNN, and the MI250X calls itself 9.0 too.
    takes_cudnn = is_nvidia and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
    takes_cudnn = takes_cudnn and (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION
    _held.enter_context(
        sdpa_kernel(
            [SDPBackend.CUDNN_ATTENTION, *FUSED] if takes_cudnn else FUSED, set_priority=True
        )
    )


def chosen_kernels(spec: ModelSpec, plan: Plan, device: torch.device) -> dict[str, str]:
    """Returns the kernels that training this model takes: of attention, as torch answers, and of
    fp32 products.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.precision]
    length = min(spec.sequence_length, 256)  # a longer one takes the same, and memory
    q, k = (
        torch.empty(
            1,
            heads // plan.tensor_parallel or 1,
            length,
            spec.head_size,
            dtype=dtype,
            device=device,
        )
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    q.requires_grad_()
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return {
        "attention": SDPBackend(attention_choice(q, k)).name,
        "fp32_products": "TF32" if tf32 else "fp32",
    }
