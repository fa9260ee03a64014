"""The papers' recipes: as tables, with what follows from them, and for `kit launch --recipe NAME`;
what they leave to whoever trains.
"""

import bisect
import dataclasses
from typing import Any, Literal

import numpy as np

from cluster.record import ConfigError, suggestion
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.memory import memory
from kit.estimate.theory.out_of_memory import RESERVE
from kit.papers import frontier_model, hlat_model
from kit.papers.facts import Known
from kit.papers.frontier_demo import run_hfu_percent
from kit.papers.layers import Drawn, Layer, Runs, by_scale, on_clusters, opened
from kit.papers.panels import facts_table

PAPERS = {"frontier": frontier_model, "hlat": hlat_model}
"""Where the facts of each paper are, and how wrong the model is."""
NOT_STATED = {
    "frontier": {
        "num_steps": "the scripts only time some steps",
        "warmup_steps": "the scripts only time some steps",
    },
    "hlat": {},
}
"""Fields without which nobody should train, and why a paper's release does not give them."""
FRONTIER = frontier_model.FACTS
HLAT = hlat_model.FACTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRecipe:
    """A model, its layout and fields of a `Recipe` as published, and where it ran; the data is
    always the reader's own.
    """

    name: str
    model: str
    site: str
    plan: Plan
    stated: dict[str, Any]
    not_stated: dict[str, str]
    """Fields that are to be filled in, and why they are not stated."""
    known: dict[str, Known]
    """How each field of the plan and the recipe is known that is not a default of the kit."""
    source: str

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return ModelSpec.preset(self.model)


def names() -> tuple[str, ...]:
    """Returns the names that `published_recipe` takes."""
    return tuple(
        f"{paper}-{size.lower()}" for paper, found in PAPERS.items() for size in found.MODELS
    )


def published_recipe(name: str, replicas: int = 0) -> PublishedRecipe:
    """Returns what was published of a training by the name of its paper and model, such as
    `frontier-175b` or `hlat-7b`: model, layout, recipe and site, each field with how it is known.

    On another number of `replicas` than the released script's, Frontier's keep their share of the
    batch, and HLAT's divide the same batch.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in names():
        raise ConfigError(
            f"recipe: {name!r} is unknown. {suggestion(name, names())} Or give a .toml or .json"
            " file."
        )
    paper, _, size = name.partition("-")
    model = size.upper()
    facts = PAPERS[paper].FACTS
    stated = facts.fields(Recipe, model)
    if paper == "frontier":
        plan = frontier_model.recipe_plan(model, replicas, engine="deepspeed", precision="fp16")
    else:
        stated["num_steps"] = last_step(model)
        nodes = int(facts.value("recipe_nodes_of_script", model))
        zero = int(facts.value("recipe_zero_stage", model))
        plan = hlat_model.trn1_plan(model, nodes, zero_stage=zero, engine="neuron")
        plan = plan.replace(data_parallel=replicas or plan.data_parallel)
    follows = ["data_parallel", "global_batch_size"][: 1 + (replicas > 0 and paper == "frontier")]
    return PublishedRecipe(
        name=name,
        model=PAPERS[paper].MODELS[model],
        site="frontier" if paper == "frontier" else hlat_model.TRN1,
        plan=plan,
        stated=stated,
        not_stated=NOT_STATED[paper],
        known=facts.known("recipe_", model) | dict.fromkeys(follows, "derived"),
        source=facts.only("recipe_learning_rate", model).source,
    )


# HLAT's schedule ----------------------------------------------------------------------------------


def recipe(model: str, cosine_floor: Literal["clamped", "rescaled"]) -> Recipe:
    """Returns HLAT's recipe for `7B` or `70B`, with either meaning of the floor."""
    own = {"data": "", "num_steps": last_step(model), "cosine_floor": cosine_floor}
    return Recipe.from_dict(HLAT.fields(Recipe, model) | own)


def last_step(model: str) -> int:
    """Returns the step at which 1.8 trillion tokens are reached."""
    return int(HLAT.value("recipe_training_tokens", model) / tokens_of(model, 1))


def floor_step(model: str) -> int:
    """Returns the first step at which the clamped schedule is at its floor."""
    clamped = recipe(model, "clamped")
    steps = range(clamped.warmup_steps, clamped.decay_steps or 0)
    falling = bisect.bisect_left(
        steps, -clamped.min_learning_rate, key=lambda step: -clamped.learning_rate_at(step)
    )
    return steps[falling]


