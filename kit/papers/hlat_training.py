"""HLAT: learning rates and the data of the last stage, as released; and section VI: training loss
and the precision of training, both measured here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kit.errors import ConfigError
from kit.monitor.figure import EMA_STEPS, smooth
from kit.papers.hlat_model import FACTS, MODELS
from kit.papers.layers import Drawn, Layer, Runs, curves, folders_with, study_points
from kit.papers.panels import legend_above, mark_demo_scale, picture
from kit.papers.recipes import floor_step, last_step, recipe, tokens_of
from kit.show.theme import BLUE, GREY, OLIVE, PURPLE, SLATE, VERMILION
from kit.trainer.spikes import spikes

ARM_COLOURS = (SLATE, BLUE, PURPLE, OLIVE, VERMILION)
Steps = list[dict[str, Any]]
STEPS_SHOWN = 60
"""Of a schedule of half a million."""
EXACT = (
    "nothing is fitted: the formula of the released scheduler (clamped), and of Megatron and NeMo"
    " (rescaled)"
)
TRAINING = "(a) loss, nats per token"
PRECISION = "precision.json"
"""File in which `hlat_demo.demo_precision` keeps its steps."""


def learning_rate_figure(runs: Runs = ()) -> Drawn:
    """Returns the learning-rate schedules of both models against tokens, clamped and rescaled;
    and the table.
    """
    own, tokens = curves(runs, "learning_rate")
    panels = {model: _schedules(model) for model in MODELS} | own
    paper = {"xlabel": "tokens, billions", "ylim": (0, None)}
    yours = {"title": "your runs: learning rate", "legend": {"loc": "upper right"}}

    def mark_ends(figure: Any) -> None:
        for axis in figure.axes[: len(MODELS)]:
            axis.axvline(1800, color=GREY, linewidth=0.8, linestyle=":")
        for axis in figure.axes:
            axis.ticklabel_format(axis="y", scilimits=(0, 0))
        legend_above(figure, 3)

    met = tokens_of("7B", floor_step("7B"))
    last = last_step("7B")
    end, other = (recipe("7B", kind).learning_rate_at(last) for kind in ("clamped", "rescaled"))
    return picture(
        panels,
        [
            paper | {"title": f"{name}: learning rate"}
            if name in MODELS
            else yours | {"xlabel": tokens[name]}
            for name in panels
        ],
        "Warm-up, then a cosine over 500,000 steps; dotted: 1.8 trillion tokens.",
        f"Clamped, as released, it meets its floor at {met / 1e12:.2f} trillion tokens.",
        f"At the end 7B has {end:.2g}; rescaled, as others do, it would have {other:.3g}.",
        notes=[f"2,000 steps of warm-up; 1.8 trillion tokens are {last:,} steps."],
        also=mark_ends,
        height=2.4 * ((len(panels) + 1) // 2) + 1.4,
    )


def _schedules(model: str) -> list[Layer]:
    """Returns both ends of a released schedule, and the whole of it with either meaning of its
    floor, against billions of tokens.
    """
    clamped = recipe(model, "clamped")
    ends = {"learning_rate": clamped.warmup_steps, "min_learning_rate": floor_step(model)}
    released = [
        FACTS.only(f"recipe_{field}", model).replace(x=str(tokens_of(model, step) / 1e9))
        for field, step in ends.items()
    ]
    layers = [Layer.published(released, label="peak and floor, released")]
    whole = np.linspace(1, clamped.decay_steps or 1, STEPS_SHOWN)
    steps = np.unique(np.concatenate([whole, [*ends.values()]]).astype(int))
    for kind in ("clamped", "rescaled"):
        rates = [recipe(model, kind).learning_rate_at(int(step)) for step in steps]
        layers.append(Layer.modelled(kind, tokens_of(model, steps) / 1e9, rates, error=EXACT))
    return layers


def data_mix_figure(runs: Runs = ()) -> Drawn:
    """Returns Table III, the data of the last 400 billion tokens of the 70B, as bars; and the
    table.
    """
    tokens = FACTS["mix_tokens"]
    shares = FACTS["mix_share"]
    whole = FACTS.value("mix_whole", "total")
    part = FACTS.value("mix_whole_share", "total")
    stage = FACTS.value("mix_stage", "length")
    begin = FACTS.value("mix_stage", "from")

    def bars(axis: Any, layers: Sequence[Layer]) -> None:
        [layer] = layers
        drawn = axis.barh(
            layer.x, layer.y, color="white", edgecolor=GREY, linewidth=1.4, height=0.4
        )
        told = [f"{t.number:g}, {s.number:.1f} %" for t, s in zip(tokens, shares, strict=True)]
        axis.bar_label(drawn, told, padding=4)
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

    figure, rows = picture(
        [Layer.published(tokens, label="billion tokens")],
        [{}],
        f"Data of the 70B from {begin:,g} billion tokens on, read {stage / whole:.2f} times.",
        "Its effect, in the paper's words: about +10 points in math, +5 in code.",
        notes=[
            f"{whole:g} billion tokens are said to be {part:g} % of the whole set, so that has"
            f" {whole / part / 10:.2f} trillion; {stage:g} billion tokens of training pass over"
            " them."
        ],
        fill=bars,
        height=3.6,
    )
    return figure, [
        row | {"share": s.number, "of": s.note} for row, s in zip(rows, shares, strict=True)
    ]


def loss_figure(
    runs: Runs = (), *, dress: Mapping[str, Mapping[str, Any]], paper_panels: bool = False
) -> Drawn:
    """Returns training loss against tokens, with marks where the kit's alerts see a spike; and the
    table.

    `dress` is that of the paper's panel and of yours, as `picture` takes it. `paper_panels` adds an
    empty one for the paper's own curve, which could not be read.

    Raises:
        ConfigError: none of the runs has a step, and there is no such panel.
    """
    own, tokens = curves(runs, "loss")
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
        [
            {**dress["yours"], "xlabel": tokens[name]} if name in tokens else dress[name]
            for name in panels
        ],
        "Training loss of your runs; crosses: what the kit's alerts call a spike.",
        f"Spikes: {count}. The paper's own curve could not be read.",
        also=mark_spikes,
        mosaic=";".join("abc"[: len(panels)]),
        height=2.8 * len(panels) + 0.6,
    )


def precision_figure(runs: Runs = ()) -> Drawn:
    """Returns the loss of a small model trained in four precisions, and how far each is from fp32;
    and the table.

    Raises:
        ConfigError: there is none.
    """
    arms, panels = _study(runs, PRECISION, "demo_precision")
    beyond = [layer.y - panels["held out"][0].y for layer in panels["held out"]]
    _, master, pure, stochastic = (f"{loss[-1]:+.3f}" for loss in beyond)
    said = "; ".join(f"{fact.x}: {fact.value}" for fact in FACTS["precision_outcome"])
    ends = "; ".join(f"{name} {loss:.3f}" for name, loss in last_losses(arms).items())
    styles = [{"linewidth": width} for width in (4.0, 2.4, 1.4, 0.9)]

    def mark_fp32(figure: Any) -> None:
        legend_above(figure, 2)
        figure.axes[1].axhline(0, color=GREY, linewidth=0.8)

    return picture(
        panels,
        [
            {
                "styles": styles,
                "title": TRAINING,
                "losses": [smooth(layer.y) for layer in panels["training"]],
            },
            {
                "styles": styles,
                "marker": "o",
                "title": "(b) held-out, less fp32's",
                "losses": beyond,
            },
        ],
        "A small model with the same weights and data in each precision.",
        f"At the end, over fp32: master {master}, pure {pure}, stochastic {stochastic}.",
        "Here a number is rounded once a step, on Trainium at every result.",
        notes=[
            f"Learning rates of HLAT's 7B. (a) is an average of about {EMA_STEPS} steps.",
            f"Held-out loss at the end: {ends}.",
            f"The paper, in words: {said}.",
        ],
        fill=_draw_arms,
        also=mark_fp32,
        height=4.5,
    )


def _draw_arms(
    axis: Any,
    layers: Sequence[Layer],
    *,
    styles: Sequence[Mapping[str, Any]],
    losses: Sequence[Any] | None = None,
    marker: str | None = None,
    **shown: Any,
) -> None:
    """Draws the arms of a study, which lie on each other; `losses` in place of their own."""
    losses = losses or [layer.y for layer in layers]
    for layer, loss, colour, style in zip(layers, losses, ARM_COLOURS, styles, strict=False):
        line = {"color": colour, "label": layer.label, "marker": marker, "markersize": 3}
        axis.plot(layer.x, loss, **line, **style)
    axis.set(xlabel="step", **shown)
    mark_demo_scale(axis)


def last_losses(arms: dict[str, Steps]) -> dict[str, float]:
    """Returns the last held-out loss of each arm of a study, nats per token."""
    return {name: _column(rows, "validation_loss")[1][-1] for name, rows in arms.items()}


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
