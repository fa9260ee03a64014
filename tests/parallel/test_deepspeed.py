"""The DeepSpeed engine trains as the native one on one process does, and takes over its
checkpoints and back.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("deepspeed")

import kit
from cluster.state import read_state
from kit.convert import load_model
from kit.engines import build_engine
from kit.engines.deepspeed.configuration import check_batch, deepspeed_config, megatron_arguments
from kit.engines.deepspeed.engine import DeepSpeedEngine
from kit.engines.deepspeed.package import DeepSpeedError
from kit.engines.deepspeed.start import import_deepspeed
from kit.errors import ConfigError, MissingPackageError
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run.checkpoint import Checkpoints
from kit.run.checkpoint_reader import CheckpointTensors
from kit.run.checkpoint_writer import CheckpointWriter
from kit.spec import ModelSpec
from tests import parity
from tests.parity import (
    CPU,
    RECIPE,
    TOLERANCE,
    batches,
    check_bf16,
    differences,
    fit,
    some_thorough,
    train,
)
from tests.workers import local_run, run_ranks, start_training

ALL = {**parity.ALL, "zero_stage": 1}
LAYOUTS = {
    "one process": {},
    "DP2, ZeRO 0": {"data_parallel": 2},
    "DP2, ZeRO 1": {"data_parallel": 2, "zero_stage": 1},
    "DP2, ZeRO 2": {"data_parallel": 2, "zero_stage": 2},
    "DP2, ZeRO 3": {"data_parallel": 2, "zero_stage": 3},
    "DP2, ZeRO 3, recompute full": {"data_parallel": 2, "zero_stage": 3, "recompute": "full"},
    "TP2": {"tensor_parallel": 2},
    "TP2 x DP2, ZeRO 3": {"tensor_parallel": 2, "data_parallel": 2, "zero_stage": 3},
    "PP2": {"pipeline_parallel": 2},
    "PP2, recompute selective": {"pipeline_parallel": 2, "recompute": "selective"},
    "TP2 x PP2 x DP2, ZeRO 1": ALL,
}
GPT_LAYOUTS = ("DP2, ZeRO 3", "TP2", "PP2", "TP2 x PP2 x DP2, ZeRO 1")
IN_BF16 = ("one process", "DP2, ZeRO 2", "DP2, ZeRO 3, recompute full", "PP2", "TP2 x DP2, ZeRO 3")
"""What `make test` trains in bf16; `make faults` trains all."""


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Workers are forked from this process, so one import serves them all."""
    with pytest.MonkeyPatch.context() as here:
        here.setenv("TORCHDYNAMO_DISABLE", "1")  # as the import does, but gone afterwards
        import_deepspeed(CPU)
        yield


def make_plan(changes: dict) -> Plan:
    return parity.make_plan(changes, "deepspeed")


