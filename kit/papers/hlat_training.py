"""HLAT, section VI: training loss, what to do about a spike, and in which numbers to train; all
of it measured here.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from kit.errors import ConfigError
from kit.monitor.figure import EMA_STEPS, smooth
from kit.papers.hlat_model import FACTS
from kit.papers.layers import Layer, Runs, curves, folders_with, study_points
from kit.papers.panels import finish, legend_above, mark_demo_scale, picture
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE, GREY, OLIVE, PURPLE, SLATE, VERMILION
from kit.trainer.spikes import spikes

ARM_COLOURS = (SLATE, BLUE, PURPLE, OLIVE, VERMILION)
Steps = list[dict[str, Any]]
SPIKES, PRECISION = "spikes.json", "precision.json"
"""What the studies of `hlat_demo` leave in their folder."""


def loss_figure(
    runs: Runs = (), *, dress: Mapping[str, Mapping[str, Any]], paper_panels: bool = False
) -> tuple[Any, Rows]:
    """Returns training loss against tokens, with marks where the kit's alerts see a spike; and the
    table.

    `dress` is that of the paper's panel and of yours, as `picture` takes it. `paper_panels` adds an
    empty one for the paper's own curve, which could not be read.

    Raises:
        ConfigError: none of the runs has a step, and there is no such panel.
    """
    own = curves(runs, "loss")
    if not own and not paper_panels:
        raise ConfigError(
            f"hlat-loss: no steps in {list(map(str, runs))}. Give run directories (--run"
            " DIRECTORY)."
        )
    panels: dict[str, list[Layer]] = ({"paper": []} if paper_panels else {}) | own

    def mark_spikes(figure: Any) -> None:
        for axis, layers in zip(figure.axes, panels.values(), strict=True):
            for layer in layers:
                rows = [row for row, _ in spikes(layer.y)]
                axis.plot(layer.x[rows], layer.y[rows], "x", color=VERMILION, zorder=5)

    count = sum(len(spikes(layer.y)) for layers in panels.values() for layer in layers)
    return picture(
        panels,
        [dress["paper" if name == "paper" else "yours"] for name in panels],
        "Training loss of your runs; crosses: what the kit's alerts call a spike.",
        f"Spikes: {count}. The paper's own curve could not be read.",
        also=mark_spikes,
        mosaic=";".join("abc"[: len(panels)]),
        height=2.8 * len(panels) + 0.6,
    )


def spikes_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the loss of a small model through a spike that was made on purpose, answered in four
    ways; its table.

    Raises:
        ConfigError: there is none.
    """
    arms, panels = _study(runs, SPIKES, "demo_spikes")
    begin = _begin(arms)
    garbled = sum(row["stands_out"] for row in arms["skip"])
    styles: dict[str, dict[str, Any]] = {
        "no spike": {"linewidth": 1.2, "linestyle": (0, (4, 2))},
        "skip": {"linewidth": 3.2},  # roll back lies on it
    }
    with new_figure(1, 2, height=4.3) as (figure, axes):
        _draw_study(axes, panels, [styles.get(arm, {"linewidth": 1.2}) for arm in arms])
        legend_above(figure, 5)
        for axis in axes:
            axis.set_xlim(begin - 45, None)
            axis.axvspan(begin - 0.5, begin - 0.5 + garbled, color=GREY, alpha=0.2, linewidth=0)
        shown = [layer.y[layer.x > begin - 45] for layer in panels["held out"]]
        axes[1].set(title="(b) on held-out text", ylim=(np.min(shown) - 0.1, np.max(shown) + 0.1))
        worst, last = worst_after(arms), last_losses(arms)
        told = ", ".join(f"{name} {worst[name]:.2f}" for name in arms if name != "no spike")
        ends = "; ".join(f"{name} {worst[name]:.2f}, then {last[name]:.2f}" for name in arms)
        return finish(
            figure,
            panels,
            f"{garbled} batches of random tokens (grey) make a spike; four answers to it.",
            f"Worst held out: {told}.",
            "The paper's own spikes, if it had any, could not be read.",
            notes=[
                (
                    "Answers: skip steps whose loss stands out; roll back to a checkpoint and leave"
                    " out the data since (as PaLM); a lower learning rate from then on (as OPT)."
                ),
                f"Held-out loss, highest and last: {ends}.",
            ],
        )


