"""The planner's panel of notebook 02 without a browser: estimates, refused choices, generated
Python code, and speed.
"""

import base64
import html
import io
import re
import time

import numpy as np
import pytest
from PIL import Image

import kit
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.rules import SPLIT_SCHEDULES
from kit.config.spec import ModelSpec
from kit.estimate import (
    Layouts,
    Panel,
    published_calibration,
    search,
    simulate_plan,
    timeline_figure,
)
from kit.estimate.choose.machine import machine_of
from kit.estimate.choose.memory_advice import estimate_options
from kit.estimate.choose.panel import Estimate
from kit.estimate.theory.schedule import Simulation
from kit.estimate.theory.step_time import step_time
from kit.papers.recipes import names as recipe_names
from kit.papers.recipes import published_recipe
from tests.support.pictures import check_figure

REST = {"zero_stage": 1, "recompute": "full", "precision": "bf16", "compile": True}
DEGREES = {"tensor_parallel": 4, "pipeline_parallel": 16, "data_parallel": 2}
PLAN = Plan(**DEGREES, **REST, global_batch_size=640)


@pytest.fixture(scope="module")
def panel() -> Panel:
    return Panel("gpt-175b", "frontier", PLAN)


def test_panel_and_search_estimates_agree(panel: Panel) -> None:
    found = panel.estimate()
    site = found.machine.site
    fixed = (
        "tensor_parallel pipeline_parallel micro_batch_size recompute recompute_layers zero_stage"
        " sequence_parallel schedule"
    ).split()
    only = {name: [getattr(found.plan, name)] for name in fixed}
    known = published_calibration(site)
    same = search(found.spec, site, 128, 640, calibration=known, only=only)
    row = same.row(int(same.order[0]))
    interval = (row["step_time_s"], row["step_time_low_s"], row["step_time_high_s"])
    assert found.step_s == pytest.approx(interval, rel=1e-9), "both are compiled, as on GPUs"
    assert found.used_bytes[0] == pytest.approx(row["used_bytes"], rel=1e-9)
    assert found.risk == pytest.approx(row["out_of_memory_probability"], abs=1e-9)
    assert all(" to " in title for title in found.titles.values()), "each with its interval"


SHARDED = {"zero_stage": 3, "shard_size": 4, "pipeline_parallel": 1, "data_parallel": 32}
GIVEN = {
    "frontier-22b": published_recipe("frontier-22b").plan,
    "frontier-175b": published_recipe("frontier-175b").plan,
    "frontier-1t": published_recipe("frontier-1t").plan,
    "hlat-7b": published_recipe("hlat-7b").plan,
    "hlat-70b": published_recipe("hlat-70b").plan,
    "interleaved": PLAN.replace(schedule="interleaved", virtual_stages=2, compile=False),
    "some blocks": PLAN.replace(recompute_layers=3, sequence_parallel=True),
    "inside a node": PLAN.replace(**SHARDED, tensor_parallel=4, global_batch_size=640),
}


@pytest.mark.parametrize("name", GIVEN)
def test_panel_estimates_its_initial_plan(name: str) -> None:
    """Compares the panel's estimate with `step_time`, and its text with the kit's advice after a
    run is out of memory. Both use the panel's plan.
    """
    plan = GIVEN[name]
    is_recipe = name in recipe_names()
    model = published_recipe(name).model if is_recipe else "gpt-175b"
    site = Site.load(published_recipe(name).site if is_recipe else "frontier")
    panel = Panel(model, site.name, plan)
    assert panel.plan == plan
    layouts = Layouts.of(ModelSpec.preset(model), [plan])
    known = published_calibration(site)
    seconds = step_time(layouts, known.hardware, known.coefficients).total_s.item()
    (option,) = estimate_options(ModelSpec.preset(model), plan, [{}], site.device)
    used = option.used_bytes
    found = panel.estimate()
    assert found.step_s[0] == pytest.approx(seconds, rel=1e-9)
    assert found.used_bytes[0] == pytest.approx(used, rel=1e-9)
    assert f"Memory: {used / 2**30:.1f} GiB" in panel.view.value
    words = [text.get_text() for text in panel._controls_figure().texts]
    assert f"engine: {plan.engine}" in words and f"precision: {plan.precision}" in words


