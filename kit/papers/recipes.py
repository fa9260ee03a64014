"""Published recipes of both papers. They are shown as tables with derived numbers, and started by
`kit launch --recipe NAME`.

The user must give values that a paper does not publish.
"""

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from cluster.record import ConfigError, suggestion
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.estimate.choose.candidates import SEARCHED_FIELDS
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.memory import memory
from kit.estimate.theory.out_of_memory import RESERVE
from kit.papers import frontier_model, hlat_model
from kit.papers.facts import Known
from kit.papers.frontier_demo import run_hfu_percent
from kit.papers.layers import FigureLayer, Runs, by_scale, measured_on_clusters, open_runs
from kit.papers.panels import TableContent, paper_facts_table

PAPERS = {"frontier": frontier_model, "hlat": hlat_model}
"""Maps the short name of each paper to a module. The module has the published numbers of the paper,
the names of its models, and the error of the planner's predictions."""
NOT_STATED = {
    "frontier": {
        "num_steps": "the scripts only time some steps",
        "warmup_steps": "the scripts only time some steps",
    },
    "hlat": {},
}
"""Maps the short name of each paper to the fields of `Recipe` that the paper does not publish and
the user must give. The fields are a dict from field name to the reason."""
SITES = {"frontier": "frontier", "hlat": hlat_model.TRN1}
"""Maps the short name of each paper to the site (description of a machine) on which its models were
trained."""
FRONTIER = frontier_model.FACTS
HLAT = hlat_model.FACTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRecipe:
    """A published training: model, layout, fields of a `Recipe`, and the site on which the model
    was trained.

    The data set is not part of it. The user always gives one.
    """

    name: str
    model: str
    site: str
    plan: Plan
    stated: dict[str, Any]
    """Published fields of `Recipe`, with their values."""
    not_stated: dict[str, str]
    """Fields of `Recipe` that the user must give, with the reason why each was not published."""
    known: dict[str, Known]
    """Reliability (read, quoted, derived or remembered) of each published field of plan and recipe.
    Fields that keep a default of the kit are left out."""
    source: str

    @property
    def spec(self) -> ModelSpec:
        """Shape of the model."""
        return ModelSpec.preset(self.model)


def names() -> tuple[str, ...]:
    """Returns the names of all published recipes, such as `frontier-175b`. `published_recipe`
    accepts these names.
    """
    return tuple(
        f"{paper}-{size.lower()}" for paper, found in PAPERS.items() for size in found.MODELS
    )


