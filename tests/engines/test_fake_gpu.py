"""Graphs, kernels and library calls that torch generates for an H100 and the native engine, without
a GPU: see `tests/engines/fake_gpu`.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.config.plan import Plan
from tests.support.environments import ROOT

HERE = Path(__file__).parent / "fake_gpu"
SITE = Path(torch.__file__).parents[1]
HEADERS = sorted(SITE.glob("nvidia/**/driver_types.h"))
"""The declaration of `cudaDeviceProp` that torch was built with, from NVIDIA's runtime package."""


def why_not() -> str:
    """Returns the reason why the simulated GPU cannot be used here, or an empty string."""
    if torch.version.cuda is None:
        return "needs a CUDA build of torch: make test-torch TORCH=2.11.0"
    if torch.cuda.is_available():
        return "there is a real GPU"
    if not torch.__version__.startswith("2.11."):
        return f"the fake GPU replaces private functions of torch 2.11, not of {torch.__version__}"
    if importlib.util.find_spec("triton") is None or not HEADERS:
        return "needs the packages triton and nvidia-cuda-runtime"
    return "" if shutil.which("gcc") else "needs gcc"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

GPU: dict[str, Any] = {"precision": "bf16", "compile": True, "micro_batch_size": 4}
THREE_LAYERS = {"num_layers": 3}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver library that is loaded before torch. The stand-in for `libcuda.so.1` in torch is
    not loaded if a library of this name is loaded already.
    """
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    includes = [HEADERS[0].parent, SITE / "triton/backends/nvidia/include"]  # the latter has crt/
    command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    command += [f"-I{folder}" for folder in includes]
    subprocess.run([*command, HERE / "driver.c", "-o", library], check=True)
    return library


def steps_on_fake_gpu(driver: Path, plan: Plan, changes: dict[str, Any]) -> dict[str, Any]:
    """Returns what three training steps compile and call on the simulated GPU."""
    command = [sys.executable, "-m", "tests.engines.fake_gpu.step"]
    command += [plan.to_json(), json.dumps(changes)]
    environment = os.environ | {"LD_PRELOAD": str(driver), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_clean(found: dict[str, Any]) -> None:
    """Fails for a graph break, and for a tensor on another device than its operator."""
    assert found["graph_breaks"] == {}
    assert found["mixed_devices"] == {}
    assert (found["state_on"], found["result_on"]) == (["cuda:0"], "cpu")


@pytest.mark.parametrize(
    ("recompute", "backward_triton"), [("none", 9), ("selective", 12)], ids=["none", "selective"]
)
def test_h100_block_calls_few_kernels(driver: Path, recompute: Any, backward_triton: int) -> None:
    """There is one graph per direction for all blocks and steps. RMSNorm is fused with the
    residual, and SiLU with the product. RoPE is fused too. Attention calls cuDNN. No expensive
    operation is repeated.
    """
    plan = Plan(**GPU, global_batch_size=8, recompute=recompute)
    found = steps_on_fake_gpu(driver, plan, THREE_LAYERS)
    assert_clean(found)
    block, loss = [each for each in found["graphs"] if each["direction"] == "forward"]
    [backward] = [each for each in found["graphs"] if each["direction"] == "backward"]
    assert block["library"] == {"mm": 7, ATTENTION["forward"]: 1} and block["triton"] <= 6
    assert backward["library"] == {"mm": 14, ATTENTION["backward"]: 1}
    assert backward["triton"] <= backward_triton
    assert (loss["triton"], loss["library"]) == (1, {}), "the softmax of the loss is one kernel"


ATTENTION = {
    "forward": "_scaled_dot_product_cudnn_attention",
    "backward": "_scaled_dot_product_cudnn_attention_backward",
}
PRODUCTS = {"forward": 7, "backward": 14}


def test_h100_zero_3_compiles_blocks_once(driver: Path) -> None:
    """The gathers of fully_shard are outside the graphs, and recomputation calls the forward graph
    again.
    """
    plan = Plan(**GPU, data_parallel=8, zero_stage=3, recompute="full", global_batch_size=64)
    found = steps_on_fake_gpu(driver, plan, THREE_LAYERS)
    assert_clean(found)
    blocks = [each for each in found["graphs"] if each["library"]]
    assert [each["direction"] for each in blocks] == ["forward", "backward"]
    for each in blocks:
        direction = each["direction"]
        assert each["library"] == {"mm": PRODUCTS[direction], ATTENTION[direction]: 1}


def test_h100_tensor_parallel_compiles_blocks_once(driver: Path) -> None:
    """Each direction of a block gathers twice and scatters twice, before and after attention and
    feed-forward block. Megatron-LM (arXiv 2205.05198, section 4.2.2) has the same number.
    """
    plan = Plan(**GPU, tensor_parallel=8, sequence_parallel=True, global_batch_size=8)
    found = steps_on_fake_gpu(driver, plan, THREE_LAYERS)
    assert_clean(found)
    assert [each["direction"] for each in found["graphs"]] == ["forward", "backward"]
    for each in found["graphs"]:
        direction, library = each["direction"], each["library"]
        assert library.pop("wait_tensor") == 4
        assert library == {
            "mm": PRODUCTS[direction],
            ATTENTION[direction]: 1,
            "all_gather_into_tensor": 2,
            "reduce_scatter_tensor": 2,
        }
