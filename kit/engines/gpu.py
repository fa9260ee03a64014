"""How torch and NCCL run on a rank's device: the kernels that they take, memory and its end, how
long they wait for other ranks, and what they tell of a wait.
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
TIMEOUT_S = 300.0  # as torchtitan gives the start: a rank that compiles again may hold up others


def set_environment(logs: Path) -> None:
    """Sets what is not set yet, before the first tensor on a GPU: segments that grow and fragment
    less (HIP has none).

    NCCL keeps its last collectives and leaves them in `logs` if they take too long; `torchfrtrace`
    reads them.
    """
    settings = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if torch.version.hip is None and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in (settings | {TRACE_FILE: str(logs / "nccl_trace_rank_")}).items():
        os.environ.setdefault(name, value)


def shorten_timeouts(hung_after_s: float | None) -> None:
    """Lets GPUs wait for a collective less than a first step needs, but longer than a watchdog
    of `hung_after_s`.
    """
    if hung_after_s is not None:
        timeout = datetime.timedelta(seconds=max(TIMEOUT_S, 2 * hung_after_s))
        set_cuda_timeouts(min(COLLECTIVE_TIMEOUT, timeout))


def dump_flight_recorder() -> None:
    """Writes this rank's last collectives, where NCCL has recorded any, to a file of its own."""
    if TRACE_FILE not in os.environ:
        return
    trace = nccl_trace()
    if trace:
        # The last line of the log must be the reason why the rank is ended, not a full disk.
        with contextlib.suppress(OSError):
            write_atomic(Path(f"{os.environ[TRACE_FILE]}{dist.get_rank()}"), trace)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory ran out: of a GPU, of this process, or of torch's CPU allocator."""
    told = ("out of memory", "can't allocate memory")
    is_torchs = isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    return is_torchs or isinstance(error, MemoryError)


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
    num_heads = spec.num_heads // plan.tensor_parallel or 1
    num_kv_heads = spec.num_kv_heads // plan.tensor_parallel or 1
    size = (length, spec.head_size)
    q = torch.empty(1, num_heads, *size, dtype=dtype, device=device, requires_grad=True)
    k = torch.empty(1, num_kv_heads, *size, dtype=dtype, device=device)
    products = "fp32"
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        products = "TF32"
    return {"attention": SDPBackend(attention_choice(q, k)).name, "fp32_products": products}
