"""Plans that are fitted to a user's own runs, and site files that keep the runs."""

import csv
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.record import ConfigError
from cluster.site import Site
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.choose.report import plan_report
from kit.estimate.fit.calibrate import own_calibration, published_calibration
from kit.estimate.fit.own_runs import extrapolation_error, kept_runs, read_own_runs, site_text
from kit.estimate.theory.layouts import Layouts
from kit.run import Run
from tests.support.recorded_runs import made, row

H100 = Site.load("dgx-h100")
SLOWER = 1.3
"""Measured step time of the recorded run, divided by the predicted step time."""
QUESTION = {"site": "dgx-h100", "devices": 512, "batch": 1024, "count": 1}


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run of llama3-8b on 8 H100 that is slower than predicted."""
    plan = Plan(
        data_parallel=8, zero_stage=2, recompute="selective", global_batch_size=64, precision="bf16"
    ).replace(compile=True)
    layouts = Layouts.of(ModelSpec.preset("llama3-8b"), [plan])
    predicted = published_calibration(H100).predict(layouts).total_s.item()
    steps = [row(step, step_time_s=SLOWER * predicted, tokens=64 * 8192) for step in range(1, 30)]
    directory = tmp_path_factory.mktemp("own") / "run"
    return made(directory, steps, plan, spec="llama3-8b", site="dgx-h100")


def test_own_run_on_8_devices_moves_plan_for_512(slow_run: Run) -> None:
    published = plan_report("llama3-8b", **QUESTION)
    own = plan_report("llama3-8b", **QUESTION, runs=[slow_run.directory])
    again = own.search.machine.step_time(
        published.search.layouts.select(np.array([published.chosen.index]))
    )
    ratio = again.total_s.item() / published.chosen.row["step_time_s"]
    assert 1.1 < ratio < 1.4
    changed, extrapolated = own.notes
    assert changed.startswith("1 own run: ") and " with own runs, and " in changed
    assert "64-fold extrapolation" in extrapolated and "mean error was" in extrapolated
    assert own.to_dict()["own_runs"] == 1


def test_site_file_keeps_own_runs(slow_run: Run, tmp_path: Path) -> None:
    kept = kept_runs([slow_run.directory])
    file = tmp_path / "mine.toml"
    file.write_text(site_text(H100, "mine", kept))
    assert tomllib.loads(file.read_text())["base"] == "dgx-h100"
    site = Site.load(file)
    assert site.own_runs == tuple(kept) and site.device == H100.device
    assert (
        own_calibration([], site).to_dict() == own_calibration([slow_run.directory], H100).to_dict()
    )
    # The file of a user's site has no base in the package, so all its numbers are written.
    other = H100.replace(name="elsewhere")
    file.write_text(site_text(other, "mine", kept))
    assert Site.load(file) == other.replace(name="mine", own_runs=tuple(kept))


def test_calibrate_command_writes_site_file(slow_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    words = ["calibrate", str(slow_run.directory), "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    question = ["plan", "llama3-8b", "--site", str(out), "--devices", "64", "--batch", "64"]
    said = CliRunner().invoke(app, question).stdout
    assert "1 own run: " in said and "8-fold extrapolation" in said
    assert "already exists" in str(CliRunner().invoke(app, words).exception)


def test_status_why_of_slow_run_advises_calibration(slow_run: Run) -> None:
    done = CliRunner().invoke(app, ["status", str(slow_run.directory), "--why"])
    is_slow = "slower" in done.output
    assert is_slow == ("kit calibrate" in done.output)


def rows_file(path: Path, **changes: str) -> Path:
    """Writes one run of llama3-8b on 8 H100 as a CSV file."""
    values = {
        "source": "own", "system": "mine", "gpu": "H100", "model": "llama3-8b", "precision": "bf16",
        "gpus": "8", "layers": "32", "hidden": "4096", "ffn_hidden": "14336", "heads": "32",
        "kv_heads": "8", "vocab": "128256", "seq": "8192", "tp": "1", "pp": "1", "zero_stage": "2",
        "micro_batch": "1", "global_batch": "64", "recompute": "selective",
        "seconds_per_iter": "9.0", **changes,
    }  # fmt: skip
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(values))
        writer.writeheader()
        writer.writerow(values)
    return path


def test_own_runs_of_csv_file_are_read(tmp_path: Path) -> None:
    (run,) = read_own_runs([rows_file(tmp_path / "own.csv")], H100)
    assert run.step_time_s == 9.0  # pyright: ignore
    assert own_calibration([run], H100).num_runs == 1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("absent", {}, "neither a run directory nor a .csv file"),
        ("b200.csv", {"gpu": "B200"}, "ran on B200, and dgx-h100 has"),
        ("oom.csv", {"kind": "oom", "seconds_per_iter": ""}, "no row has a step time"),
    ],
)
def test_wrong_own_runs_are_refused(tmp_path: Path, name: str, changes: dict, message: str) -> None:
    path = tmp_path / name
    if path.suffix:
        rows_file(path, **changes)
    with pytest.raises(ConfigError, match=message):
        read_own_runs([path], H100)


def test_extrapolation_error_is_of_packaged_runs() -> None:
    assert extrapolation_error(64, 128) is None
    near, far = extrapolation_error(64, 512), extrapolation_error(8, 512)
    assert near and far and "8-fold" in near and "64-fold" in far
