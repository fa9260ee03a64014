"""HLAT: both models, hyperparameters and learning rates from the released code, and the data of
the last stage.
"""

import bisect
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from kit.papers.hlat_model import FACTS, MODELS
from kit.papers.layers import Layer, Runs, curves, opened
from kit.papers.panels import facts_table, finish, legend_above, picture, recipe_of
from kit.recipe import Recipe
from kit.show.style import Rows, new_figure
from kit.show.theme import GREY
from kit.spec import ModelSpec

STEPS_SHOWN = 60
"""Of a schedule of half a million."""


def models_figure(runs: Runs = (), *, labels: Mapping[str, str]) -> tuple[Any, Rows]:
    """Returns both models' shapes from the released code with what follows from them, as a table;
    `labels` are of the fields of a shape, by their series.
    """
    own = [
        (
            run,
            {
                label: f"{getattr(run.spec, series.removeprefix('model_')):g}"
                for series, label in labels.items()
            }
            | _counts(run.spec),
        )
        for run in opened(runs)
    ]
    layers = [
        Layer.published(FACTS["model_num_layers"], label="shapes"),
        Layer.published(FACTS["model_sequence_length"], label="sequence length"),
    ]
    return facts_table(
        FACTS,
        labels,
        {name: _counts(ModelSpec.preset(preset)) for name, preset in MODELS.items()},
        own,
        layers,
        "Shapes of both models as released; the last four rows follow from them.",
        note="Sequences of 4,096 tokens as in Table I, although the configuration files say 2,048:"
        " the script raises it.",
    )


def hyperparameters_figure(runs: Runs = (), *, labels: Mapping[str, str]) -> tuple[Any, Rows]:
    """Returns both models' hyperparameters and layouts as released, with what follows from them,
    as a table; `labels` are of the fields of a recipe, by their series.
    """
    schedules = {
        name: {
            "tokens per step": f"{int(_tokens(name, 1)):,}",
            "steps for 1.8 trillion tokens": f"{last_step(name):,}",
            "floor is reached at step": f"{floor_step(name):,}",
        }
        for name in MODELS
    }
    own = [
        (
            run,
            recipe_of(run, labels)
            | {
                "sequence parallel": "on" if run.plan.sequence_parallel else "off",
                "tokens per step": f"{run.plan.global_batch_size * run.spec.sequence_length:,}",
            },
        )
        for run in opened(runs)
    ]
    words = ("cosine_floor", "precision", "sequence_parallel", "recompute")
    numbers = [series for series in labels if series.removeprefix("recipe_") not in words]
    return facts_table(
        FACTS,
        labels,
        schedules,
        own,
        [Layer.published(FACTS[series], label=series) for series in numbers],
        "Recipe and layout of both models as released; the last three rows follow from them.",
        note="Where the paper names a value it is the same. The code's group of weights without"
        " decay matches the name of no weight, so norms decay too.",
    )


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
            fact.replace(x=str(_tokens(model, step) / 1e9))
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

    met, last = _tokens("7B", floor_step("7B")), last_step("7B")
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


def recipe(model: str, cosine_floor: Literal["clamped", "rescaled"]) -> Recipe:
    """Returns HLAT's recipe for `7B` or `70B`, with either meaning of the floor."""
    own = {"data": "", "num_steps": last_step(model), "cosine_floor": cosine_floor}
    return Recipe.from_dict(FACTS.fields(Recipe, model) | own)


def last_step(model: str) -> int:
    """Returns the step at which 1.8 trillion tokens are reached."""
    return int(FACTS.value("recipe_training_tokens", model) / _tokens(model, 1))


def floor_step(model: str) -> int:
    """Returns the first step at which the clamped schedule is at its floor."""
    clamped = recipe(model, "clamped")
    steps = range(clamped.warmup_steps, clamped.decay_steps or 0)
    falling = bisect.bisect_left(
        steps, -clamped.min_learning_rate, key=lambda step: -clamped.learning_rate_at(step)
    )
    return steps[falling]


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
    return Layer.modelled(kind, _tokens(model, steps) / 1e9, rates, error=exact)


def _tokens(model: str, steps: Any) -> Any:
    batch = FACTS.value("recipe_global_batch_size", model)
    return steps * batch * FACTS.value("model_sequence_length", model)


def _counts(spec: ModelSpec) -> dict[str, str]:
    return {
        "parameters": f"{spec.num_params:,}",
        "of them in blocks": f"{spec.num_layers * spec.params_per_layer:,}",
        "model FLOPs per token": f"{spec.flops_per_token():.4g}",
        "bytes of bf16 weights": f"{2 * spec.num_params / 1e9:.4g} GB",
    }
