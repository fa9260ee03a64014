"""The DeepSpeed engine trains as the native engine does on one process. Its checkpoints can be
loaded on other layouts and by other engines.
"""

import contextlib
import importlib
import io
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("deepspeed")

import kit
from kit.config.plan import Plan
from kit.config.spec import SWITCHES, ModelSpec
from kit.engines.build import build_engine
from kit.engines.capabilities import capabilities_of
from kit.engines.deepspeed.configuration import check_batch, deepspeed_config
from kit.engines.deepspeed.engine import DeepSpeedEngine
from kit.engines.deepspeed.start import import_deepspeed
from kit.errors import ConfigError, MissingPackageError
from kit.interop.weights import load_model
from kit.run.checkpoint import Checkpoints
from kit.run.checkpoint_reader import CheckpointTensors
from tests.support import parity
from tests.support.attempts import Attempt, finished
from tests.support.checkpoints import facts, writer_in
from tests.support.hostile import in_a_child
from tests.support.parity import (
    CPU,
    RECIPE,
    TOLERANCE,
    assert_trains_in_bf16,
    batches,
    compare,
    fit,
    some_thorough,
)
from tests.support.workers import local_run, run_ranks

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
THREE = ("TP2 x PP2 x DP2, ZeRO 1",)
GPT_LAYOUTS = ("DP2, ZeRO 3", "TP2", "PP2", *THREE)
IN_BF16 = ("one process", "DP2, ZeRO 2", "DP2, ZeRO 3, recompute full", "PP2", "TP2 x DP2, ZeRO 3")
"""Names of layouts that `make test` trains in bf16. `make faults` trains all layouts."""


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Imports DeepSpeed once in this process, from which the ranks are forked."""
    with pytest.MonkeyPatch.context() as here:
        # The import of DeepSpeed sets this variable too. Because the variable is set here, it is
        # restored after the tests.
        here.setenv("TORCHDYNAMO_DISABLE", "1")
        import_deepspeed(CPU)
        yield


def make_plan(changes: dict) -> Plan:
    return parity.make_plan(changes, "deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_deepspeed_trains_the_switches_of_a_block(layout, llama_spec, native_run):
    """Layouts that make each layer of their own, and split each matrix with plain tensors."""
    spec = llama_spec.replace(
        head_dim=12,
        norm_placement="both",
        zero_centered_norm=True,
        activation="geglu_tanh",
        qkv_bias=True,
        ffn_bias=True,
        partial_rotary_factor=0.5,
        attention_multiplier=0.3,
        attn_logit_softcapping=2.0,
        residual_multiplier=0.5,
    )
    trained = SWITCHES - capabilities_of("deepspeed").untrained_switches
    assert {*spec.switches} == trained - {"parallel_residual"}
    for each in (spec, spec.replace(norm_placement="before", parallel_residual=True)):
        found = compare(LAYOUTS[layout], "deepspeed", each, native_run)
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [*some_thorough(LAYOUTS, (), "llama"), *some_thorough(GPT_LAYOUTS, THREE, "gpt")],
)
def test_deepspeed_engine_equals_native_engine(family, layout, llama_spec, gpt_spec, native_run):
    spec = {"llama": llama_spec, "gpt": gpt_spec}[family]
    found = compare(LAYOUTS[layout], "deepspeed", spec, native_run)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    some_thorough([name for name in LAYOUTS if "ZeRO 0" not in name], {*LAYOUTS} - {*IN_BF16}),
)
def test_bf16_gradients_equal_one_process(layout, llama_spec, one_process):
    changes = {"zero_stage": 1, **LAYOUTS[layout]}
    assert_trains_in_bf16(changes, "deepspeed", llama_spec, one_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    some_thorough(["DP2, ZeRO 2", "DP2, ZeRO 3", "TP2 x PP2, ZeRO 1", *THREE], THREE),
)
def test_fp16_with_loss_scaling_follows_fp32(layout, llama_spec, native_run):
    changes = {**ALL, "data_parallel": 1} if "TP2 x PP2, ZeRO" in layout else LAYOUTS[layout]
    found = compare({**changes, "precision": "fp16"}, "deepspeed", llama_spec, native_run)
    assert 0 < found["loss"] < 1e-4 and found["grad_norm"] < 1e-3, found


def steps_in_fp16(spec: ModelSpec, plan: Plan) -> list[tuple[float, dict[str, float], float]]:
    """Trains four steps with a loss scale that is much too large. Returns for each step (gradient
    norm, loss scale and number of skipped steps, sum of absolute weights).
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


