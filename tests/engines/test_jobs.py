"""Jobs for the plans of the papers: commands, environment variables, and configuration files of the
engine.
"""

import json
import re
import sys

import pytest

from cluster import submission
from cluster.attempts import AttemptOutcome, claimed, write_end
from cluster.render import render, scripts
from kit import launcher
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.deepspeed.configuration import deepspeed_config, megatron_arguments
from kit.errors import ConfigError
from tests.engines.test_neuron_recipes import PLANS, RECIPE, a_run
from tests.support.sources import ROOT

FRONTIER_175B = Plan(
    tensor_parallel=4,
    pipeline_parallel=16,
    data_parallel=2,
    zero_stage=1,
    global_batch_size=640,
    recompute="full",
    precision="fp16",
    engine="deepspeed",
)
# Environment variables from github.com/awslabs/HLAT, 7b/ and 70b/. Two XLA variables are left out,
# because the kit does not need them.
HLAT = {
    "hlat-7b": {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_RT_ENABLE_VERBOSE_NUMERICAL_ERRORS": "0",
        "NEURON_TRANSFER_WITH_STATIC_RING_OPS": "''",
    },
    "hlat-70b": {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "31",
        "NEURON_EXPERIMENTAL_COMPRESS_RG": "1",
        "TORCH_DIST_INIT_BARRIER": "0",
    },
}
BOTH = {
    "NEURON_CC_FLAGS": "'--model-type transformer --distribution-strategy=llm-training'",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_EXEC_TIMEOUT": "4000",
    "MALLOC_ARENA_MAX": "64",
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "XLA_USE_BF16": "0",
    "XLA_DOWNCAST_BF16": "0",
}


@pytest.mark.parametrize("name", PLANS)
def test_hlat_scripts_compile_then_train(name, tmp_path):
    """The compile script and the training script set the environment variables of the published
    recipe.
    """
    run = a_run(tmp_path / "run", name, PLANS[name], "trn1.32xlarge")
    texts = scripts(launcher.job_spec(run), run.site)
    assert list(texts) == ["compile.sh", "submit.sh"], "in this order"
    start = f"{ROOT}/cluster/start.py"
    command = f"exec {sys.executable} -P {start} kit.train --run {run.directory}"
    agent = f"{sys.executable} -P -m torch.distributed.run"
    nodes = {"hlat-7b": 64, "hlat-70b": 256}[name]
    for text in texts.values():
        lines = [line.strip() for line in text.splitlines()]
        assert command in lines and f"#SBATCH --nodes={nodes}" in lines
        assert re.search(rf"--nnodes={nodes} .*--nproc-per-node=32", text)
        exports = dict(re.findall(r"^\s*export (\w+)=(.*)$", text, re.MULTILINE))
        assert {**BOTH, **HLAT[name]}.items() <= exports.items()
    assert f"exec neuron_parallel_compile {agent}" in texts["compile.sh"]
    assert f"exec {agent}" in texts["submit.sh"]
    assert "neuron_parallel_compile" not in texts["submit.sh"]


def test_frontier_script_starts_one_rank_per_gpu(tmp_path):
    """Each rank runs DeepSpeed, which reads the rank's number from RANK and LOCAL_RANK."""
    run = a_run(tmp_path / "run", "gpt-175b", FRONTIER_175B, "frontier")
    text = render(launcher.job_spec(run), run.site)
    for part in (
        "#SBATCH --nodes=16",
        "srun --nodes=16 --ntasks=128 --ntasks-per-node=8",
        f"-P {ROOT}/cluster/start.py kit.train --run {run.directory}",
        "--gpus-per-task=1 --gpu-bind=closest",
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID",  # DeepSpeed reads both
    ):
        assert part in text


def test_submit_writes_deepspeed_configuration(tmp_path, monkeypatch):
    """The 175B run has the layout of the authors' launch scripts. A later submission with another
    engine removes DeepSpeed's configuration files.
    """

    def submit(prepared):
        with claimed(tmp_path / "run", prepared.files) as attempt:
            pass
        write_end(tmp_path / "run", attempt, AttemptOutcome(0, "done"))

    monkeypatch.setattr(submission, "submit_prepared", submit)
    run = a_run(tmp_path / "run", "gpt-175b", FRONTIER_175B, "frontier")
    launcher.submit(launcher.draft(run))
    config = deepspeed_config(FRONTIER_175B, RECIPE)
    assert json.loads((run.directory / "deepspeed.json").read_text()) == config
    assert config["train_batch_size"] == 640 == 2 * 1 * config["gradient_accumulation_steps"]
    line = (run.directory / "megatron_deepspeed.txt").read_text()
    for part in (
        "pretrain_gpt.py ",
        "--tensor-model-parallel-size 4 ",
        "--pipeline-model-parallel-size 16 ",
        "--num-layers 96 ",
        "--micro-batch-size 1 ",
        "--global-batch-size 640 ",
        "--zero-stage 1 ",
        "--checkpoint-activations ",
        "--fp16 ",
        "--lr 0.0003 ",
    ):
        assert part in line
    with pytest.raises(ConfigError, match="is no GPT with tied embeddings"):
        megatron_arguments(ModelSpec.preset("hlat-7b"), FRONTIER_175B, RECIPE)
    native = FRONTIER_175B.replace(engine="native", precision="bf16")
    native_run = a_run(run.directory, "gpt-175b", native, "frontier")
    launcher.submit(launcher.draft(native_run))
    assert not (run.directory / "deepspeed.json").exists(), "nothing is left of another engine"