def precision_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the loss of a small model trained in four precisions, and how far each is from fp32;
    and the table.

    Raises:
        ConfigError: there is none.
    """
    arms, panels = _study(runs, PRECISION, "demo_precision")
    shown = {
        "training": [dataclasses.replace(each, y=smooth(each.y)) for each in panels["training"]],
        "held out": [
            dataclasses.replace(each, y=each.y - panels["held out"][0].y)
            for each in panels["held out"]
        ],
    }
    with new_figure(1, 2, height=4.5) as (figure, axes):
        _draw_study(axes, shown, [{"linewidth": width} for width in (4.0, 2.4, 1.4, 0.9)])
        legend_above(figure, 2)
        axes[1].axhline(0, color=GREY, linewidth=0.8)
        axes[1].set_title("(b) held-out, less fp32's")
        _, master, pure, stochastic = (f"{layer.y[-1]:+.3f}" for layer in shown["held out"])
        said = "; ".join(f"{fact.x}: {fact.value}" for fact in FACTS["precision_outcome"])
        ends = "; ".join(f"{name} {loss:.3f}" for name, loss in last_losses(arms).items())
        return finish(
            figure,
            panels,
            "A small model with the same weights and data in each precision.",
            f"At the end, over fp32: master {master}, pure {pure}, stochastic {stochastic}.",
            "MISSED: rounding is once a step here, at every result on Trainium.",
            notes=[
                f"Learning rates of HLAT's 7B. (a) is an average of about {EMA_STEPS} steps.",
                f"Held-out loss at the end: {ends}.",
                f"The paper, in words: {said}.",
            ],
        )


def _draw_study(axes: Any, panels: dict[str, list[Layer]], styles: list[dict[str, Any]]) -> None:
    """Draws the arms of a study, which lie on each other: loss in training on the left, on held-out
    text on the right.
    """
    for axis, marker, layers in zip(axes, (None, "o"), panels.values(), strict=True):
        for layer, colour, style in zip(layers, ARM_COLOURS, styles, strict=False):
            line = {"color": colour, "label": layer.label, "marker": marker, "markersize": 3}
            axis.plot(layer.x, layer.y, **line, **style)
        axis.set_xlabel("step")
        mark_demo_scale(axis)
    axes[0].set_title("(a) loss, nats per token")


def last_losses(arms: dict[str, Steps]) -> dict[str, float]:
    """Returns the last held-out loss of each arm of a study, nats per token."""
    return {name: _column(rows, "validation_loss")[1][-1] for name, rows in arms.items()}


def worst_after(arms: dict[str, Steps]) -> dict[str, float]:
    """Returns the highest held-out loss of each arm from the spike on."""
    begin = _begin(arms)
    return {
        name: max(_column(rows[begin - 1 :], "validation_loss")[1]) for name, rows in arms.items()
    }


def _begin(arms: dict[str, Steps]) -> int:
    """Returns the first step of damaged data, whether or not its loss stands out."""
    pairs = zip(arms["nothing"], arms["no spike"], strict=False)
    return next(row["step"] for row, calm in pairs if row["loss"] != calm["loss"])


def _column(rows: Steps, name: str) -> Any:
    """Returns the steps that have this number, and the numbers."""
    known = [(row["step"], row[name]) for row in rows if row[name] is not None]
    return tuple(zip(*known, strict=True))


def _study(runs: Runs, name: str, function: str) -> tuple[dict[str, Steps], dict[str, list[Layer]]]:
    """Returns the arms of a study that one of `runs` holds: their steps, and the losses of each in
    training and on held-out text.
    """
    folders = folders_with(runs, name)
    if not folders:
        raise ConfigError(
            f"runs: no {name} in {list(map(str, runs))}. Make the study first: "
            f'python -c \'from kit.papers.hlat_demo import *; {function}("FOLDER", "DATA")\'; then'
            " --run FOLDER."
        )
    arms = json.loads((folders[0] / name).read_text())
    return arms, {
        panel: [
            study_points(folders[0], arm, *_column(rows, column), joined=True)
            for arm, rows in arms.items()
        ]
        for panel, column in (("training", "loss"), ("held out", "validation_loss"))
    }
