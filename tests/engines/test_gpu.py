"""Choice of kernels for a GPU. The tests run on a CPU, so they check which kernels are chosen, but
do not run the kernels.
"""

import pytest
import torch

from kit.config.plan import Plan
from kit.engines import gpu
from tests.support.workers import run_ranks


@pytest.mark.parametrize(
    ("hip", "precision", "is_tf32"),
    [(None, "bf16", True), (None, "fp32", False), ("7.0", "bf16", False)],
)
def test_tf32_is_allowed_for_bf16_on_nvidia_gpus_only(hip, precision, is_tf32):
    assert run_ranks(1, rounds_factors, hip, precision) == [is_tf32]


def test_chosen_kernels_reports_flash_attention_on_cpu(llama_spec):
    """Torch reports the chosen attention kernel on the CPU too, also for models with grouped
    key/value heads.
    """
    for tensor_parallel in (1, 2):
        plan = Plan(tensor_parallel=tensor_parallel)
        found = gpu.chosen_kernels(llama_spec, plan, torch.device("cpu"))
        assert found == {"attention": "FLASH_ATTENTION", "fp32_products": "fp32"}


def rounds_factors(hip: str | None, precision: str) -> bool:
    """Returns whether TF32 is allowed after the choice of kernels. The process has
    `torch.version.hip` set to `hip`: a version for AMD, None for NVIDIA.
    """
    torch.version.hip = hip
    gpu.choose_kernels(torch.device("cuda"), Plan.from_dict({"precision": precision}))
    return torch.get_float32_matmul_precision() == "high"
