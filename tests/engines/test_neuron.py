"""The Neuron engine on a simulated NxD (folder `standin`): which functions of NxD are called in
which order, and that training results equal those of the native engine.

Only tests marked `neuron` run the real NxD, on a Trainium host.
"""

import importlib
import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch

import kit
from cluster.state import JobState, read_state
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.neuron.checkpoint import SETTLE_STEPS
from kit.engines.neuron.configuration import needed_environment
from kit.engines.neuron.probe import probe
from kit.errors import CheckpointError, ConfigError
from kit.interop.weights import load_model
from kit.interop.weights.neuron import import_nxd
from kit.model import build_decoder
from kit.run.checkpoint import Checkpoints
from kit.run.checkpoint_reader import CheckpointTensors
from tests.engines.signatures import CALLS, SIGNATURES, check
from tests.support.attempts import Attempt, finished
from tests.support.checkpoints import facts, nxd_in
from tests.support.parity import (
    BATCH,
    RECIPE,
    SAME_LEARNING,
    STEPS,
    TOLERANCE,
    batches,
    build,
    compare,
    make_plan,
    overfit,
    some_thorough,
)
from tests.support.workers import local_run, run_ranks

SP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS = {
    "one process": {},
    "ZeRO 1": {"zero_stage": 1},
    "DP2": {"data_parallel": 2},
    "TP2": {"tensor_parallel": 2},
    "TP2, sequence parallel": SP,
    "TP2 x DP2, sequence parallel, recompute selective": {
        **SP,
        "data_parallel": 2,
        "recompute": "selective",
    },
    "TP2 x PP2, ZeRO 1, recompute full": {
        **SP,
        "pipeline_parallel": 2,
        "zero_stage": 1,
        "recompute": "full",
    },
}

HERE = probe()


def neuron_plan(changes: dict) -> Plan:
    return make_plan(changes, "neuron")


@pytest.fixture
def small_spec(llama_spec) -> ModelSpec:
    """A tiny Llama model of two layers, with two query heads for each key/value head, as in HLAT's
    70B model.
    """
    return llama_spec.replace(num_layers=2)


# Parity -------------------------------------------------------------------------------------------


EACH, SHARED, ONE = 4, 2, 1
"""Numbers of key/value heads for four query heads: four as in the 7B model, two as in the 70B
model, and one, which is copied to all tensor ranks."""
EQUAL = {
    **{name: (changes, SHARED, RECIPE) for name, changes in LAYOUTS.items()},
    "one fused matrix": (SP, EACH, RECIPE),
    "copies of a key/value head": ({"tensor_parallel": 2}, ONE, RECIPE),
    "copies, sharded": ({**SP, "zero_stage": 1, "data_parallel": 2}, ONE, RECIPE),
    "nothing is clipped": ({}, SHARED, RECIPE.replace(gradient_clip=None)),
}


@pytest.mark.parametrize("case", EQUAL)
def test_neuron_engine_equals_native_engine(case, standin, small_spec, native_run):
    changes, num_kv_heads, recipe = EQUAL[case]
    spec = small_spec.replace(num_kv_heads=num_kv_heads)
    found = compare(changes, "neuron", spec, native_run, recipe)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("layout", some_thorough(list(LAYOUTS)[2:], list(LAYOUTS)[-1:]))
def test_bf16_layout_learns_as_one_process(layout, standin, small_spec, one_process):
    """bf16 is tested, because a sum over ranks that is lost due to different dtypes would not show
    in fp32.
    """
    plan = neuron_plan({**LAYOUTS[layout], "precision": "bf16"})
    alone = neuron_plan({"precision": "bf16", "zero_stage": plan.zero_stage})
    losses, norms = zip(*run_ranks(plan.num_devices, overfit, small_spec, plan)[0], strict=True)
    expected, expected_norms = zip(*one_process(overfit, small_spec, alone), strict=True)
    assert norms[0] == pytest.approx(expected_norms[0], rel=1e-3)
    assert losses == pytest.approx(expected, rel=SAME_LEARNING)


