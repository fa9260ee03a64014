"""Frontier, section IV: the hyperparameter search over layouts, on the model and with real runs
at demo scale.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cluster.site import Site
from kit.estimate.choose.search import Machine
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.layouts import Array
from kit.estimate.theory.out_of_memory import RESERVE
from kit.estimate.tuning.objectives import FRONTIER_SPACE, EstimatedRate, plan_of
from kit.estimate.tuning.tune import Trials, sensitivity, tune
from kit.papers.frontier_demo import SEARCH
from kit.papers.frontier_model import calibration, layouts_of, model_error, paper_plan
from kit.papers.layers import Drawn, Layer, Runs, folders_with, study_points
from kit.papers.panels import DEMO_COLOURS, finish, mark_demo_scale
from kit.show.style import new_figure
from kit.show.theme import BLUE, VERMILION
from kit.spec import FlopBasis, ModelSpec

NUM_TRIALS = 60
SPACES: dict[str, tuple[str, dict[str, tuple]]] = {
    "1.4B": (
        "gpt-1.4b",
        {
            "tensor_parallel": (1, 2, 4, 8),
            "pipeline_parallel": (1, 2, 4, 8),
            "micro_batch_size": tuple(range(10, 21)),
            "num_microbatches": (10,),
            "num_nodes": (4,),
        },
    ),
    "175B": (
        "gpt-175b",
        {
            "tensor_parallel": (2, 4, 8),
            "pipeline_parallel": (4, 8, 12, 16),
            "micro_batch_size": (1, 2, 4, 6, 8, 12),
            "num_microbatches": (5, 10, 25, 50),
            "zero_stage": (0, 1),
            "num_nodes": (12, 16, 24),
        },
    ),
}
"""1.4B: the space of the authors' released driver, read. 175B: our own, since that of the paper
is remembered only."""


def search_figure(runs: Runs = ()) -> Drawn:
    """Returns the trials of the search in the authors' spaces, best so far, and its table."""
    panels = {name: _model_layers(name) for name in SPACES}
    demo = [_demo_layers(folder, trials) for folder, trials in demo_searches(runs).items()]
    titles = [
        "1.4B, driver space: TFLOP/s",
        "175B, our space: TFLOP/s",
        *("here, real runs: tokens/s" for _ in demo),
    ]
    mosaic = ";".join(["ab", *(2 * letter for letter in "cdefgh"[: len(demo)])])
    with new_figure(mosaic, height=4 + 3 * len(demo)) as (figure, axes):
        for axis, title, layers in zip(axes, titles, [*panels.values(), *demo], strict=True):
            _draw(axis, title, *layers)
        panels["demo scale"] = [layer for layers in demo for layer in layers]
        caption, notes = _search_texts()
        return finish(figure, panels, *caption, notes=notes)


def sensitivity_figure(runs: Runs = ()) -> Drawn:
    """Returns what each parameter mattered in those searches (its share of the variance), and
    the table.
    """
    panels = {f"{name}: % of the variance": [_importance(name)] for name in SPACES}
    panels |= {
        f"{folder.name}: % of the variance": [
            study_points(folder, "this machine", **_shares(trials))
        ]
        for folder, trials in demo_searches(runs).items()
    }
    bars = [len(layer.y) for [layer] in panels.values()]
    height = 0.36 * sum(bars) + 0.6 * len(bars) + 0.9
    mosaic = ";".join("abcdefgh"[: len(bars)])
    with new_figure(mosaic, height=height, height_ratios=bars) as (figure, axes):
        for axis, (title, [layer]) in zip(axes, panels.items(), strict=True):
            colour = DEMO_COLOURS[0] if layer.scale == "demo" else BLUE
            drawn = axis.barh(layer.x, layer.y, color=colour, height=0.6)
            axis.bar_label(drawn, fmt="%.1f", padding=3)
            axis.set_yticks(layer.x, [name.replace("_", " ") for name in layer.names])
            axis.set(title=title, xlim=(0, 1.25 * max(layer.y.max(), 1e-9)))
            axis.invert_yaxis()
            axis.grid(visible=False)
            if layer.scale == "demo":
                mark_demo_scale(axis)
        return finish(
            figure,
            panels,
            "How much each parameter mattered: share of the variance.",
            misses="The paper's ranking, by SHAP values, is only remembered: not drawn.",
            notes=[
                "Functional ANOVA of a random forest fitted to the trials; a failed trial counts as"
                " the worst that succeeded. SHAP values are another measure: mean sizes of effects,"
                " not shares."
            ],
        )


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
    base = paper_plan(engine="deepspeed")
    return EstimatedRate(
        spec=ModelSpec.preset(SPACES[name][0]), machine=machine, devices_per_node=8, base=base
    )


@lru_cache(maxsize=4)
def _search(name: str) -> tuple[Trials, Array]:
    """Returns (trials, the objective on the whole space)."""
    rate, space = objective(name), SPACES[name][1]
    return tune(rate, space, num_trials=NUM_TRIALS, seed=0), rate.rates(space)


def _model_layers(name: str) -> list[Layer]:
    """Returns the trials, and the best so far with the interval of that layout: TFLOP/s, counted
    as the authors' objective reads it from a log, with recomputation.
    """
    trials, spec = _search(name)[0], ModelSpec.preset(SPACES[name][0])
    unit = spec.flops_per_token(FlopBasis.MEGATRON_RECOMPUTE) / 1e12
    numbers, best = np.arange(1.0, len(trials.trials) + 1), unit * trials.best_so_far
    known = np.flatnonzero(np.isfinite(best))
    winners = [trials.trials[np.nanargmax(trials.values[: i + 1])] for i in known]
    plans = [
        plan_of(winner.parameters, devices_per_node=8, base=paper_plan()) for winner in winners
    ]
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


@lru_cache(maxsize=4)
def _importance(name: str) -> Layer:
    shares = _shares(_search(name)[0])
    return Layer(kind="modelled", label=name, source=model_error(), **shares)


def _shares(trials: Trials) -> dict[str, Any]:
    """Returns x, y and names of what each parameter mattered, %."""
    shown = {name: 100 * share for name, share in sensitivity(trials).items() if share > 1e-9}
    return {"x": range(len(shown)), "y": [*shown.values()], "names": tuple(shown)}


def _draw(axis: Any, title: str, dots: Layer, best: Layer) -> None:
    """Draws trials as dots, the best so far as steps with its interval, and failures as marks at
    the bottom.
    """
    colour = DEMO_COLOURS[0] if best.scale == "demo" else BLUE
    axis.plot(dots.x, dots.y, "o", color=colour, alpha=0.5, label="trial")
    axis.step(best.x, best.y, where="post", color=colour, label="best so far")
    axis.fill_between(
        best.x, best.low, best.high, step="post", color=colour, alpha=0.15, linewidth=0
    )
    failed = dots.x[np.isnan(dots.y)]
    bottom = axis.get_xaxis_transform()
    axis.vlines(failed, 0, 0.07, transform=bottom, color=VERMILION, linewidth=1.2)
    axis.set(
        title=title,
        xlabel=f"trial; marks: {len(failed)} of {len(dots.x)} failed",
        xlim=(0, len(dots.x) + 1),
        ylim=(0, 1.3 * float(np.nanmax([best.y, np.nan_to_num(best.high)]))),
    )
    axis.legend(loc="upper right", ncols=2)
    if best.scale == "demo":
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
    caption = (
        "Trials of a search as the paper did it, and the best so far.",
        f"It reaches {shares}.",
        "The paper's failures and its best layout could not be read.",
    )
    return caption, [
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
