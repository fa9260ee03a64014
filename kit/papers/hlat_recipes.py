"""HLAT: both models, hyperparameters and learning rates from the released code, and the data of
the last stage.
"""

import bisect
from typing import Any, Literal

import numpy as np

from kit.papers.hlat_model import MODELS, facts
from kit.papers.layers import Layer, Runs, curves, opened, scale_of
from kit.papers.panels import draw, draw_curves, finish, pairs, paper_table
from kit.recipe import Recipe
from kit.run import Run
from kit.show.style import Rows, new_figure
from kit.show.theme import GREY
from kit.spec import ModelSpec

EXACT = (
    "nothing is fitted: the formula of the released scheduler (clamped), and of Megatron and NeMo"
    " (rescaled)"
)
SHAPES = {
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "num_heads": "heads",
    "num_kv_heads": "key/value heads",
    "ffn_hidden_size": "feed-forward size (SwiGLU)",
    "vocab_size": "vocabulary",
    "sequence_length": "sequence length",
    "norm_eps": "epsilon of RMSNorm",
    "rope_theta": "rotary base",
    "init_std": "initial standard deviation",
}
RECIPE = {
    "global_batch_size": "global batch, sequences",
    "micro_batch_size": "micro-batch, sequences",
    "learning_rate": "peak learning rate",
    "min_learning_rate": "lowest learning rate",
    "warmup_steps": "warm-up, steps",
    "decay_steps": "cosine ends at step",
    "cosine_floor": "cosine meets its floor",
    "beta1": "beta 1",
    "beta2": "beta 2",
    "eps": "epsilon of AdamW",
    "weight_decay": "weight decay, norms too",
    "gradient_clip": "gradient clip, L2",
    "precision": "precision",
    "tensor_parallel": "tensor parallel",
    "pipeline_parallel": "pipeline parallel",
    "zero_stage": "ZeRO",
    "sequence_parallel": "sequence parallel",
    "recompute": "recompute (core attention)",
    "checkpoint_every": "checkpoint, every steps",
    "kept_checkpoint_every": "kept checkpoint, every steps",
    "seed": "seed",
    "nodes_of_script": "nodes of the script",
    "nodes_at_most": "nodes at most",
}
DEMO = " (demo scale)"
STEPS_SHOWN = 60
"""Of a schedule of half a million."""


OPTIMIZER = (
    "learning_rate",
    "min_learning_rate",
    "beta1",
    "beta2",
    "weight_decay",
    "gradient_clip",
)
"""Fields of a `Recipe` that both papers state."""


def models_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns both models' shapes from the released code with what follows from them, as a
    table.
    """
    counts = {name: _counts(ModelSpec.preset(preset)) for name, preset in MODELS.items()}
    own = {}
    for run in opened(runs):
        shapes = {label: f"{getattr(run.spec, key):g}" for key, label in SHAPES.items()}
        own[_title(run)] = shapes | _counts(run.spec)
    return _drawn(
        "model",
        SHAPES,
        counts,
        own,
        {"shapes": "model_num_layers", "sequence length": "model_sequence_length"},
        "Shapes of both models as released; the last four rows follow from them.",
        "Sequences of 4,096 tokens as in Table I, although the configuration files say 2,048: the"
        " script raises it.",
    )


def hyperparameters_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns both models' hyperparameters and layouts as released, with what follows from them,
    as a table.
    """
    schedules = {
        name: {
            "tokens per step": f"{int(_tokens(name, 1)):,}",
            "steps for 1.8 trillion tokens": f"{last_step(name):,}",
            "floor is reached at step": f"{floor_step(name):,}",
        }
        for name in MODELS
    }
    words = ("cosine_floor", "precision", "sequence_parallel", "recompute")
    return _drawn(
        "recipe",
        RECIPE,
        schedules,
        {_title(run): _own_recipe(run) for run in opened(runs)},
        {f"recipe_{key}": f"recipe_{key}" for key in RECIPE if key not in words},
        "Recipe and layout of both models as released; the last three rows follow from them.",
        "Where the paper names a value it is the same. The code's group of weights without decay"
        " matches the name of no weight, so norms decay too.",
    )


def _drawn(
    kind: str,
    labels: dict[str, str],
    computed: dict[str, dict[str, str]],
    own: dict[str, dict[str, str]],
    sources: dict[str, str],
    caption: str,
    note: str,
) -> tuple[Any, Rows]:
    """Returns a table of what the release states (`labels`, by their facts) and what is computed
    from that, for both models and your runs; and its rows with their kind.
    """
    columns = {
        name: {label: _fact(f"{kind}_{key}", name) for key, label in labels.items()} | follows
        for name, follows in computed.items()
    } | own
    rows: Rows = [
        {"": name} | {title: column.get(name, "") for title, column in columns.items()}
        for name in columns["7B"]
    ]
    layers = [Layer.published(facts()[series], label=label) for label, series in sources.items()]
    runs = [title.removesuffix(DEMO) for title in own]
    drawn = paper_table(rows, layers, caption, notes=[note], runs=runs)
    stated = labels.values()
    return drawn, [
        {"layer": "published" if row[""] in stated else "computed"} | row for row in rows
    ]


