"""Frontier, section IV: the hyperparameter search for the fastest layout. The throughput of a trial
comes from the planner's model, or from a small real run on this machine (demo scale).
"""

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
from kit.papers.facts import read_paper_toml
from kit.papers.frontier_demo import SEARCH
from kit.papers.frontier_model import (
    frontier_calibration,
    frontier_layouts,
    model_error,
    paper_plan,
)
from kit.papers.layers import FigureLayer, Runs, folders_with, study_points
from kit.papers.panels import DEMO_COLOURS, FigureContent, mark_demo_scale
from kit.show.theme import BLUE, GREY, VERMILION

NUM_TRIALS = 60
"""Number of trials of a search that uses the planner's model."""
OTHER_SEEDS = (1, 2)
"""Seeds of further searches. The search with seed 0 is drawn with its trials. A further search is
drawn only as its best throughput so far, to show how much the result depends on the seed."""
LABELS = {
    "micro_batch_size": "micro-batch size",
    "num_microbatches": "micro-batches",
    "num_nodes": "nodes",
    "zero_stage": "ZeRO stage",
}
"""Maps the name of a parameter to its label in figures. Other parameters have their name as label,
with spaces."""
SPACES = read_paper_toml("spaces")
"""Maps the name of each hyperparameter search that uses the planner's model to its search space: a
model preset, and the allowed values of each parameter."""


def search_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of the hyperparameter searches in `SPACES`. It shows the throughput of each
    trial, and the highest throughput up to each trial, for two further seeds too.

    Each search with real runs of this machine has a separate panel.
    """
    panels = {name: _model_layers(name) for name in SPACES}
    for folder, trials in read_demo_searches(runs).items():
        panels[folder.name] = _demo_layers(folder, trials)
    num_demo = len(panels) - len(SPACES)
    rows = ["ab", *(2 * letter for letter in "cdefgh"[:num_demo])]
    reached = []
    fitting = []
    for name in SPACES:
        grid = _all_rates(name)
        best = np.nanmax(grid)
        share, *other_shares = (
            np.nanmax(_search(name, seed).values) / best for seed in (0, *OTHER_SEEDS)
        )
        others = " and ".join(f"{100 * other:.0f}" for other in other_shares)
        reached.append(f"{share:.0%} of the best at {name} (other seeds: {others}%)")
        fitting.append(f"{name} {np.isfinite(grid).sum()} of {grid.size:,}")
    remembered = np.isfinite(search_objective("175B").rates(FRONTIER_SPACE))
    return FigureContent(
        panels=panels,
        values={
            "reached": ", ".join(reached),
            "fitting": "; ".join(fitting),
            "remembered_fitting": str(remembered.sum()),
            "remembered": f"{remembered.size:,}",
            "num_trials": str(NUM_TRIALS),
            "sampler": _search("1.4B").sampler,
        },
        draw_panel=lambda axis, name: _draw_trials(axis, *panels[name]),
        layout={"mosaic": ";".join(rows), "height": 4 + 3 * num_demo},
    )


def sensitivity_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of the sensitivity of each search: the share of the objective's variance
    that each parameter explains, in %.
    """
    panels = {}
    for name in SPACES:
        shares = _shares(_search(name))
        layer = FigureLayer(kind="modelled", label=name, source=model_error(), **shares)
        panels[name] = [layer]
    searches = read_demo_searches(runs)
    for folder, trials in searches.items():
        panel = "runs on this machine"
        if len(searches) > 1:
            panel += f", {folder.name}"
        panels[panel] = [study_points(folder, "this machine", **_shares(trials))]
    num_bars = [len(layer.y) for [layer] in panels.values()]
    return FigureContent(
        panels=panels,
        draw_panel=lambda axis, name: _draw_bars(axis, *panels[name]),
        layout={
            "mosaic": ";".join("abcdefgh"[: len(panels)]),
            "height": 0.36 * sum(num_bars) + 0.6 * len(panels) + 0.9,
            "height_ratios": num_bars,
        },
    )


def read_demo_searches(runs: Runs) -> dict[Path, Trials]:
    """Returns the searches with real runs that are stored in the given folders, as a dict from
    folder to trials.
    """
    return {folder: Trials.read(folder / SEARCH) for folder in folders_with(runs, SEARCH)}


def search_objective(name: str) -> EstimatedRate:
    """Returns the objective of the search in one of SPACES: tokens per second per GCD, from the
    planner's model.

    A layout that runs out of memory counts as a failed trial.
    """
    found = frontier_calibration()
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


@lru_cache(maxsize=8)
def _search(name: str, seed: int = 0) -> Trials:
    """Returns the trials of the search in one of SPACES."""
    space = SPACES[name]["choices"]
    return tune(search_objective(name), space, num_trials=NUM_TRIALS, seed=seed)


