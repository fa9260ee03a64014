"""Runs a function on several gloo ranks, which are forked from this process.

The import of torch takes longer than these tests compute. Therefore this process imports torch once
before it forks the ranks.
"""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import state_dict_saver

from cluster.process import become_rank as end_with
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.process_group import start_process_group
from kit.parallel.groups import final_barrier
from kit.run import Run
from tests.support import quick
from tests.support.runs import new_run, seal


def local_run(directory: Path, spec: ModelSpec, plan: Plan, recipe: Recipe) -> Run:
    """Returns a prepared run for the site `laptop`, which is this machine."""
    return new_run(directory, spec=spec, plan=plan, recipe=recipe, site=Site.load("laptop"))


def complete_checkpoint(run: Run, state: dict[str, torch.Tensor], step: int) -> None:
    """Writes a complete checkpoint with these tensors into a run directory, as the trainer does."""
    state_dict_saver.save(state, checkpoint_id=run.checkpoints.path(step), no_dist=True)
    seal(run, step)


def start_gloo() -> None:
    """Joins this rank to the process group of all ranks of a test."""
    start_process_group()


def run_ranks(
    num_ranks: int,
    function: Callable,
    *args: Any,
    timeout_s: float = 120,
    start: Callable[[], Any] = start_gloo,
    method: str = "fork",
) -> list[Any]:
    """Runs a function on several ranks, and returns the values of `function(*args)` in rank order.
    If a rank raises an exception, this process raises AssertionError with the rank's traceback.

    `start` joins the process group. `method` is a start method of multiprocessing.
    """
    quick.refuse_many(num_ranks)
    # Every optimizer imports this module. The import would take over a second in each rank.
    import torch._dynamo  # noqa: F401

    context = mp.get_context(method)
    queue, port = context.SimpleQueue(), free_port()
    processes = [
        context.Process(
            target=_worker, args=(rank, num_ranks, port, queue, start, function, args), daemon=True
        )
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


def _worker(
    rank: int,
    num_ranks: int,
    port: int,
    queue: Any,
    start: Callable[[], Any],
    function: Callable,
    args: tuple,
) -> None:
    become_rank(rank, num_ranks, port)
    try:
        start()
        queue.put((rank, function(*args), None))
        final_barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        os._exit(1)


class StandingRanks:
    """Gloo ranks that stay alive and run one function after another. Torch's set-up in the first
    steps of a process takes longer than all steps of a tiny model.

    Use the ranks only for functions that leave no changed state in their process. If one rank
    fails, all ranks are ended.
    """

    def __init__(self, num_ranks: int) -> None:
        import torch._dynamo  # noqa: F401

        context, port = mp.get_context("fork"), free_port()
        self.processes, self.pipes = [], []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            given = rank, num_ranks, os.getpid(), port, there
            self.processes.append(context.Process(target=_serve, args=given, daemon=True))
            self.processes[-1].start()
            # Only the rank keeps this end open, so that the end of a rank closes the pipe.
            there.close()
            self.pipes.append(here)

    def run(self, function: Callable, *args: Any, timeout_s: float = 120) -> list[Any]:
        """Runs a function on all ranks, and returns the values of `function(*args)` in rank order.
        If a rank raises an exception, this process raises AssertionError with the rank's traceback.
        """
        found: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        for pipe in self.pipes:
            pipe.send((function, args))
        while waiting:
            ready = wait([*waiting], timeout_s)
            assert ready, f"only ranks {sorted(found)} of {len(self.pipes)} returned"
            for pipe in ready:
                rank = waiting.pop(pipe)
                found[rank], error = pipe.recv()
                assert error is None, f"rank {rank} failed:\n{error}"
        return [found[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for each in self.processes:
            each.kill()
            each.join()


def _serve(rank: int, num_ranks: int, keeper: int, port: int, pipe: Connection) -> None:
    end_with(keeper)
    become_rank(rank, num_ranks, port)
    start_gloo()
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def become_rank(rank: int, num_ranks: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
