"""Names that torch keeps to itself and the kit cannot do without, each used here and nowhere else.

Any release may change them: `tests/test_torch_private.py` calls each of them, on every supported
release by `make test-torch`.
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
"""Where a checkpoint's description says that a tensor lies: it stands in each `.metadata`."""
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What `scaled_dot_product_attention` calls, as selective recomputation sees it."""
TENSOR_PARALLEL_SUMS = {
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""What a DTensor's sums over ranks call, as selective recomputation sees them."""


def document_attention() -> Any:
    """Returns what `varlen_attn` calls; not in torch 2.9, the last for Trainium."""
    return torch.ops.torch_attn._varlen_attn.default


def attention_choice(query: Tensor, key: Tensor) -> int:
    """Returns which kernel, of `torch.nn.attention.SDPBackend`, causal attention would call."""
    shared = query.shape != key.shape
    return torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=shared)  # pyright: ignore


def multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies tensors in place, all by one kernel where the device has one for it."""
    torch._foreach_mul_(tensors, factor)  # pyright: ignore


def local_part(weight: Tensor, target: DTensor) -> Tensor:
    """Returns the part of a whole weight that this rank's part of `target` stands for, a view.

    `distribute_tensor` would copy the whole weight to the device first.
    """
    shape, offset = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    return weight[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def reusable_stager(options: StagingOptions) -> DefaultStager:
    """Returns a stager that copies any number of states, one after the other, to the same memory.

    Torch 2.11 and 2.12 close the inner stager after its first copy. That clears a table without
    which the next copy fails (KeyError: <class 'type'>), so the inner stager gets a `close` without
    effect.
    """
    stager = DefaultStager(options)
    stager._state_dict_stager.close = lambda: None
    return stager


def default_store() -> Any:
    """Returns the store in which the ranks of the process group met."""
    return dist.distributed_c10d._get_default_store()


def fake_store() -> Any:
    """Returns the store of a process group that has one member here and any number elsewhere; with
    it comes the backend `fake`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def set_cuda_timeouts(timeout: datetime.timedelta) -> None:
    """Sets how long collectives on GPUs may take, in all groups.

    `init_process_group` takes a limit for their whole life only.
    """
    cuda = torch.device("cuda")
    for group in dist.distributed_c10d._world.pg_map:
        if cuda in group._device_types:
            group._get_backend(cuda)._set_default_timeout(timeout)


def nccl_trace() -> bytes:
    """Returns NCCL's last collectives as `torchfrtrace` reads them; empty in a torch without
    NCCL.
    """
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, "_dump_nccl_trace", bytes)()


def on_compile(begins: Callable[..., None], ends: Callable[..., None]) -> None:
    """Has functions called whenever torch.compile begins and ends to compile."""
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(begins)
    on_compile_end(ends)


def record_memory(max_entries: int) -> None:
    """Begins to record the newest allocations and releases of memory on this GPU."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_memory(file: Path) -> None:
    """Writes what `record_memory` has recorded, for pytorch.org/memory_viz, and ends it."""
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
