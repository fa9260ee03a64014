"""Figures on the training of HLAT. Published: the learning rates, and the data mix of the last
training stage. Measured on this machine or in the user's runs: training loss and precision (Section
VI of the paper). Measured on this machine only: averaged weights.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kit.errors import ConfigError
from kit.monitor.figure import EMA_STEPS, moving_average
from kit.papers.hlat_model import FACTS, MODELS
from kit.papers.layers import FigureLayer, Runs, curves, folders_with, study_points
from kit.papers.panels import FigureContent, mark_demo_scale, panel_rows
from kit.papers.recipes import final_step, floor_step, recipe, tokens_of
from kit.show.theme import BLUE, GREY, OLIVE, PURPLE, SLATE, VERMILION
from kit.trainer.spikes import find_spikes

Steps = list[dict[str, Any]]
"""Rows of the training of a small model, one per training step. Each row maps a column name, such
as `loss`, to the value."""
STEPS_SHOWN = 60
"""Number of points at which a learning-rate schedule is drawn, since the complete schedule has half
a million steps."""
EXACT = "exact formulas: clamped as in the released scheduler, rescaled as in Megatron and NeMo"
"""Text in the place of a model's error for the learning-rate schedules, which are computed exactly.
It is shown in the list of sources below the figure."""
PRECISION = "precision.json"
"""Name of the file with the losses of the small model that was trained in four precisions on this
machine."""
PRECISION_STYLES = ((SLATE, 4.0), (BLUE, 2.4), (PURPLE, 1.4), (OLIVE, 1.4))
"""(colour, line width) of the curve of each precision, in the figure of a small model that is
trained in four precisions. The first two curves are wider, since they cover each other."""

AVERAGING = "averaging.json"
"""Name of the file with the losses of averaged weights of the small model that was trained on this
machine."""
NUM_AVERAGED = (1, 2, 3, 5)
"""Numbers of copies of the weights that are averaged. 1 stands for weights without an average."""


def learning_rate_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of learning rate against tokens, with the schedules of both HLAT models and
    of the user's runs. Each HLAT schedule is drawn twice: with the cosine clamped at the
    learning-rate floor, and rescaled to end at the floor.
    """
    own, token_units = curves(runs, "learning_rate")
    last = final_step("7B")
    floor_tokens = tokens_of("7B", floor_step("7B"))
    clamped = recipe("7B", "clamped").learning_rate_at(last)
    rescaled = recipe("7B", "rescaled").learning_rate_at(last)

    def mark_ends(figure: Any) -> None:
        for axis in figure.axes[: len(MODELS)]:
            axis.axvline(1800, color=GREY, linewidth=0.8, linestyle=":")
        for axis in figure.axes:
            exponent = math.floor(math.log10(axis.get_ylim()[1]))
            axis.yaxis.set_major_formatter(partial(_rate_text, exponent))

    return FigureContent(
        panels={model: _schedules(model) for model in MODELS} | own,
        values={
            "floor_tokens": f"{floor_tokens / 1e12:.2f}",
            "clamped": _rate_text(-5, clamped),
            "rescaled": _rate_text(-5, rescaled),
            "last_step": f"{last:,}",
            **{f"{scale}_tokens": unit for scale, unit in token_units.items()},
        },
        annotate=mark_ends,
    )


def _rate_text(exponent: int, rate: float, _: int = 0) -> str:
    """Returns a learning rate as a multiple of 10 to the power of `exponent`, such as `1.5e-4`. As
    the formatter of an axis, the function gets the number of the tick too.
    """
    return f"{rate / 10**exponent:.3g}e{exponent}" if rate else "0"


def _schedules(model: str) -> list[FigureLayer]:
    """Returns three figure layers of one model's learning-rate schedule, against billions of
    tokens.

    The first layer has the published points: the peak and the floor. Two modelled curves show the
    complete schedule, one for each meaning of the floor (clamped or rescaled).
    """
    clamped = recipe(model, "clamped")
    ends = {"learning_rate": clamped.warmup_steps, "min_learning_rate": floor_step(model)}
    released = [
        FACTS.only(f"recipe_{field}", model).replace(x=str(tokens_of(model, step) / 1e9))
        for field, step in ends.items()
    ]
    layers = [FigureLayer.published(released, label="peak and floor, released")]
    whole = np.linspace(1, clamped.decay_steps or 1, STEPS_SHOWN)
    steps = np.unique(np.concatenate([whole, [*ends.values()]]).astype(int))
    for kind in ("clamped", "rescaled"):
        rates = [recipe(model, kind).learning_rate_at(int(step)) for step in steps]
        layers.append(FigureLayer.modelled(kind, tokens_of(model, steps) / 1e9, rates, error=EXACT))
    return layers


