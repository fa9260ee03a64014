"""The table of all runs below a folder, the figure that compares runs, and the commands `kit runs`,
`kit export` and `kit import`.
"""

import json
import math
import re
import time
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.job import JobSpec, JobStatus
from cluster.login.mirror import ClusterReport, Mirror
from cluster.site import Site
from cluster.state import JobState, update_state
from cluster.submission import submit
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.errors import ConfigError, DataError, RunError
from kit.monitor.runs import TAIL_BYTES, cell_text, compare_figure, find_runs, runs_table
from kit.run import Run
from tests.support.foreign_logs import frontier
from tests.support.pictures import check_data
from tests.support.recorded_runs import lines, made, row


def make(directory, *, steps=40, step_time_s=0.5, spec: str | ModelSpec = "demo", **plan) -> Run:
    """Returns a run that has recorded steps but was never started as a job."""
    rows = [row(step, step_time_s=step_time_s) for step in range(1, steps + 1)]
    return made(directory, rows, Plan(**{"global_batch_size": 8, **plan}), spec=spec)


def job_spec(run: Run, *argv: str) -> JobSpec:
    return JobSpec(name=run.name, run_dir=str(run.directory), argv=argv, num_processes=1)


def test_runs_table_has_states_and_differing_settings(tmp_path):
    make(tmp_path / "new", data_parallel=2)
    for name, command in (("done", "true"), ("failed", "false")):
        submit(job_spec(make(tmp_path / "group" / name), command), Site.load("laptop")).wait(20)
    remote = make(tmp_path / "remote", micro_batch_size=2)
    job_spec(remote, "x").write(remote.directory / "job.json")
    silent = {"state": JobState.RUNNING, "step": 40, "heartbeat": time.time() - 300}
    update_state(remote.directory, attempt=1, **silent)
    table = runs_table(tmp_path)
    states = [(row["run"], row["state"]) for row in table.rows]
    known = [("group/done", "done"), ("group/failed", "failed"), ("new", "not started")]
    assert sorted(states) == [*known, ("remote", "stalled")]
    assert table.settings == ["plan.data_parallel", "plan.micro_batch_size"]
    new = next(row for row in table.to_dicts() if row["run"] == "new")
    assert (new["step"], new["num_steps"], new["plan.data_parallel"]) == (40, 80, 2)
    assert (new["loss"], new["tokens_per_s"]) == pytest.approx((6.0, 4096)) and 0 < new["mfu"] < 1
    make(tmp_path / "other model", spec="gpt2-xl")
    assert "spec.name" in (settings := runs_table(tmp_path).settings)
    assert "spec.num_layers" not in settings, "the name stands for its shapes"
    make(tmp_path / "other shape", spec=ModelSpec.preset("demo").replace(num_layers=2))
    assert {"spec.name", "spec.num_layers"} <= set(runs_table(tmp_path).settings)


def test_runs_table_shows_age_of_remote_status(tmp_path):
    make(tmp_path / "here")
    assert "heard" not in runs_table(tmp_path).columns
    job_spec(run := make(tmp_path / "there"), "x").write(run.directory / "job.json")
    there = run.directory
    Mirror(login="far", python="python", source="/", directory="/run").write(there / "login.json")
    status = JobStatus(state=JobState.RUNNING, reason="step 40", attempt=1)
    ClusterReport(time=time.time() - 7300, status=status.to_dict()).write(there / "login_seen.json")
    table = runs_table(tmp_path)
    here, far = table.to_dicts()
    assert (here["heard"], far["heard"], far["state"]) == (None, "2 h ago", "running")
    assert 7300 <= far["heard_s"] < 7400 and ">as of</th>" in table._repr_html_()
    assert "somebody else made this mirror" in far["reason"]


def test_runs_table_explains_unreadable_runs(tmp_path, monkeypatch):
    make(tmp_path / "good")
    make(tmp_path / "damaged").directory.joinpath("plan.json").write_text('{"tensor_par')
    foreign = b'\xff\x00{"step": 1}\n[1]\n{"step": Infi'
    make(tmp_path / "metrics").directory.joinpath("metrics.jsonl").write_bytes(foreign)
    make(tmp_path / "half").directory.joinpath("recipe.json").unlink()
    gone = tmp_path / "gone"
    monkeypatch.setattr("kit.monitor.runs.find_runs", lambda folder: [*find_runs(folder), gone])
    rows = {row["run"]: row for row in runs_table(tmp_path).rows}
    assert rows["damaged"]["state"] == rows["half"]["state"] == "unreadable"
    assert "not valid JSON" in rows["damaged"]["reason"]
    assert "recipe.json" in rows["half"]["reason"]
    assert rows["gone"]["reason"] == "deleted while it was looked at"
    assert rows["metrics"]["step"] == 0 and rows["good"]["step"] == 40
    assert "unreadable" in runs_table(tmp_path)._repr_html_()


def test_runs_table_marks_nan_loss_and_impossible_mfu(tmp_path):
    assert runs_table(tmp_path).rows == []
    run = make(tmp_path / "run", steps=1, step_time_s=1e-9)
    (found,) = runs_table(tmp_path).rows
    assert found["mfu"] is None and "above the peak, see kit status" in found["reason"]
    (run.directory / "metrics.jsonl").write_text(lines([row(1, loss=math.nan)]))
    (found,) = runs_table(tmp_path).rows
    assert math.isnan(found["loss"]) and found["tokens_per_s"] == 4096
    shown = [cell_text("loss", value) for value in (math.nan, math.inf, None, 2.0)]
    assert shown == ["not finite", "not finite", "–", "2.0000"]