@pytest.mark.parametrize("stage", [0, 1])
def test_bf16_losses_follow_fp32(stage, standin, small_spec, native_run):
    """The CPU has no stochastic rounding. A few training steps in bf16 follow fp32 without
    stochastic rounding.
    """
    changes = {"precision": "bf16", "zero_stage": stage, "data_parallel": 2}
    changes["recompute"] = "selective"
    found = compare(changes, "neuron", small_spec, native_run)
    assert 0 < found["loss"] < 1e-3 and found["grad_norm"] < 0.01, found


def test_tensor_parallel_4_refuses_copied_heads(standin, small_spec, native_run, monkeypatch):
    """With four tensor ranks, NxD spreads the tensor ranks over a node, but not the copies of a
    key/value head. Without the kit's check, heads are paired wrongly and the gradient norm differs.
    """
    changes = {"tensor_parallel": 4, "data_parallel": 2}
    with pytest.raises(ConfigError, match="tensor_parallel: 4 is not allowed with engine 'neuron'"):
        neuron_plan(changes).check(small_spec)
    monkeypatch.setattr(Plan, "check", lambda *_: None)
    found = compare(changes, "neuron", small_spec, native_run, RECIPE.replace(num_steps=1))
    assert found["grad_norm"] > TOLERANCE, found


# Calls --------------------------------------------------------------------------------------------


def calls_of_two_steps(spec: ModelSpec, plan: Plan, folder: Path) -> tuple[list[str], ...]:
    engine = build(spec, plan)
    made = len(CALLS)
    for samples, rate in zip(batches(spec, plan, engine.data_rank), (1e-3, 5e-4), strict=False):
        engine.train_step(samples, rate)
    checkpoints = nxd_in(folder, spec, engine)
    checkpoints.save(facts(spec, 2, plan))
    checkpoints.finish()
    inside = re.compile("parallel_cross|region|get_")
    steps = [name for name, _ in CALLS[made:] if not inside.search(name)]
    rates = [arguments["learning_rate"] for name, arguments in CALLS if name == "step"]
    return [name for name, _ in CALLS[:made]], steps, rates


def test_nxd_functions_are_called_in_order(standin, small_spec, tmp_path):
    """In a pipeline, one call of `run_train` processes all micro-batches. Otherwise each
    micro-batch has one call.
    """
    made = "initialize_parallel_model", "initialize_parallel_optimizer"
    order = ["neuronx_distributed_config", *made, "zero_grad"]
    for changes in ({}, {"pipeline_parallel": 2, "zero_stage": 1}):
        plan = neuron_plan(changes)
        called = run_ranks(plan.num_devices, calls_of_two_steps, small_spec, plan, tmp_path)[0]
        built, steps, rates = called
        assert [name for name in built if name in order] == order
        each = ["run_train", "mark_step"] * plan.num_microbatches
        one_step = [*(["run_train"] if changes else each), "step", "zero_grad", "mark_step"]
        assert steps == [*one_step, *one_step, "save_checkpoint", "finalize_checkpoint"]
        assert rates == [1e-3, 5e-4] and ("NxDPPModel" in built) is bool(changes)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("initialize_parallel_model", {"nxd_config": {}}, "missing a required argument"),
        ("neuronx_distributed_config", {"context_parallel_size": 1}, "got an unexpected keyword"),
    ],
)
def test_standin_refuses_arguments_nxd_does_not_take(name, arguments, message):
    with pytest.raises(TypeError, match=f"{name} of version 0.9.0: {message}"):
        check(f"neuronx_distributed.{name}", arguments)


def test_recorded_nxd_signatures_name_their_source():
    source = "https://github.com/aws-neuron/neuronx-distributed/tree/"
    for version, table in json.loads(SIGNATURES.read_text()).items():
        assert table["source"].startswith(source) and len(table["signatures"]) >= 15, version


@pytest.mark.neuron
@pytest.mark.skipif(HERE.state != "ok", reason=HERE.reason)
def test_recorded_signatures_match_installed_nxd():
    version = ".".join(HERE.versions["neuronx-distributed"].split(".")[:2]) + ".0"
    for name, parameters in json.loads(SIGNATURES.read_text())[version]["signatures"].items():
        module, _, symbol = name.rpartition(".")
        live = inspect.signature(getattr(importlib.import_module(module), symbol))
        assert list(live.parameters) == [parameter[0] for parameter in parameters], name


