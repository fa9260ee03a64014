"""Kernels on a GPU, told by what torch says of it; which of them then run, only a GPU can tell."""

import pytest
import torch

from kit.config.plan import Plan
from kit.engines import gpu
from tests.support.workers import run_ranks


@pytest.mark.parametrize(
    ("hip", "precision", "is_tf32"),
    [(None, "bf16", True), (None, "fp32", False), ("7.0", "bf16", False)],
)
def test_tf32_is_for_bf16_on_nvidias_gpus_alone(hip, precision, is_tf32):
    assert run_ranks(1, rounds_factors, hip, precision) == [is_tf32]


def test_chosen_kernels_are_those_that_run(llama_spec):
    """On the CPU too torch says what it takes, grouped heads included."""
    for tensor_parallel in (1, 2):
        plan = Plan(tensor_parallel=tensor_parallel)
        found = gpu.chosen_kernels(llama_spec, plan, torch.device("cpu"))
        assert found == {"attention": "FLASH_ATTENTION", "fp32_products": "fp32"}


def rounds_factors(hip: str | None, precision: str) -> bool:
    """Returns whether TF32 is allowed, in a process whose GPU pretends."""
    torch.version.hip = hip
    gpu.choose_kernels(torch.device("cuda"), Plan.from_dict({"precision": precision}))
    return torch.get_float32_matmul_precision() == "high"