def data_mix_content(runs: Runs = ()) -> FigureContent:
    """Returns Table III as bars: the data on which the 70B model was trained in its last 400
    billion tokens.
    """
    tokens = FACTS["mix_tokens"]
    shares = FACTS["mix_share"]
    whole = FACTS.value("mix_whole", "total")
    percent = FACTS.value("mix_whole_share", "total")
    stage = FACTS.value("mix_stage", "length")
    begin = FACTS.value("mix_stage", "from")
    layer = FigureLayer.published(tokens, label="billion tokens")
    rows = panel_rows({"": [layer]})
    for row, share in zip(rows, shares, strict=True):
        row["share"] = share.number
        row["of"] = share.note

    def draw_bars(axis: Any, _: str) -> None:
        bars = axis.barh(layer.x, layer.y, color="white", edgecolor=GREY, linewidth=1.4, height=0.4)
        texts = []
        for place, (fact, share) in enumerate(zip(tokens, shares, strict=True)):
            texts.append(f"{fact.number:g}, {share.number:.1f} %")
            axis.text(0, place - 0.28, f"{fact.x}: {fact.note}", va="bottom")
        axis.bar_label(bars, texts, padding=4)
        axis.set(xlim=(0, 1.3 * layer.y.max()), ylim=(len(layer.y) - 0.6, -0.8))
        axis.grid(visible=False)

    return FigureContent(
        panels={"": [layer]},
        values={
            "begin": f"{begin:,g}",
            "end": f"{begin + stage:,g}",
            "passes": f"{stage / whole:.2f}",
            "whole": f"{whole:g}",
            "percent": f"{percent:g}",
            "set_trillions": f"{whole / percent / 10:.2f}",
            "stage": f"{stage:g}",
        },
        rows=rows,
        draw_panel=draw_bars,
    )


def loss_content(runs: Runs = (), *, paper_panels: bool = False) -> FigureContent:
    """Returns a figure of training loss against tokens for the user's runs. Crosses mark the loss
    spikes that the kit's alerts detect.

    If `paper_panels` is true, an empty panel is added for the paper's curve, whose numbers could
    not be read off the paper's figure.

    Raises:
        ConfigError: No run has a step, and `paper_panels` is false.
    """
    own, token_units = curves(runs, "loss")
    if not own and not paper_panels:
        raise ConfigError(
            f"hlat-loss: no steps in {list(map(str, runs))}. Give run directories (--run"
            " DIRECTORY)."
        )
    panels: dict[str, list[FigureLayer]] = {"paper": []} if paper_panels else {}
    panels |= own
    num_spikes = sum(len(find_spikes(layer.y)) for layers in panels.values() for layer in layers)

    def mark_spikes(figure: Any) -> None:
        for axis, layers in zip(figure.axes, panels.values(), strict=True):
            for layer in layers:
                rows = [row for row, _ in find_spikes(layer.y)]
                axis.plot(layer.x[rows], layer.y[rows], "x", color=VERMILION, zorder=5)

    return FigureContent(
        panels=panels,
        values={
            "num_spikes": str(num_spikes),
            **{f"{scale}_tokens": unit for scale, unit in token_units.items()},
        },
        annotate=mark_spikes,
    )


