"""Comparison of a run's step time with the expected step time, and the part of a step that makes a
run slow.
"""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.site import Site
from cluster.state import JobState, update_state
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.errors import RunError
from kit.estimate import Layouts, published_calibration
from kit.estimate.fit.calibrate import Prediction
from kit.estimate.theory.hardware import Hardware
from kit.monitor.speed import PASSES, STEP_PARTS, SpeedMonitor, compare_speed, speed_facts
from kit.run import Run
from tests.support.recorded_runs import made, row

SITE = "selene"
HALF = Plan(global_batch_size=64, precision="bf16")
LAYOUTS = {
    "one node": HALF.replace(tensor_parallel=8, micro_batch_size=4),
    "pipeline": HALF.replace(
        tensor_parallel=8, pipeline_parallel=4, micro_batch_size=2, global_batch_size=128
    ),
    "wide": HALF.replace(data_parallel=64, zero_stage=1, micro_batch_size=1),
}


def recorded(folder: Path, plan: Plan, seconds: float, steps: int = 30, **parts: Any) -> Run:
    """Returns a run whose steps took `seconds`. The first step took twice as long."""
    taken = [2 * seconds] + (steps - 1) * [seconds]
    rows = [row(step, step_time_s=took, **parts) for step, took in enumerate(taken, 1)]
    return made(folder, rows, plan, spec="gpt-1.4b", site=SITE, planned=100)


def estimate(plan: Plan, **speeds: Any) -> Prediction:
    """Returns the planner's prediction for `plan` on the site. `speeds` maps fields of its
    `Hardware` to factors.
    """
    hardware = Hardware.of(Site.load(SITE), "bf16")
    changed = {name: getattr(hardware, name) * by for name, by in speeds.items()}
    layouts = Layouts.of(ModelSpec.preset("gpt-1.4b"), [plan])
    slower = dataclasses.replace(hardware, **changed)
    return published_calibration(Site.load(SITE)).predict(layouts, slower)


def estimated(plan: Plan) -> float:
    """Returns the predicted step time of `plan` in seconds."""
    return float(np.ravel(estimate(plan).total_s)[0])


@pytest.mark.parametrize("plan", LAYOUTS.values(), ids=list(LAYOUTS))
def test_run_at_predicted_speed_is_as_expected(tmp_path, plan):
    found = compare_speed(recorded(tmp_path / "run", plan, estimated(plan)))
    assert found.low_s < found.took_s < found.high_s and found.verdict.startswith("as expected")
    measured = f"measured {found.took_s:.3g} s a step (median of the last {found.took_steps} steps)"
    predicted = f"predicted {found.expected_s:.3g} s, 90 % interval {found.low_s:.3g} to"
    assert measured in found.verdict and predicted in found.verdict
    assert found.parts_s == {}, "of metrics that do not tell"
    assert "calibrated on" in found.verdict and found.slow_part is None
    assert sum(found.terms_s.values()) == pytest.approx(found.expected_s, rel=1e-6)


def test_expected_speed_never_exceeds_the_peak(tmp_path):
    """The machine is unknown to the planner, so its interval of the step time is wide. The fast end
    of the interval must not need more than the peak FLOP/s.
    """
    plan = Plan(global_batch_size=32, micro_batch_size=8)
    rows = [row(step, step_time_s=1.0) for step in range(1, 31)]
    found = compare_speed(made(tmp_path / "run", rows, plan, peak=1e11))
    slow, fast = found.band["mfu"]
    assert slow < 0.9 and fast == pytest.approx(1), "the interval would reach beyond it"
    assert found.low_s == found.band["step_time_s"][0] < found.expected_s < found.high_s


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_run_verdict_names_slow_part_of_step(tmp_path, layout):
    plan = LAYOUTS[layout]
    slow = estimate(plan, matmul_flops_per_s=0.3, attention_flops_per_s=0.3)
    seconds = {name: float(np.ravel(value)[0]) for name, value in slow.step_time.terms_s.items()}
    total_s = float(np.ravel(slow.total_s)[0])
    parts: dict[str, Any] = {
        column: sum(seconds[term] for term in terms) for column, terms in STEP_PARTS.values()
    }
    parts["forward_backward_s"] += parts["waiting_s"]
    found = compare_speed(recorded(tmp_path / "run", plan, total_s, **parts))
    assert found.verdict.startswith("slower than expected by") and found.slow_part == PASSES
    assert f"Most of it: {PASSES}, " in found.verdict
    mute = compare_speed(recorded(tmp_path / "mute", plan, total_s))
    assert mute.slow_part is None, "nothing that was not measured is guessed"
    assert mute.verdict.endswith("runs)")


