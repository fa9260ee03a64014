"""Settings of torch and NCCL on a rank's device: kernels, memory allocation, timeouts of
collectives, and NCCL's record of the last collectives. Also recognises out-of-memory errors.
"""

import contextlib
import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from cluster.files import write_atomic
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.parallel.groups import COLLECTIVE_TIMEOUT
from kit.torch_private import attention_choice, nccl_trace, set_cuda_timeouts

TRACE_FILE = "TORCH_FR_DUMP_TEMP_FILE"
TIMEOUT_S = 300.0
"""Shortest timeout of a collective after the first step, in seconds. A shorter timeout could end a
run in which one rank compiles again and delays the other ranks. torchtitan uses 300 s for the start
of training."""


def set_environment(logs: Path) -> None:
    """Sets environment variables of torch and NCCL, unless the user has set them. Must be called
    before the first tensor is on a GPU.

    torch's allocator uses expandable segments, which reduce fragmentation (not available on HIP).
    NCCL records its last collectives. If a collective times out, NCCL writes the record to a file
    in `logs`, which the tool `torchfrtrace` reads.
    """
    settings = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if torch.version.hip is None and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in (settings | {TRACE_FILE: str(logs / "nccl_trace_rank_")}).items():
        os.environ.setdefault(name, value)


def shorten_timeouts(hung_after_s: float | None) -> None:
    """Shortens the timeout of collectives on GPUs. Must be called after the first step, which needs
    the longer timeout because it compiles.

    The new timeout is twice `hung_after_s`, the seconds after which the watchdog calls a step hung.
    The new timeout is at least TIMEOUT_S and at most COLLECTIVE_TIMEOUT. If `hung_after_s` is None,
    the timeout is not changed.
    """
    if hung_after_s is not None:
        timeout = datetime.timedelta(seconds=max(TIMEOUT_S, 2 * hung_after_s))
        set_cuda_timeouts(min(COLLECTIVE_TIMEOUT, timeout))


def dump_flight_recorder() -> None:
    """Writes NCCL's record of this rank's last collectives to this rank's file in the folder of
    logs. Does nothing if NCCL has no record.
    """
    if TRACE_FILE not in os.environ:
        return
    trace = nccl_trace()
    if trace:
        # If the disk is full, the error is suppressed: the last line of the log must give the
        # reason why the rank is ended.
        with contextlib.suppress(OSError):
            write_atomic(Path(f"{os.environ[TRACE_FILE]}{dist.get_rank()}"), trace)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether the error means that memory is exhausted: on a GPU, in Python, or in torch's
    CPU allocator.
    """
    told = ("out of memory", "can't allocate memory")
    is_torchs = isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    return is_torchs or isinstance(error, MemoryError)


def choose_kernels(device: torch.device, plan: Plan) -> None:
    """Allows TF32 on NVIDIA GPUs for the few matrix products that are fp32 in a bf16 plan.

    The setting lasts until this process ends. In an fp32 plan nothing is changed, since its matrix
    products are computed in full fp32.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and plan.precision == "bf16":
        torch.set_float32_matmul_precision("high")


def chosen_kernels(spec: ModelSpec, plan: Plan, device: torch.device) -> dict[str, str]:
    """Returns the names of the kernels with which this model is trained on the device.

    The value of `attention` is the backend that torch chooses for attention without a window. If
    the model has a soft cap of the scores, attention is computed without a fused kernel, and the
    value is MATH. The value of `fp32_products` is the format in which fp32 matrix products are
    computed, "fp32" or "TF32".
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.precision]
    # torch's choice of a kernel does not depend on the sequence length, so a short sequence is used
    # here. It needs less memory.
    length = min(spec.sequence_length, 256)
    num_heads = spec.num_heads // plan.tensor_parallel or 1
    num_kv_heads = spec.num_kv_heads // plan.tensor_parallel or 1
    size = (length, spec.head_size)
    q = torch.empty(1, num_heads, *size, dtype=dtype, device=device, requires_grad=True)
    k = torch.empty(1, num_kv_heads, *size, dtype=dtype, device=device)
    attention = SDPBackend(attention_choice(q, k)).name
    if spec.attn_logit_softcapping is not None:
        attention = SDPBackend.MATH.name
    products = "fp32"
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        products = "TF32"
    return {"attention": attention, "fp32_products": products}