def test_panel_refuses_unsupported_choices() -> None:
    """The panel refuses an unsupported engine, precision or site. It does not silently choose
    another value.
    """
    plan = PLAN.replace(compile=False)
    panel = Panel("gpt-175b", "frontier", plan)
    for control, value, reason in (
        ("engine", "neuron", "trains on AWS Trainium alone"),
        ("precision", "fp32", "not estimated here"),
        ("precision", "fp8", "does not train it"),
        ("site", "trn1.32xlarge", "trains on GPUs and CPU cores"),
    ):
        before = panel.controls[control].value
        panel.controls[control].value = value
        assert panel.plan is None and reason in panel.view.value
        panel.controls[control].value = before
        assert panel.plan == plan


@pytest.mark.parametrize(
    "changes", [{}, {"recompute": "none"}, {"zero_stage": 0, "tensor_parallel": 8}]
)
def test_memory_bars_add_up_to_title(changes: dict) -> None:
    """Reads numbers from the drawing: the tops of the bars, one for each pipeline device, the line
    of the memory interval, and the line of the device's capacity.
    """
    panel = Panel("gpt-175b", "frontier", PLAN.replace(**changes))
    [told] = re.findall(
        r"Memory: ([\d.]+) GiB \(([\d.]+) to ([\d.]+)\) of (\d+) on", panel.view.value
    )
    used, least, most, capacity = map(float, told)
    axis = panel.estimate().figures()[0].axes[0]
    tops = [path.vertices[:, 1].max() for bars in axis.collections for path in bars.get_paths()]
    limit, stroke = (line.get_ydata() for line in axis.lines)
    assert max(tops) == pytest.approx(used, abs=0.06)
    assert limit[0] == pytest.approx(capacity, abs=0.5)
    assert list(stroke) == pytest.approx([least, most], abs=0.06) and axis.get_ylim()[1] > most
    assert axis.collections[-1].get_label() == "reserve"


def test_step_figure_shows_interval_and_all_terms(panel: Panel) -> None:
    found = panel.estimate()
    axis = found.figures()[1].axes[0]
    stroke = axis.lines[0].get_xdata() * found.step_s[0] / 100
    assert list(stroke) == pytest.approx(found.step_s[1:])
    assert max(bar.get_x() + bar.get_width() for bar in axis.patches) == pytest.approx(100)


def test_memory_interval_ends_have_risk_95_and_5(panel: Panel) -> None:
    found = panel.estimate()
    used = found.machine.memory(Layouts.of(found.spec, [found.plan])).used_bytes
    for end, risk in ((2, 0.05), (1, 0.95)):
        at_end = found.machine.reserve.out_of_memory_probability(used, found.used_bytes[end])
        assert at_end[0] == pytest.approx(risk)


@pytest.mark.slow
def test_control_change_costs_little_above_drawing(panel: Panel) -> None:
    """A change of a control and the drawing alone are timed alternately on one core, so that other
    load slows both. A change takes 0.2 s on an idle machine.
    """
    moves, pictures, found = [], [], panel.estimate()
    for stage in (0, 1) * 2:
        begin = time.process_time()
        panel.controls["zero_stage"].value = stage
        moved = time.process_time()
        found.to_png()
        moves.append(moved - begin)
        pictures.append(time.process_time() - moved)
    assert min(moves) < 1.5 * min(pictures)


def test_largest_model_is_drawn() -> None:
    spec, site = ModelSpec.preset("gpt-1t"), Site.load("frontier")
    machine = machine_of(site, published_calibration(site))
    degrees = {"tensor_parallel": 8, "pipeline_parallel": 64, "data_parallel": 6}
    plan = Plan(**degrees, **REST, global_batch_size=9600)
    assert Estimate.of(spec, machine, plan).to_png().startswith(b"\x89PNG")


def test_panel_explains_impossible_layout_and_recovers(
    panel: Panel,
) -> None:
    panel.controls["tensor_parallel"].value = 7
    assert panel.plan is None
    assert "devices: 128 is no multiple of tensor x pipeline = 112" in panel.view.value
    panel.write()
    assert panel.text.value == ""
    panel.controls["tensor_parallel"].value = 4
    panel.controls["micro_batch_size"].value = 3
    assert "cannot be cut into micro-batches of 3" in panel.view.value
    panel.controls["micro_batch_size"].value = 1
    assert panel.plan == PLAN


def test_written_python_recreates_the_plan(panel: Panel) -> None:
    panel.write()
    code = html.unescape(panel.text.value.partition(">")[2].removesuffix("</pre>"))
    assert eval(code, {"kit": kit}) == panel.plan
    panel.controls["zero_stage"].value = 0
    assert panel.text.value == "", "of no other layout"


@pytest.mark.slow
def test_models_on_lumi_are_drawn_or_refused(panel: Panel) -> None:
    panel.controls["site"].value = "lumi"
    for model in ("demo", "hlat-70b", "gpt-22b"):
        panel.controls["model"].value = model
        assert ("Impossible: " in panel.view.value) == (panel.plan is None)


