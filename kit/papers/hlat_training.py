"""HLAT: learning rates and the data of the last stage, as released; and section VI: training loss,
what to do about a spike, and in which numbers to train, all of it measured here.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from kit.errors import ConfigError
from kit.monitor.figure import EMA_STEPS, smooth
from kit.papers.hlat_model import FACTS, MODELS
from kit.papers.layers import Layer, Runs, curves, folders_with, study_points
from kit.papers.panels import finish, legend_above, mark_demo_scale, picture
from kit.papers.recipes import floor_step, last_step, recipe, tokens_of
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE, GREY, OLIVE, PURPLE, SLATE, VERMILION
from kit.trainer.spikes import spikes

ARM_COLOURS = (SLATE, BLUE, PURPLE, OLIVE, VERMILION)
Steps = list[dict[str, Any]]
STEPS_SHOWN = 60
"""Of a schedule of half a million."""
SPIKES, PRECISION = "spikes.json", "precision.json"
"""What the studies of `hlat_demo` leave in their folder."""


def learning_rate_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the learning-rate schedules of both models against tokens, clamped and rescaled;
    and the table.
    """
    panels: dict[str, list[Layer]] = {}
    for model in MODELS:
        peak = FACTS.only("recipe_learning_rate", model)
        floor = FACTS.only("recipe_min_learning_rate", model)
        warm = recipe(model, "clamped").warmup_steps
        ends = [
            fact.replace(x=str(tokens_of(model, step) / 1e9))
            for fact, step in ((peak, warm), (floor, floor_step(model)))
        ]
        panels[model] = [
            Layer.published(ends, label="peak and floor, released"),
            *(schedule_layer(model, kind) for kind in ("clamped", "rescaled")),
        ]
    dress: list[dict[str, Any]] = [
        {"title": f"{model}: learning rate", "xlabel": "tokens, billions", "ylim": (0, None)}
        for model in MODELS
    ]
    for scale, layers in curves(runs, "learning_rate").items():
        panels[scale] = layers
        title = {"title": "your runs: learning rate", "xlabel": "tokens, millions"}
        dress.append(title | {"legend": {"loc": "upper right"}})

    def mark_ends(figure: Any) -> None:
        for axis in figure.axes[: len(MODELS)]:
            axis.axvline(1800, color=GREY, linewidth=0.8, linestyle=":")
        for axis in figure.axes:
            axis.ticklabel_format(axis="y", scilimits=(0, 0))
        legend_above(figure, 3)

    met, last = tokens_of("7B", floor_step("7B")), last_step("7B")
    end, other = (recipe("7B", kind).learning_rate_at(last) for kind in ("clamped", "rescaled"))
    return picture(
        panels,
        dress,
        "Warm-up, then a cosine over 500,000 steps; dotted: 1.8 trillion tokens.",
        f"Clamped, as released, it meets its floor at {met / 1e12:.2f} trillion tokens.",
        f"At the end 7B has {end:.2g}; rescaled, as others do, it would have {other:.3g}.",
        notes=[f"2,000 steps of warm-up; 1.8 trillion tokens are {last:,} steps."],
        also=mark_ends,
        height=2.4 * ((len(panels) + 1) // 2) + 1.4,
    )


def data_mix_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns Table III, the data of the last 400 billion tokens of the 70B, as bars; and the
    table.
    """
    tokens, shares = FACTS["mix_tokens"], FACTS["mix_share"]
    layer = Layer.published(tokens, label="billion tokens")
    whole, part = FACTS.value("mix_whole", "total"), FACTS.value("mix_whole_share", "total")
    stage, begin = FACTS.value("mix_stage", "length"), FACTS.value("mix_stage", "from")
    with new_figure(height=3.6) as (figure, axis):
        bars = axis.barh(
            range(len(layer.y)), layer.y, color="white", edgecolor=GREY, linewidth=1.4, height=0.4
        )
        told = [f"{t.number:g}, {s.number:.1f} %" for t, s in zip(tokens, shares, strict=True)]
        axis.bar_label(bars, told, padding=4)
        for place, fact in enumerate(tokens):
            axis.text(0, place - 0.28, f"{fact.x}: {fact.note}", va="bottom")
        axis.set(
            xlim=(0, 1.3 * layer.y.max()),
            ylim=(len(layer.y) - 0.6, -0.8),
            title="Table III: billion tokens",
            xticks=(0, 50, 100),
            yticks=(),
        )
        axis.grid(visible=False)
        _, rows = finish(
            figure,
            [layer],
            f"Data of the 70B from {begin:,g} billion tokens on, read {stage / whole:.2f} times.",
            "Its effect, in the paper's words: about +10 points in math, +5 in code.",
            notes=[
                f"{whole:g} billion tokens are said to be {part:g} % of the whole set, so that has"
                f" {whole / part / 10:.2f} trillion; {stage:g} billion tokens of training pass over"
                " them."
            ],
        )
    return figure, [
        row | {"share": s.number, "of": s.note} for row, s in zip(rows, shares, strict=True)
    ]


def schedule_layer(model: str, kind: Literal["clamped", "rescaled"]) -> Layer:
    """Returns a schedule over its whole length, against billions of tokens."""
    schedule = recipe(model, kind)
    ends = [schedule.warmup_steps, floor_step(model)]
    whole = np.linspace(1, schedule.decay_steps or 1, STEPS_SHOWN)
    steps = np.unique(np.concatenate([whole, ends]).astype(int))
    rates = [schedule.learning_rate_at(int(step)) for step in steps]
    exact = (
        "nothing is fitted: the formula of the released scheduler (clamped), and of Megatron and"
        " NeMo (rescaled)"
    )
    return Layer.modelled(kind, tokens_of(model, steps) / 1e9, rates, error=exact)


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