@pytest.mark.neuron
# The time limit is long, because graphs for the device are compiled first.
@pytest.mark.timeout(3600)
@pytest.mark.skipif(HERE.state != "ok", reason=HERE.reason)
def test_two_neuron_cores_train_two_steps(tmp_path, spec, recipe):
    recipe = recipe.replace(num_steps=2, warmup_steps=0, checkpoint_every=2)
    plan = neuron_plan({"tensor_parallel": 2, "precision": "bf16"})
    run = kit.launch(tmp_path / "run", spec=spec.replace(num_layers=2), plan=plan, recipe=recipe)
    run.job.wait(3600)
    state = read_state(run.directory)
    assert state is not None and state.state is JobState.DONE, state
    assert list(run.metrics().columns["step"]) == [1, 2]
    manifest = run.checkpoints.manifest(2)
    run.checkpoints.verify(manifest, manifest.files)


# Checkpoints --------------------------------------------------------------------------------------


SAVED = STEPS // 2


def save_and_go_on(spec: ModelSpec, plan: Plan, folder: Path) -> list[tuple[float, float]]:
    """Trains half of the steps, saves, and trains the other half. Returns (loss, gradient norm) of
    each step of the second half.
    """
    engine = build(spec, plan)
    checkpoints = nxd_in(folder, spec, engine)
    mine = batches(spec, plan, engine.data_rank)
    for samples in mine[:SAVED]:
        engine.train_step(samples, 1e-3)
    checkpoints.save(facts(spec, SAVED, plan))
    if torch.distributed.get_rank() == 0:
        assert Checkpoints(folder).steps() == [], "it counts before its files are whole"
    # The simulated NxD writes the files only when the save is completed, after these steps.
    rest = [engine.train_step(samples, 1e-3) for samples in mine[SAVED:]]
    for _ in range(SETTLE_STEPS):
        checkpoints.poll()
    assert checkpoints.pending is None, "it completes behind training by now"
    checkpoints.finish()
    return rest


def resume(spec: ModelSpec, plan: Plan, folder: Path) -> list[tuple[float, float]]:
    engine = build(spec, plan, initialise=False)
    manifest = nxd_in(folder, spec, engine).load(SAVED)
    assert manifest.samples == SAVED * BATCH
    assert manifest.checksums.keys() == manifest.files.keys() | {"manifest.json"}
    Checkpoints(folder).verify(manifest, manifest.files)
    rest = batches(spec, plan, engine.data_rank)[SAVED:]
    return [engine.train_step(samples, 1e-3) for samples in rest]


@pytest.mark.parametrize("changes", [{"tensor_parallel": 2}, {"data_parallel": 2, "zero_stage": 1}])
def test_resumed_steps_equal_an_uninterrupted_run(changes, standin, small_spec, tmp_path):
    plan = neuron_plan(changes)
    expected = run_ranks(2, save_and_go_on, small_spec, plan, tmp_path)[0]
    assert run_ranks(2, resume, small_spec, plan, tmp_path)[0] == expected


def test_zero_0_resumes_on_fewer_replicas(standin, small_spec, tmp_path):
    two = neuron_plan({"data_parallel": 2})
    expected = run_ranks(2, save_and_go_on, small_spec, two, tmp_path)[0]
    found = run_ranks(1, resume, small_spec, neuron_plan({}), tmp_path)[0]
    assert found == [pytest.approx(pair, rel=TOLERANCE) for pair in expected]


def test_zero_1_on_fewer_replicas_resets_the_moments(standin, small_spec, tmp_path, capfd):
    plan = neuron_plan({"data_parallel": 2, "zero_stage": 1})
    expected = run_ranks(2, save_and_go_on, small_spec, plan, tmp_path)[0]
    found = run_ranks(1, resume, small_spec, plan.replace(data_parallel=1), tmp_path)[0]
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE), "weights of the checkpoint"
    assert found[-1] != pytest.approx(expected[-1], rel=10 * TOLERANCE), "the moments are not"
    said = "AdamW's moments start from zero: they were cut for 2 replicas, now there are 1"
    assert said in capfd.readouterr().out


