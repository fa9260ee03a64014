"""Frontier, section IV: the hyperparameter search over layouts, on the model and with real runs
at demo scale.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cluster.site import Site
from kit.config.spec import FlopBasis, ModelSpec
from kit.estimate.choose.search import Machine
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.layouts import Array
from kit.estimate.theory.out_of_memory import RESERVE
from kit.estimate.tuning.objectives import FRONTIER_SPACE, EstimatedRate, plan_of_trial
from kit.estimate.tuning.tune import Trials, sensitivity, tune
from kit.papers.facts import read_toml
from kit.papers.frontier_demo import SEARCH
from kit.papers.frontier_model import calibration, layouts_of, model_error, paper_plan
from kit.papers.layers import Drawn, Layer, Runs, folders_with, study_points
from kit.papers.panels import DEMO_COLOURS, finish, mark_demo_scale, picture
from kit.show.style import new_figure
from kit.show.theme import BLUE, VERMILION

NUM_TRIALS = 60
SPACES = read_toml("spaces")
"""Of the search on the model: a preset and the choices of each parameter."""


def search_figure(runs: Runs = ()) -> Drawn:
    """Returns the trials of the search in the authors' spaces, best so far, and its table."""
    panels = {name: _model_layers(name) for name in SPACES}
    demo = [_demo_layers(folder, trials) for folder, trials in demo_searches(runs).items()]
    titles = ["1.4B, driver space: TFLOP/s", "175B, our space: TFLOP/s"]
    titles += ["here, real runs: tokens/s"] * len(demo)
    mosaic = ";".join(["ab", *(2 * letter for letter in "cdefgh"[: len(demo)])])
    with new_figure(mosaic, height=4 + 3 * len(demo)) as (figure, axes):
        for axis, title, layers in zip(axes, titles, [*panels.values(), *demo], strict=True):
            _draw_trials(axis, title, *layers)
        panels["demo scale"] = [layer for layers in demo for layer in layers]
        caption, notes = _search_texts()
        return finish(figure, panels, *caption, notes=notes)


def sensitivity_figure(runs: Runs = ()) -> Drawn:
    """Returns what each parameter mattered in those searches (its share of the variance), and
    the table.
    """
    panels = {
        name: [
            Layer(kind="modelled", label=name, source=model_error(), **_shares(_search(name)[0]))
        ]
        for name in SPACES
    }
    for folder, trials in demo_searches(runs).items():
        panels[folder.name] = [study_points(folder, "this machine", **_shares(trials))]
    bars = [len(layer.y) for [layer] in panels.values()]
    return picture(
        {f"{name}: % of the variance": layers for name, layers in panels.items()},
        [{"title": f"{name}: % of the variance"} for name in panels],
        "How much each parameter mattered: share of the variance.",
        "",
        "The paper's ranking, by SHAP values, is only remembered: not drawn.",
        notes=[
            "Functional ANOVA of a random forest fitted to the trials; a failed trial counts as"
            " the worst that succeeded. SHAP values are another measure: mean sizes of effects,"
            " not shares."
        ],
        fill=_draw_bars,
        mosaic=";".join("abcdefgh"[: len(bars)]),
        height=0.36 * sum(bars) + 0.6 * len(bars) + 0.9,
        height_ratios=bars,
    )


def _draw_bars(axis: Any, layers: Sequence[Layer], *, title: str) -> None:
    """Draws shares of the variance."""
    [layer] = layers
    is_demo = layer.scale == "demo"
    drawn = axis.barh(layer.x, layer.y, color=DEMO_COLOURS[0] if is_demo else BLUE, height=0.6)
    axis.bar_label(drawn, fmt="%.1f", padding=3)
    axis.set_yticks(layer.x, [name.replace("_", " ") for name in layer.names])
    axis.set(title=title, xlim=(0, 1.25 * max(layer.y.max(), 1e-9)))
    axis.invert_yaxis()
    axis.grid(visible=False)
    if is_demo:
        mark_demo_scale(axis)


def demo_searches(runs: Runs) -> dict[Path, Trials]:
    """Returns the searches with real runs that lie in the given folders, by folder."""
    return {folder: Trials.read(folder / SEARCH) for folder in folders_with(runs, SEARCH)}


def objective(name: str) -> EstimatedRate:
    """Returns modelled tokens/s and GCD in one of SPACES; what would run out of memory fails."""
    found = calibration()
    machine = Machine(
        site=Site.load("frontier"),
        hardware=found.hardware,
        calibration=found,
        kernels=MEGATRON,
        reserve=RESERVE,
    )
    return EstimatedRate(
        spec=_spec(name), machine=machine, devices_per_node=8, base=paper_plan(engine="deepspeed")
    )