def test_runs_table_shows_the_speed_of_kit_status(tmp_path):
    """The newest attempt has two steps. Both commands take the median over 20 steps of both
    attempts, also if the last bytes of metrics.jsonl contain only steps that were repeated.
    """
    for repeated in (5, 500):
        run = make(tmp_path / f"run-{repeated}", steps=1000)
        again = [row(step, 2, step_time_s=2.0) for step in (1001 - repeated, 1002 - repeated)]
        with (run.directory / "metrics.jsonl").open("a") as stream:
            stream.write(lines(again))
        (found,) = runs_table(run.directory).rows
        summary = run.metrics().summary()
        names = ("step", "attempt", "tokens_per_s", "step_time_s", "mfu", "speed_steps")
        assert [found[name] for name in names] == [summary[name] for name in names]
        assert (found["tokens_per_s"], found["speed_steps"]) == (4096, 20)


def test_runs_table_uses_newest_attempt_of_long_file(tmp_path):
    run = make(tmp_path / "run", steps=5000)
    file = run.directory / "metrics.jsonl"
    assert file.stat().st_size > 5 * TAIL_BYTES
    with file.open("a") as stream:
        stream.write(lines([row(4001, 2, loss=1.5, step_time_s=1.0)]) + '{"step": 4002, "a')
    (found,) = runs_table(tmp_path).rows
    assert "tokens/s, MFU: median of the last 20 steps" in runs_table(tmp_path).notes[-1]
    told = [found[name] for name in ("step", "attempt", "loss", "tokens_per_s")]
    assert told == [4001, 2, 1.5, 4096], "the speed is a median that includes earlier steps"


def test_compare_figure_has_a_curve_per_run_with_gaps(tmp_path):
    runs = [make(tmp_path / f"run{i}", steps=10 + i) for i in range(8)]
    file = runs[0].directory / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 7.75', '"loss": NaN'))
    figure, table = compare_figure(runs)
    check_data(figure)
    left, right = figure.axes
    assert len(left.lines) == len(right.lines) == len(table) == 8
    looks = {(line.get_color(), str(line.get_linestyle())) for line in left.lines}
    assert len(looks) == 8, "each run by colour and dash"
    drawn = np.asarray(left.lines[0].get_ydata())
    assert np.isnan(drawn[4]) and np.isfinite(drawn[5:]).all()
    for wrong, message in (([*runs, runs[0]], "9 runs cannot"), (2 * runs[:1], "with itself")):
        with pytest.raises(RunError, match=message):
            compare_figure(wrong)
    with pytest.raises(RunError, match="is not a folder"):
        runs_table(tmp_path / "none")


def test_comparison_with_diverged_run_shows_both_curves(tmp_path):
    good = make(tmp_path / "good", steps=10)
    diverged = make(tmp_path / "diverged", steps=10)
    rows = [row(step, loss=8.0 * 10.0 ** (step / 2)) for step in range(1, 11)]
    (diverged.directory / "metrics.jsonl").write_text(lines(rows))
    figure, _ = compare_figure([good, diverged])
    assert figure.axes[0].get_yscale() == "log"


# The commands `kit runs`, `kit export` and `kit import` -------------------------------------------


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """Returns a function that runs a `kit` command in the test's folder and returns its output. It
    raises the exceptions of the command.
    """
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"catch_exceptions": False, "standalone_mode": False}
    return lambda *words: CliRunner().invoke(app, [*map(str, words)], **given).stdout


def test_imported_run_is_listed_exported_and_compared(kit, tmp_path):
    (tmp_path / "train.log").write_text(frontier())
    options = ["--format", "megatron", "--site", "frontier", "--json", "--out", "runs/old"]
    assert json.loads(kit("import", "train.log", *options))["steps"] == 5
    make(tmp_path / "runs" / "new")
    rows = json.loads(kit("runs", "runs", "--json"))
    states = [(row["run"], row["state"]) for row in rows]
    assert states == [("new", "not started"), ("old", "imported")]
    shown = kit("runs", "runs")
    assert "not started" in shown and "imported" in shown
    assert json.loads(kit("export", "runs/old", "--format", "csv", "--json"))["rows"] == 5
    assert (tmp_path / "runs/old/export.csv").is_file()
    kit("runs", "runs", "--compare", "old", "--compare", "new", "--out", "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000
    pytest.importorskip("tensorboard")
    told = kit("--json", "export", "runs/new", "--format", "tensorboard")
    assert json.loads(told)["rows"] == 40, "what it has copied"
    assert list((tmp_path / "runs/new/tensorboard/attempt_01").iterdir())


NXDT = "import none.log --format nxdt --out out --site"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export run --step 3", "--step: only with --format hf"),
        ("export run --format wandbb", "Did you mean 'wandb'?"),
        (f"{NXDT} lumi", "cannot be read"),
        (f"{NXDT} lumni", "Did you mean 'lumi'?"),
    ],
)
def test_wrong_command_option_changes_no_file(kit, tmp_path, words, message):
    make(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        kit(*words.split())
    assert sorted(tmp_path.rglob("*")) == before
