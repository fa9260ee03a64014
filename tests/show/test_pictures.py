"""Figures and tables of the kit: their layout on a page of 1,000 pixels, in light and dark
themes.
"""

import re
import threading
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch

from cluster.field_docs import html_table
from cluster.site import Site
from kit.config.plan import Plan, Schedule
from kit.config.spec import ModelSpec
from kit.demo import REPOSITORY
from kit.estimate.choose import figures
from kit.estimate.choose.search import search
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import StageMemory, memory_by_stage
from kit.estimate.theory.schedule import simulate_plan
from kit.estimate.theory.timeline import memory_over_step, step_memory_figure, timeline_figure
from kit.estimate.tuning.figures import sensitivity_figure, trials_figure
from kit.estimate.tuning.tune import Trial, Trials
from kit.evaluate.figures import interval_figure, score_figure
from kit.evaluate.report import ANSWER_BITS, EvalReport, Metric, TaskScore
from kit.model import TENSOR_PARALLEL_SPLIT, Decoder
from kit.show.pictures import (
    RUN_FILES,
    block_picture,
    flop_basis_figure,
    ring_all_reduce,
    ring_all_reduce_picture,
    run_directory_picture,
    stage_weights_figure,
    tensor_split_picture,
    zero_stages_picture,
)
from kit.show.style import new_figure, short
from kit.show.table import Table
from kit.show.theme import DARK, GREY, TEXT
from tests.bench.exams.new_machine import Met, never_met_figure
from tests.evaluate.conftest import task_score
from tests.support.pictures import check_data, check_figure

SPECS = ("demo", "gpt-1.4b", "gpt-22b", "gpt-175b", "gpt-1t", "hlat-7b", "hlat-70b", "llama3-8b")


def report() -> EvalReport:
    def score(task: str, metric: str, value: float, chance: float | None) -> TaskScore:
        metrics = (Metric.of(metric, value, None, 50), Metric.of(ANSWER_BITS, 1.9, 0.1, 50))
        return task_score(task, metrics=metrics, num_items=50, total_items=1838, chance=chance)

    choices = (score("piqa", "acc", 0.5, 0.5), score("arc_easy", "acc", 0.3, 0.25))
    scores = (score("heldout", "bits_per_byte", 2.6, None), *choices)
    return EvalReport(name="mine", tokenizer_sha256="00", scores=scores)


def stages() -> dict:
    shape: dict[str, Any] = {"tensor_parallel": 4, "pipeline_parallel": 16, "data_parallel": 2}
    plan = Plan(**shape, zero_stage=1, global_batch_size=640)
    spec = ModelSpec.preset("gpt-175b")

    def memory(kind: str):
        return memory_by_stage(Layouts.of(spec, [plan.replace(recompute=kind)]))

    return {f"recompute {kind}": memory(kind) for kind in ("full", "selective", "none")}


def predicted() -> dict:
    rng = np.random.default_rng(0)
    names = ("Selene", "KAIST multi-node", "KAIST single node", "Aleph Alpha", "MI250X")
    times = {name: np.exp(rng.normal(1, 2, 30)) for name in names}
    return {name: (s, s * np.exp(rng.normal(0, 0.1, 30))) for name, s in times.items()}


