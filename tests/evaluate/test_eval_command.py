"""`kit eval` of a run, and of a Hugging Face folder. The report of a folder is stored next to the
folder.
"""

import json
import os
import re
from pathlib import Path

import pytest

from kit.errors import ConfigError, DataError
from kit.evaluate import EvalReport, evaluate_model, loading
from kit.evaluate.task_data import mirror_table
from kit.interop.weights.hugging_face import export_hugging_face, import_hugging_face
from kit.model import build_decoder
from tests.evaluate.conftest import SPEC, kit

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_eval_prints_and_keeps_scores(run, benchmarks):
    given = ("eval", run.directory, "--task-data", benchmarks, "--tasks")
    text = kit(*given, "heldout,piqa", "--limit", "10")
    assert text.startswith("run, step 3, 768 training tokens") and "partial: 10 of 30 items" in text
    assert not EvalReport.from_json(kit(*given, "piqa", "--json"))["piqa"].partial
    assert (run.directory / "eval" / "step_00000003.json").exists()
    line = json.loads(kit(*given, "arc_easy", "--follow", "--json"))
    assert (line["step"], line["scored"]) == (3, True) and line["seconds"] > 0


def test_eval_without_benchmarks_scores_only_heldout(run, no_network):
    """The machine has no benchmark data, like that of a new user. A task that is requested by name
    is refused without its data.
    """
    report = EvalReport.from_json(kit("eval", run.directory, "--json"))
    assert [score.task for score in report.scores] == ["heldout"]
    assert [item.task for item in report.unscored] == ["piqa", "arc_easy"]
    assert kit("eval", run.directory).count("kit eval-data") == 2
    with pytest.raises(DataError, match="piqa: .*kit eval-data"):
        kit("eval", run.directory, "--tasks", "heldout,piqa")
    alone = EvalReport.from_json(kit("eval", run.directory, "--tasks", "heldout", "--json"))
    assert alone["heldout"].metrics == report["heldout"].metrics


def test_eval_suite_shows_papers_tables_and_gaps(run, benchmarks):
    text = kit("eval", run.directory, "--suite", "hlat", "--limit", "4", "--task-data", benchmarks)
    assert "measured here" in text and "Table II" in text and "Table V" in text
    assert "not scored: truthfulqa_mc1 (0 shots): on the hub only" in text
    assert "commonsense: piqa (partial: 4 of 30 items" in text


def test_eval_data_lists_benchmarks_and_gaps(make_mirror):
    mirror = make_mirror()
    found = json.loads(kit("eval-data", mirror, "--json"))
    rows = {row["task"]: row for row in found["benchmarks"]}
    assert rows["triviaqa"]["items"] == "7,993 of 17,944"
    assert "hub" in rows["truthfulqa_mc1"]["note"]
    assert all(re.fullmatch(r"[A-Za-z0-9.\- ]+", row["licence"]) for row in rows.values())
    assert rows["piqa"]["items"] == "1,838" and rows["piqa"]["licence"] == "AFL-3.0"
    assert rows["truthfulqa_mc1"]["items"] == "not offline" and len(found["sha256"]) == 64
    assert "not offline" in kit("eval-data", mirror)
    empty = {row["task"]: row["items"] for row in mirror_table(mirror / "none")}
    assert empty["piqa"] == "build with `kit eval-data`"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("RUN --suite smkoe", "suite: 'smkoe' is unknown. Did you mean 'smoke'"),
        ("RUN --tasks piqua", "tasks: 'piqua' is unknown. Did you mean 'piqa'"),
        ("RUN --suite piqa", "suite: 'piqa' is unknown. For a single task, give a list"),
        ("RUN --tasks=", "--tasks: names no task"),
        ("RUN --limit 0", "limit: 0 is not allowed"),
        ("RUN --suite=", "tasks: '' is not allowed"),
        ("RUN --tasks piqa --suite smoke", "--suite smoke: not with --tasks piqa"),
        ("RUN --submit", "--submit: only with --follow"),
        ("RUN --untrusted-code yes", "untrusted_code: 'yes' is not allowed. Allowed: 'refuse', "),
        ("RUN --set precision=fp8", "precision: 'fp8' is not allowed. Allowed: 'fp32', 'bf16'"),
        ("RUN --set devices=0", "devices: 0 is not allowed"),
        ("RUN --set seed=often", "evaluate.seed: expected int, got str 'often'"),
        ("RUN --set sede=1", "evaluate.sede: unknown key. Did you mean 'seed'"),
        ("RUN --set out=x.json", "out: only with a Hugging Face folder"),
        ("FOLDER --tasks heldout", "heldout: only a run has a held-out text"),
        ("FOLDER --step 3", "--step: .*tiny is a Hugging Face folder"),
        ("FOLDER --follow", "--follow: .*tiny is a Hugging Face folder"),
        ("FOLDER --tasks piqa --output /dev/null", "cannot be written: .*--output FILE"),
    ],
)
def test_wrong_eval_request_is_refused(run, folder, benchmarks, arguments, message):
    place, *words = arguments.split()
    with pytest.raises(ConfigError, match=message):
        kit(
            "eval",
            {"RUN": run.directory, "FOLDER": folder}[place],
            "--task-data",
            benchmarks,
            *words,
        )
    assert not (run.directory / "eval").exists()
    assert {path.name for path in folder.parent.iterdir()} == {"tiny"}


