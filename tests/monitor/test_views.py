"""The views of a run without a browser: the text of `kit status` and the static figure."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from cluster.job import JobSpec
from cluster.state import JobState
from kit.cli.options import strict_json
from kit.config.plan import Plan
from kit.monitor import run_figure, runs_table, status_table
from kit.monitor.dashboard import complete_dashboard
from kit.monitor.figure import snapshot
from kit.monitor.text import status_row
from kit.run import Run
from kit.show.style import save_figure
from tests.support.pictures import check_data
from tests.support.recorded_runs import happened, lines, made, row, say, spoil


@pytest.fixture
def run(tmp_path) -> Run:
    """Returns a run directory with 40 steps in two attempts. The job has ended."""
    plan = Plan(global_batch_size=8)
    rows = [row(step, 1 + (step > 25)) for step in range(1, 41)]
    rows[-1]["validation_loss"] = 6.1
    run = made(tmp_path / "a <b> run", rows, plan, plan.replace(data_parallel=2))
    job = JobSpec(name="ended", run_dir=str(run.directory), argv=("true",), num_processes=1)
    job.write(run.directory / "job.json")
    say(run, JobState.DONE, attempt=2, step=40)
    return run


@pytest.mark.parametrize("losses", [[], [8.0, 7.0, math.inf, math.nan], [math.nan] * 3])
def test_figure_of_empty_and_diverged_run_is_drawn(run, losses):
    rows = [row(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    (run.directory / "metrics.jsonl").write_text(lines(rows))
    figure, _ = run_figure(run)
    axis = figure.axes[0]
    raw = np.asarray(axis.get_lines()[0].get_ydata(), dtype=float)
    assert raw[np.isfinite(raw)].tolist() == [loss for loss in losses if math.isfinite(loss)]
    lost = len(losses) - np.isfinite(losses).sum()
    labels = [line.get_label() for line in axis.get_lines()]
    assert (f"not finite ({lost})" in labels) == (lost > 0)
    assert np.isfinite(axis.get_ylim()).all(), "steps before it keep their scale"


def test_saved_figure_of_diverged_run_has_plain_labels(run, tmp_path):
    rows = [row(step, loss=loss) for step, loss in enumerate([8.0, 7.0, 4e6, 2e7], start=1)]
    (run.directory / "metrics.jsonl").write_text(lines(rows))
    figure, table = run_figure(run)
    assert figure.axes[0].get_yscale() == "log"
    save_figure(figure, table, [tmp_path / "run.svg"])
    text = (tmp_path / "run.svg").read_text()
    assert "1e+07" in text or "1e7" in text
    assert "mathdefault" not in text


def test_run_figure_shows_baseline_and_layouts(run):
    figure, table = run_figure(run, baselines={"unigram <i>": 6.62})
    check_data(figure)
    assert "unigram <i> 6.62" in [text.get_text() for text in figure.axes[0].texts]
    assert len(table["step"]) == 40 and np.isfinite(table["validation_loss"]).sum() == 1
    speed = figure.axes[1]
    labels = [text.get_text() for text in speed.texts]
    assert any("1 device" in label for label in labels) and any("DP2" in label for label in labels)
    assert speed.get_title(loc="left") == "MFU, % of peak (fp32)\nline: attempt's median"


@pytest.mark.parametrize(
    ("peak", "reason"), [(None, "peak unknown"), (1e9, "above the peak")], ids=["none", "too low"]
)
def test_figure_without_mfu_gives_the_reason(run, peak, reason):
    site = run.site.replace(device=run.site.device.replace(peak_flops_per_s={}))
    if peak is not None:
        site = site.with_measured_peak("fp32", peak, "test")
    for file in run.directory.glob("site*.json"):
        site.write(file)
    figure, table = run_figure(Run.open(run.directory))
    check_data(figure)
    assert "mfu" not in table
    assert figure.axes[1].get_title(loc="left") == f"Tokens/s, line: median\nno MFU: {reason}"


def test_figure_marks_non_finite_losses(run):
    spoil(run, {10: {"loss": math.nan}, 11: {"loss": math.inf}, 30: {"step_time_s": math.nan}})
    figure, table = run_figure(run)
    assert np.isfinite(table["loss_ema"]).sum() == 38 and np.isfinite(table["loss_ema"][-1])
    loss, speed = figure.axes
    marks = next(line for line in loss.get_lines() if "not finite" in str(line.get_label()))
    assert np.asarray(marks.get_xdata()).tolist() == [10, 11]
    assert not any("nan" in text.get_text() for text in speed.texts)
    figure.canvas.draw()


def status_words(run: Run) -> str:
    """Returns the text of `kit status`, with one space between words."""
    screen = io.StringIO()
    Console(width=100, file=screen).print(status_table(run))
    return " ".join(screen.getvalue().split())


def test_status_text_says_why_earlier_attempts_ended(run):
    """The supervisor has started the ranks again, and the run has ended well."""
    assert "ended" not in status_words(run).partition("s/step")[2]
    killed = "rank 3 was killed by SIGKILL (often: out of memory)"
    happened(run, 1, 1.0, JobState.RUNNING)
    happened(run, 1, 2.0, JobState.STOPPING, step=25, reason=killed)
    words = status_words(run)
    assert f"attempt 1 ended at step 25: {killed}" in words and "attempt 2 ended" not in words
    say(run, JobState.DONE, attempt=6, step=40)
    for attempt in (2, 3, 4, 5):
        happened(run, attempt, 2.0 + attempt, JobState.RUNNING, step=25 + attempt)
    words = status_words(run)
    assert "and 2 earlier attempts: kit status" in words and killed not in words
    for attempt in (3, 4, 5):
        end = f"attempt {attempt} ended at step {25 + attempt}: its end was not recorded"
        assert end in words


def test_status_text_marks_non_finite_values(run):
    """The last step has values that are not finite. Step time and tokens per second come from the
    steps before it.
    """
    lost = {"loss": float("inf"), "grad_norm": float("nan"), "step_time_s": float("nan")}
    spoil(run, {40: lost, 39: {"tokens": 0}})
    row = status_row(run)
    assert (row["step"], row["num_steps"]) == (40, 80)
    assert row["step_time_s"] == pytest.approx(0.5) and row["tokens_per_s"] == pytest.approx(4096)
    words = status_words(run)
    assert "loss not finite" in words and "grad norm not finite" in words and "nan" not in words
    assert "?" in words, "a lost step is seen in the line of bars"
    assert json.loads(strict_json(row), parse_constant=pytest.fail)["loss"] == "Infinity"


def test_views_show_a_run_that_was_stopped_early(run):
    """The run has 80 steps and ended well after step 40. JSON keeps the state of the job."""

    def shown() -> list[str]:
        console = Console(file=io.StringIO(), width=100)
        console.print(status_table(run, 100))
        dashboard = complete_dashboard(run)
        (row,) = runs_table(run.directory).rows
        title = snapshot(dashboard).get_suptitle()
        return [
            console.file.getvalue(),  # pyright: ignore[reportAttributeAccessIssue]
            dashboard.facts()["state_word"],
            row["state_word"],
            runs_table(run.directory)._repr_html_(),
            title,
        ]

    for text in shown():
        assert "stopped" in text and "done" not in text
    assert "● stopped" in shown()[0] and "40 / 80" in shown()[0]
    assert "stopped, attempt 2, step 40 of 80" in shown()[-1]
    assert status_row(run)["state"] == runs_table(run.directory).to_dicts()[0]["state"] == "done"
    run.recipe.replace(num_steps=40).write(run.directory / "recipe.json")
    run = Run.open(run.directory)
    for text in shown():
        assert "done" in text and "stopped" not in text