PARTS = dict.fromkeys(figures.TIME_COLOURS, 1.0)
DRAWN = {
    "tensor split": tensor_split_picture,
    "bases": lambda: flop_basis_figure([ModelSpec.preset(name) for name in SPECS])[0],
    "stage weights": lambda: stage_weights_figure(
        {stage: (9 * 10**9, 10 * 10**9) for stage in range(16)}
    )[0],
    "block": lambda: drawn_block("llama3-8b")[0],
    "widest block": lambda: drawn_block("gpt-1t")[0],
    "norms after": lambda: drawn_block("olmo2-7b")[0],
    "ring": lambda: ring_all_reduce_picture(4)[0],
    "zero": lambda: zero_stages()[0],
    "step memory": lambda: step_memory_figure(simulations()[0], step_memory())[0],
    "scores": lambda: score_figure(report(), {"unigram model": 3.0})[0],
    "interval": lambda: interval_figure(0.64, 0.5, {50: "scored here", 1838: "all of PIQA"})[0],
    "memory": lambda: figures.memory_figure(stages(), 64 * 2.0**30)[0],
    "breakdown": lambda: figures.breakdown_figure(
        {f"gpt-{size}, as published": PARTS for size in ("22b", "175b", "1t")},
        title="Modelled time of a step, divided into terms",
    )[0],
    "predicted": lambda: figures.predicted_figure(predicted(), title="Without their group")[0],
    "pareto": lambda: pareto(),
    "timeline": lambda: timeline_figure(*simulations())[0],
    "trials": lambda: trials_figure(searched(0), unit="tokens/s", control=searched(1))[0],
    "sensitivity": lambda: sensitivity_figure({"micro_batch_size": 0.6, "num_nodes": 0.4})[0],
    "never met": lambda: never_met_figure(strangers()),
}


def drawn_block(name: str) -> tuple:
    spec = ModelSpec.preset(name)
    with torch.device("meta"):
        block = Decoder(spec.replace(num_layers=1)).layers["0"]
    shapes = {name: tuple(weight.shape) for name, weight in block.named_parameters()}
    return block_picture(spec, shapes, TENSOR_PARALLEL_SPLIT)


def zero_stages() -> tuple:
    spec = ModelSpec.preset("hlat-7b")
    plan = Plan(data_parallel=4, global_batch_size=16, precision="bf16")
    held = {}
    for stage in range(4):
        states = memory_by_stage(Layouts.of(spec, [plan.replace(zero_stage=stage)]))
        held[stage] = {name: size.item() for name, size in states.bytes_per_param.items()}
    return zero_stages_picture(held, plan.data_parallel, spec.num_params)


def step_memory(schedule: Schedule = "1f1b") -> StageMemory:
    """Returns the memory of each device of a 7B model in a pipeline of `simulations`."""
    virtual_stages = 1 if schedule == "1f1b" else 2
    plan = Plan(
        pipeline_parallel=4,
        schedule=schedule,
        virtual_stages=virtual_stages,
        global_batch_size=8,
        precision="bf16",
    )
    return memory_by_stage(Layouts.of(ModelSpec.preset("hlat-7b"), [plan]))


def pareto():
    spec, frontier = ModelSpec.preset("gpt-22b"), Site.load("frontier")
    found = search(spec, frontier, 64, 640)
    return figures.pareto_figure(found, marked={"fastest that fits": int(found.order[0])})[0]


def simulations() -> list:
    plan = Plan(pipeline_parallel=4, global_batch_size=8)
    two = {"virtual_stages": 2}
    plans = [plan, *(plan.replace(schedule=name, **two) for name in ("interleaved", "zbv"))]
    times = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
    return [simulate_plan(each, **times) for each in plans]


def searched(seed: int) -> Trials:
    """Returns the result of a search with 80 trials. The first half of the trials failed."""
    values = np.random.default_rng(seed).uniform(0, 40, 80)
    values[:40] = np.nan
    trials = [
        Trial(parameters={}, value=None if np.isnan(value) else float(value), failure=None)
        for value in values
    ]
    return Trials(trials=tuple(trials), sampler="random", seed=seed, space={})


def strangers() -> list:
    """Returns prediction errors on machines that were left out of the planner's fit. One machine
    has too few runs to fit five and predict others.
    """
    rng, names = np.random.default_rng(0), ("KAIST single node", "Selene", "PaLM", "Eos")
    return [
        Met(name=name, num_runs=count, off=rng.normal(0, 0.3, 9), half=half, conformal=half)
        for name in names
        for count, half in ((0, np.full(9, 0.5)), (5, np.full(9, 0.2)))
        if (name, count) != ("PaLM", 5)
    ]