def tokens_of(model: str, steps: Any) -> Any:
    """Returns the tokens of some of HLAT's steps."""
    batch = HLAT.value("recipe_global_batch_size", model)
    return steps * batch * HLAT.value("model_sequence_length", model)


# Tables: `words` are labels, caption and note, as of `facts_table` -------------------------------


def frontier_figure(runs: Runs = (), **words: Any) -> Drawn:
    """Returns the recipes as the authors' scripts have them, with what the model says of each, as a
    table.
    """
    layers = [
        Layer.published(FRONTIER["throughput_percent"], label="throughput"),
        Layer.published(FRONTIER["recipe_pipeline_parallel"], label="layouts"),
        Layer.modelled("recipes", error=frontier_model.model_error()),
        *on_clusters(runs, x=lambda run: 0.0, y=lambda run: run.metrics().tokens_per_s),
    ]
    own = [
        (
            run,
            {
                "GCDs of the script": str(run.plan.num_devices),
                "% of peak, abstract": f"{np.nanmedian(run_hfu_percent(run)):.1f} (measured)",
            },
        )
        for run in by_scale(runs)["cluster"]
    ]
    follows = {model: _modelled(model) for model in frontier_model.MODELS}
    return facts_table(FRONTIER, follows, own, layers, kind="modelled", **words)


def _modelled(model: str) -> dict[str, str]:
    """Returns what the model says of a recipe."""
    spec = ModelSpec.preset(frontier_model.MODELS[model])
    plan = frontier_model.recipe_plan(model)
    layouts = frontier_model.layouts_of(spec, [plan])
    held = memory(layouts, kernels=MEGATRON, reserve=RESERVE)
    size = float(frontier_model.calibration().hardware.memory_bytes)
    m = plan.num_microbatches
    p = plan.pipeline_parallel
    rate = frontier_model.throughput_layer("", [0], [(spec, layouts)])
    return {
        "replicas": str(plan.data_parallel),
        "micro-batches per replica": str(m),
        "bubble (p-1)/(m+p-1)": f"{(p - 1) / (m + p - 1):.1%}",
        "GiB on the fullest GCD, modelled": f"{float(held.used_bytes.max()) / 2**30:.0f}",
        "risk of out of memory, modelled": (
            f"{float(held.out_of_memory_probability(size).max()):.1%}"
        ),
        "% of peak, modelled (HFU)": f"{rate.y[0]:.1f} ({rate.low[0]:.1f} to {rate.high[0]:.1f})",
    }


def models_figure(runs: Runs = (), **words: Any) -> Drawn:
    """Returns both of HLAT's models, their shapes from the released code with what follows from
    them, as a table.
    """
    layers = [
        Layer.published(HLAT["model_num_layers"], label="shapes"),
        Layer.published(HLAT["model_sequence_length"], label="sequence length"),
    ]
    own = [(run, _counts(run.spec)) for run in opened(runs)]
    follows = {
        name: _counts(ModelSpec.preset(preset)) for name, preset in hlat_model.MODELS.items()
    }
    return facts_table(HLAT, follows, own, layers, **words)


def _counts(spec: ModelSpec) -> dict[str, str]:
    return {
        "parameters": f"{spec.num_params:,}",
        "of them in blocks": f"{spec.num_layers * spec.params_per_layer:,}",
        "model FLOPs per token": f"{spec.flops_per_token():.4g}",
        "bytes of bf16 weights": f"{2 * spec.num_params / 1e9:.4g} GB",
    }


def hlat_figure(runs: Runs = (), **words: Any) -> Drawn:
    """Returns HLAT's hyperparameters and layouts as released, with what follows from them, as a
    table.
    """
    follows = {
        name: {
            "tokens per step": f"{int(tokens_of(name, 1)):,}",
            "steps for 1.8 trillion tokens": f"{last_step(name):,}",
            "floor is reached at step": f"{floor_step(name):,}",
        }
        for name in hlat_model.MODELS
    }
    own = [
        (
            run,
            {
                "sequence parallel": "on" if run.plan.sequence_parallel else "off",
                "tokens per step": f"{run.plan.global_batch_size * run.spec.sequence_length:,}",
            },
        )
        for run in opened(runs)
    ]
    numbers = [
        Layer.published(HLAT[series], label=series)
        for series in words["labels"]
        if not isinstance(HLAT[series][0].parsed, str)
    ]
    return facts_table(HLAT, follows, own, numbers, **words)
