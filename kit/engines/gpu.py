"""Settings of torch and NCCL on a rank's device: kernels, memory allocation, timeouts of
collectives, and the record of the last collectives. Also recognises errors of exhausted memory.
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
"""Shortest timeout of a collective after the first step, in seconds, since a rank that compiles
again may delay the others. torchtitan uses this value for the start of training."""


def set_environment(logs: Path) -> None:
    """Sets environment variables of torch and NCCL that are not set yet. Must be called before the
    first tensor is on a GPU.

    torch's allocator gets expandable segments, which fragment less (HIP does not have them). NCCL
    records its last collectives. If a collective times out, NCCL writes the record to a file in
    `logs`, which `torchfrtrace` reads.
    """
    settings = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if torch.version.hip is None and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in (settings | {TRACE_FILE: str(logs / "nccl_trace_rank_")}).items():
        os.environ.setdefault(name, value)


def shorten_timeouts(hung_after_s: float | None) -> None:
    """Shortens the timeout of collectives on GPUs. Called after the first step, which needs a
    longer timeout.

    The new timeout is longer than `hung_after_s`, the limit of the watchdog in seconds. If
    `hung_after_s` is None, the timeout is not changed.
    """
    if hung_after_s is not None:
        timeout = datetime.timedelta(seconds=max(TIMEOUT_S, 2 * hung_after_s))
        set_cuda_timeouts(min(COLLECTIVE_TIMEOUT, timeout))


def dump_flight_recorder() -> None:
    """Writes NCCL's record of this rank's last collectives, if there is one, to this rank's
    file.
    """
    if TRACE_FILE not in os.environ:
        return
    trace = nccl_trace()
    if trace:
        # The last line of the log must say why the rank is ended, not that the disk is full.
        with contextlib.suppress(OSError):
            write_atomic(Path(f"{os.environ[TRACE_FILE]}{dist.get_rank()}"), trace)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether the error means that memory ran out: on a GPU, in this process, or in torch's
    CPU allocator.
    """
    told = ("out of memory", "can't allocate memory")
    is_torchs = isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    return is_torchs or isinstance(error, MemoryError)


def choose_kernels(device: torch.device, plan: Plan) -> None:
    """Lets NVIDIA GPUs use TF32 for the few fp32 matrix products of a plan in bf16.

    The setting holds for the life of this process. Nothing is changed for a plan in fp32, whose
    products are computed in fp32.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and plan.precision == "bf16":
        torch.set_float32_matmul_precision("high")


def chosen_kernels(spec: ModelSpec, plan: Plan, device: torch.device) -> dict[str, str]:
    """Returns the kernels that training this model uses on the device.

    `attention` is the backend that torch chooses for attention. `fp32_products` is "fp32" or
    "TF32".
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.precision]
    # A longer sequence uses the same kernel, but needs more memory.
    length = min(spec.sequence_length, 256)
    num_heads = spec.num_heads // plan.tensor_parallel or 1
    num_kv_heads = spec.num_kv_heads // plan.tensor_parallel or 1
    size = (length, spec.head_size)
    q = torch.empty(1, num_heads, *size, dtype=dtype, device=device, requires_grad=True)
    k = torch.empty(1, num_kv_heads, *size, dtype=dtype, device=device)
    products = "fp32"
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        products = "TF32"
    return {"attention": SDPBackend(attention_choice(q, k)).name, "fp32_products": products}