@pytest.mark.parametrize("name", DRAWN)
def test_figure_fits_page_in_both_themes(name: str) -> None:
    check_data(DRAWN[name]())


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_ring_all_reduce_sums_on_every_rank(num_ranks: int) -> None:
    """The messages are executed on numbers. All messages of one step are sent at the same time."""
    tensors = np.random.default_rng(0).normal(size=(num_ranks, num_ranks))
    expected = np.broadcast_to(tensors.sum(axis=0), tensors.shape)
    sends = ring_all_reduce(num_ranks)
    for step in range(2 * (num_ranks - 1)):
        before = tensors.copy()
        for _, phase, sender, receiver, chunk in (each for each in sends if each.step == step):
            own = tensors[receiver, chunk] if phase == "reduce-scatter" else 0.0
            tensors[receiver, chunk] = own + before[sender, chunk]
    assert np.allclose(tensors, expected)
    assert sum(send.sender == 0 for send in sends) == 2 * (num_ranks - 1)
    assert len(sends) == num_ranks * 2 * (num_ranks - 1)


def test_ring_picture_counts_summed_ranks() -> None:
    _, rows = ring_all_reduce_picture(4)
    assert [row["ranks summed"] for row in rows if row["sender"] == 0] == [2, 3, 4, 4, 4, 4]


@pytest.mark.parametrize("name", ["demo", "gpt-22b", "llama3-8b", "olmo2-7b"])
def test_block_picture_has_every_weight(name: str) -> None:
    _, rows = drawn_block(name)
    assert sum(row["number"] for row in rows) == ModelSpec.preset(name).params_per_layer
    split = {row["weight"]: row["split by"] for row in rows}
    assert split["attention.query.weight"] == "column"
    assert split["attention.output.weight"] == "row"
    assert split.get("attention.output.bias", "") == ""


def test_zero_picture_has_the_planners_bytes() -> None:
    """Over four replicas, ZeRO 1 divides 12 bytes by four, ZeRO 2 also 4 bytes, and ZeRO 3 keeps no
    bf16 weights.
    """
    _, rows = zero_stages()
    assert [row["bytes"] for row in rows] == [18, 9, 6, 4]
    plan = Plan(data_parallel=4, zero_stage=1, global_batch_size=16, precision="bf16")
    spec = ModelSpec.preset("hlat-7b")
    state_bytes = memory_by_stage(Layouts.of(spec, [plan])).state_bytes.item()
    assert rows[1]["GiB"] == pytest.approx(state_bytes / 2**30)


@pytest.mark.parametrize(("number", "schedule"), [(0, "1f1b"), (1, "interleaved"), (2, "zbv")])
def test_largest_memory_of_a_step_is_the_planners(number: int, schedule: Schedule) -> None:
    stages = step_memory(schedule)
    _, rows = step_memory_figure(simulations()[number], stages)
    assert [row["GiB"] for row in rows] == pytest.approx(stages.total_bytes / 2**30)


def test_memory_of_a_step_rises_by_micro_batches() -> None:
    """In 1F1B, device 0 of 4 saves four micro-batches before it frees one, and all are freed at the
    end. Device 3 saves one.
    """
    devices = memory_over_step(simulations()[0], step_memory())
    saved = [device["saved_bytes"] for device in devices]
    of_one = saved[3].max()
    assert saved[0][:4] / saved[0].max() == pytest.approx([0.25, 0.5, 0.75, 1])
    assert set(saved[3]) == {0, of_one}
    assert [each[-1] for each in saved] == [0, 0, 0, 0]


