"""`kit eval`: the command line's twin of `evaluate`."""

import json
import re

import pytest
from typer.testing import CliRunner

from kit import evaluate
from kit.commands.app import app
from kit.errors import ConfigError, DataError
from kit.evaluate import EvalReport
from kit.evaluate.task_data import mirror_table

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def kit(*arguments: str) -> str:
    found = CliRunner().invoke(
        app, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False
    )
    return found.stdout


def test_scores_are_printed_and_kept(run, benchmarks):
    text = kit(
        "eval", run.directory, "--tasks", "heldout,piqa", "--limit", "10", "--task-data", benchmarks
    )
    assert text.startswith("run, step 3, 768 training tokens") and "partial: 10 of 30 items" in text
    report = EvalReport.from_json(
        kit("eval", run.directory, "--tasks", "piqa", "--task-data", benchmarks, "--json")
    )
    assert not report["piqa"].partial
    assert (run.directory / "eval" / "step_00000003.json").exists()


def test_without_benchmark_data_what_needs_none_is_scored(run, tmp_path, no_network, monkeypatch):
    """As on a machine of a first user, whose home is empty; a task that was asked for by name is
    missed.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    report = EvalReport.from_json(kit("eval", run.directory, "--json"))
    assert [score.task for score in report.scores] == ["heldout"]
    assert [item.task for item in report.unscored] == ["piqa", "arc_easy"]
    assert kit("eval", run.directory).count("kit eval-data") == 2
    with pytest.raises(DataError, match="piqa: .*kit eval-data"):
        kit("eval", run.directory, "--tasks", "heldout,piqa")
    alone = EvalReport.from_json(kit("eval", run.directory, "--tasks", "heldout", "--json"))
    assert alone["heldout"].metrics == report["heldout"].metrics


def test_the_papers_suite_has_its_tables_beside_and_names_what_is_missing(run, benchmarks):
    text = kit("eval", run.directory, "--suite", "hlat", "--limit", "4", "--task-data", benchmarks)
    assert "measured here" in text and "Table II" in text and "Table V" in text
    assert "not scored: truthfulqa_mc1 (0 shots): on the hub only" in text
    assert "commonsense: piqa: partial: 4 of 30 items" in text


def test_following_prints_a_line_for_each_checkpoint(run, benchmarks):
    line = json.loads(
        kit(
            "eval",
            run.directory,
            "--tasks",
            "piqa",
            "--follow",
            "--task-data",
            benchmarks,
            "--json",
        )
    )
    assert (line["step"], line["scored"]) == (3, True) and line["seconds"] > 0


def test_benchmark_data_is_listed_with_its_gaps(make_mirror):
    mirror = make_mirror()
    found = json.loads(kit("eval-data", mirror, "--json"))
    rows = {row["task"]: row for row in found["benchmarks"]}
    assert (
        rows["triviaqa"]["items"] == "7,993 of 17,944" and "hub" in rows["truthfulqa_mc1"]["note"]
    )
    assert all(re.fullmatch(r"[A-Za-z0-9.\- ]+", row["licence"]) for row in rows.values())
    assert rows["piqa"]["items"] == "1,838" and rows["piqa"]["licence"] == "AFL-3.0"
    assert rows["truthfulqa_mc1"]["items"] == "not offline" and len(found["sha256"]) == 64
    assert "not offline" in kit("eval-data", mirror)
    empty = {row["task"]: row["items"] for row in mirror_table(mirror / "none")}
    assert empty["piqa"] == "build with `kit eval-data`"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "smkoe"), "suite: 'smkoe' is unknown. Did you mean 'smoke'"),
        (("--tasks", "piqua"), "tasks: 'piqua' is unknown. Did you mean 'piqa'"),
        (
            ("--suite", "piqa"),
            "suite: 'piqa' is unknown. For a single task, give a list",
        ),
        (("--tasks", ""), "tasks: '' is unknown"),
        (("--limit", "0"), "limit: 0 is not allowed"),
        (("--suite", ""), "tasks: '' is not allowed"),
        (("--tasks", "piqa", "--suite", "smoke"), "--suite smoke: not with --tasks piqa"),
        (("--submit",), "--submit: only with --follow"),
        (
            ("--untrusted-code", "yes"),
            "untrusted_code: 'yes' is not allowed. Allowed: 'refuse', ",
        ),
        (("--set", "precision=fp8"), "precision: 'fp8' is not allowed. Allowed: 'fp32', 'bf16'"),
        (("--set", "devices=0"), "devices: 0 is not allowed"),
        (("--set", "seed=often"), "evaluate.seed: expected int, got str 'often'"),
        (("--set", "sede=1"), "evaluate.sede: unknown key. Did you mean 'seed'"),
        (("--set", "out=x.json"), "out: only with a Hugging Face folder"),
    ],
)
def test_a_wrong_request_is_refused(run, benchmarks, arguments, message):
    with pytest.raises(ConfigError, match=message):
        kit("eval", run.directory, "--task-data", benchmarks, *arguments)
    assert not (run.directory / "eval").exists()


def test_a_report_that_could_not_be_kept_is_refused_before_the_work(run, benchmarks, monkeypatch):
    monkeypatch.setattr("kit.evaluate.loading.load_lm", lambda *_: pytest.fail("the work began"))
    (run.directory / "eval").write_text("a file")
    with pytest.raises(ConfigError, match="step_00000003.json: cannot be written"):
        evaluate.evaluate(run, tasks=("piqa",), task_data=benchmarks)
    (run.directory / "eval").unlink()
    monkeypatch.setattr("os.access", lambda *given: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="step_00000003.json: cannot be written"):
        evaluate.evaluate(run, tasks=("piqa",), task_data=benchmarks)
