"""Universal checkpoints: DeepSpeed itself goes on from the kit's, and the kit reads those of DeepSpeed's converter."""

import argparse
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

import kit
from kit.convert import load_model
from kit.convert.deepspeed import export_universal, import_universal
from kit.engines.deepspeed.configuration import deepspeed_config
from kit.engines.deepspeed.engine import DeepSpeedEngine
from kit.engines.deepspeed.start import import_deepspeed
from kit.errors import CheckpointError, ConfigError, DataError
from kit.plan import Plan
from kit.run.checkpoint_writer import CheckpointWriter
from kit.spec import ModelSpec
from tests.parity import CPU, RECIPE, TOLERANCE, batches, build, make_plan
from tests.workers import run_ranks

HALF = 5


@pytest.fixture(scope="module", autouse=True)
def imported():
    import_deepspeed(CPU)


@pytest.fixture(scope="module")
def small_spec(llama_spec) -> ModelSpec:
    return llama_spec.replace(num_layers=2)


@pytest.fixture(scope="module")
def trained(small_spec, tmp_path_factory) -> kit.Run:
    """A run of five steps under the native engine, on two processes that share each matrix."""
    directory, plan = tmp_path_factory.mktemp("run"), make_plan({"tensor_parallel": 2})
    run = kit.Run(directory, spec=small_spec, plan=plan, recipe=RECIPE, site=kit.Site.load("laptop"))
    run_ranks(2, train_half, run)
    return run


def train_half(run: kit.Run) -> None:
    engine = build(run.spec, run.plan)
    for samples in batches(run.spec, run.plan, engine.data_rank)[:HALF]:
        engine.train_step(samples, 1e-3)
    writer = CheckpointWriter(run.checkpoints, attempt=1, keep_last=1, keep_every=None)
    facts = {"step": HALF, "samples": 0, "tokens": 0, "seed": 0, "spec": run.spec, "plan": run.plan}
    writer.start(engine.state_dict(), facts)
    writer.finish()


def go_on(spec: ModelSpec, plan: Plan, folder: Path, out: Path) -> list[tuple[float, float]]:
    """Returns five more steps of DeepSpeed, which reads a universal checkpoint and writes one of its own kind."""
    config = deepspeed_config(plan, RECIPE) | {"checkpoint": {"load_universal": True}}
    engine = DeepSpeedEngine(spec, plan, RECIPE, CPU, config=config)
    loaded, _ = engine.engine.load_checkpoint(str(folder))
    assert loaded is not None
    steps = [engine.train_step(samples, 1e-3) for samples in batches(spec, plan, engine.data_rank)[HALF:]]
    engine.engine.save_checkpoint(str(out / "deepspeed"), tag="last")
    torch.save(engine.state_dict(), out / f"weights{engine.data_rank}.pt")
    return steps


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_and_comes_back(stage, trained, native_run, tmp_path):
    from deepspeed.checkpoint import ds_to_universal

    folder = export_universal(trained, None, tmp_path / "universal")
    plan = make_plan({"data_parallel": 2, "zero_stage": stage}, "deepspeed")
    steps = run_ranks(2, go_on, trained.spec, plan, folder, tmp_path)[0]
    expected = native_run(trained.spec)[1][HALF:]
    assert steps == [pytest.approx(pair, rel=TOLERANCE) for pair in expected]
    arguments = argparse.Namespace(
        input_folder=str(tmp_path / "deepspeed" / "last"), output_folder=str(tmp_path / "back"), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    ds_to_universal.main(arguments)
    found = import_universal(tmp_path / "back", trained.spec).decoder().state_dict()
    weights = torch.load(tmp_path / "weights0.pt") | torch.load(tmp_path / "weights1.pt")
    assert all(torch.equal(weight, weights[f"model.{name}"]) for name, weight in found.items())


def test_our_own_comes_back_to_the_bit(trained, tmp_path):
    folder = export_universal(trained, HALF, tmp_path / "universal")
    found, expected = import_universal(folder / f"global_step{HALF}", trained.spec).decoder(), load_model(trained, HALF)
    assert all(
        torch.equal(*pair) for pair in zip(found.state_dict().values(), expected.state_dict().values(), strict=True)
    )


def test_what_cannot_be_written_or_read_is_told(trained, tmp_path, gpt_spec):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_universal(trained, HALF, tmp_path / "full")
    with pytest.raises(CheckpointError, match="No usable checkpoint of step 7"):
        export_universal(trained, 7, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    folder = export_universal(trained, HALF, tmp_path / "new") / f"global_step{HALF}"
    with pytest.raises(DataError, match="does not exist. Give a folder global_stepN"):
        import_universal(folder, gpt_spec).decoder()


def test_adamw_counts_the_updates_that_were_done(trained, tmp_path, monkeypatch):
    manifest, description = trained.checkpoints.describe(HALF)
    monkeypatch.setattr(type(trained.checkpoints), "describe", lambda *_: (manifest.replace(skipped=2), description))
    folder = export_universal(trained, HALF, tmp_path / "out") / f"global_step{HALF}"
    assert torch.load(folder / "zero" / "norm.weight" / "step.pt") == HALF - 2
    common = torch.load(folder / "mp_rank_00_model_states.pt")
    assert (common["global_steps"], common["skipped_steps"]) == (HALF, 2)
