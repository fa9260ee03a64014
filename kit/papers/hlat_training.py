"""HLAT, section VI: training loss, what to do about a spike, and in which numbers to train; all
of it measured here.
"""

import json
from typing import Any

import numpy as np

from kit.errors import ConfigError
from kit.monitor.figure import EMA_STEPS, smooth
from kit.papers.hlat_demo import PRECISION, SPIKES
from kit.papers.hlat_model import facts
from kit.papers.layers import Layer, Runs, curves, demo_source, folders_with
from kit.papers.panels import draw_curves, finish, mark_demo_scale
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE, GREY, OLIVE, PURPLE, SLATE, VERMILION
from kit.trainer.spikes import spikes

ARM_COLOURS = (SLATE, BLUE, PURPLE, OLIVE, VERMILION)
Steps = list[dict[str, Any]]


def loss_figure(runs: Runs = (), *, paper_panels: bool = False) -> tuple[Any, Rows]:
    """Returns training loss against tokens, with marks where the kit's alerts see a spike; and the
    table.

    `paper_panels` adds an empty one for the paper's own curve, which could not be read.

    Raises:
        ConfigError: none of the runs has a step, and there is no such panel.
    """
    panels: dict[str, list[Layer]] = {"paper": []} if paper_panels else {}
    panels |= curves(runs, "loss")
    if not panels:
        raise ConfigError(
            f"hlat-loss: no steps in {list(map(str, runs))}. Give run directories (--run"
            " DIRECTORY)."
        )
    with new_figure(len(panels), height=2.8 * len(panels) + 0.6, squeeze=False) as (figure, axes):
        count = 0
        for axis, (name, layers) in zip(axes[:, 0], panels.items(), strict=True):
            if name == "paper":
                axis.set(
                    title="HLAT: training loss, nats per token",
                    xlabel="tokens, billions",
                    xlim=(0, 1900),
                )
                axis.set_ylim(1, 11)  # ln 32,000 is 10.4: where training begins
                continue
            draw_curves(axis, layers, linewidth=1.1)
            for layer in layers:
                rows = [row for row, _ in spikes(layer.y)]
                count += len(rows)
                axis.plot(layer.x[rows], layer.y[rows], "x", color=VERMILION, zorder=5)
            axis.set(title="training loss, nats per token", xlabel="tokens, millions")
            axis.legend(loc="upper right")
        return finish(
            figure,
            panels,
            "Training loss of your runs; crosses: what the kit's alerts call a spike.",
            f"Spikes: {count}. The paper's own curve could not be read.",
        )


def spikes_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the loss of a small model through a spike that was made on purpose, answered in four
    ways; its table.

    Raises:
        ConfigError: there is none.
    """
    arms, training, held_out = _study(runs, SPIKES, "demo_spikes")
    with new_figure(1, 2, height=4.3) as (figure, (left, right)):
        for number, name in enumerate(arms):
            style = {
                "color": ARM_COLOURS[number],
                "linestyle": (0, (4, 2)) if name == "no spike" else "-",
            }
            width = 3.2 if name == "skip" else 1.2  # roll back lies on it
            left.plot(training[name].x, training[name].y, label=name, linewidth=width, **style)
            right.plot(
                held_out[name].x,
                held_out[name].y,
                label=name,
                marker="o",
                markersize=3,
                linewidth=width,
                **style,
            )
        begin = _begin(arms)
        garbled = sum(row["stands_out"] for row in arms["skip"])
        for axis in (left, right):
            axis.set(xlabel="step", xlim=(begin - 45, None))
            axis.axvspan(begin - 0.5, begin - 0.5 + garbled, color=GREY, alpha=0.2, linewidth=0)
            mark_demo_scale(axis)
        shown = np.concatenate([layer.y[layer.x > begin - 45] for layer in held_out.values()])
        right.set_ylim(shown.min() - 0.1, shown.max() + 0.1)
        left.set_title("(a) loss, nats per token")
        right.set_title("(b) on held-out text")
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=5)
        panels = {"training": [*training.values()], "held out": [*held_out.values()]}
        return finish(figure, panels, *_spike_caption(arms), notes=_spike_notes(arms))


def precision_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the loss of a small model trained in four precisions, and how far each is from fp32;
    and the table.

    Raises:
        ConfigError: there is none.
    """
    _, training, held_out = _study(runs, PRECISION, "demo_precision")
    with new_figure(1, 2, height=4.5) as (figure, (left, right)):
        for number, name in enumerate(training):
            style = {
                "color": ARM_COLOURS[number],
                "linewidth": (4.0, 2.4, 1.4, 0.9)[number],
            }  # they lie on each other
            left.plot(training[name].x, smooth(training[name].y), label=name, **style)
            right.plot(
                held_out[name].x,
                held_out[name].y - held_out["fp32"].y,
                marker="o",
                markersize=3,
                **style,
            )
        for axis in (left, right):
            axis.set_xlabel("step")
            mark_demo_scale(axis)
        left.set_title("(a) loss, nats per token")
        right.set_title("(b) held-out, less fp32's")
        right.axhline(0, color=GREY, linewidth=0.8)
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        _, master, pure, stochastic = (
            f"{layer.y[-1] - held_out['fp32'].y[-1]:+.3f}" for layer in held_out.values()
        )
        return finish(
            figure,
            {"training": [*training.values()], "held out": [*held_out.values()]},
            "A small model with the same weights and data in each precision.",
            f"At the end, over fp32: master {master}, pure {pure}, stochastic {stochastic}.",
            "MISSED: rounding is once a step here, at every result on Trainium.",
            notes=_precision_notes(held_out),
        )


