"""Training that starts from Hugging Face weights. On every layout, the first loss equals the loss
that transformers computes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kit import launcher
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.interop.weights import load_model
from kit.interop.weights.hugging_face import export_hugging_face, import_hugging_face
from kit.interop.weights.hugging_face_config import load_spec
from kit.model import build_decoder
from kit.run import Run
from kit.trainer.checkpoints import load_initial_weights
from tests.support.attempts import finished
from tests.support.parity import build, make_plan
from tests.support.workers import local_run, run_ranks

BATCH = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2 x PP2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "TP2 x DP2, ZeRO 3": {"tensor_parallel": 2, "data_parallel": 2, "zero_stage": 3},
    "DeepSpeed, DP2, ZeRO 1": {"data_parallel": 2, "zero_stage": 1, "engine": "deepspeed"},
}


def of_one_batch(layout: dict[str, Any]) -> Plan:
    """Returns the plan of a layout with a global batch of BATCH sequences."""
    count = 2 if "pipeline_parallel" in layout else 1
    size = BATCH // (count * layout.get("data_parallel", 1))
    return make_plan({"micro_batch_size": size, "global_batch_size": BATCH, **layout})


def save(folder: Path, spec: ModelSpec) -> Path:
    """Writes a model of two layers with large random weights by transformers' `save_pretrained`.
    Returns the folder.
    """
    import transformers

    random = spec.replace(num_layers=2, vocab_size=300, init_std=0.2, tied_embeddings=True)
    exported = export_hugging_face(build_decoder(random, seed=3), folder / "ours")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    model.save_pretrained(folder)
    return folder


def their_loss(folder: Path, samples: torch.Tensor) -> float:
    """Returns the loss of these samples, computed by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(samples[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()))


def first_losses(spec: ModelSpec, plan: Plan, folder: Path, samples: torch.Tensor) -> list[float]:
    """Trains two steps on the same samples, and returns both losses."""
    engine = build(spec, plan, Recipe(data="none", num_steps=2), initialise=False)
    load_initial_weights(str(folder), spec, engine)
    share = BATCH // plan.data_parallel
    mine = samples[engine.data_rank * share :][:share]
    return [engine.train_step(mine, 1e-2)[0] for _ in range(2)]


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_loss_equals_transformers_loss(
    layout: str, family: str, tmp_path: Path, request, run_standing
) -> None:
    folder = save(tmp_path / family, request.getfixturevalue(f"{family}_spec"))
    spec = load_spec(str(folder)).replace(sequence_length=16)
    plan = of_one_batch(LAYOUTS[layout])
    samples = torch.randint(0, 300, (BATCH, 17), generator=torch.Generator().manual_seed(1))
    run = run_standing if plan.engine == "native" else run_ranks
    found = run(plan.num_devices, first_losses, spec, plan, folder, samples)
    assert all(losses == found[0] for losses in found)
    assert found[0][0] == pytest.approx(their_loss(folder, samples), rel=1e-5)
    assert found[0][1] < found[0][0], "the optimizer was given these weights too"


@pytest.mark.thorough
@pytest.mark.download
@pytest.mark.parametrize(
    "layout", [{}, {"tensor_parallel": 3, "pipeline_parallel": 2}], ids=["one process", "TP3 x PP2"]
)
def test_first_loss_of_smollm2_equals_transformers(layout: dict, tmp_path: Path) -> None:
    """SmolLM2 has nine query heads and three key/value heads. Two tensor ranks could not split
    these heads, so the layout has three tensor ranks.
    """
    from kit.interop.weights.smollm2 import load_smollm2

    model, tokenizer = load_smollm2()
    folder = export_hugging_face(model, tmp_path / "smollm2", tokenizer=tokenizer)
    spec = load_spec(str(folder)).replace(sequence_length=64)
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    samples = torch.tensor(tokenizer.encode(text)[: 4 * 65]).view(4, 65)
    plan = of_one_batch(layout)
    found = run_ranks(plan.num_devices, first_losses, spec, plan, folder, samples)[0]
    assert found[0] == pytest.approx(their_loss(folder, samples), abs=1e-4)


def test_run_starts_from_initial_weights_once(tmp_path: Path, llama_spec, recipe) -> None:
    """A resumed run loads its own checkpoint, so the initial weights may be deleted after the first
    attempt.
    """
    folder = save(tmp_path / "theirs", llama_spec)
    spec = load_spec(str(folder)).replace(sequence_length=16)
    recipe = Recipe(data=recipe.data, num_steps=3, learning_rate=1e-9, min_learning_rate=0)
    recipe = recipe.replace(init_from=str(folder))
    plan = Plan(data_parallel=2, micro_batch_size=2, global_batch_size=4)
    run = local_run(tmp_path / "run", spec, plan, recipe)
    assert "started from the weights in" in finished(run).log()
    begun, now = import_hugging_face(folder).decoder(), load_model(run)
    for (name, before), after in zip(begun.named_parameters(), now.parameters(), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6, msg=name)
    (folder / "model.safetensors").unlink()
    Run.open(run.directory)
    (run.directory / "recipe.json").write_text(recipe.replace(num_steps=5).to_json())
    log = finished(Run.open(run.directory), 2).log()
    assert "resumed from step 3" in log and "started from" not in log, "its folder may be gone"


def test_init_from_refuses_other_model_or_tokenizer(
    tmp_path, llama_spec, tiny_dataset, monkeypatch
) -> None:
    folder = save(tmp_path / "theirs", llama_spec)
    spec = load_spec(str(folder))
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=3, init_from=str(folder))
    launcher.check_weights(spec.replace(name="mine", sequence_length=16), recipe)
    with pytest.raises(ConfigError, match="holds another model: num_layers 2 there and 3 here"):
        launcher.check_weights(spec.replace(num_layers=3), recipe)
    (folder / "tokenizer.json").write_bytes(b"{}")
    monkeypatch.setattr(
        "kit.data.tokenizer.load_tokenizer", lambda folder: type("Other", (), {"sha256": "0" * 64})
    )
    with pytest.raises(ConfigError, match="Build the data with --tokenizer"):
        launcher.check_weights(spec, recipe)


def test_load_spec_reads_config_json(tmp_path: Path, llama_spec) -> None:
    """config.json may be a link, as in the cache of the Hugging Face hub. A spec.json in the same
    folder has priority. Unsupported configurations are refused.
    """
    folder = save(tmp_path / "theirs", llama_spec)
    # In the cache of the Hugging Face hub, files of a snapshot are links to a folder `blobs`.
    (tmp_path / "blobs").mkdir()
    (folder / "config.json").rename(tmp_path / "blobs" / "config")
    (folder / "config.json").symlink_to(tmp_path / "blobs" / "config")
    spec = load_spec(str(folder / "config.json"))
    assert (spec.name, spec.num_layers, spec.num_kv_heads) == ("theirs", 2, 2)
    assert load_spec(str(folder)) == spec
    (folder / "spec.json").write_text(spec.replace(name="ours").to_json())
    assert load_spec(str(folder)).name == "ours"
    options = ["--site", "frontier", "--devices", "8", "--batch", "8", "--json"]
    planned = CliRunner().invoke(app, ["plan", str(folder / "config.json"), *options])
    assert json.loads(planned.output)
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"model_type": "mixtral"},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"attention_bias": "some"},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError):
            load_spec(str(folder / "config.json"))
