"""How torch and NCCL run on GPUs: their memory, how long they wait for other ranks, and what they tell of a wait."""

import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _world

from kit.parallel.groups import COLLECTIVE_TIMEOUT

TRACE_FILE = "TORCH_FR_DUMP_TEMP_FILE"
TIMEOUT_S = 300.0
"""Of a collective once all have met, as torchtitan gives the start: a graph compiled again may hold up other ranks."""


def prepare(logs: Path) -> None:
    """Sets what is not set yet. Call it before the first tensor on a GPU.

    Memory: segments that grow fragment less (PyTorch, CUDA semantics, PYTORCH_ALLOC_CONF); HIP has none. The flight
    recorder keeps the last collectives, and NCCL's own watchdog leaves them in `logs`: `torchfrtrace` reads them.
    """
    if torch.version.hip is None and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault(TRACE_FILE, str(logs / "nccl_trace_rank_"))


def shorten_timeouts(hung_after_s: float | None) -> None:
    """Lets collectives on GPUs wait no longer than after a first step is needed; call it on all ranks after that step.

    The watchdog of a rank, which gives a step `hung_after_s`, has the first word; None: nobody wants a limit.
    """
    if hung_after_s is None:
        return
    timeout = min(COLLECTIVE_TIMEOUT, datetime.timedelta(seconds=max(TIMEOUT_S, 2 * hung_after_s)))
    for group in _world.pg_map:
        if torch.device("cuda") in group._device_types:
            group._get_backend(torch.device("cuda"))._set_default_timeout(timeout)


def dump_flight_recorder() -> None:
    """Writes this rank's last collectives, where NCCL has recorded any, to a file of its own."""
    dump = getattr(c10d, "_dump_nccl_trace", None)  # None: a torch without NCCL
    if dump is not None and TRACE_FILE in os.environ:
        Path(f"{os.environ[TRACE_FILE]}{dist.get_rank()}").write_bytes(dump())
