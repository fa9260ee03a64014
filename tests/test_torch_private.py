"""Private names of torch that the kit uses. The installed torch release has these names, and the
functions behave as the kit needs.
"""

import datetime
import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from kit import torch_private


@pytest.fixture
def fake_group():
    """A fake process group of 4 ranks. Only rank 1 exists, which is this process."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_attention_calls_a_listed_kernel():
    query = torch.zeros(1, 1, 8, 8, requires_grad=True)
    with torch.profiler.profile(acc_events=True) as profile:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    names = {str(kernel).removesuffix(".default") for kernel in torch_private.ATTENTION}
    assert names & {event.name.replace("::", ".") for event in profile.events()}
    assert {str(kernel) for kernel in torch_private.TENSOR_PARALLEL_SUMS} == {
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.reduce_scatter_tensor.default",
    }


def test_attention_choice_returns_a_known_kernel():
    query = torch.zeros(1, 2, 8, 8)
    chosen = torch_private.attention_choice(query, query[:, :1])
    assert SDPBackend(chosen).name in ("MATH", "FLASH_ATTENTION")


def test_document_attention_is_torchs_varlen_kernel():
    from torch.nn.attention.varlen import varlen_attn

    assert callable(varlen_attn) and "_varlen_attn" in str(torch_private.document_attention())


def test_multiply_scales_every_tensor():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    torch_private.multiply(tensors, torch.tensor(0.5))
    assert [tensor.sum().item() for tensor in tensors] == [1.0, 3.0]


def test_local_part_equals_the_dtensors_shard(fake_group):
    mesh, weight = init_device_mesh("cpu", (4,)), torch.arange(12.0).reshape(6, 2)
    target = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    part = torch_private.local_part(weight, target)
    assert part.equal(target.to_local()) and part.data_ptr() != target.to_local().data_ptr()


def test_reusable_stager_copies_several_states():
    stager = torch_private.reusable_stager(StagingOptions(False, False, True, False))
    weight = torch.zeros(3)
    copies = []
    for number in range(3):
        weight.fill_(number)
        copies.append(stager.stage({"weight": weight}).result()["weight"].clone())
    assert [copy.tolist() for copy in copies] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_process_groups_have_store_and_timeouts():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = store.num_keys()
        torch_private.default_store().set("met", "here")
        assert store.num_keys() == before + 1
        torch_private.set_cuda_timeouts(datetime.timedelta(seconds=1))
        (group,) = dist.distributed_c10d._world.pg_map
        assert torch.device("cpu") in group._device_types
        backend = group._get_backend(torch.device("cpu"))
        backend._set_default_timeout(datetime.timedelta(seconds=1))
    finally:
        dist.destroy_process_group()


def test_nccl_trace_returns_bytes_without_nccl():
    assert isinstance(torch_private.nccl_trace(), bytes)


def test_compile_callbacks_can_be_registered():
    torch_private.on_compile(lambda *_: None, lambda *_: None)


def test_memory_history_functions_exist():
    assert "max_entries" in inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert callable(torch.cuda.memory._dump_snapshot)


def test_overridden_checkpoint_names_exist():
    """`kit.run.checkpoint_reader` and `kit.run.checkpoint_writer` override these methods of
    torch.
    """
    assert [*inspect.signature(FileSystemReader._slice_file).parameters][1:] == ["file", "sinfo"]
    assert "_cached_plans_key" in vars(DefaultSavePlanner(enable_plan_caching=True))
    assert torch_private.StorageInfo("name", 0, 1).relative_path == "name"
