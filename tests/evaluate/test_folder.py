"""`kit eval FOLDER`: a Hugging Face folder is scored as it lies, and its report is kept beside
it, never in it.
"""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kit.commands.app import app
from kit.convert.hugging_face import export_hugging_face, import_hugging_face
from kit.errors import ConfigError, DataError
from kit.evaluate import EvalReport, evaluate_model
from kit.model import build_decoder
from tests.evaluate.conftest import SPEC

# Saving without a process group is meant.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def folder(tmp_path: Path, tiny_decoder, tokenizer) -> Path:
    return export_hugging_face(tiny_decoder, tmp_path / "models" / "tiny", tokenizer=tokenizer)


def kit(*arguments) -> str:
    found = CliRunner().invoke(
        app, ["eval", *map(str, arguments)], catch_exceptions=False, standalone_mode=False
    )
    return found.stdout


def test_a_folder_is_scored_and_the_report_lies_beside_it(folder, benchmarks, tokenizer):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    text = kit(folder, "--tasks", "piqa", "--task-data", benchmarks)
    report = EvalReport.read(folder.parent / "tiny.eval.json")
    assert f"Kept in {folder.parent / 'tiny.eval.json'}" in text
    expected = evaluate_model(
        import_hugging_face(folder).decoder(),
        tokenizer,
        SPEC.sequence_length,
        ("piqa",),
        task_data=benchmarks,
    )
    assert report["piqa"].metrics == expected["piqa"].metrics and report.name == "tiny"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before, (
        "nothing is written into the folder"
    )

    out = folder.parent / "scores" / "mine.json"
    found = EvalReport.from_json(
        kit(
            folder,
            "--tasks",
            "arc_easy",
            "--task-data",
            benchmarks,
            "--set",
            f"out={out}",
            "--json",
        )
    )
    assert out.exists() and found["arc_easy"].num_items == 30
    kit(folder, "--tasks", "arc_easy", "--limit", 5, "--task-data", benchmarks)
    assert [score.task for score in EvalReport.read(folder.parent / "tiny.eval.json").scores] == [
        "piqa",
        "arc_easy",
    ]


def test_scores_of_other_weights_are_not_mixed(folder, benchmarks, tokenizer):
    kit(folder, "--tasks", "piqa", "--limit", 5, "--task-data", benchmarks)
    folder.rename(folder.with_name("old"))
    export_hugging_face(build_decoder(SPEC, seed=7), folder, tokenizer=tokenizer)
    with pytest.raises(
        ConfigError, match="tiny.eval.json: its scores are of weights that tiny does not have now"
    ):
        kit(folder, "--tasks", "piqa", "--limit", 5, "--task-data", benchmarks)


def test_where_its_user_may_not_write_out_is_asked_for_before_the_work(
    folder, benchmarks, monkeypatch
):
    kit(folder, "--tasks", "piqa", "--limit", 2, "--task-data", benchmarks)
    monkeypatch.setattr(
        "kit.evaluate.loading.load_model", lambda *_: pytest.fail("the model was loaded")
    )
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
        with pytest.raises(ConfigError, match="tiny.eval.json: cannot be written: .*out=FILE"):
            kit(folder, "--tasks", "piqa", "--task-data", benchmarks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "heldout"), "heldout: only a run has a held-out text"),
        (("--step", "3"), "--step: .*tiny is a Hugging Face folder"),
        (("--follow",), "--follow: .*tiny is a Hugging Face folder"),
        (("--tasks", "piqua"), "tasks: 'piqua' is unknown"),
    ],
)
def test_what_a_folder_does_not_have_is_refused(folder, benchmarks, arguments, message):
    with pytest.raises(ConfigError, match=message):
        kit(folder, "--task-data", benchmarks, *arguments)
    assert {path.name for path in folder.parent.iterdir()} == {"tiny"}


def test_a_folder_is_held_to_the_checks_of_an_import(folder, benchmarks):
    with pytest.raises(ConfigError, match="cannot be written: it is a folder"):
        kit(folder, "--tasks", "piqa", "--task-data", benchmarks, "--set", f"out={folder.parent}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_type": "yarn"}})
    )
    with pytest.raises(ConfigError, match="config.rope_parameters"):
        kit(folder, "--tasks", "piqa", "--task-data", benchmarks)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(DataError, match="has no weight 'model.layers.2"):
        kit(folder, "--tasks", "piqa", "--task-data", benchmarks)
    (folder / "config.json").write_text(json.dumps(config))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(DataError, match="transformers cannot load it"):
        kit(folder, "--tasks", "piqa", "--task-data", benchmarks)
    (folder / "model.safetensors").write_bytes(weights)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match="no tokenizer.json, no tokenizer.model"):
        kit(folder, "--tasks", "piqa", "--task-data", benchmarks)
    assert not (folder.parent / "tiny.eval.json").exists()