def test_status_why_has_verdict_and_goodput(tmp_path):
    """The test checks only that the goodput is printed. test_ledger.py tests its value."""
    plan = LAYOUTS["one node"]
    run = recorded(tmp_path / "run", plan, estimated(plan))
    command = ["status", str(run.directory), "--why"]
    words = " ".join(CliRunner().invoke(app, command).output.split())
    assert "as expected" in words and "where the time should go" in words
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert set(told) == {"pace", "goodput"}
    assert told["pace"]["verdict"] == compare_speed(run).verdict
    assert told["goodput"]["attempts"][0]["devices"] == 8


def test_status_why_shares_add_up_to_100_percent(tmp_path):
    parts = {"data_s": 0.01, "forward_backward_s": 0.96, "reduction_s": 0.02, "waiting_s": 0.54}
    run = recorded(tmp_path / "run", LAYOUTS["one node"], 1.0, **parts)
    output = CliRunner().invoke(app, ["status", str(run.directory), "--why"]).output
    words = " ".join(output.split())
    measured = words.split("a step, measured ")[1].split(" of that, waiting ")[0]
    shares = [int(share) for share in re.findall(r"(\d+)%", measured)]
    assert sum(shares) == pytest.approx(100, abs=2), measured
    assert "of that, waiting 54% for other ranks or the network" in words


def test_speed_monitor_gives_reason_without_estimate(tmp_path):
    """The views do not import the planner. If the estimate fails, the reason is shown in place of
    the verdict.
    """
    views = "import sys, kit.monitor.dashboard, kit.monitor.text"
    code = f"{views}; sys.exit('kit.estimate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    run = recorded(tmp_path / "run", LAYOUTS["wide"], 1.0, steps=6)
    monitor = SpeedMonitor(run, run.metrics)
    assert monitor.facts["verdict"] == "" and monitor.facts["band"] is None
    monitor.update_comparison(wait=True)
    verdict, band = monitor.facts["verdict"], monitor.facts["band"]
    assert verdict.startswith("expected: ") and "too few steps" in verdict
    with pytest.raises(RunError, match="fewer than 10 steps"):
        compare_speed(run)
    low, high = band["step_time_s"]
    tokens = run.plan.global_batch_size * run.spec.sequence_length
    assert band["tokens_per_s"] == pytest.approx((tokens / high, tokens / low))
    assert monitor.facts["goodput"]["share"] == pytest.approx(1, abs=0.2)
    (run.directory / "plan.attempt_01.json").write_text("{")
    monitor.update_comparison(wait=True)
    assert monitor.facts["verdict"] == verdict, "not asked again within 20 s"
    monitor = SpeedMonitor(run, run.metrics, earlier=monitor)
    monitor.update_comparison(wait=True)
    verdict = monitor.facts["verdict"]
    assert verdict.startswith("no estimate: ") and "plan.attempt_01.json" in verdict
    assert not verdict.endswith("."), "a view adds its own full stop"
    assert monitor.facts["band"] is None


def test_verdict_without_estimate_omits_errors_example(tmp_path):
    """The error for a site without peak numbers has an example on its further lines, which the
    verdict must not show.
    """
    rows = [row(step) for step in range(1, 31)]
    run = made(tmp_path / "run", rows, Plan(global_batch_size=32), site="generic-gpu-slurm")
    verdict = speed_facts(run, run.metrics())["verdict"]
    assert verdict.startswith("no estimate: ") and verdict.endswith("`kit bench --out FILE.toml`)")


def test_verdict_with_a_huge_error_is_short(tmp_path):
    """The time to read an error grows with its length, not with the square of its length."""
    rows = [row(step) for step in range(1, 31)]
    run = made(tmp_path / "run", rows, Plan(global_batch_size=32))
    site = run.site.to_dict()
    site["links"]["topology"] = "x" * 1_000_000
    (run.directory / "site.attempt_01.json").write_text(json.dumps(site))
    verdict = speed_facts(run, run.metrics())["verdict"]
    assert verdict.startswith("no estimate: ") and "topology" in verdict
    assert len(verdict) < 450


def test_new_attempt_is_not_judged_by_earlier_steps(tmp_path):
    plan = LAYOUTS["one node"]
    run = recorded(tmp_path / "run", plan, 10 * estimated(plan))
    assert speed_facts(run, run.metrics())["verdict"].startswith("slower than expected")
    # attempt 2 has not written its plan yet
    update_state(run.directory, attempt=2, state=JobState.STARTING)
    found = speed_facts(run, run.metrics())
    assert found["verdict"].endswith("too few steps to compare") and found["band"]["attempt"] == 2
