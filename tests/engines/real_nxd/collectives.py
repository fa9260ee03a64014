"""XLA's collectives, computed by gloo on the host, between processes with one CPU device each.

On CPUs, each process of Torch-XLA is a separate world. This module therefore replaces the functions
of `xla_model` and `runtime` that describe the world, and the collectives of `xla_model`. Sums of
bf16 tensors are computed in fp32 and rounded once.

On a Trainium device, a collective is a node in the only graph of a training step. Here a collective
ends the graph, and must end it for all tensors at once, because a tensor that is read alone is
computed by a separate graph. Torch-XLA 2.9 identifies graphs by a hash. The hash ignores which of
several inputs with equal shapes an operation takes (github.com/pytorch/xla/issues/8353). If two
weights of one shape are read before the gradient norm is computed, both weights are updated with
the gradient of the first weight.
"""

import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_xla  # pyright: ignore[reportMissingImports]
from torch import Tensor

TIMEOUT = datetime.timedelta(minutes=5)
Groups = list[list[int]] | None
_made: dict[tuple[int, ...], Any] = {}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def members(groups: Groups) -> tuple[int, ...]:
    """Returns the ranks of this rank's group, in order. Without groups, returns all ranks.

    With NEURON_EXPERIMENTAL_COMPRESS_RG, NxD passes only the first group. Each further group then
    has the same number of consecutive ranks.
    """
    if not groups:
        return tuple(range(world_size()))
    for group in groups:
        if rank() in group:
            return tuple(group)
    assert len(groups) == 1 and groups[0] == list(range(len(groups[0]))), (
        f"rank {rank()} is in none of {groups}"
    )
    first = rank() - rank() % len(groups[0])
    return tuple(range(first, first + len(groups[0])))


def gloo(ranks: tuple[int, ...]) -> Any:
    """Returns the gloo process group of these ranks, and creates it if needed. Ranks outside the
    group need not call this function.
    """
    if ranks not in _made:
        name = "over-gloo-" + "-".join(map(str, ranks))
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        _made[ranks] = dist.ProcessGroupGloo(store, ranks.index(rank()), len(ranks), TIMEOUT)
    return _made[ranks]


def on_host(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor on the host. Floating-point values are converted to fp32."""
    copy = tensor.detach().cpu()
    return (copy.float() if copy.is_floating_point() else copy).contiguous().clone()


def total(reduce_type: str, tensor: Tensor, groups: Groups, scale: float) -> Tensor:
    """Returns the sum, minimum or maximum of a tensor over this rank's group, multiplied by
    `scale`. The result is on the host.
    """
    ranks, value = members(groups), on_host(tensor)
    options = dist.AllreduceOptions()
    options.reduceOp = {
        "sum": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }[reduce_type]
    if len(ranks) > 1:
        gloo(ranks).allreduce([value], options).wait()
    return value if scale == 1 else value * scale


def back(value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype).to(like.device)


def listed(one: Callable[[Tensor], Tensor], given: Any, output: Any) -> Any:
    """Applies the function `one` to a tensor, or to each tensor of a list, and returns the results.
    If `output` is given, the results are copied into the tensors of `output`.
    """
    many = isinstance(given, list | tuple)
    # End the graph before any tensor is read: see the docstring of this module.
    torch_xla.sync()
    made = [one(tensor) for tensor in (given if many else [given])]
    if output is None:
        return made if many else made[0]
    with torch.no_grad():
        for to, value in zip(output if many else [output], made, strict=True):
            assert to.shape == value.shape, f"output has shape {to.shape}, {value.shape} came"
            to.data.copy_(value)
    return output


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Any:
    """Returns a new reduced tensor for a single tensor. The tensors of a list are reduced
    in place.
    """
    is_list = not isinstance(inputs, Tensor)
    return listed(
        lambda t: back(total(reduce_type, t, groups, scale), t), inputs, inputs if is_list else None
    )


def all_gather(
    value: Any,
    dim: int = 0,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    **ignored: Any,
) -> Any:
    ranks = members(groups)

    def one(tensor: Tensor) -> Tensor:
        mine = on_host(tensor)
        parts = [torch.empty_like(mine) for _ in ranks]
        if len(ranks) > 1:
            gloo(ranks).allgather([parts], [mine]).wait()
        return back(torch.cat(parts if len(ranks) > 1 else [mine], dim), tensor)

    return listed(one, value, output)


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    **ignored: Any,
) -> Any:
    ranks = members(groups)
    assert shard_count == len(ranks), f"{shard_count} parts for {len(ranks)} ranks"

    def one(tensor: Tensor) -> Tensor:
        assert tensor.shape[scatter_dim] % shard_count == 0, (
            f"{tuple(tensor.shape)} over {shard_count} ranks"
        )
        parts = total(reduce_type, tensor, groups, scale).chunk(shard_count, scatter_dim)
        return back(parts[ranks.index(rank())].contiguous(), tensor)

    return listed(one, input, output)


def all_gather_bucketized(
    input_list: Any, dim: int = 0, groups: Groups = None, output: Any = None, **ignored: Any
) -> Any:
    return all_gather(input_list, dim, groups, output)


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    **ignored: Any,
) -> Any:
    return reduce_scatter(reduce_type, input_list, scale, scatter_dim, shard_count, groups, output)


def rendezvous(tag: str, payload: bytes = b"", replicas: Any = None) -> list[bytes]:
    """Waits until all ranks have called this function."""
    ranks = members(None)
    if len(ranks) > 1:
        gloo(ranks).barrier().wait()
    return [payload]


def replacements(module: str) -> dict[str, Any]:
    """Returns the functions and values that replace names of a Torch-XLA module, by name."""
    if module == "torch_xla.core.xla_env_vars":
        # The value is the name of the environment variable with the number of hosts.
        return {"HOST_WORLD_SIZE": "HOST_WORLD_SIZE"}
    if module == "torch_xla.runtime":
        return {
            "world_size": world_size,
            "global_device_count": world_size,
            "global_ordinal": rank,
            "local_ordinal": local_rank,
            "local_process_count": local_world_size,
        }
    moved = (
        all_reduce,
        all_gather,
        reduce_scatter,
        all_gather_bucketized,
        reduce_scatter_bucketized,
        rendezvous,
    )
    return {function.__name__: function for function in moved}
