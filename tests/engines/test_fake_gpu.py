"""Graphs, kernels and library calls that torch generates for the native engine on an H100, checked
without a GPU. tests/engines/fake_gpu simulates the H100.
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
"""Header files of NVIDIA's runtime package that declare `cudaDeviceProp`, as used in the build of
torch.
"""


def why_not() -> str:
    """Returns the reason why the simulated GPU cannot be used on this machine, or an empty
    string.
    """
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
    """Path of the simulated CUDA driver library, which is loaded before torch. Torch then does not
    load its own `libcuda.so.1`, because a library of this name is loaded already.
    """
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    # Triton's include folder contains crt/, which the first folder lacks.
    includes = [HEADERS[0].parent, SITE / "triton/backends/nvidia/include"]
    command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    command += [f"-I{folder}" for folder in includes]
    subprocess.run([*command, HERE / "driver.c", "-o", library], check=True)
    return library


def steps_on_fake_gpu(driver: Path, plan: Plan, changes: dict[str, Any]) -> dict[str, Any]:
    """Runs three training steps on the simulated GPU. Returns the kernels that the steps compile,
    and the library functions that they call.
    """
    command = [sys.executable, "-m", "tests.engines.fake_gpu.step"]
    command += [plan.to_json(), json.dumps(changes)]
    environment = os.environ | {"LD_PRELOAD": str(driver), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_clean(found: dict[str, Any]) -> None:
    """Fails if a graph was broken into parts, or if an operator received tensors on different
    devices.
    """
    assert found["graph_breaks"] == {}
    assert found["mixed_devices"] == {}
    assert (found["state_on"], found["result_on"]) == (["cuda:0"], "cpu")


@pytest.mark.parametrize(
    ("recompute", "backward_triton"), [("none", 9), ("selective", 12)], ids=["none", "selective"]
)
def test_h100_block_calls_few_kernels(driver: Path, recompute: Any, backward_triton: int) -> None:
    """All blocks and steps share one graph for the forward pass and one for the backward pass.
    RMSNorm is fused with the residual addition, and SiLU with the multiplication. RoPE is fused
    too. Attention calls cuDNN. No expensive operation is repeated.
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
    """The all-gathers of `fully_shard` are outside the compiled graphs. Recomputation calls the
    graph of the forward pass again.
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
    """In each direction, a block has two all-gathers and two reduce-scatters, before and after
    attention and feed-forward. Megatron-LM has the same number (arXiv 2205.05198, section 4.2.2).
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