def test_resume_refuses_another_tensor_degree(standin, small_spec, tmp_path):
    run_ranks(1, save_and_go_on, small_spec, neuron_plan({}), tmp_path)
    two, message = neuron_plan({"tensor_parallel": 2}), "plan.tensor_parallel 1, now it is 2"
    with pytest.raises(AssertionError, match=f"CheckpointError: .* {message}"):
        run_ranks(2, resume, small_spec, two, tmp_path)


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        (SP, 1),
        ({**SP, "tensor_parallel": 8}, 4),
        ({"tensor_parallel": 2, "pipeline_parallel": 2, "zero_stage": 1}, None),
    ],
)
def test_import_nxd_restores_the_engines_checkpoint(changes, copies, standin, small_spec, tmp_path):
    """The engine splits and orders heads by its own rules. `kit.interop.weights.neuron`, which
    joins the shards, shares no code with the engine. Without copied heads, the weights of query,
    key and value are one matrix.
    """
    spec = small_spec.replace(**{"num_heads": 8} if copies else {"num_kv_heads": EACH})
    plan = neuron_plan(changes)
    assert plan.kv_replication(spec) == (copies or 1)
    run_ranks(plan.num_devices, save_initial, spec, plan, tmp_path)
    found = import_nxd(tmp_path / "step_00000005", spec).decoder().state_dict()
    expected = build_decoder(spec, seed=RECIPE.seed).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def save_initial(spec: ModelSpec, plan: Plan, folder: Path) -> None:
    engine = build(spec, plan)
    checkpoints = nxd_in(folder, spec, engine)
    checkpoints.save(facts(spec, 5, plan))
    checkpoints.finish()


# Runs ---------------------------------------------------------------------------------------------


NEEDED = needed_environment(neuron_plan({}))


@pytest.fixture
def short_run(standin, spec, recipe, tmp_path) -> kit.Run:
    """A finished run of four steps with two checkpoints, trained with the simulated NxD."""
    recipe = recipe.replace(num_steps=4, checkpoint_every=2, warmup_steps=0)
    recipe = recipe.replace(validation_every=4, validation_sequences=8)
    return local_run(tmp_path / "run", spec.replace(num_layers=2), neuron_plan({}), recipe)


def test_compile_phase_leaves_run_directory_unchanged(short_run):
    """After the compile phase, the run trains, saves and resumes. Its checkpoints hold files in
    NxD's format, which `CheckpointTensors` refuses.
    """

    def files() -> dict[Path, bytes]:
        every = short_run.directory.rglob("*.*")
        return {file: file.read_bytes() for file in every if file.suffix != ".log"}

    compiling = Attempt(short_run, NEURON_EXTRACT_GRAPHS_ONLY="1", **NEEDED)
    before = files()
    assert compiling.wait() == [0] and "recorded the graphs of 4 steps" in compiling.log()
    assert files() == before, "a compile phase is no attempt of the run"
    assert "finished 4 steps" in finished(short_run, **NEEDED).log()
    assert short_run.checkpoints.steps() == [2, 4] and len(short_run.metrics()) == 4
    weights = load_model(short_run).state_dict()
    assert all(weight.isfinite().all() for weight in weights.values())
    short_run.recipe.replace(num_steps=6).write(short_run.directory / "recipe.json")
    assert finished(short_run, 2, **NEEDED).resumed_from() == 4
    assert short_run.checkpoints.steps() == [4, 6]
    with pytest.raises(CheckpointError, match="holds NxD's files"):
        CheckpointTensors(short_run.checkpoints, short_run.checkpoints.describe(6), short_run.spec)


def test_run_with_wrong_rounding_does_not_start(short_run):
    """The environment variable for stochastic rounding contradicts the plan's precision."""
    attempt = Attempt(short_run, **NEEDED | {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"})
    assert attempt.wait() == [os.EX_CONFIG] and "Traceback" not in attempt.log()
    assert "ConfigError: plan.precision" in attempt.log()
    assert "STOCHASTIC_ROUNDING_EN is '1'" in attempt.log()