def last_losses(arms: dict[str, Steps]) -> dict[str, float]:
    """Returns the last held-out loss of each arm of a study, nats per token."""
    return {
        name: next(
            row["validation_loss"] for row in reversed(rows) if row["validation_loss"] is not None
        )
        for name, rows in arms.items()
    }


def worst_after(arms: dict[str, Steps]) -> dict[str, float]:
    """Returns the highest held-out loss of each arm from the spike on."""
    begin = _begin(arms)
    return {
        name: max(
            row["validation_loss"]
            for row in rows
            if row["step"] >= begin and row["validation_loss"] is not None
        )
        for name, rows in arms.items()
    }


def _begin(arms: dict[str, Steps]) -> int:
    """Returns the first step of damaged data, whether or not its loss stands out."""
    pairs = zip(arms["nothing"], arms["no spike"], strict=False)
    return next(row["step"] for row, calm in pairs if row["loss"] != calm["loss"])


def _spike_caption(arms: dict[str, Steps]) -> tuple[str, str, str]:
    worst = worst_after(arms)
    garbled = sum(row["stands_out"] for row in arms["skip"])
    told = ", ".join(f"{name} {worst[name]:.2f}" for name in arms if name != "no spike")
    return (
        f"{garbled} batches of random tokens (grey) make a spike; four answers to it.",
        f"Worst held out: {told}.",
        "The paper's own spikes, if it had any, could not be read.",
    )


def _spike_notes(arms: dict[str, Steps]) -> list[str]:
    worst, last = worst_after(arms), last_losses(arms)
    told = "; ".join(f"{name} {worst[name]:.2f}, then {last[name]:.2f}" for name in arms)
    return [
        (
            "Answers: skip steps whose loss stands out; roll back to a checkpoint and leave out the"
            " data since (as PaLM); a lower learning rate from then on (as OPT)."
        ),
        f"Held-out loss, highest and last: {told}.",
    ]


def _precision_notes(held_out: dict[str, Layer]) -> list[str]:
    said = "; ".join(f"{fact.x}: {fact.value}" for fact in facts()["precision_outcome"])
    ends = "; ".join(f"{name} {layer.y[-1]:.3f}" for name, layer in held_out.items())
    return [
        f"Learning rates of HLAT's 7B. (a) is an average of about {EMA_STEPS} steps.",
        f"Held-out loss at the end: {ends}.",
        f"The paper, in words: {said}.",
    ]


def _study(
    runs: Runs, name: str, function: str
) -> tuple[dict[str, Steps], dict[str, Layer], dict[str, Layer]]:
    """Returns the arms of a study that one of `runs` holds: their steps, training losses and
    held-out losses.
    """
    folders = folders_with(runs, name)
    if not folders:
        raise ConfigError(
            f"runs: no {name} in {list(map(str, runs))}. Make the study first: "
            f'python -c \'from kit.papers.hlat_demo import *; {function}("FOLDER", "DATA")\'; then'
            " --run FOLDER."
        )
    arms, source = json.loads((folders[0] / name).read_text()), demo_source(folders[:1])

    def layer(arm: str, column: str) -> Layer:
        x, y = zip(
            *((row["step"], row[column]) for row in arms[arm] if row[column] is not None),
            strict=True,
        )
        return Layer(
            kind="measured",
            label=arm,
            x=x,
            y=y,
            source=source,
            scale="demo",
            joined=True,
            runs=(folders[0].name,),
        )

    training, held_out = (
        {arm: layer(arm, column) for arm in arms} for column in ("loss", "validation_loss")
    )
    return arms, training, held_out