def test_fp16_overflow_skips_step_and_lowers_scale(llama_spec):
    plan = make_plan({"zero_stage": 1, "precision": "fp16"})
    steps = run_ranks(1, steps_in_fp16, fit(llama_spec, plan), plan)[0]
    norms, scalings, weights = zip(*steps, strict=True)
    powers = enumerate((29, 28, 27, 26), 1)
    assert scalings == tuple({"loss_scale": 2.0**p, "skipped_steps": n} for n, p in powers)
    assert {*norms} == {float("inf")} and len({*weights}) == 1


def test_gradient_norm_is_reported_without_clipping(llama_spec, native_run):
    recipe = RECIPE.replace(gradient_clip=None)
    found = compare(LAYOUTS["DP2, ZeRO 1"], "deepspeed", llama_spec, native_run, recipe)
    assert max(found.values()) <= TOLERANCE, found


# Checkpoints --------------------------------------------------------------------------------------


def go_on(spec: ModelSpec, plan: Plan, directory: Path, steps: range) -> list[tuple[float, float]]:
    """Trains the given steps, from a checkpoint of the step before unless the steps begin at 0.
    Saves a checkpoint after the last step. Returns (loss, gradient norm) of each step.
    """
    engine = build_engine(spec, plan, RECIPE, CPU, initialise=not steps.start)
    mine = batches(spec, plan, engine.data_rank)
    if steps.start:
        checkpoints = Checkpoints(directory)
        manifest = checkpoints.describe(steps.start)
        tensors = CheckpointTensors(checkpoints, manifest, spec)
        engine.load(tensors.fill_all, num_updates=steps.start)
        engine.validation_loss(mine[0])  # A validation must not change the loaded state.
    found = [engine.train_step(mine[step], 1e-3) for step in steps]
    writer = writer_in(directory)
    writer.start(engine.state_dict(), facts(spec, steps.stop, plan))
    writer.finish()
    return found


ZERO_1, ZERO_3 = (("deepspeed", LAYOUTS[f"DP2, ZeRO {stage}"]) for stage in (1, 3))
MOVES = {
    "native PP2 to ZeRO 1 to native TP2": (
        ("native", {"pipeline_parallel": 2}),
        ZERO_1,
        ("native", {"tensor_parallel": 2}),
    ),
    "ZeRO 3 to 3D to native": (
        ZERO_3,
        ("deepspeed", ALL),
        ("native", {"data_parallel": 2, "zero_stage": 3}),
    ),
    "ZeRO 0 TP2 to PP2": (("deepspeed", LAYOUTS["TP2"]), ("deepspeed", LAYOUTS["PP2"])),
    "native 3D to ZeRO 3": (("native", ALL), ZERO_3),
}


@pytest.mark.slow
@pytest.mark.parametrize("move", some_thorough(MOVES, {"native 3D to ZeRO 3"}))
def test_checkpoint_moves_between_engines_and_layouts(move, gpt_spec, native_run, tmp_path):
    spec = gpt_spec.replace(num_layers=2)
    expected = native_run(spec)[1]
    for leg, (engine, layout) in enumerate(MOVES[move]):
        plan, steps = parity.make_plan(layout, engine), range(2 * leg, 2 * leg + 2)
        found = run_ranks(plan.num_devices, go_on, spec, plan, tmp_path, steps)[0]
        assert found == [pytest.approx(expected[step], rel=TOLERANCE) for step in steps], plan


# Start --------------------------------------------------------------------------------------------


def start_with(spec: ModelSpec, plan: Plan, changes: dict) -> str:
    """Starts an engine with a changed DeepSpeed configuration. Returns the text of the error, or
    "started".
    """
    config = {**deepspeed_config(plan, RECIPE), **changes}
    try:
        DeepSpeedEngine(spec, plan, RECIPE, CPU, config=config)
    except ConfigError as error:
        return str(error)
    return "started"


@pytest.mark.parametrize("layout", ["DP2, ZeRO 1", "PP2"])
def test_batch_size_mismatch_with_deepspeed_is_refused(layout, llama_spec):
    """In the 175B run on Frontier, a mismatch of the batch size made the printed speed four times
    too high.
    """
    plan = make_plan({**LAYOUTS[layout], "micro_batch_size": 1})
    tampered = {"train_micro_batch_size_per_gpu": 4}
    tampered["gradient_accumulation_steps"] = plan.num_microbatches // 4
    for message in run_ranks(plan.num_devices, start_with, llama_spec, plan, tampered):
        assert "plan.micro_batch_size: the plan says 1, but DeepSpeed reports 4" in message


