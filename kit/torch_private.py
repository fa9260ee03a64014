"""All private names of torch that the kit uses. No other module uses private names of torch.

Any release of torch may change private names. Therefore `tests/test_torch_private.py` calls each of
them, and `make test-torch` runs this test on every supported release.
"""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

StorageInfo = _StorageInfo
"""Class of entries in a checkpoint's file `.metadata`. An entry gives the file, the offset and the
length in bytes of a tensor."""
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operators to which `scaled_dot_product_attention` is dispatched. Selective recomputation
recognises attention by these operators."""
TENSOR_PARALLEL_SUMS = {
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""Operators with which a DTensor sums over ranks. Selective recomputation recognises these sums by
the operators."""


def document_attention() -> Any:
    """Returns the operator that torch's `varlen_attn` calls for attention within documents. Torch
    2.9, the last release for Trainium, does not have it.
    """
    return torch.ops.torch_attn._varlen_attn.default


def attention_choice(query: Tensor, key: Tensor) -> int:
    """Returns which attention kernel torch chooses for causal attention with these tensors. The
    result is the number of a value of `torch.nn.attention.SDPBackend`.
    """
    shared = query.shape != key.shape
    return torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=shared)  # pyright: ignore


def multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies all tensors in place by `factor`, with a single kernel if the device has such a
    kernel.
    """
    torch._foreach_mul_(tensors, factor)  # pyright: ignore


def local_part(weight: Tensor, target: DTensor) -> Tensor:
    """Returns the part of the full `weight` that corresponds to this rank's shard of `target`. The
    result is a view of `weight`.

    `distribute_tensor` is not used, since it would first copy the full weight to the device.
    """
    shape, offset = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    return weight[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def reusable_stager(options: StagingOptions) -> DefaultStager:
    """Returns a stager (torch's object that copies a state to host memory) that can copy several
    states, one after the other, into one buffer.

    In torch 2.11 and 2.12 the stager closes another stager, which it contains, after the first
    copy. Closing deletes a table that the next copy needs (KeyError: <class 'type'>). Therefore
    `close` of the contained stager is replaced by a function without effect.
    """
    stager = DefaultStager(options)
    stager._state_dict_stager.close = lambda: None
    return stager


def default_store() -> Any:
    """Returns the key-value store through which the ranks of the default process group have met."""
    return dist.distributed_c10d._get_default_store()


def fake_store() -> Any:
    """Returns a store for a simulated process group, in which this process is the only actual rank.
    The import also registers the backend `fake`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def set_cuda_timeouts(timeout: datetime.timedelta) -> None:
    """Sets the timeout of collectives on GPUs in all process groups that exist.

    `init_process_group` can only set a timeout for the whole life of a group.
    """
    cuda = torch.device("cuda")
    for group in dist.distributed_c10d._world.pg_map:
        if cuda in group._device_types:
            group._get_backend(cuda)._set_default_timeout(timeout)


def nccl_trace() -> bytes:
    """Returns NCCL's record of the last collectives, in the format that the tool `torchfrtrace`
    reads. Returns empty bytes if torch was built without NCCL.
    """
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, "_dump_nccl_trace", bytes)()


def on_compile(begins: Callable[..., None], ends: Callable[..., None]) -> None:
    """Registers two functions: torch calls them when torch.compile begins and ends a
    compilation.
    """
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(begins)
    on_compile_end(ends)


def record_memory(max_entries: int) -> None:
    """Starts recording the newest `max_entries` allocations and releases of memory on this GPU."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_memory(file: Path) -> None:
    """Writes the events that were recorded since `record_memory`, in the format of
    pytorch.org/memory_viz, and ends the recording.
    """
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