@lru_cache(maxsize=4)
def _all_rates(name: str) -> Array:
    """Returns the objective of every layout in one of SPACES. NaN: the layout does not fit."""
    return search_objective(name).rates(SPACES[name]["choices"])


def _model_layers(name: str) -> list[FigureLayer]:
    """Returns figure layers in TFLOP/s against the number of the trial. The first has the
    throughput of each trial. The second has the highest throughput up to each trial, with the
    prediction interval of its layout. Each further layer has the highest throughput up to each
    trial of a search with another seed.

    FLOPs include recomputation, as in the log from which the authors' objective reads the
    throughput.
    """
    trials = _search(name)
    spec = _spec(name)
    unit = spec.flops_per_token(FlopBasis.MEGATRON_RECOMPUTE) / 1e12
    numbers = np.arange(1.0, len(trials.trials) + 1)
    best = unit * trials.best_so_far
    known = np.flatnonzero(np.isfinite(best))
    winners = [trials.trials[np.nanargmax(trials.values[: i + 1])].parameters for i in known]
    plans = [plan_of_trial(winner, devices_per_node=8, base=paper_plan()) for winner in winners]
    found = frontier_calibration().predict(frontier_layouts(spec, plans, gradient_bytes=4.0))
    ends = np.full((2, len(best)), np.nan)
    ends[:, known] = best[known] * found.total_s / np.stack([found.high_s, found.low_s])
    return [
        FigureLayer.modelled("trial", numbers, unit * trials.values, error=model_error()),
        FigureLayer.modelled("best so far", numbers, best, *ends, error=model_error()),
        *(
            FigureLayer.modelled(
                f"best so far, seed {seed}",
                numbers,
                unit * _search(name, seed).best_so_far,
                error=model_error(),
            )
            for seed in OTHER_SEEDS
        ),
    ]


def _demo_layers(folder: Path, trials: Trials) -> list[FigureLayer]:
    numbers = np.arange(1.0, len(trials.trials) + 1)
    return [
        study_points(folder, "trial", numbers, trials.values),
        study_points(folder, "best so far", numbers, trials.best_so_far),
    ]


def _shares(trials: Trials) -> dict[str, Any]:
    """Returns the fields x, y and names of a figure layer that is drawn as bars: positions of the
    bars, shares of the variance in %, and names of the parameters.
    """
    shown = {name: 100 * share for name, share in sensitivity(trials).items() if share > 1e-9}
    return {"x": range(len(shown)), "y": [*shown.values()], "names": tuple(shown)}


def _draw_bars(axis: Any, layer: FigureLayer) -> None:
    """Draws shares of the variance as horizontal bars, with their numbers."""
    colour = _colour_and_mark(axis, layer)
    bars = axis.barh(layer.x, layer.y, color=colour, height=0.6)
    axis.bar_label(bars, fmt="%.1f", padding=3)
    axis.set_yticks(layer.x, [LABELS.get(name, name.replace("_", " ")) for name in layer.names])
    axis.set_xlim(0, 1.25 * max(layer.y.max(), 1e-9))
    axis.invert_yaxis()
    axis.grid(visible=False)


def _draw_trials(axis: Any, trials: FigureLayer, best: FigureLayer, *others: FigureLayer) -> None:
    """Draws trials as dots, and the best value so far as a step line with its interval. A short
    vertical line at the bottom shows each failed trial. `others` are the best values so far of
    searches with other seeds, which are thin lines.
    """
    colour = _colour_and_mark(axis, best)
    failed = trials.x[np.isnan(trials.y)]
    axis.plot(trials.x, trials.y, "o", color=colour, alpha=0.5, label="trial")
    bottom = axis.get_xaxis_transform()
    marks = {"color": VERMILION, "linewidth": 1.2}
    axis.vlines(failed, 0, 0.07, transform=bottom, label="failed trial", **marks)
    axis.step(best.x, best.y, where="post", color=colour, label="best so far")
    for other in others:
        label = "other seeds" if other is others[0] else None
        axis.step(other.x, other.y, where="post", color=GREY, linewidth=1, label=label)
    axis.fill_between(
        best.x, best.low, best.high, step="post", color=colour, alpha=0.15, linewidth=0
    )
    highest = [np.nan_to_num(layer.y) for layer in (best, *others)]
    axis.set(
        xlabel=f"trial; {len(failed)} of {len(trials.x)} failed",
        xlim=(0, len(trials.x) + 1),
        ylim=(0, 1.1 * float(np.max([*highest, np.nan_to_num(best.high)]))),
    )


def _colour_and_mark(axis: Any, layer: FigureLayer) -> str:
    """Returns the colour in which a figure layer (curve or points) is drawn. If the layer was
    measured on this machine, the words `demo scale` are written across its panel.
    """
    if layer.scale != "demo":
        return BLUE
    mark_demo_scale(axis)
    return DEMO_COLOURS[0]
