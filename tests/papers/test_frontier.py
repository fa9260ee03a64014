"""The figures of the Frontier paper: their layers (published, modelled or measured data), their
numbers with tolerances, and the paper's statements in the planner's model.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from kit.cli.app import app
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.papers import FRONTIER, frontier_demo, frontier_model, paper_figure
from kit.papers.frontier_kernels import flash_gains, layer_intensity
from kit.papers.frontier_memory import frontier_stages, lumi_bytes
from kit.papers.frontier_model import FACTS, MODELS, recipe_plan
from kit.papers.frontier_scaling import batch_layer, efficiency_layer, lumi_layers
from kit.papers.frontier_throughput import measured_relations, modelled_relations
from kit.papers.recipes import published_recipe
from tests.papers.recorded import cluster_run, demo_study, values
from tests.support.pictures import check_figure

WITHOUT_RUNS = {
    "frontier-search",
    "frontier-sensitivity",
    "frontier-recipes",
    "frontier-observations",
    "frontier-strong-scaling",
}
"""Figures that the test of the user's own runs leaves out. The first two draw a search, and the
others have their own tests."""


@pytest.mark.parametrize("name", sorted(set(FRONTIER) - WITHOUT_RUNS))
def test_own_runs_are_drawn_or_listed_as_left_out(name, frontier_runs) -> None:
    figure, rows = FRONTIER[name].draw(frontier_runs)
    drawn = values(rows, layer="measured", scale="cluster")
    lacks = ["imported"] if "memory" in name else []  # the log has no memory column
    assert sorted(row["run"] for row in drawn) == sorted({"cluster", "imported"} - {*lacks})
    left_out = [text for text in figure.left_out if str(frontier_runs[2]) not in text]
    assert len(left_out) == len(lacks)
    for text in left_out:
        assert "imported is not drawn. Drawn here: runs of a cluster" in text
    shown = [*figure.legends, *filter(None, (axis.get_legend() for axis in figure.axes))]
    legends = [text.get_text() for legend in shown for text in legend.get_texts()]
    assert set(legends) & {row["series"] for row in drawn}, "and are named in a legend"
    if name == "frontier-tensor-parallel":
        assert [row["x"] for row in drawn] == [4, 4]
        log, own = sorted(row["y"] for row in drawn)
        assert own == pytest.approx(35, rel=0.01), "warm-up steps are left out"
        assert log == pytest.approx(100 * 69.2 * 212.2 / 220 / 191.5, rel=0.01)


def test_strong_scaling_draws_only_comparable_runs(frontier_runs, tmp_path) -> None:
    """A panel needs two or more runs of one model and batch size, and has a legend. Other runs are
    listed as left out.
    """
    strong = FRONTIER["frontier-strong-scaling"]
    # The inputs are a single run, and two runs with different batch sizes.
    for given in (frontier_runs[:1], frontier_runs[:2]):
        figure, rows = strong.draw(given)
        assert values(rows, layer="measured") == [] and len(figure.left_out) == len(given)
        assert "is not drawn. Drawn here: two runs or more of one model" in figure.left_out[0]
    other = cluster_run(tmp_path / "twice", hfu=0.3, replicas=4)
    figure, rows = strong.draw([*frontier_runs, other])
    drawn = values(rows, layer="measured", scale="cluster")
    assert [(row["run"], row["x"]) for row in drawn] == [("cluster", 128), ("twice", 256)]
    panels = {axis.get_title(loc="left"): axis for axis in figure.axes}
    share = 100 * (0.3 / 0.35)
    assert drawn[-1]["y"] == pytest.approx(share, rel=0.01)
    legend = panels[f"your runs: {share:.0f} %"].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["175B, batch 640"]
    left_out = [text.split(" is not")[0] for text in figure.left_out]
    assert left_out == [str(run) for run in frontier_runs[1:]]
    check_figure(figure)


def test_frontier_model_is_fitted_only_to_lumi_runs() -> None:
    assert {run.system for run in frontier_model.lumi_runs()} == {"LUMI"}
    errors = np.abs(list(frontier_model.left_out_errors().values()))
    assert len(errors) == 12 and 0.03 < errors.mean() < 0.15


def test_log_verdicts_compare_speed_with_model() -> None:
    *lumi, authors = [row["is it as fast as it should be?"] for row in frontier_model.verdicts()]
    assert len(lumi) == 5 and all(words.startswith("as expected: ") for words in lumi)
    assert authors.startswith("slower than expected by 7")
    assert "measured 196 s a step, predicted 1" in authors, "and names the centre of the interval"


def test_headline_throughput_is_inside_interval() -> None:
    _, rows = paper_figure("frontier-throughput").draw()
    for name, published in (("22B", 38.38), ("175B", 36.14), ("1T", 31.96)):
        paper, hfu = values(rows, panel="HFU", x=name)
        _, mfu = values(rows, panel="MFU", x=name)
        assert paper["y"] == published and hfu["low"] < published < hfu["high"]
        assert hfu["y"] == pytest.approx(published, rel=0.1)
        assert mfu["y"] / hfu["y"] == pytest.approx(0.75, abs=0.01), "three passes of four"


def test_paper_observations_hold_in_the_model() -> None:
    one, two, three, four = modelled_relations()
    assert [relation.verdict for relation in (one, two, three)] == ["holds"] * 3, "wholly"
    assert four.verdict != "fails" and four.value > three.value


def test_observations_are_judged_on_measured_runs(frontier_runs, tmp_path) -> None:
    found = measured_relations(frontier_runs)
    assert [relation.claim for relation in found] == ["III.1", "III.2", "III.3", "III.4"]
    assert [round(relation.value, 2) for relation in found] == [0.45, 1.8, 0.8, 1.12]
    assert {relation.verdict for relation in found} == {"holds"}
    rates = {(2, 1, 4): 4000.0, (1, 2, 8): 500.0, (1, 2, 1): 1000.0}
    contrary = demo_study(tmp_path / "contrary", rates)
    assert [each.verdict for each in measured_relations([contrary])[:2]] == ["fails", "fails"]
    assert measured_relations(frontier_runs[:1]) == []
    table, _ = paper_figure("frontier-observations").draw(frontier_runs)
    assert [row["kind"] for row in table.rows].count("measured, demo scale") == 4
    assert repr(table).count("III.1") == 2 and "TP 8 / TP 1" in table._repr_html_()


def test_weak_scaling_holds_and_strong_scaling_depends_on_batch() -> None:
    """The paper's batch is remembered, so a number outside the interval is not called
    missed.
    """
    for model in ("175B", "1T"):
        weak, strong = efficiency_layer(model, "weak"), efficiency_layer(model, "strong")
        assert weak.low[-1] < 100 < weak.high[-1] and weak.y[-1] == pytest.approx(100, abs=3.5)
        assert weak.y[0] == strong.y[0] == strong.low[0] == 100
        assert weak.y[-1] > strong.y[-1]
    figure, rows = paper_figure("frontier-strong-scaling").draw()
    for model, x, published in (("175B", 1024, 89.0), ("1T", 3072, 87.0)):
        [row] = values(rows, layer="modelled", series=model, x=float(x))
        assert abs(row["low"] - published) < 3, "at the remembered batch, 8,000, it hopes"
        told = f"{model} (paper {published:.0f}, model {row['y']:.3g})"
        _, _, outside = figure.caption.partition("Not in: ")
        assert (told in outside) == (published < row["low"]) and "MISSED" not in figure.caption
        layer = batch_layer(model)
        batch = np.interp(published, layer.y, layer.x)
        assert 1000 < batch < 4000, "but it gives the paper's number at a smaller one"


def test_lumi_strong_scaling_is_inside_interval() -> None:
    log, model = lumi_layers()
    assert log.y[-1] == pytest.approx(60.1, abs=0.1)
    assert ((model.low <= log.y + 1e-9) & (log.y <= model.high + 1e-9)).all()
    assert np.abs(model.y / log.y - 1).max() < 0.05


def test_modelled_memory_matches_logs() -> None:
    per_stage = -np.diff(frontier_stages()[1].dynamic_bytes[1:15]) / 2**20
    log = np.array([fact.number for fact in FACTS["stage_peak_mib"]])
    assert per_stage == pytest.approx(-np.diff(log[1:15]), abs=1), "a micro-batch less on each"
    for fact in FACTS["lumi_allocated_mib"]:
        assert lumi_bytes(int(fact.x)) / 2**20 == pytest.approx(fact.number, rel=0.02)
    figure, rows = paper_figure("frontier-memory").draw()
    table = {(row["model"], row["bytes"]): row["TB"] for row in rows if "bytes" in row}
    assert table["1T", 14.0] == pytest.approx(14, rel=0.02)
    assert table["22B", 24.0] == pytest.approx(0.53, rel=0.02)
    caption = paper_figure("frontier-stage-memory").draw()[0].caption
    assert "9.0 bytes a parameter in the log, 9.1 modelled" in caption


def test_layers_are_compute_bound_and_flash_helps() -> None:
    ridge = 191.5e12 / 1.6e12
    for name, preset in MODELS.items():
        spec, plan = ModelSpec.preset(preset), recipe_plan(name)
        written = layer_intensity(spec, plan, flash_attention=False)
        assert ridge < written < layer_intensity(spec, plan)
    small, middle, large = flash_gains()
    assert small["y"] > middle["y"] > large["y"] > 0, "wider layers spend less in attention"
    assert small["low"] > 0


def test_attention_is_timed_once_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier_demo, "LENGTHS", (64, 128))
    rows = frontier_demo.demo_attention(tmp_path)
    assert [row["kernel"] for row in rows] == ["fused", "scores written out"] * 2
    assert all(second > 0 for row in rows for second in row["seconds"])
    assert frontier_demo.demo_attention(tmp_path) == rows, "kept, not measured again"
    own = [tmp_path, cluster_run(tmp_path / "run").directory]
    _, drawn = paper_figure("frontier-flash-attention").draw(own)
    assert len(values(drawn, layer="measured", scale="demo")) == 4


def test_recipe_table_has_script_plans_and_own_runs(frontier_runs) -> None:
    plans = [recipe_plan(name) for name in MODELS]
    assert [plan.num_devices for plan in plans] == [16, 128, 1024]
    assert [plan.num_microbatches for plan in plans] == [320, 320, 512]
    _, rows = paper_figure("frontier-recipes").draw(frontier_runs)
    [bubble] = values(rows, **{"": "bubble (p-1)/(m+p-1)"})
    assert [bubble[name] for name in MODELS] == ["2.1%", "4.5%", "11.0%"]
    [stages] = values(rows, **{"": "pipeline parallel"})
    assert stages["imported"] == stages["cluster"] == "16"


def test_published_recipe_gives_plan_and_provenance() -> None:
    small = published_recipe("frontier-22b")
    assert (small.plan.tensor_parallel, small.plan.pipeline_parallel) == (1, 8)
    assert (small.plan.num_devices, small.plan.global_batch_size) == (16, 640)
    assert small.spec == ModelSpec.preset("gpt-22b") and small.site == "frontier"
    assert small.known["tensor_parallel"] == small.known["global_batch_size"] == "read"
    assert small.known["data_parallel"] == "derived", "from the script's GCDs"
    large = published_recipe("frontier-1t", replicas=6)
    assert (large.plan.num_devices, large.plan.global_batch_size) == (3072, 3072)
    large.plan.check(large.spec, 3072)
    assert large.known["global_batch_size"] == "derived", "the script's share of each replica"
    for name in MODELS:
        layout = published_recipe(f"frontier-{name.lower()}").plan
        own = recipe_plan(name, engine=layout.engine, precision=layout.precision)
        assert own == layout, "the figures draw the same"
    llama = published_recipe("hlat-70b", replicas=32)
    assert (llama.site, llama.plan.num_devices) == ("trn1.32xlarge", 8192)
    assert llama.plan.global_batch_size == 1024 and llama.known["global_batch_size"] == "read"


def test_training_cost_of_1t_matches_paper() -> None:
    figure, rows = paper_figure("frontier-cost").draw()
    [published] = values(rows, panel="years", layer="published")
    [modelled] = values(rows, panel="years", layer="modelled", x=3072.0)
    days = 365.25 * published["y"]
    assert days == pytest.approx(10_057, rel=0.001), "at 61.2 TFLOP/s with recomputation"
    [spent] = values(rows, panel="million GCD-hours", layer="modelled", x=3072.0)
    assert spent["y"] == pytest.approx(modelled["y"] * 365.25 * 24 * 3072 / 1e6)
    assert f"{modelled['y']:.0f} years" in figure.caption and "GCD-hours" in figure.caption
    is_met = modelled["low"] <= published["y"] <= modelled["high"]
    assert ("MISSED: 3,072" in figure.caption) != is_met
    assert modelled["y"] == pytest.approx(published["y"], rel=0.2)
    assert any("121 million exaFLOP, as in the abstract (120)" in note for note in figure.notes)


def test_figure_command_draws_and_lists_figures(tmp_path, capsys, frontier_runs) -> None:
    file = tmp_path / "memory.svg"
    words = ["figure", "frontier-memory", "--out", str(file), "--run", str(frontier_runs[0])]
    app([*words, "--json"], standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)
    assert values(rows, layer="measured") and file.stat().st_size > 10_000
    with file.with_suffix(".csv").open(newline="") as stream:
        kept = [row["source"] for row in csv.DictReader(stream)]
    assert kept == [row.get("source", "") for row in rows]
    app(["figure", "--json"], standalone_mode=False)
    assert set(FRONTIER) <= set(json.loads(capsys.readouterr().out))
    with pytest.raises(ConfigError, match="--out FOLDER"):
        app(["figure", "--run", str(frontier_runs[0])], standalone_mode=False)
    with pytest.raises(ConfigError, match="Did you mean 'frontier-memory'"):
        paper_figure("frontier-memroy")
