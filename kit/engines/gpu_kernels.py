"""Which kernels torch takes: for attention, and for matrix products of what stays fp32."""

import torch
from torch.nn.attention import SDPBackend

from kit.plan import Plan
from kit.spec import ModelSpec
from kit.torch_private import attention_choice


def choose_kernels(device: torch.device, plan: Plan) -> None:
    """Lets matrix products of the few fp32 tensors of a plan in bf16 round their factors to TF32,
    on NVIDIA's GPUs, for the life of this process; a plan in fp32 means fp32.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and plan.precision == "bf16":
        torch.set_float32_matmul_precision("high")


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
