"""How a rank joins the others: by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, over gloo, NCCL or XLA."""

import ctypes
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from kit.plan import EngineName

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


def start_process_group(engine: EngineName = "native") -> torch.device:
    """Joins this rank's process group (gloo, gloo and NCCL, or XLA) and returns the device it computes on."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    if engine == "neuron":
        from kit.engines.neuron.adapter import start_process_group as start_xla

        return start_xla()
    if torch.cuda.is_available():
        # A launcher that shows each rank one device only has a single index 0.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=COLLECTIVE_TIMEOUT, device_id=device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    return device


def control_group() -> Any:
    """Returns the group in which ranks agree on what to do next: on the CPU, so that it is never part of a graph."""
    return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of handing it back to the kernel, for the life of this process.

    Each step allocates the same large tensors again. On a CPU, fresh pages for them took a sixth of a demo step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_max = -1, -4  # malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
