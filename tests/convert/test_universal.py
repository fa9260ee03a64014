"""The kit reads the universal checkpoints that DeepSpeed's own converter makes."""

import argparse
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from kit.convert.deepspeed import import_universal
from kit.engines.deepspeed.start import import_deepspeed
from kit.errors import DataError
from kit.plan import Plan
from kit.spec import ModelSpec
from tests.parity import CPU, batches, build, make_plan
from tests.workers import run_ranks


@pytest.fixture(scope="module", autouse=True)
def imported():
    import_deepspeed(CPU)


def train(spec: ModelSpec, plan: Plan, out: Path) -> None:
    """Trains two steps, and writes DeepSpeed's own checkpoint and the weights of the engine."""
    engine = build(spec, plan)
    for samples in batches(spec, plan, engine.data_rank, steps=2):
        engine.train_step(samples, 1e-3)
    engine.engine.save_checkpoint(str(out / "deepspeed"), tag="last")
    torch.save(engine.state_dict(), out / f"weights{engine.data_rank}.pt")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_deepspeeds_converter_makes_is_read_to_the_bit(stage, llama_spec, tmp_path):
    from deepspeed.checkpoint import ds_to_universal

    spec = llama_spec.replace(num_layers=2)
    plan = make_plan({"data_parallel": 2, "zero_stage": stage}, "deepspeed")
    run_ranks(2, train, spec, plan, tmp_path)
    arguments = argparse.Namespace(
        input_folder=str(tmp_path / "deepspeed" / "last"),
        output_folder=str(tmp_path / "back"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    ds_to_universal.main(arguments)
    found = import_universal(tmp_path / "back", spec).decoder().state_dict()
    weights = torch.load(tmp_path / "weights0.pt") | torch.load(tmp_path / "weights1.pt")
    assert all(torch.equal(weight, weights[f"model.{name}"]) for name, weight in found.items())


def test_a_folder_of_another_kind_is_told(tmp_path, gpt_spec):
    with pytest.raises(DataError, match="does not exist. Give a folder global_stepN"):
        import_universal(tmp_path, gpt_spec).decoder()