def learning_rate_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the learning-rate schedules of both models against tokens, clamped and rescaled;
    and the table.
    """
    panels: dict[str, list[Layer]] = {}
    for model in MODELS:
        steps = {
            "learning_rate": recipe(model, "clamped").warmup_steps,
            "min_learning_rate": floor_step(model),
        }
        ends = [
            facts().only(f"recipe_{name}", model).replace(x=str(_tokens(model, step) / 1e9))
            for name, step in steps.items()
        ]
        panels[model] = [
            Layer.published(ends, label="peak and floor, released"),
            *(schedule_layer(model, kind) for kind in ("clamped", "rescaled")),
        ]
    panels |= curves(runs, "learning_rate")
    mosaic = pairs(len(panels))
    with new_figure(mosaic, height=2.4 * (1 + mosaic.count(";")) + 1.4) as (figure, axes):
        for axis, (name, layers) in zip(axes, panels.items(), strict=True):
            if name in MODELS:
                draw(axis, layers)
                axis.axvline(1800, color=GREY, linewidth=0.8, linestyle=":")
                axis.set(title=f"{name}: learning rate", xlabel="tokens, billions", ylim=(0, None))
            else:
                draw_curves(axis, layers)
                axis.set(title="your runs: learning rate", xlabel="tokens, millions")
                axis.legend(loc="upper right")
            axis.ticklabel_format(axis="y", scilimits=(0, 0))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
        floor, last = _tokens("7B", floor_step("7B")), last_step("7B")
        end, other = (recipe("7B", kind).learning_rate_at(last) for kind in ("clamped", "rescaled"))
        return finish(
            figure,
            panels,
            "Warm-up, then a cosine over 500,000 steps; dotted: 1.8 trillion tokens.",
            f"Clamped, as released, it meets its floor at {floor / 1e12:.2f} trillion tokens.",
            f"At the end 7B has {end:.2g}; rescaled, as others do, it would have {other:.3g}.",
            notes=[f"2,000 steps of warm-up; 1.8 trillion tokens are {last:,} steps."],
        )


def data_mix_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns Table III, the data of the last 400 billion tokens of the 70B, as bars; and the
    table.
    """
    known = facts()
    tokens, shares = known["mix_tokens"], known["mix_share"]
    layer = Layer.published(tokens, label="billion tokens")
    whole, part = known.value("mix_whole", "total"), known.value("mix_whole_share", "total")
    stage, begin = known.value("mix_stage", "length"), known.value("mix_stage", "from")
    with new_figure(height=3.6) as (figure, axis):
        bars = axis.barh(
            range(len(layer.y)), layer.y, color="white", edgecolor=GREY, linewidth=1.4, height=0.4
        )
        axis.bar_label(
            bars,
            [f"{t.number:g}, {s.number:.1f} %" for t, s in zip(tokens, shares, strict=True)],
            padding=4,
        )
        for place, (name, fact) in enumerate(zip(layer.names, tokens, strict=True)):
            axis.text(0, place - 0.28, f"{name}: {fact.note}", va="bottom")
        axis.set(
            xlim=(0, 1.3 * layer.y.max()),
            ylim=(len(layer.y) - 0.6, -0.8),
            title="Table III: billion tokens",
        )
        axis.set(xticks=(0, 50, 100), yticks=())
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
    known = facts()
    numbers = {name: known.value(f"recipe_{name}", model) for name in (*OPTIMIZER, "eps")}
    steps = {
        name: int(known.value(f"recipe_{name}", model))
        for name in ("warmup_steps", "decay_steps", "seed")
    }
    fixed = {"data": "", "num_steps": last_step(model), "cosine_floor": cosine_floor}
    return Recipe.from_dict({**fixed, **numbers, **steps})


def last_step(model: str) -> int:
    """Returns the step at which 1.8 trillion tokens are reached."""
    return int(facts().value("recipe_training_tokens", model) / _tokens(model, 1))


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
    return Layer.modelled(kind, _tokens(model, steps) / 1e9, rates, error=EXACT)


def _tokens(model: str, steps: Any) -> Any:
    known = facts()
    return (
        steps
        * known.value("recipe_global_batch_size", model)
        * known.value("model_sequence_length", model)
    )


def _fact(series: str, x: str) -> str:
    value = facts().only(series, x).value
    return f"{int(value):,}" if value.isdigit() and len(value) > 4 else value


def _title(run: Run) -> str:
    return run.name + (DEMO if scale_of(run) == "demo" else "")


def _counts(spec: ModelSpec) -> dict[str, str]:
    return {
        "parameters": f"{spec.num_params:,}",
        "of them in blocks": f"{spec.num_layers * spec.params_per_layer:,}",
        "model FLOPs per token": f"{spec.flops_per_token():.4g}",
        "bytes of bf16 weights": f"{2 * spec.num_params / 1e9:.4g} GB",
    }


def _own_recipe(run: Run) -> dict[str, str]:
    """Returns the same rows of one run; what only HLAT's scripts have stays empty."""
    records = run.plan.to_dict() | run.recipe.to_dict()
    values = {
        label: str(records[key])
        for key, label in RECIPE.items()
        if key in records and records[key] is not None
    }
    tokens = run.plan.global_batch_size * run.spec.sequence_length
    return values | {
        "sequence parallel": "on" if run.plan.sequence_parallel else "off",
        "tokens per step": f"{tokens:,}",
    }