def test_static_image_shows_controls_and_figures(panel: Panel, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    panel._ipython_display_()
    assert shown[0] is panel.box
    [live] = re.findall(r"base64,([^']+)'", panel.view.value)
    still = shown[1]["image/png"]
    assert f"base64,{still}'" in shown[1]["text/html"]
    whole, below = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in (still, live)
    )
    assert np.array_equal(whole[-len(below) :], below) and len(whole) > len(below) + 50
    words = [text.get_text() for text in panel._controls_figure().texts]
    assert len(words) == len(panel.controls) and {"tensor: 4", "recompute: full"} <= set(words)


def test_bubble_share_in_title_is_of_whole_step(panel: Panel) -> None:
    """The figure shows only a few micro-batches, in which devices wait for a much larger share of
    the time than in the whole step.
    """
    found = panel.estimate()
    title = found.titles["timeline"]
    share = float(re.findall(r"bubble ([\d.]+)% of the step", title)[0])
    assert share == pytest.approx(100 * found.terms_s["bubble"] / found.step_s[0], abs=0.06)
    assert "the first 64 of 320 micro-batches" in title


@pytest.mark.parametrize(
    ("schedule", "pipeline", "stages", "tensor"),
    [
        ("1f1b", 16, 1, 4),
        ("gpipe", 16, 1, 4),
        ("interleaved", 16, 2, 4),
        ("zero_bubble", 16, 2, 4),
        ("zbv", 16, 2, 4),
        ("1f1b", 2, 1, 4),
        ("1f1b", 1, 1, 8),
    ],
)
def test_drawn_timeline_is_start_of_full_simulation(schedule, pipeline, stages, tensor) -> None:
    """Compares the drawn timeline with the simulation of all micro-batches. The figure does not
    show the end of the step, in which the pipeline empties.
    """
    fields = {"schedule": schedule, "virtual_stages": stages, "compile": False}
    fields["recompute"] = "none" if schedule in SPLIT_SCHEDULES else "full"
    degrees = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    spec = ModelSpec.preset("gpt-175b")
    machine = machine_of(Site.load("frontier"), published_calibration(Site.load("frontier")))
    found = Estimate.of(spec, machine, PLAN.replace(**degrees, **fields))
    assert found.drawn_microbatches < found.plan.num_microbatches == 320
    figure, _ = timeline_figure(found.timeline, drawn_microbatches=found.drawn_microbatches)
    axis = figure.axes[0]
    end = axis.get_xlim()[1] * (1.0 if "ms" not in axis.get_xlabel() else 1e-3)
    whole = simulate_plan(found.plan, **machine.stage_times(spec, found.plan, found.terms_s))
    operations = [_operations(each, end) for each in (found.timeline, whole)]
    assert operations[0] == operations[1], "the drawn part is that of the whole step"
    paths = [path for each in axis.collections[1:] for path in each.get_paths()]
    assert len(paths) == len(operations[0])
    assert max(path.vertices[:, 0].max() for path in paths) <= axis.get_xlim()[1]
    second_half = [op for op in operations[0] if op[0] > end / 2]
    busy = sum(min(op[1], end) - op[0] for op in second_half)
    if schedule != "gpipe":
        assert busy > 0.8 * pipeline * end / 2, "the end of the picture is the steady state"


def _operations(simulation: Simulation, end: float) -> list[tuple[float, float, int]]:
    """Returns (start, end, device) of all simulated operations that start before the time `end`."""
    devices, columns = np.nonzero(simulation.start_s < end)
    starts, ends = (each[devices, columns] for each in (simulation.start_s, simulation.end_s))
    rounded = zip(starts.round(9).tolist(), ends.round(9).tolist(), devices.tolist(), strict=True)
    return sorted(rounded)


def test_short_step_is_drawn_completely() -> None:
    panel = Panel("gpt-175b", "frontier", PLAN.replace(global_batch_size=64))
    found = panel.estimate()
    assert found.timeline.order.num_microbatches == found.plan.num_microbatches == 32
    assert "drawn: the whole step" in found.titles["timeline"]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(4, 16), (8, 1)])
def test_panel_texts_do_not_overlap_or_leave_figure(degrees: tuple[int, int]) -> None:
    tensor, pipeline = degrees
    plan = PLAN.replace(tensor_parallel=tensor, pipeline_parallel=pipeline)
    panel = Panel("gpt-175b", "frontier", plan)
    for figure in (panel._controls_figure(), *panel.estimate().figures()):
        check_figure(figure)