def test_check_batch_compares_global_batch_size():
    plan = make_plan({})
    reported = {"micro_batch_size": 4, "num_microbatches": 2, "global_batch_size": 8}
    check_batch(plan, reported)
    with pytest.raises(ConfigError, match="global_batch_size: the plan says 8, .* reports 32"):
        check_batch(plan, reported | {"global_batch_size": 32})


def test_deepspeed_start_ignores_stale_compiler_locks(llama_spec, tmp_path):
    """If a job is killed while DeepSpeed compiles, a lock file remains, and later jobs would wait
    for it. The kit's start of DeepSpeed needs neither the lock nor a compiler.
    """
    for python in ("", "py311_cpu/", "py312_cpu/"):
        (tmp_path / f"{python}deepspeed_shm_comm").mkdir(parents=True)
        (tmp_path / f"{python}deepspeed_shm_comm" / "lock").touch()
    nowhere = str(tmp_path / "nothing")
    for program in ("cc", "c++", "gcc", "g++"):
        assert shutil.which(program, path=nowhere) is None
    unset = ("CC", "CXX", "DS_ACCELERATOR")
    own = {name: value for name, value in os.environ.items() if name not in unset}
    given = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": nowhere, "LOCAL_RANK": "0"}
    command = [sys.executable, "-W", "error::UserWarning", "-m", "kit.engines.deepspeed.probe"]
    done = subprocess.run(command, env=own | given, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, f"{version('deepspeed')}\n"), done.stderr
    assert done.stderr == ""


# Plans and words ----------------------------------------------------------------------------------


def test_launch_refuses_missing_or_old_deepspeed(llama_spec, tmp_path, monkeypatch):
    for found, message in (
        (Mock(side_effect=PackageNotFoundError), "needs deepspeed, which is not installed"),
        (Mock(return_value="0.12.3"), "needs DeepSpeed 0.19: version 0.12.3 .* Run: pip install"),
    ):
        monkeypatch.setattr("importlib.metadata.version", found)
        with pytest.raises(MissingPackageError, match=message):
            kit.launch(tmp_path / "run", spec=llama_spec, plan=make_plan({}), recipe=RECIPE)
    assert not list(tmp_path.iterdir())


def probe_anew(folder: Path) -> tuple[int, str]:
    """Checks the DeepSpeed installation as `kit doctor` does, with `folder` first on sys.path and
    no module of DeepSpeed imported yet. Returns (exit code, standard error).
    """
    for name in [name for name in sys.modules if "deepspeed" in name]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    probe = importlib.import_module("kit.engines.deepspeed.probe")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return probe.main(), said.getvalue()


def test_broken_deepspeed_is_reported_without_traceback(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    broken = 'raise RuntimeError("undefined symbol: deepspeed_op")'
    (tmp_path / "deepspeed" / "__init__.py").write_text(broken)
    code, said = in_a_child(lambda: probe_anew(tmp_path))
    told = "cannot be imported: RuntimeError: undefined symbol: deepspeed_op. Run: pip install"
    assert code == 1 and told in said and "Traceback" not in said


def test_notebook_hides_traceback_of_deepspeed_error(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    code = "from kit.engines.deepspeed import package; raise package.DeepSpeedError('too old')"
    InteractiveShell(history_manager=None).run_cell(code)
    shown = capsys.readouterr().out
    assert "DeepSpeedError: plan.engine 'deepspeed' needs DeepSpeed 0.19: too old" in shown
    assert "Traceback" not in shown and "---->" not in shown


# A run --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_deepspeed_run_resumes_as_native_run(spec, recipe, tmp_path):
    """Final losses and weights equal those of an uninterrupted run of the native engine."""
    recipe = recipe.replace(num_steps=40, checkpoint_every=10)
    alone = Plan(micro_batch_size=8, global_batch_size=8)
    native = local_run(tmp_path / "native", spec, alone, recipe)
    finished(native)
    plan = alone.replace(data_parallel=2, zero_stage=1, micro_batch_size=2, engine="deepspeed")
    run = local_run(tmp_path / "run", spec, plan, recipe)
    killed = Attempt(run)
    while not run.checkpoints.steps():
        assert not killed.is_over(), killed.log()
        time.sleep(0.01)
    killed.kill()
    resumed = finished(run, 2)
    assert "WARNING" not in killed.log() + resumed.log()
    ours, theirs = run.metrics(), native.metrics()
    assert ours["step"].tolist() == list(range(1, 41)) and ours["attempt"][-1] == 2
    assert ours["loss"].tolist() == pytest.approx(theirs["loss"].tolist(), rel=TOLERANCE)
    weights = dict(load_model(native).named_parameters())
    for name, parameter in load_model(run).named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=1e-3, atol=1e-5)
