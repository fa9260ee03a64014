"""Runs a function on several gloo processes, forked from this one, and returns what each rank returned.

Importing torch costs more than such a test computes, so workers are forked after one import.
"""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(num_ranks: int, function: Callable, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Returns `function(*args)` of every rank, in rank order; a rank's exception is raised here with its traceback."""
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_worker, args=(rank, num_ranks, port, queue, function, args), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    for process in processes:
        process.join(timeout_s)
    while not queue.empty():
        rank, result, error = queue.get()
        if error is not None:
            for process in processes:
                process.kill()
            raise AssertionError(f"rank {rank} failed:\n{error}")
        results[rank] = result
    assert len(results) == num_ranks, f"only ranks {sorted(results)} of {num_ranks} returned"
    return [results[rank] for rank in range(num_ranks)]


def _worker(rank: int, num_ranks: int, port: int, queue: Any, function: Callable, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        queue.put((rank, function(*args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        os._exit(1)
