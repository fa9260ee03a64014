"""Scores while training: each checkpoint once, what they cost, and the curves that the views show."""

import json
import shutil

import numpy as np
import pytest

from kit.errors import ConfigError
from kit.evaluate import EvalReport, evaluate
from kit.evaluate.follow import eval_job, follow_run
from kit.monitor import eval_curve, eval_figure, run_figure, status_row
from kit.monitor.scores import ScoreFollower

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # saving without a process group is meant


def follow(run, mirror, **options) -> list:
    return list(follow_run(run, ("heldout", "piqa"), mirror=mirror, limit=10, poll_s=0, **options))


def test_each_checkpoint_is_scored_once_and_told_with_its_cost(run, mirror, tiny_decoder, save_checkpoint):
    save_checkpoint(run, tiny_decoder, 6)
    first, second = follow(run, mirror)
    assert (first.step, second.step, first.scored, second.scored) == (3, 6, True, True)
    assert first.said.startswith("heldout bits_per_byte ") and "piqa acc_norm" in first.said
    assert "(partial)" in first.line() and first.seconds > 0
    report = EvalReport.read(run.directory / "eval" / "step_00000006.json")
    assert 0 < sum(score.seconds for score in report.scores) <= report.seconds <= 1.05 * second.seconds
    assert report.attempt == 1
    assert follow(run, mirror) == [], "started again, it passes over what is there"


def test_checkpoints_that_appear_later_are_scored_until_the_job_has_ended(
    run, mirror, tiny_decoder, save_checkpoint, monkeypatch
):
    states = iter([False, False, True])
    monkeypatch.setattr("kit.evaluate.follow._is_over", lambda run: next(states))
    arrivals = iter([6, None])

    def train(seconds: float) -> None:
        step = next(arrivals)
        if step:
            save_checkpoint(run, tiny_decoder, step)

    assert [found.step for found in follow(run, mirror, idle=train)] == [3, 6]


def test_a_checkpoint_that_cannot_be_scored_is_told_and_the_next_one_is(run, mirror, tiny_decoder, save_checkpoint):
    save_checkpoint(run, tiny_decoder, 6)
    for shard in run.checkpoints.path(3).glob("*.distcp"):
        shard.write_bytes(b"")
    broken, whole = follow(run, mirror)
    assert not broken.scored and "not scored: " in broken.line() and "0 bytes" in broken.said
    assert whole.scored


def test_interrupting_keeps_what_is_scored(run, mirror, monkeypatch):
    monkeypatch.setattr("kit.evaluate.follow._is_over", lambda run: False)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    assert [found.step for found in follow(run, mirror, idle=interrupt)] == [3]


def test_a_wrong_request_is_refused_before_the_first_checkpoint(run, mirror):
    with pytest.raises(ConfigError, match="suite: 'hlta' is unknown. Did you mean 'hlat'"):
        next(follow_run(run, "hlta", mirror=mirror))
    assert not (run.directory / "eval").exists()


def test_a_checkpoint_is_scored_in_a_job_of_its_own(run, mirror):
    (found,) = list(follow_run(run, ("heldout",), submit=True, mirror=mirror, poll_s=0.2))
    assert found.scored and found.said.startswith("heldout bits_per_byte") and found.seconds > 0
    job = json.loads((run.directory / "eval" / "jobs" / "step_00000003" / "job.json").read_text())
    assert job["num_processes"] == 1 and "eval" in job["argv"]
    assert eval_curve(run)[0].step.tolist() == [3]


def test_the_job_has_the_command_that_a_user_would_type(run, mirror, tmp_path):
    from kit.evaluate import Options

    job = eval_job(run, 3, "smoke", Options(limit=5, mirror=tmp_path, untrusted_code="isolated"))
    words = " ".join(job.argv)
    assert f"-m kit eval {run.directory} --step 3 --suite smoke --limit 5 --untrusted-code isolated" in words
    assert f"--mirror {tmp_path}" in words


def test_curves_have_steps_tokens_scores_and_errors(run, mirror, tiny_decoder, save_checkpoint):
    save_checkpoint(run, tiny_decoder, 6)
    follow(run, mirror)
    evaluate(run, 6, ("piqa",), mirror=mirror)
    bits, piqa = eval_curve(run)
    assert (bits.task, bits.metric, piqa.task, piqa.metric) == ("heldout", "bits_per_byte", "piqa", "acc_norm")
    assert piqa.step.tolist() == [3, 6] and piqa.tokens.tolist() == [768, 1536]
    report = EvalReport.read(run.directory / "eval" / "step_00000006.json")
    assert piqa.score[1] == report["piqa"].metric("acc_norm").value
    assert piqa.stderr[1] == report["piqa"].metric("acc_norm").stderr
    assert piqa.partial.tolist() == [True, False] and piqa.chance == 0.5
    assert np.isnan(bits.chance)

    figure, table = eval_figure(run)
    assert len(figure.axes) == 2 and len(table) == 4
    assert {"task": "piqa", "metric": "acc_norm", "step": 6}.items() <= table[-1].items()
    assert len(run_figure(run)[0].axes) == 3
    (run.directory / "eval" / "step_00000006.json").write_text("{")
    assert eval_curve(run)[1].step.tolist() == [3], "a damaged file is left out"
    shutil.rmtree(run.directory / "eval")
    assert eval_curve(run) == [] and len(run_figure(run)[0].axes) == 2


def test_new_scores_are_followed_once(run, mirror):
    follower = ScoreFollower(run)
    assert follower.read() == []
    follow(run, mirror)
    ((attempt, step, values),) = follower.read()
    assert (attempt, step) == (1, 3)
    assert {"eval/heldout/bits_per_byte", "eval/piqa/acc_norm", "eval/piqa/acc_norm_stderr"} <= set(values)
    assert follower.read() == [] and ScoreFollower(run, follower.seen).read() == []
    evaluate(run, 3, ("arc_easy",), mirror=mirror)
    ((_, _, more),) = follower.read()
    assert all(name.startswith("eval/arc_easy/") for name in more)


def test_status_has_the_last_scores_and_their_cost(run, mirror, monkeypatch):
    follow(run, mirror)
    monkeypatch.setattr(type(run), "job", property(lambda self: _Ended()))
    row = status_row(run)
    assert row["scores"]["piqa"]["step"] == 3 and row["scores"]["piqa"]["partial"] is True
    assert row["eval_s"] > 0
    assert json.loads(json.dumps(row["scores"])) == row["scores"]


class _Ended:
    def status(self):
        from cluster.job import JobStatus
        from cluster.state import JobState

        return JobStatus(state=JobState.DONE, reason="done", attempt=1)