def test_run_directory_picture_lists_known_files(tmp_path: Path) -> None:
    for name in ("spec.json", "plan.attempt_01.json", ".reserve", "notes.txt", "mine.txt"):
        (tmp_path / name).touch()
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000001" / "manifest.json").touch()
    figure, rows = run_directory_picture(tmp_path)
    job = "ranks and supervisor"
    assert [tuple(row.values()) for row in rows] == [
        ("checkpoints/", job, "1 file"),
        ("metrics.jsonl", job, "2 lines"),
        ("mine.txt", "", ""),
        ("notes.txt", "commands and views", ""),
        ("plan.attempt_01.json", job, ""),
        ("spec.json", "launch and resume", ""),
    ]
    check_data(figure)


def test_run_files_have_the_documented_writers() -> None:
    documented: dict[str, set[str]] = {}
    page = (REPOSITORY / "docs" / "run-directory.md").read_text(encoding="utf-8")
    table = page.split("## Files and folders")[1].split("```")[0]
    for names, _, writer in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|$", table, re.M):
        known = "ranks and supervisor"
        if writer.startswith("each launch"):
            known = "launch and resume"
        if re.match(r"`kit|these commands|commands|the dashboard", writer):
            known = "commands and views"
        for name in re.findall(r"`([^`]+)`", names):
            documented.setdefault(name.split("/")[0], set()).add(known)
    assert len(documented) > 30
    found = {
        name: [key for key, patterns in RUN_FILES.items() if any(map(Path(name).match, patterns))]
        for name in documented
    }
    assert all(len(keys) == 1 for keys in found.values()), found
    assert not {name for name, keys in found.items() if keys[0] not in documented[name]}


def test_machine_with_too_few_runs_is_marked() -> None:
    figure = never_met_figure(strangers())
    said = [[text.get_text() for text in panel.texts] for panel in figure.axes]
    assert said == [[], ["too few runs"]]


def test_figure_check_finds_layout_faults() -> None:
    def drawn(fault: str):
        with new_figure(1, 2, height=2) as (figure, (left, right)):
            left.set_title("a title")
            if fault == "small":
                left.text(0.5, 0.5, "small", fontsize=TEXT - 1)
            if fault == "cut":
                text = right.text(1, 0.5, "beyond the edge", transform=right.transAxes)
                text.set_in_layout(False)
            if fault == "one on the other":
                left.set_title("a title that runs into that of its neighbour")
                right.set_title("a neighbour")
            if fault == "three lines":
                figure.supxlabel("one\ntwo\nthree\nfour")
            if fault == "twin":
                left.plot([0, 1], color="#224466")
        return figure

    check_figure(drawn(""))
    for fault in ("small", "cut", "one on the other", "three lines", "twin"):
        with pytest.raises(AssertionError, match=fault):
            check_figure(drawn(fault))


def test_data_check_finds_hidden_and_cut_data() -> None:
    def drawn(fault: str):
        with new_figure(height=2) as (figure, axis):
            axis.plot([0, 1], [0, 1], label="rises")
            axis.errorbar(0.5, 0.2, 0.1)
            if fault == "cuts data":
                axis.set_ylim(0.15, 1)
            axis.legend(loc="upper right" if fault == "legend" else "upper left")
        return figure

    check_data(drawn(""))
    for fault in ("cuts data", "legend"):
        with pytest.raises(AssertionError, match=fault):
            check_data(drawn(fault))


def test_notebook_output_has_light_and_dark_drawings() -> None:
    """A front end that cannot show HTML gets one PNG picture."""
    with new_figure(height=2) as (figure, axis):
        axis.plot([0, 1], color=GREY)
        axis.set_title("loss & <b>speed</b>")
    figure.notes, figure.left_out = ("Published: <i>a paper</i>.",), ("runs/x is not drawn.",)
    bundle, metadata = figure._repr_mimebundle_()
    page = bundle["text/html"]
    assert page.count("<img ") == 2
    assert "kit-dark' hidden" in page, "a page without styles shows the light one"
    assert "alt='loss &amp; &lt;b&gt;speed&lt;/b&gt;'" in page
    assert metadata == {"image/png": {"width": 600}}
    assert "<li>Published: &lt;i&gt;a paper&lt;/i&gt;.</li>" in page
    assert "⚠ runs/x is not drawn." in page
    light, dark = figure.to_svg(), figure.to_svg(dark=True)
    for glyphs in (f"scale({TEXT / 100:g} -{TEXT / 100:g})", "scale(0.015625)"):
        assert glyphs in light, "they keep their size"
    for colour in (GREY.lower(), "#ffffff"):
        assert colour in light and colour not in dark and DARK[colour] in dark


