"""Checkpoints that the real NxD writes on a simulated slow disk: training resumes from these
checkpoints, and the kit imports their weights.
"""

import threading
from pathlib import Path

import pytest
import torch

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.interop.weights.neuron import import_nxd
from kit.model import build_decoder
from kit.run.checkpoint import Checkpoints
from tests.engines.real_nxd.conftest import run_xla
from tests.support.checkpoints import facts, nxd_in
from tests.support.parity import RECIPE, batches, build, make_plan

pytestmark = pytest.mark.neuron

LIMIT_S = 800
TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
SAVED = {
    "7B": {**TP2, "precision": "bf16"},
    "70B": {"zero_stage": 1, "data_parallel": 2, "precision": "bf16"},
    "70B, pipeline": {"zero_stage": 1, "pipeline_parallel": 2, "precision": "bf16"},
}


def save_on_a_slow_disk(spec: ModelSpec, plan: Plan, folder: Path) -> list[tuple[float, float]]:
    """Trains three steps, starts a save, and trains three more steps. The disk writes only after
    these steps have ended. Returns (loss, gradient norm) of the last three steps.
    """
    from neuronx_distributed.trainer import checkpoint_storage  # pyright: ignore[reportMissingImports]

    storage, trained = checkpoint_storage.FilesysCheckpointStorage, threading.Event()
    write = storage.save_object

    def write_late(self, obj, filename):
        assert trained.wait(LIMIT_S)
        write(self, obj, filename)

    storage.save_object = write_late
    engine = build(spec, plan)
    checkpoints = nxd_in(folder, spec, engine)
    mine = batches(spec, plan, engine.data_rank)[:6]
    for samples in mine[:3]:
        engine.train_step(samples, 1e-3)
    checkpoints.save(facts(spec, 3, plan))
    rest = [engine.train_step(samples, 1e-3) for samples in mine[3:]]
    trained.set()
    checkpoints.finish()
    return rest


def resume(spec: ModelSpec, plan: Plan, folder: Path) -> list[tuple[float, float]]:
    engine = build(spec, plan, initialise=False)
    nxd_in(folder, spec, engine).load(3)
    return [
        engine.train_step(samples, 1e-3) for samples in batches(spec, plan, engine.data_rank)[3:6]
    ]


@pytest.mark.parametrize("recipe", SAVED)
def test_nxd_resume_equals_uninterrupted_training(recipe, mha, tmp_path):
    spec = mha.replace(num_kv_heads=4 if recipe == "7B" else 2)
    plan = make_plan(SAVED[recipe], "neuron")
    expected = run_xla(2, save_on_a_slow_disk, spec, plan, tmp_path)
    for file in (tmp_path / "step_00000003" / "optim").glob("*.pt"):
        assert saved_steps(torch.load(file, weights_only=False)) == {3}, file
    manifest = Checkpoints(tmp_path).manifest(3)
    Checkpoints(tmp_path).verify(manifest, manifest.files)
    assert run_xla(2, resume, spec, plan, tmp_path) == expected


def saved_steps(state: dict) -> set[int]:
    """Returns the distinct step counts in one file of AdamW's optimizer state."""
    states = state.get("base_state") or state["state"]
    return {int(of_weight["step"]) for of_weight in states.values()}


def save_initial(spec: ModelSpec, plan: Plan, folder: Path, use_xser: bool) -> None:
    import neuronx_distributed  # pyright: ignore[reportMissingImports]

    model = build(spec, plan).model
    neuronx_distributed.save_checkpoint(
        checkpoint_dir_str=str(folder), tag="first", model=model, use_xser=use_xser
    )


def save_as_the_converter(folder: Path) -> None:
    """Rewrites the shards of a checkpoint as AWS's converter does with --save_xser. CPU tensors
    stay in the main file of a shard.
    """
    import torch_xla.utils.serialization as xser  # pyright: ignore[reportMissingImports]

    for file in folder.glob("*.pt"):
        xser.save(torch.load(file, weights_only=True), str(file))


@pytest.mark.parametrize("use_xser", [False, True])
@pytest.mark.parametrize(("num_kv_heads", "tensor", "pipeline"), [(4, 2, 1), (2, 2, 2), (1, 2, 1)])
def test_import_nxd_restores_every_weight(num_kv_heads, tensor, pipeline, use_xser, mha, tmp_path):
    spec = mha.replace(num_kv_heads=num_kv_heads)
    degrees = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    plan = make_plan({**degrees, "zero_stage": 1}, "neuron")
    run_xla(plan.num_devices, save_initial, spec, plan, tmp_path, use_xser)
    folder = tmp_path / "first" / "model"
    expected = build_decoder(spec, seed=RECIPE.seed).state_dict()

    def is_whole() -> bool:
        found = import_nxd(folder, spec).decoder().state_dict()
        return all(torch.equal(found[name], weight) for name, weight in expected.items())

    assert any(folder.glob("*.tensors")) == use_xser and is_whole()
    if not use_xser:
        run_xla(1, save_as_the_converter, folder)
        assert any(folder.glob("*.tensors")) and is_whole()
