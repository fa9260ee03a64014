"""The panel of notebook 02 without a browser: what it computes, refuses, writes, how fast it is."""

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
from kit.estimate import Layouts, Panel, published_calibration, search
from kit.estimate.choose.panel import Estimate
from kit.estimate.choose.search import machine_of
from kit.plan import Plan
from kit.spec import ModelSpec
from tests.pictures import check_figure

REST = {"zero_stage": 1, "recompute": "full", "precision": "bf16", "compile": True}
DEGREES = {"tensor_parallel": 4, "pipeline_parallel": 16, "data_parallel": 2}
PLAN = Plan(**DEGREES, **REST, global_batch_size=640)


@pytest.fixture(scope="module")
def panel() -> Panel:
    return Panel("gpt-175b", "frontier", PLAN)


def test_it_says_what_the_search_says(panel: Panel) -> None:
    found = panel.estimate()
    site = found.machine.site
    fixed = (
        "tensor_parallel pipeline_parallel micro_batch_size recompute zero_stage sequence_parallel"
        " schedule"
    ).split()
    only = {name: [getattr(found.plan, name)] for name in fixed}
    known = published_calibration(site)
    same = search(found.spec, site, 128, 640, calibration=known, only=only)
    row = same.row(int(same.order[0]))
    interval = (row["step_time_s"], row["step_time_low_s"], row["step_time_high_s"])
    assert found.step_s == pytest.approx(interval, rel=0.01), "both are compiled, as on GPUs"
    assert found.used_bytes[0] == pytest.approx(row["used_bytes"], rel=0.01)
    assert found.risk == pytest.approx(row["out_of_memory_probability"], abs=0.01)
    assert all(" to " in title for title in found.texts.values()), "each with its interval"


@pytest.mark.parametrize(
    "changes", [{}, {"recompute": "none"}, {"zero_stage": 0, "tensor_parallel": 8}]
)
def test_the_bars_add_up_to_the_number_in_the_title(changes: dict) -> None:
    """Read from the drawing: tops of the bars of pipeline devices, the stroke, memory's line."""
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


def test_the_step_s_stroke_is_its_interval_and_its_terms_add_up(panel: Panel) -> None:
    found = panel.estimate()
    axis = found.figures()[1].axes[0]
    stroke = axis.lines[0].get_xdata() * found.step_s[0] / 100
    assert list(stroke) == pytest.approx(found.step_s[1:])
    assert max(bar.get_x() + bar.get_width() for bar in axis.patches) == pytest.approx(100)


def test_a_device_with_memory_at_the_end_of_the_interval_runs_out_at_95_to_5(panel: Panel) -> None:
    found = panel.estimate()
    used = found.machine.memory(Layouts.of(found.spec, [found.plan])).used_bytes
    for end, risk in ((2, 0.05), (1, 0.95)):
        at_end = found.machine.reserve.out_of_memory_probability(used, found.used_bytes[end])
        assert at_end[0] == pytest.approx(risk)


@pytest.mark.slow
def test_a_move_costs_hardly_more_than_its_picture(panel: Panel) -> None:
    """Both on the same core in turn, so that what runs beside them slows both: 0.2 s alone."""
    moves, pictures, found = [], [], panel.estimate()
    for stage in (0, 1) * 2:
        begin = time.process_time()
        panel.controls["zero_stage"].value = stage
        moved = time.process_time()
        found.to_png()
        moves.append(moved - begin)
        pictures.append(time.process_time() - moved)
    assert min(moves) < 1.5 * min(pictures)


def test_the_largest_model_is_drawn_too() -> None:
    spec, site = ModelSpec.preset("gpt-1t"), Site.load("frontier")
    machine = machine_of(site, published_calibration(site))
    degrees = {"tensor_parallel": 8, "pipeline_parallel": 64, "data_parallel": 6}
    plan = Plan(**degrees, **REST, global_batch_size=9600)
    assert Estimate.of(spec, machine, plan).to_png().startswith(b"\x89PNG")


def test_an_impossible_layout_is_answered_with_the_reason_and_the_next_possible_one_drawn(
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
    assert panel.plan and panel.plan.replace(engine="native", sequence_parallel=False) == PLAN


def test_the_text_of_a_layout_is_python_that_makes_it(panel: Panel) -> None:
    panel.write()
    code = html.unescape(panel.text.value.partition(">")[2].removesuffix("</pre>"))
    assert eval(code, {"kit": kit}) == panel.plan
    panel.controls["zero_stage"].value = 0
    assert panel.text.value == "", "of no other layout"


def test_every_pair_of_model_and_machine_is_drawn_or_refused(panel: Panel) -> None:
    panel.controls["site"].value = "lumi"
    for model in ("demo", "hlat-70b", "gpt-22b"):
        panel.controls["model"].value = model
        assert ("Impossible: " in panel.view.value) == (panel.plan is None)


def test_the_still_is_the_picture_below_the_controls(panel: Panel, monkeypatch) -> None:
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


def test_the_share_of_the_bubble_is_that_of_the_whole_step(panel: Panel) -> None:
    """Not of the few micro-batches that are drawn, in which devices wait much longer."""
    found = panel.estimate()
    title = found.texts["timeline"]
    share = float(re.findall(r"bubble ([\d.]+)% of the step", title)[0])
    assert share == pytest.approx(100 * found.terms_s["bubble"] / found.step_s[0], abs=0.06)
    assert share < 100 * found.timeline.bubble_fraction / 5
    assert "its first 16 of 320 micro-batches" in title


@pytest.mark.parametrize("degrees", [(4, 16), (8, 1)])
def test_no_text_of_the_pictures_lies_on_another_or_is_cut(degrees: tuple[int, int]) -> None:
    tensor, pipeline = degrees
    plan = PLAN.replace(tensor_parallel=tensor, pipeline_parallel=pipeline)
    panel = Panel("gpt-175b", "frontier", plan)
    for figure in (panel._controls_figure(), *panel.estimate().figures()):
        check_figure(figure)