def precision_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of a small model that was trained in four precisions: differences of the
    training losses and of the validation losses from fp32. Curves of the losses themselves would
    cover each other.

    Raises:
        ConfigError: No folder in `runs` contains the stored study (PRECISION).
    """
    folder = _study_folder(runs, PRECISION, "demo_precision")
    steps = json.loads((folder / PRECISION).read_text())
    panels = {
        panel: [
            study_points(folder, name, *_column(rows, column), joined=True)
            for name, rows in steps.items()
        ]
        for panel, column in (("training", "loss"), ("held out", "validation_loss"))
    }
    fp32 = {panel: layers[0].y for panel, layers in panels.items()}
    held_out_end = fp32["held out"][-1]
    _, master, pure, stochastic = (layer.y[-1] - held_out_end for layer in panels["held out"])
    ends = [f"{name} {loss:.3f}" for name, loss in last_losses(steps).items()]
    statements = [f"{fact.x}: {fact.value}" for fact in FACTS["precision_outcome"]]

    def draw_lines(axis: Any, name: str) -> None:
        for layer, (colour, width) in zip(panels[name], PRECISION_STYLES, strict=True):
            style: dict[str, Any] = {"color": colour, "linewidth": width, "label": layer.label}
            difference = layer.y - fp32[name]
            if name == "training":
                axis.plot(layer.x, moving_average(difference), **style)
            else:
                axis.plot(layer.x, difference, marker="o", markersize=3, **style)
        mark_demo_scale(axis)

    return FigureContent(
        panels=panels,
        values={
            "master": f"{master:+.3f}",
            "pure": f"{pure:+.3f}",
            "stochastic": f"{stochastic:+.3f}",
            "average_steps": str(EMA_STEPS),
            "first_loss": f"{fp32['training'][0]:.2f}",
            "last_loss": f"{moving_average(fp32['training'])[-1]:.2f}",
            "ends": "; ".join(ends),
            "statements": "; ".join(statements),
        },
        draw_panel=draw_lines,
    )


def averaging_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of a small model that was trained with a constant and with a falling
    learning rate: validation loss of averaged weights minus that of the last weights, against the
    step.

    Raises:
        ConfigError: No folder in `runs` contains the stored study (AVERAGING).
    """
    folder = _study_folder(runs, AVERAGING, "demo_averaging")
    schedules = json.loads((folder / AVERAGING).read_text())
    panels = {}
    for name, rows in schedules.items():
        panels[name] = []
        for count in NUM_AVERAGED[1:]:
            known = [row for row in rows if row[str(count)] is not None]
            differences = [row[str(count)] - row["1"] for row in known]
            steps = [row["step"] for row in known]
            panels[name].append(
                study_points(folder, f"mean of {count}", steps, differences, joined=True)
            )

    ends = [float(y) for layers in panels.values() for layer in layers for y in layer.y]

    def draw_lines(axis: Any, name: str) -> None:
        for layer, colour in zip(panels[name], (BLUE, VERMILION, OLIVE), strict=True):
            axis.plot(layer.x, layer.y, color=colour, label=layer.label, marker="o", markersize=3)
        axis.axhline(0, color=GREY, linewidth=0.8)
        axis.set_ylim(min(ends) - 0.02, max(ends) + 0.02)
        mark_demo_scale(axis)

    return FigureContent(
        panels=panels,
        values={
            name: f"{min(float(layer.y[-1]) for layer in layers):+.3f}"
            for name, layers in panels.items()
        },
        draw_panel=draw_lines,
    )


def _study_folder(runs: Runs, file: str, function: str) -> Path:
    """Returns the first folder in `runs` with the stored result of a study.

    Raises:
        ConfigError: There is none. The error names the function of `hlat_demo` that makes it.
    """
    folders = folders_with(runs, file)
    if not folders:
        raise ConfigError(
            f"runs: no {file} in {list(map(str, runs))}. Make the study first: python -c"
            f' \'from kit.papers.hlat_demo import *; {function}("FOLDER", "DATA")\';'
            " then --run FOLDER."
        )
    return folders[0]


def last_losses(steps: dict[str, Steps]) -> dict[str, float]:
    """Returns the last validation loss for each precision of the study, in nats per token."""
    return {name: _column(rows, "validation_loss")[1][-1] for name, rows in steps.items()}


def _column(rows: Steps, name: str) -> tuple[list[int], list[float]]:
    """Returns (step numbers, values) of one column of the training rows. Steps without a value in
    this column are left out.
    """
    known = [row for row in rows if row[name] is not None]
    return [row["step"] for row in known], [row[name] for row in known]