# Model folders in Hugging Face's format -----------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, tiny_decoder, tokenizer) -> Path:
    return export_hugging_face(tiny_decoder, tmp_path / "models" / "tiny", tokenizer=tokenizer)


@pytest.fixture
def score(folder, benchmarks):
    """Returns a function that scores the model folder on the given tasks with `kit eval`."""
    return lambda tasks, *rest: kit(
        "eval", folder, "--tasks", tasks, "--task-data", benchmarks, *rest
    )


def test_folder_report_is_written_beside_the_folder(score, folder, benchmarks, tokenizer):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    kept = folder.parent / "tiny.eval.json"
    assert f"Kept in {kept}" in score("piqa")
    report, decoder = EvalReport.read(kept), import_hugging_face(folder).decoder()
    expected = evaluate_model(
        decoder, tokenizer, SPEC.sequence_length, ("piqa",), task_data=benchmarks
    )
    assert report["piqa"].metrics == expected["piqa"].metrics and report.name == "tiny"
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert after == before, "nothing is written into the folder"

    out = folder.parent / "scores" / "mine.json"
    found = EvalReport.from_json(score("arc_easy", "--set", f"out={out}", "--json"))
    assert out.exists() and found["arc_easy"].num_items == 30
    score("arc_easy", "--limit", 5)
    assert [score.task for score in EvalReport.read(kept).scores] == ["piqa", "arc_easy"]


def test_unwritable_report_or_other_weights_are_refused(score, folder, tokenizer, monkeypatch):
    """A report of a model with other weights is not extended. If the report cannot be written, `kit
    eval` fails before it loads the model.
    """
    score("piqa", "--limit", 5)
    with monkeypatch.context() as patched:
        patched.setattr(loading, "load_causal_model", lambda *_: pytest.fail("it was loaded"))
        # the superuser may write everywhere, so the check is patched
        patched.setattr("os.access", lambda path, mode: mode != os.W_OK)
        with pytest.raises(ConfigError, match="tiny.eval.json: cannot be written: .*--output FILE"):
            score("piqa")
    folder.rename(folder.with_name("old"))
    export_hugging_face(build_decoder(SPEC, seed=7), folder, tokenizer=tokenizer)
    message = "tiny.eval.json: its scores are of weights that tiny does not have now"
    with pytest.raises(ConfigError, match=message):
        score("piqa", "--limit", 5)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"num_hidden_layers": 3}, DataError, "has no weight 'model.layers.2"),
        ("cut", DataError, "transformers cannot load it"),
        ("no tokenizer", DataError, r"has no tokenizer \(tokenizer.json, tokenizer.model"),
    ],
)
def test_eval_refuses_damaged_model_folder(score, folder, change, kind, message):
    """Scoring checks a folder in the way in which `kit import` checks it."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    if change == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif change == "no tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(kind, match=message):
        score("piqa")
    assert not (folder.parent / "tiny.eval.json").exists()