def published_recipe(name: str, replicas: int = 0) -> PublishedRecipe:
    """Returns the published model, layout, recipe and site of a training, with the reliability of
    each field.

    Args:
        name: name of the paper and the model, such as `frontier-175b` or `hlat-7b`.
        replicas: number of replicas. 0: the number in the released script. Another number changes
            the global batch of a Frontier recipe, since the batch per replica stays constant. The
            global batch of an HLAT recipe stays constant and is divided among the replicas.

    Raises:
        ConfigError: No recipe has this name.
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
        stated["num_steps"] = final_step(model)
        nodes = int(facts.value("recipe_nodes_of_script", model))
        zero = int(facts.value("recipe_zero_stage", model))
        plan = hlat_model.trn1_plan(model, nodes, zero_stage=zero, engine="neuron")
        plan = plan.replace(data_parallel=replicas or plan.data_parallel)
    derived = ["data_parallel"]
    if paper == "frontier" and replicas > 0:
        derived.append("global_batch_size")
    return PublishedRecipe(
        name=name,
        model=PAPERS[paper].MODELS[model],
        site=SITES[paper],
        plan=plan,
        stated=stated,
        not_stated=NOT_STATED[paper],
        known=facts.known("recipe_", model) | dict.fromkeys(derived, "derived"),
        source=facts.only("recipe_learning_rate", model).source,
    )


def plan_arguments(name: str, devices: int | None = None) -> dict[str, Any]:
    """Returns the arguments of `plan_report` that ask for the published layout of a recipe on the
    machine on which it was trained. fp16 is planned as bf16, since both are equally fast.

    `devices` changes the number of replicas (`published_recipe`). Default: the number of devices in
    the released script.

    Raises:
        ConfigError: No recipe has this name, or a replica needs another number of devices.
    """
    recipe = published_recipe(name)
    if devices is not None:
        of_replica = recipe.plan.num_devices // recipe.plan.data_parallel
        if devices < 1 or devices % of_replica:
            raise ConfigError(
                f"--devices {devices}: a replica of {name} has {of_replica:,} devices. Give a"
                f" multiple, or plan the model {recipe.model} with --batch, to search for another"
                " layout."
            )
        recipe = published_recipe(name, devices // of_replica)
    plan = recipe.plan
    return {
        "model": recipe.model,
        "site": recipe.site,
        "devices": plan.num_devices,
        "batch": plan.global_batch_size,
        "engine": plan.engine,
        "only": {field: [getattr(plan, field)] for field in SEARCHED_FIELDS},
    }


# HLAT's schedule ----------------------------------------------------------------------------------


def recipe(model: str, cosine_floor: Literal["clamped", "rescaled"]) -> Recipe:
    """Returns HLAT's recipe for the model `7B` or `70B`. `cosine_floor` selects one of two meanings
    of the learning-rate floor: the cosine is clamped at the floor, or rescaled to end at the floor.
    """
    own = {"data": "", "num_steps": final_step(model), "cosine_floor": cosine_floor}
    return Recipe.from_dict(HLAT.fields(Recipe, model) | own)


def final_step(model: str) -> int:
    """Returns the number of HLAT's last training step, at which the model has been trained on all
    1.8 trillion tokens.
    """
    return int(HLAT.value("recipe_training_tokens", model) / tokens_of(model, 1))


def floor_step(model: str) -> int:
    """Returns the first step at which HLAT's learning rate has reached its floor, if the cosine is
    clamped at the floor.
    """
    clamped = recipe(model, "clamped")
    steps = range(clamped.warmup_steps, clamped.decay_steps or 0)
    falling = bisect.bisect_left(
        steps, -clamped.min_learning_rate, key=lambda step: -clamped.learning_rate_at(step)
    )
    return steps[falling]


def tokens_of(model: str, steps: Any) -> Any:
    """Returns the number of tokens that HLAT trains on in a number of steps. `steps` may be an
    array.
    """
    batch = HLAT.value("recipe_global_batch_size", model)
    return steps * batch * HLAT.value("model_sequence_length", model)


# Tables ------------------------------------------------------------------------------------------


def frontier_recipes_content(runs: Runs = (), *, labels: Mapping[str, str]) -> TableContent:
    """Returns the table of the recipes in the Frontier authors' scripts, with the planner's
    predictions for each recipe.

    `labels` maps each series of published numbers that the table shows to the label of its row.
    """
    layers = [
        FigureLayer.published(FRONTIER["throughput_percent"], label="throughput"),
        FigureLayer.published(FRONTIER["recipe_pipeline_parallel"], label="layouts"),
        FigureLayer.modelled("recipes", error=frontier_model.model_error()),
        *measured_on_clusters(runs, x=lambda run: 0.0, y=lambda run: run.metrics().tokens_per_s),
    ]
    own = []
    for run in by_scale(runs)["cluster"]:
        hfu_percent = np.nanmedian(run_hfu_percent(run))
        cells = {
            "GCDs of the script": str(run.plan.num_devices),
            "% of peak, abstract": f"{hfu_percent:.1f} (measured)",
        }
        own.append((run, cells))
    predicted = {model: _predicted_cells(model) for model in frontier_model.MODELS}
    return paper_facts_table(FRONTIER, predicted, own, layers, labels=labels, kind="modelled")


def _predicted_cells(model: str) -> dict[str, str]:
    """Returns a dict from row label to table cell for one recipe: predictions of the planner, and
    numbers derived from the layout.
    """
    spec = ModelSpec.preset(frontier_model.MODELS[model])
    plan = frontier_model.recipe_plan(model)
    layouts = frontier_model.frontier_layouts(spec, [plan])
    stages = memory(layouts, kernels=MEGATRON, reserve=RESERVE)
    used_gib = float(stages.used_bytes.max()) / 2**30
    capacity = float(frontier_model.frontier_calibration().hardware.memory_bytes)
    risk = float(stages.out_of_memory_probability(capacity).max())
    m = plan.num_microbatches
    p = plan.pipeline_parallel
    rate = frontier_model.throughput_layer("", [0], [(spec, layouts)])
    return {
        "replicas": str(plan.data_parallel),
        "micro-batches per replica": str(m),
        "bubble (p-1)/(m+p-1)": f"{(p - 1) / (m + p - 1):.1%}",
        "GiB on the fullest GCD, modelled": f"{used_gib:.0f}",
        "risk of out of memory, modelled": f"{risk:.1%}",
        "% of peak, modelled (HFU)": f"{rate.y[0]:.1f} ({rate.low[0]:.1f} to {rate.high[0]:.1f})",
    }


def hlat_models_content(runs: Runs = (), *, labels: Mapping[str, str]) -> TableContent:
    """Returns the table of the shapes of both HLAT models, as in the released code, with derived
    numbers.

    `labels` maps each series of published numbers that the table shows to the label of its row.
    """
    layers = [
        FigureLayer.published(HLAT["model_num_layers"], label="shapes"),
        FigureLayer.published(HLAT["model_sequence_length"], label="sequence length"),
    ]
    own = [(run, _counts(run.spec)) for run in open_runs(runs)]
    follows = {}
    for name, preset in hlat_model.MODELS.items():
        follows[name] = _counts(ModelSpec.preset(preset))
    return paper_facts_table(HLAT, follows, own, layers, labels=labels)


def _counts(spec: ModelSpec) -> dict[str, str]:
    return {
        "parameters": f"{spec.num_params:,}",
        "parameters in blocks": f"{spec.num_layers * spec.params_per_layer:,}",
        "model FLOPs per token": f"{spec.flops_per_token():.4g}",
        "bytes of bf16 weights": f"{2 * spec.num_params / 1e9:.4g} GB",
    }


def hlat_recipes_content(runs: Runs = (), *, labels: Mapping[str, str]) -> TableContent:
    """Returns the table of HLAT's released hyperparameters and layouts, with numbers derived from
    them.

    `labels` maps each series of published numbers that the table shows to the label of its row.
    """
    follows = {}
    for name in hlat_model.MODELS:
        follows[name] = {
            "tokens per step": f"{int(tokens_of(name, 1)):,}",
            "steps for 1.8 trillion tokens": f"{final_step(name):,}",
            "lowest rate reached at step": f"{floor_step(name):,}",
        }
    own = []
    for run in open_runs(runs):
        sequence_parallel = "on" if run.plan.sequence_parallel else "off"
        tokens = run.plan.global_batch_size * run.spec.sequence_length
        cells = {"sequence parallel": sequence_parallel, "tokens per step": f"{tokens:,}"}
        own.append((run, cells))
    numbers = [
        FigureLayer.published(HLAT[series], label=series)
        for series in labels
        if not isinstance(HLAT[series][0].parsed, str)
    ]
    return paper_facts_table(HLAT, follows, own, numbers, labels=labels)