def compare(layout: dict, spec: ModelSpec, native_run, recipe: Recipe = RECIPE) -> dict[str, float]:
    """Returns the largest relative differences of a layout's loss, gradient norm and validation
    loss.
    """
    plan = make_plan(layout)
    spec = fit(spec, plan)
    return differences(
        run_ranks(plan.num_devices, train, spec, plan, recipe), native_run(spec, recipe)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama_equals_the_native_engine(layout, llama_spec, native_run):
    found = compare(LAYOUTS[layout], llama_spec, native_run)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("layout", some_thorough(GPT_LAYOUTS, GPT_LAYOUTS[-1:]))
def test_gpt_with_tied_embeddings_equals_the_native_engine(layout, gpt_spec, native_run):
    found = compare(LAYOUTS[layout], gpt_spec, native_run)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(
    "layout",
    some_thorough([name for name in LAYOUTS if "ZeRO 0" not in name], {*LAYOUTS} - {*IN_BF16}),
)
def test_bf16_gradients_equal_those_of_one_process(layout, llama_spec, one_process):
    check_bf16({"zero_stage": 1, **LAYOUTS[layout]}, "deepspeed", llama_spec, one_process)


@pytest.mark.parametrize("layout", [LAYOUTS["DP2, ZeRO 2"], LAYOUTS["DP2, ZeRO 3"], ALL])
def test_fp16_with_a_scaled_loss_follows_fp32(layout, llama_spec, native_run):
    found = compare({**layout, "precision": "fp16"}, llama_spec, native_run)
    assert 0 < found["loss"] < 1e-4 and found["grad_norm"] < 1e-3, found


def steps_in_fp16(spec: ModelSpec, plan: Plan) -> list[tuple[float, dict[str, float], float]]:
    """Returns gradient norm, scaling and a sum over the weights of four steps, the first with
    far too large a scale.
    """
    config = deepspeed_config(plan, RECIPE)
    config["fp16"] |= {"initial_scale_power": 30, "hysteresis": 1}
    engine = DeepSpeedEngine(spec, plan, RECIPE, CPU, config=config)
    steps = []
    for samples in batches(spec, plan, engine.data_rank)[:4]:
        _, norm = engine.train_step(samples, 1e-3)
        weights = sum(float(weight.detach().double().abs().sum()) for weight in engine.parameters())
        steps.append((norm, engine.loss_scaling(), weights))
    return steps


def test_steps_that_overflow_in_fp16_are_skipped_counted_and_scaled_down(llama_spec):
    plan = make_plan({"zero_stage": 1, "precision": "fp16"})
    steps = run_ranks(1, steps_in_fp16, fit(llama_spec, plan), plan)[0]
    assert [scaling["loss_scale"] for _, scaling, _ in steps] == [
        2.0**power for power in (29, 28, 27, 26)
    ]
    assert [scaling["skipped_steps"] for _, scaling, _ in steps] == [1, 2, 3, 4]
    assert (
        all(norm == float("inf") for norm, _, _ in steps)
        and len({weights for _, _, weights in steps}) == 1
    )


def test_fp16_is_deepspeeds_alone():
    for engine in ("native", "neuron"):
        with pytest.raises(
            ConfigError, match=f"plan.precision: 'fp16' is not allowed with engine '{engine}': only"
        ):
            Plan(precision="fp16", engine=engine)


def test_norms_are_told_without_clipping_too(llama_spec, native_run):
    found = compare(
        LAYOUTS["DP2, ZeRO 1"], llama_spec, native_run, RECIPE.replace(gradient_clip=None)
    )
    assert max(found.values()) <= TOLERANCE, found


# Checkpoints --------------------------------------------------------------------------------------


def train_and_save(spec: ModelSpec, plan: Plan, directory: Path) -> list[tuple[float, float]]:
    engine = build_engine(spec, plan, RECIPE, CPU)
    mine = batches(spec, plan, engine.data_rank)
    steps = [engine.train_step(samples, 1e-3) for samples in mine[:5]]
    writer = CheckpointWriter(Checkpoints(directory), attempt=1, keep_last=2, keep_every=None)
    writer.start(
        engine.state_dict(),
        {"step": 5, "samples": 0, "tokens": 0, "seed": 0, "spec": spec, "plan": plan},
    )
    writer.finish()
    return steps


def load_and_train(
    spec: ModelSpec, plan: Plan, directory: Path
) -> tuple[float, list[tuple[float, float]]]:
    engine = build_engine(spec, plan, RECIPE, CPU, initialise=False)
    engine.restore_optimizer(5)
    checkpoints = Checkpoints(directory)
    CheckpointTensors(checkpoints, checkpoints.describe(5), spec).fill_all(engine.state_dict())
    engine.after_load()
    mine = batches(spec, plan, engine.data_rank)
    return engine.validation_loss(mine[5]), [
        engine.train_step(samples, 1e-3) for samples in mine[5:]
    ]


MOVES = {
    "native to ZeRO 1": (
        ("native", {"pipeline_parallel": 2}),
        ("deepspeed", LAYOUTS["DP2, ZeRO 1"]),
    ),
    "ZeRO 1 to native": (("deepspeed", LAYOUTS["DP2, ZeRO 1"]), ("native", {"tensor_parallel": 2})),
    "native 3D to ZeRO 3": (("native", ALL), ("deepspeed", LAYOUTS["DP2, ZeRO 3"])),
    "ZeRO 3 to 3D": (("deepspeed", LAYOUTS["DP2, ZeRO 3"]), ("deepspeed", ALL)),
    "3D to native": (("deepspeed", ALL), ("native", {"data_parallel": 2, "zero_stage": 3})),
    "ZeRO 0 TP2 to PP2": (("deepspeed", LAYOUTS["TP2"]), ("deepspeed", LAYOUTS["PP2"])),
}


@pytest.mark.parametrize("move", some_thorough(MOVES, {"native 3D to ZeRO 3"}))
def test_a_checkpoint_moves_between_engines_and_layouts(move, gpt_spec, native_run, tmp_path):
    before, after = (parity.make_plan(layout, engine) for engine, layout in MOVES[move])
    run_ranks(before.num_devices, train_and_save, gpt_spec, before, tmp_path)
    results = run_ranks(after.num_devices, load_and_train, gpt_spec, after, tmp_path)
    expected = native_run(gpt_spec)[1][5:]
    for (loss, norm), (expected_loss, expected_norm) in zip(results[0][1], expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert norm == pytest.approx(expected_norm, rel=TOLERANCE)


# Start --------------------------------------------------------------------------------------------


def start_with(spec: ModelSpec, plan: Plan, changes: dict) -> str:
    config = {**deepspeed_config(plan, RECIPE), **changes}
    try:
        DeepSpeedEngine(spec, plan, RECIPE, CPU, config=config)
    except ConfigError as error:
        return str(error)
    return "started"


@pytest.mark.parametrize("layout", ["DP2, ZeRO 1", "PP2"])
def test_another_batch_in_the_configuration_is_refused(layout, llama_spec):
    """As in the 175B run on Frontier whose speed was printed four times too high."""
    plan = make_plan({**LAYOUTS[layout], "micro_batch_size": 1})
    tampered = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": plan.num_microbatches // 4,
    }
    for message in run_ranks(plan.num_devices, start_with, llama_spec, plan, tampered):
        assert "plan.micro_batch_size: the plan says 1, but DeepSpeed reports 4" in message


def test_each_batch_number_is_compared():
    plan = make_plan({})
    with pytest.raises(
        ConfigError, match="plan.global_batch_size: the plan says 8, but DeepSpeed reports 32"
    ):
        check_batch(plan, {"micro_batch_size": 4, "num_microbatches": 2, "global_batch_size": 32})
    check_batch(plan, {"micro_batch_size": 4, "num_microbatches": 2, "global_batch_size": 8})


def test_a_start_needs_no_compiler_and_waits_for_no_lock(llama_spec, tmp_path):
    """A job killed while DeepSpeed compiled leaves a lock, on which later ones would wait for
    ever, silently.
    """
    for extension in (
        "deepspeed_shm_comm",
        "py311_cpu/deepspeed_shm_comm",
        "py312_cpu/deepspeed_shm_comm",
    ):
        (tmp_path / extension).mkdir(parents=True, exist_ok=True)
        (tmp_path / extension / "lock").touch()
    code = (
        "import torch, torch.distributed as dist\nfrom kit.engines.deepspeed.engine import"
        " DeepSpeedEngine\nfrom kit.engines.process_group import leave\nfrom kit.plan import Plan;"
        " from kit.recipe import Recipe; from kit.spec import"
        " ModelSpec\ndist.init_process_group('gloo', store=dist.HashStore(), rank=0,"
        f" world_size=1)\nspec = ModelSpec.from_json({llama_spec.to_json()!r})\nplan ="
        " Plan(engine='deepspeed', zero_stage=2)\nengine = DeepSpeedEngine(spec, plan,"
        " Recipe(data='none', num_steps=1),"
        " torch.device('cpu'))\nprint(engine.train_step(torch.zeros(1, 17, dtype=torch.int64),"
        " 1e-3)[0] > 0)\nleave(0)\n"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CC", "CXX", "DS_ACCELERATOR")
    }
    environment |= {
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "PATH": str(tmp_path / "nothing"),
        "LOCAL_RANK": "0",
    }
    for program in ("cc", "c++", "gcc", "g++"):
        assert shutil.which(program, path=environment["PATH"]) is None
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stdout + done.stderr
    assert done.stderr == ""


# Plans and words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipeline_parallel": 2, "zero_stage": 2},
            "plan.zero_stage: 2 is not allowed with engine 'deepspeed'",
        ),
        ({"pipeline_parallel": 2, "schedule": "gpipe"}, "its pipeline runs 1F1B only"),
        (
            {"tensor_parallel": 2, "sequence_parallel": True},
            "plan.sequence_parallel: True is not allowed with engine",
        ),
        ({"precision": "bf16"}, "use zero_stage 1, also with one replica"),
        ({"zero_stage": 3, "recompute": "selective"}, "not with zero_stage 3; use 'full'"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_with_its_reason(changes, message):
    with pytest.raises(ConfigError) as error:
        make_plan(changes)
    assert message in str(error.value)


def test_a_job_whose_engine_is_not_installed_is_not_started(llama_spec, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", Mock(side_effect=PackageNotFoundError))
    with pytest.raises(MissingPackageError, match="needs deepspeed, which is not installed"):
        kit.launch(tmp_path / "run", spec=llama_spec, plan=make_plan({}), recipe=RECIPE)
    monkeypatch.setattr("importlib.metadata.version", Mock(return_value="0.12.3"))
    with pytest.raises(
        DeepSpeedError, match="needs DeepSpeed 0.19: version 0.12.3 is installed. Run: pip install"
    ):
        kit.launch(tmp_path / "run", spec=llama_spec, plan=make_plan({}), recipe=RECIPE)
    assert not list(tmp_path.iterdir())


def test_a_broken_installation_is_told_without_a_traceback(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text(
        'raise RuntimeError("undefined symbol: deepspeed_op")'
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "kit.engines.deepspeed.probe"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "cannot be imported: RuntimeError: undefined symbol: deepspeed_op. Run: pip install"
        in done.stderr
    )


def test_a_notebook_shows_the_message_alone(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    code = (
        "from kit.engines.deepspeed.package import DeepSpeedError; raise DeepSpeedError('it is too"
        " old')"
    )
    InteractiveShell(history_manager=None).run_cell(code)
    shown = capsys.readouterr().out
    assert "DeepSpeedError: plan.engine 'deepspeed' needs DeepSpeed 0.19: it is too old" in shown
    assert "Traceback" not in shown and "---->" not in shown


def test_frontier_175b_in_the_words_of_both():
    """The layout of the 175B run in the authors' launch scripts."""
    plan = Plan(
        tensor_parallel=4,
        pipeline_parallel=16,
        data_parallel=2,
        zero_stage=1,
        global_batch_size=640,
        recompute="full",
        precision="bf16",
        engine="deepspeed",
    )
    recipe = RECIPE.replace(learning_rate=6e-5, min_learning_rate=6e-6)
    config = deepspeed_config(plan, recipe)
    assert config["train_batch_size"] == 640 == 2 * 1 * config["gradient_accumulation_steps"]
    line = " ".join(megatron_arguments(ModelSpec.preset("gpt-175b"), plan, recipe))
    for part in (
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 16",
        "--num-layers 96",
        "--micro-batch-size 1",
        "--global-batch-size 640",
        "--zero-stage 1",
        "--checkpoint-activations",
        "--bf16",
        "--lr 6e-05",
    ):
        assert part in line
    with pytest.raises(ConfigError, match="is no GPT with tied embeddings"):
        megatron_arguments(ModelSpec.preset("hlat-7b"), plan, recipe)


# A job --------------------------------------------------------------------------------------------


def test_a_killed_job_resumes_and_ends_as_an_unbroken_native_one(
    llama_spec, tiny_dataset, tmp_path
):
    spec = llama_spec.replace(vocab_size=300)
    recipe = Recipe(
        data=str(tiny_dataset.directory), num_steps=40, checkpoint_every=10, learning_rate=3e-3
    )
    plan = Plan(
        data_parallel=2, zero_stage=1, micro_batch_size=2, global_batch_size=8, engine="deepspeed"
    )
    alone = Plan(micro_batch_size=8, global_batch_size=8)
    native = local_run(tmp_path / "native", spec, alone, recipe)
    unbroken = start_training(native.directory)[0].wait()
    assert unbroken.returncode == 0, unbroken.stderr
    run = kit.launch(tmp_path / "run", spec=spec, plan=plan, recipe=recipe)
    deadline = time.time() + 120
    while not run.checkpoints.steps():
        assert time.time() < deadline and not run.job.status().state.is_final, run.job.logs()
        time.sleep(0.01)
    state = read_state(run.directory)
    assert state is not None and state.process is not None
    os.kill(state.process.pid, signal.SIGKILL)
    run.job.wait(timeout_s=20)
    assert "WARNING" not in run.job.logs() and (run.directory / "deepspeed.json").exists()
    for rank in start_training(run.directory, 2, KIT_ATTEMPT="2"):
        resumed = rank.wait()
        assert resumed.returncode == 0 and "WARNING" not in resumed.stderr, resumed.stderr
    ours, theirs = run.metrics(), native.metrics()
    assert ours["step"].tolist() == list(range(1, 41)) and ours["attempt"][-1] == 2
    assert ours["loss"].tolist() == pytest.approx(theirs["loss"].tolist(), rel=TOLERANCE)
    weights = dict(load_model(native).named_parameters())
    for name, parameter in load_model(run).named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=1e-3, atol=1e-5)
