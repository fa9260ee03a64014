"""Whether a run is as fast as it should be: the sentence, and which part of the machine is named for a slow one."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.heartbeats import RankHeartbeat, write_all_heartbeats
from cluster.site import Fact, Site
from cluster.state import JobState, update_state
from kit.commands.app import app
from kit.errors import RunError
from kit.estimate import Layouts, published_calibration
from kit.estimate.fit.calibrate import Prediction
from kit.estimate.theory.hardware import Hardware
from kit.monitor.expected import LINKS_WAIT, SUSPECTS, gains, pace
from kit.monitor.outlook import Outlook, compare
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec
from tests.monitor.steps import lines, row

SITE = "selene"
LAYOUTS = {
    "one node": Plan(tensor_parallel=8, micro_batch_size=4, global_batch_size=64, precision="bf16"),
    "pipeline": Plan(
        tensor_parallel=8, pipeline_parallel=4, micro_batch_size=2, global_batch_size=128, precision="bf16"
    ),
    "wide": Plan(data_parallel=64, zero_stage=1, micro_batch_size=1, global_batch_size=64, precision="bf16"),
}


THROTTLED = [
    ("one node", "matrix products", 0.5), ("one node", "matrix products", 0.3), ("one node", "memory bandwidth", 0.3),
    ("one node", "links inside a node", 0.3), ("pipeline", "matrix products", 0.3),
    ("pipeline", "memory bandwidth", 0.15), ("pipeline", "links inside a node", 0.15),
    ("wide", "matrix products", 0.5), ("wide", "memory bandwidth", 0.15),
    ("wide", "links inside a node", 0.15), ("wide", "the network between nodes", 0.3),
]  # fmt: skip


def recorded(
    folder: Path, plan: Plan, seconds: float, site: str = SITE, steps: int = 30, optimizer_s: float | None = None
) -> Run:
    """Returns a run whose steps took so long, the first twice."""
    spec = ModelSpec.preset("gpt-1.4b")
    run = Run.create(folder, spec=spec, plan=plan, recipe=Recipe(data="data", num_steps=100), site=Site.load(site))
    run.plan.write(run.directory / "plan.attempt_01.json")
    rows = [
        row(step, step_time_s=seconds * (2 if step == 1 else 1), optimizer_s=optimizer_s)
        for step in range(1, steps + 1)
    ]
    (run.directory / "metrics.jsonl").write_text(lines(rows))
    return run


def estimate(plan: Plan, **speeds: Any) -> Prediction:
    """Returns the estimate on the site with some of its numbers multiplied."""
    hardware = Hardware.of(Site.load(SITE), "bf16")
    hardware = dataclasses.replace(hardware, **{name: getattr(hardware, name) * by for name, by in speeds.items()})
    layouts = Layouts.of(ModelSpec.preset("gpt-1.4b"), [plan])
    return published_calibration(Site.load(SITE)).predict(layouts, hardware)


def estimated(plan: Plan, **speeds: Any) -> float:
    """Returns its seconds."""
    return float(np.ravel(estimate(plan, **speeds).total_s)[0])


@pytest.mark.parametrize("plan", LAYOUTS.values(), ids=list(LAYOUTS))
def test_as_expected(tmp_path, plan):
    found = pace(recorded(tmp_path / "run", plan, estimated(plan)))
    assert found.low_s < found.took_s < found.high_s and found.verdict.startswith("as expected")
    assert found.parts_s == {}, "of metrics that do not tell"
    assert "calibrated on" in found.verdict and not found.suspects and found.nearest is not None
    assert sum(found.terms_s.values()) == pytest.approx(found.expected_s, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "part", "speed"),
    [
        ("one node", "matrix products", 0.5),
        ("one node", "links inside a node", 0.1),
        ("pipeline", "matrix products", 0.4),
        ("pipeline", "links inside a node", 0.15),
        ("wide", "the network between nodes", 0.1),
        ("wide", "matrix products", 0.5),
    ],
)
def test_a_part_that_alone_explains_it_is_among_the_suspects_at_its_speed(tmp_path, layout, part, speed):
    plan = LAYOUTS[layout]
    found = pace(recorded(tmp_path / "run", plan, estimated(plan, **dict.fromkeys(SUSPECTS[part][0], speed))))
    assert found.verdict.startswith("slower than expected by")
    speeds = {suspect.part: suspect.speed for suspect in found.suspects}
    assert speeds[part] == pytest.approx(speed, rel=0.01)


def test_what_was_measured_at_the_start_is_named_first_and_what_was_found_well_last(tmp_path):
    plan = LAYOUTS["wide"]
    run = recorded(tmp_path / "run", plan, estimated(plan, network_bytes_per_s=0.1))
    assert len(pace(run).suspects) > 1
    site = run.site
    slow = site.links.inter_node_bytes_per_s
    assert slow is not None
    seen = site.replace(
        links=site.links.replace(inter_node_bytes_per_s=Fact(value=0.1 * slow.value, source="node check"))
    )
    seen.write(run.directory / "measured_site.json")
    found = pace(run)
    assert found.suspects[0].part == "the network between nodes"
    assert "(measured at the start: 10%)" in found.verdict
    healthy = site.replace(
        links=site.links.replace(inter_node_bytes_per_s=Fact(value=0.99 * slow.value, source="node check"))
    )
    healthy.write(run.directory / "measured_site.json")
    assert pace(run).suspects[-1].part == "the network between nodes"


def test_nine_in_ten_are_named_first_where_the_job_has_measured(tmp_path):
    """Synthetic: steps as the estimate has them with one part slow, as node check and optimizer would have seen it."""
    named = []
    for layout, part, speed in THROTTLED:
        plan = LAYOUTS[layout]
        slow = estimate(plan, **dict.fromkeys(SUSPECTS[part][0], speed))
        optimizer_s, total_s = (float(np.ravel(s)[0]) for s in (slow.step_time.terms_s["optimizer"], slow.total_s))
        run = recorded(tmp_path / f"{layout} {part} {speed}", plan, total_s, optimizer_s=optimizer_s)
        site, share = run.site, lambda name, part=part, speed=speed: speed if name == part else 0.99
        peaks = site.device.matmul_flops_per_s
        peaks = {name: fact.replace(value=fact.value * share("matrix products")) for name, fact in peaks.items()}
        network = site.links.inter_node_bytes_per_s
        assert network is not None
        network = network.replace(value=network.value * share("the network between nodes"))
        device, links = (
            site.device.replace(matmul_flops_per_s=peaks),
            site.links.replace(inter_node_bytes_per_s=network),
        )
        site.replace(device=device, links=links).write(run.directory / "measured_site.json")
        found = pace(run)
        named.append(found.suspects[0].part == part if found.suspects else False)
    assert sum(named) >= 0.9 * len(named), [case for case, right in zip(THROTTLED, named, strict=True) if not right]


@pytest.mark.parametrize(
    ("took_s", "own_s", "named"),
    [
        (1, [0.2, 0.9, 0.2, 0.2], "the work of rank 1 on n1, 0.9 s a step; the other ranks work 0.2 s (measured)"),
        (1, [0.2, 0.2, 0.2, 0.2], "the network between nodes at"),
        (10, [0.2, 0.2, 0.2, 0.2], f"{LINKS_WAIT}, 9.8 s a step (measured)"),
        (1, [0.9, 0.9, 0.9, 0.9], None),
        (1, [0.2], None),
    ],
)
def test_what_the_ranks_tell_together(tmp_path, took_s, own_s, named):
    """Of a step, of which the estimate explains little; no link of this site, however slow, explains 10 s."""
    plan = LAYOUTS["wide"]
    run = recorded(tmp_path / "run", plan, took_s)
    assert estimated(plan) < 0.3
    beats = [
        RankHeartbeat(
            rank=rank, attempt=1, step=30, time=0.0, host=f"n{rank}", parts_s=(0, took_s, 0, 0, took_s - own), own_s=own
        )
        for rank, own in enumerate(own_s)
    ]
    write_all_heartbeats(run.directory, [beat.line for beat in beats])
    suspects = [str(suspect) for suspect in pace(run).suspects]
    assert named in suspects[0] if named else not [each for each in suspects if "rank" in each]


def test_changes_that_gain(tmp_path):
    """Eight tensor parallel devices with full recomputation are a poor plan for a small model."""
    plan = Plan(tensor_parallel=8, micro_batch_size=1, global_batch_size=64, precision="bf16", recompute="full")
    run = recorded(tmp_path / "run", plan, estimated(plan))
    found = gains(run, plan)
    assert 1 <= len(found) <= 5 and [gain for _, gain, _ in found] == sorted(
        (gain for _, gain, _ in found), reverse=True
    )
    assert all(0.01 < gain < 1 and 0 <= risk <= 0.05 for _, gain, risk in found)
    result = CliRunner().invoke(app, ["explain", str(run.directory)])
    assert result.exit_code == 0 and "as expected" in result.output and found[0][0].split(",")[0] in result.output
    told = json.loads(CliRunner().invoke(app, ["explain", str(run.directory), "--json"]).output)
    assert told["changes"][0]["gain"] == pytest.approx(found[0][1]) and told["verdict"].startswith("as expected")


def test_views_ask_without_being_held_up_and_are_told_why_there_is_no_answer(tmp_path):
    code = "import sys, kit.monitor.dashboard, kit.monitor.text; print('kit.estimate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"]
    run = recorded(tmp_path / "run", LAYOUTS["wide"], 1.0, steps=6)
    outlook = Outlook(run)
    assert outlook.facts()["verdict"] == "" and outlook.facts()["band"] is None
    outlook.refresh(wait=True)
    assert outlook.verdict.startswith("expected: ") and "too few steps" in outlook.verdict and outlook.band
    low, high = outlook.band.step_time_s
    tokens = run.plan.global_batch_size * run.spec.sequence_length
    assert outlook.band.tokens_per_s == pytest.approx((tokens / high, tokens / low))
    assert outlook.facts()["goodput"]["share"] == pytest.approx(1, abs=0.2)
    (run.directory / "plan.attempt_01.json").write_text("{")
    outlook.refresh(wait=True)
    assert outlook.verdict.startswith("expected: "), "not asked again within 20 s"
    outlook.again(run)
    outlook.refresh(wait=True)
    assert outlook.verdict.startswith("no estimate: ") and "plan.attempt_01.json" in outlook.verdict
    assert not outlook.verdict.endswith("."), "a view adds its own full stop"
    assert outlook.band is None


def test_no_estimate_says_why(tmp_path):
    run = recorded(tmp_path / "few", LAYOUTS["wide"], 1.0, steps=6)
    with pytest.raises(RunError, match="fewer than 10 steps"):
        pace(run)


def test_a_new_attempt_is_not_judged_by_the_steps_of_the_one_before(tmp_path):
    plan = LAYOUTS["one node"]
    run = recorded(tmp_path / "run", plan, 10 * estimated(plan))
    assert compare(run)[1].startswith("slower than expected")
    update_state(run.directory, attempt=2, state=JobState.STARTING)  # its plan comes later
    band, words, _ = compare(run)
    assert words.endswith("too few steps to compare") and band and band.attempt == 2
