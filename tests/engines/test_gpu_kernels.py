"""Kernels on a GPU, told by what torch says of it; which of them then run, only a GPU can tell."""

import pytest
import torch
from torch.nn.attention import _cur_sdpa_kernel_backends

from kit.engines import gpu_kernels
from kit.plan import Plan
from tests.workers import run_ranks

CUDNN, FLASH, EFFICIENT, MATH = "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"


@pytest.mark.parametrize(
    "capability, cudnn, hip, first",
    [
        ((9, 0), 91900, None, CUDNN),
        ((9, 0), 91002, None, FLASH),
        ((9, 0), None, "7.0", FLASH),
        ((10, 0), 91900, None, CUDNN),
        ((8, 0), 91900, None, FLASH),
        ((12, 0), 91900, None, FLASH),
    ],
)
def test_order_of_attention_kernels(capability, cudnn, hip, first):
    """MI250X calls itself 9.0 too; an older cuDNN is one that torch does not take first either."""
    assert run_ranks(1, chosen, capability, cudnn, hip, "bf16")[0][0][0] == first


def test_tf32_is_for_bf16_alone():
    order, tf32 = run_ranks(1, chosen, (9, 0), 91900, None, "bf16")[0]
    assert (order, tf32) == ([CUDNN, FLASH, EFFICIENT, MATH], True)
    assert run_ranks(1, chosen, (9, 0), 91900, None, "fp32")[0][1] is False


def test_chosen_kernels_are_those_that_run(llama_spec):
    """On the CPU too torch says what it takes, grouped heads included."""
    for tensor_parallel in (1, 2):
        plan = Plan(tensor_parallel=tensor_parallel)
        found = gpu_kernels.chosen_kernels(llama_spec, plan, torch.device("cpu"))
        assert found == {"attention": "FLASH_ATTENTION", "fp32_products": "fp32"}


def chosen(capability, cudnn, hip, precision):
    """Returns the order of kernels, and whether TF32 is allowed, in a process whose GPU
    pretends.
    """
    torch.cuda.get_device_capability = lambda _device: capability
    torch.backends.cudnn.version = lambda: cudnn
    torch.version.hip = hip
    gpu_kernels.choose_kernels(torch.device("cuda"), Plan(precision=precision))
    return [
        backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)
    ], torch.get_float32_matmul_precision() == "high"