def test_table_leaves_unknown_cells_empty() -> None:
    rows = [{"x": "<a>", "n": 12345, "run": "r"}, {"x": "b", "n": None, "y": float("nan")}]
    table = Table(rows, "Caption", ["A <note>."])
    page = table._repr_html_()
    assert "<td style='text-align:left'>&lt;a&gt;</td>" in page
    assert "text-align:right'>12,345" in page
    assert table.columns == ("x", "n", "run", "y")
    assert [cell.plain for cell in table.cells[1]] == ["b", "", "", ""]
    assert "<li>A &lt;note&gt;.</li>" in page and repr(table).startswith("Caption\nx    n")


def test_table_from_columns_equals_table_of_rows() -> None:
    """Numbers of NumPy arrays are shown as those of Python are."""
    columns = {
        "run": {"a": 1, "b": 2},
        "tokens": np.array([1_234_567, 8]),
        "loss": np.array([2.71828, np.nan], dtype=np.float32),
        "done": np.array([True, False]),
    }
    rows = [
        {"run": "a", "tokens": 1_234_567, "loss": 2.71828, "done": True},
        {"run": "b", "tokens": 8, "loss": None, "done": False},
    ]
    table = Table.from_columns(columns, "Caption", ["A note."])
    assert table._repr_html_() == Table(rows, "Caption", ["A note."])._repr_html_()
    assert "1,234,567" in repr(table) and "2.718" in repr(table)
    with pytest.raises(ValueError, match="shorter"):
        Table.from_columns({"run": ["a", "b"], "loss": [2.7]})


def test_text_columns_are_left_aligned() -> None:
    """JupyterLab aligns table cells to the right unless the cell's style sets an alignment."""
    text = "64 sequences on 512 devices leave at most 1 replica"
    answer = html_table("answer", [("layout", "TP8"), ("warning", text)])
    assert not re.findall(r"<t[dh]\b(?![^>]*text-align:left)", answer)
    rows = [{"why": text, "s/step": "8.25 to 18.8", "of memory": "41 GiB of 64", "GiB": 3}]
    sides = re.findall(r"<td style='text-align:(\w+)'", Table(rows)._repr_html_())
    assert sides == ["left", "right", "right", "right"]


def test_long_name_is_shortened_in_the_middle() -> None:
    """A space is put before a name that starts with an underscore, because matplotlib hides legend
    entries with an underscore.
    """
    assert short("run-of-today") == "run-of-today" and short("_mine") == " _mine"
    assert short("a" * 20 + "b" * 20) == "a" * 14 + "…" + "b" * 15


def test_figures_of_two_threads_keep_their_style():
    """One thread leaves the context of `new_figure` while another thread is inside it. This happens
    in a notebook with a live dashboard.
    """
    before, entered, sizes = dict(matplotlib.rcParams), threading.Event(), []

    def first() -> None:
        with new_figure(height=2):
            entered.set()
            time.sleep(0.3)

    def second() -> None:
        entered.wait()
        with new_figure(height=2) as (_, axis):
            other.join()
            sizes.append(axis.set_title("title").get_fontsize())

    other, this = threading.Thread(target=first), threading.Thread(target=second)
    other.start()
    this.start()
    other.join()
    this.join()
    assert sizes == [TEXT] and dict(matplotlib.rcParams) == before
