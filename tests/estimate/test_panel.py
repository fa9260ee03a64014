"""The panel of notebook 02 without a browser: what it computes, refuses, writes, and how long that takes."""

import html
import re
import time

import pytest

import kit
from kit.estimate import Layouts, Panel, published_calibration, search
from kit.estimate.choose.figures import memory_figure
from kit.estimate.choose.panel import Estimate
from kit.estimate.choose.search import machine_of
from kit.plan import Plan
from kit.spec import ModelSpec

PLAN = Plan(tensor_parallel=4, pipeline_parallel=16, data_parallel=2, zero_stage=1, global_batch_size=640,
            recompute="full", precision="bf16", compile=True)  # fmt: skip


@pytest.fixture(scope="module")
def panel() -> Panel:
    return Panel("gpt-175b", "frontier", PLAN)


def test_it_says_what_the_search_says(panel: Panel) -> None:
    found = panel.estimate()
    site = found.machine.site
    same = search(found.spec, site, 128, 640, calibration=published_calibration(site),
                  only={name: [getattr(found.plan, name)] for name in ("tensor_parallel", "pipeline_parallel",
                        "micro_batch_size", "recompute", "zero_stage", "sequence_parallel", "schedule")})  # fmt: skip
    row = same.row(int(same.order[0]))
    assert found.step_s == pytest.approx(
        (row["step_time_s"], row["step_time_low_s"], row["step_time_high_s"]), rel=0.01
    ), "both plans are compiled, as the search's are on GPUs"
    assert found.used_bytes[0] == pytest.approx(row["used_bytes"], rel=0.01)
    assert found.risk == pytest.approx(row["out_of_memory_probability"], abs=0.01)
    for title in found.texts.values():
        assert " to " in title, "each with its interval"


@pytest.mark.parametrize("changes", [{}, {"recompute": "none"}, {"zero_stage": 0, "tensor_parallel": 8}])
def test_the_bars_add_up_to_the_number_in_the_title(changes: dict) -> None:
    """Heights read from the drawing: of the rectangles over each pipeline device, and of the line at its memory."""
    panel = Panel("gpt-175b", "frontier", PLAN.replace(**changes))
    title, drawn = re.findall(r"<div>(Memory: .*?)</div>(<svg.*?</svg>)", panel.view.value)[0]
    boxes = re.findall(r"M([\d.]+) [\d.]+h[\d.]+v([\d.]+)", drawn)
    heights = {x: sum(float(height) for left, height in boxes if left == x) for x, _ in boxes}
    limit = 130 - float(re.findall(r"<line x1='0.0' y1='([\d.]+)'", drawn)[0])
    used, capacity = re.findall(r"Memory: ([\d.]+) GiB .* of (\d+) on", title)[0]
    assert max(heights.values()) / limit == pytest.approx(float(used) / float(capacity), abs=0.01)
    assert "</svg> reserve</span>" in panel.view.value
    rows = memory_figure({"": panel.estimate().stages}, 0.0)[1]
    assert max(row["GiB"] for row in rows) == pytest.approx(float(used), abs=0.06), "and in the still"


def test_a_device_with_memory_at_the_end_of_the_interval_runs_out_at_95_to_5(panel: Panel) -> None:
    found = panel.estimate()
    reserve, used = found.machine.reserve, found.machine.memory(Layouts.of(found.spec, [found.plan])).used_bytes
    assert reserve.out_of_memory_probability(used, found.used_bytes[2])[0] == pytest.approx(0.05)
    assert reserve.out_of_memory_probability(used, found.used_bytes[1])[0] == pytest.approx(0.95)


def test_the_largest_model_is_drawn_in_a_fifth_of_a_second() -> None:
    spec, site = ModelSpec.preset("gpt-1t"), Panel("gpt-175b", "frontier", PLAN).estimate().machine.site
    machine = machine_of(site, published_calibration(site))
    plan = Plan(tensor_parallel=8, pipeline_parallel=64, data_parallel=6, zero_stage=1, global_batch_size=9600,
                recompute="full", precision="bf16", compile=True)  # fmt: skip
    begin = time.process_time()
    page = Estimate.of(spec, machine, plan).to_html()
    assert time.process_time() - begin < 0.2 and page.count("<path") > 20


def test_an_impossible_layout_is_answered_with_the_reason_and_the_next_possible_one_drawn(panel: Panel) -> None:
    panel.controls["tensor_parallel"].value = 7
    assert panel.plan is None and "devices: 128 is no multiple of tensor x pipeline = 112" in panel.view.value
    panel.write()
    assert panel.text.value == ""
    panel.controls["tensor_parallel"].value = 4
    panel.controls["micro_batch_size"].value = 3
    assert "cannot be cut into micro-batches of 3" in panel.view.value
    panel.controls["micro_batch_size"].value = 1
    assert panel.plan is not None and panel.plan.replace(engine="native", sequence_parallel=False) == PLAN


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


def test_the_still_is_one_picture() -> None:
    assert Panel("gpt-175b", "frontier", PLAN).estimate().to_png().startswith(b"\x89PNG")