def _spec(name: str) -> ModelSpec:
    return ModelSpec.preset(SPACES[name]["model"])


@lru_cache(maxsize=4)
def _search(name: str) -> tuple[Trials, Array]:
    """Returns (trials, the objective on the whole space)."""
    rate = objective(name)
    space = SPACES[name]["choices"]
    return tune(rate, space, num_trials=NUM_TRIALS, seed=0), rate.rates(space)


def _model_layers(name: str) -> list[Layer]:
    """Returns the trials, and the best so far with the interval of that layout: TFLOP/s, counted
    as the authors' objective reads it from a log, with recomputation.
    """
    trials = _search(name)[0]
    spec = _spec(name)
    unit = spec.flops_per_token(FlopBasis.MEGATRON_RECOMPUTE) / 1e12
    numbers = np.arange(1.0, len(trials.trials) + 1)
    best = unit * trials.best_so_far
    known = np.flatnonzero(np.isfinite(best))
    winners = [trials.trials[np.nanargmax(trials.values[: i + 1])].parameters for i in known]
    plans = [plan_of_trial(winner, devices_per_node=8, base=paper_plan()) for winner in winners]
    found = calibration().predict(layouts_of(spec, plans, gradient_bytes=4.0))
    ends = np.full((2, len(best)), np.nan)
    ends[:, known] = best[known] * found.total_s / np.stack([found.high_s, found.low_s])
    return [
        Layer.modelled("trial", numbers, unit * trials.values, error=model_error()),
        Layer.modelled("best so far", numbers, best, *ends, error=model_error()),
    ]


def _demo_layers(folder: Path, trials: Trials) -> list[Layer]:
    numbers = np.arange(1.0, len(trials.trials) + 1)
    return [
        study_points(folder, "trial", numbers, trials.values),
        study_points(folder, "best so far", numbers, trials.best_so_far),
    ]


def _shares(trials: Trials) -> dict[str, Any]:
    """Returns x, y and names of what each parameter mattered, %."""
    shown = {name: 100 * share for name, share in sensitivity(trials).items() if share > 1e-9}
    return {"x": range(len(shown)), "y": [*shown.values()], "names": tuple(shown)}


def _draw_trials(axis: Any, title: str, dots: Layer, best: Layer) -> None:
    """Draws trials as dots, the best so far as steps with its interval, and failures as marks at
    the bottom.
    """
    is_demo = best.scale == "demo"
    colour = DEMO_COLOURS[0] if is_demo else BLUE
    failed = dots.x[np.isnan(dots.y)]
    axis.plot(dots.x, dots.y, "o", color=colour, alpha=0.5, label="trial")
    axis.step(best.x, best.y, where="post", color=colour, label="best so far")
    axis.fill_between(
        best.x, best.low, best.high, step="post", color=colour, alpha=0.15, linewidth=0
    )
    bottom = axis.get_xaxis_transform()
    axis.vlines(failed, 0, 0.07, transform=bottom, color=VERMILION, linewidth=1.2)
    axis.set(
        title=title,
        xlabel=f"trial; marks: {len(failed)} of {len(dots.x)} failed",
        xlim=(0, len(dots.x) + 1),
        ylim=(0, 1.3 * float(np.nanmax([best.y, np.nan_to_num(best.high)]))),
    )
    axis.legend(loc="upper right", ncols=2)
    if is_demo:
        mark_demo_scale(axis)


def _search_texts() -> tuple[tuple[str, str, str], list[str]]:
    """Returns the caption and the notes."""
    found = {name: _search(name) for name in SPACES}
    shares = ", ".join(
        f"{np.nanmax(trials.values) / np.nanmax(grid):.0%} of the best at {name}"
        for name, (trials, grid) in found.items()
    )
    fits = "; ".join(
        f"{name} {np.isfinite(grid).sum()} of {grid.size:,}" for name, (_, grid) in found.items()
    )
    remembered = np.isfinite(objective("175B").rates(FRONTIER_SPACE))
    return (
        "Trials of a search as the paper did it, and the best so far.",
        f"It reaches {shares}.",
        "The paper's failures and its best layout could not be read.",
    ), [
        "TFLOP/s of a GCD. 1.4B in the space of the authors' released driver, 175B in one of ours.",
        (
            f"Layouts that fit: {fits}. In the space that is remembered of the paper,"
            f" {remembered.sum()} of {remembered.size:,} do. What runs out of memory or does not"
            " divide is a failure."
        ),
        (
            f"The sampler here is {found['1.4B'][0].sampler}; the authors used DeepHyper's CBO."
            " The first ten trials are random."
        ),
    ]
