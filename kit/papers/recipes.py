"""The papers' training recipes, for `kit launch --recipe NAME`: what they state, and what is
left to whoever trains.
"""

import dataclasses
from typing import Any

from cluster.record import ConfigError, suggestion
from cluster.site import Site
from kit.papers import frontier_model, hlat_model, hlat_recipes
from kit.papers.frontier_scaling import LAYOUT, recipe_plan
from kit.papers.layers import Facts
from kit.plan import Plan

MODELS = {"frontier": frontier_model.MODELS, "hlat": hlat_model.MODELS}
NOT_STATED = {
    "frontier": {
        "num_steps": "the scripts only time some steps",
        "warmup_steps": "the scripts only time some steps",
    },
    "hlat": {},
}
"""Fields without which nobody should train, and why a paper's release does not give them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRecipe:
    """A model, its layout and fields of a `Recipe` as published; the data is always the reader's
    own.
    """

    name: str
    model: str
    plan: Plan
    stated: dict[str, Any]
    not_stated: dict[str, str]
    """Fields that are to be filled in, and why they are not stated."""
    source: str


def names() -> tuple[str, ...]:
    """Returns the names that `published_recipe` takes."""
    return tuple(f"{paper}-{size.lower()}" for paper, sizes in MODELS.items() for size in sizes)


def published_recipe(name: str) -> PublishedRecipe:
    """Returns a recipe by the name of its paper and model: `frontier-175b`, `hlat-7b`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in names():
        raise ConfigError(
            f"recipe: {name!r} is unknown. {suggestion(name, names())} Or give a .toml or .json"
            " file."
        )
    paper, _, size = name.partition("-")
    known, model = Facts.load(paper), size.upper()
    if paper == "frontier":
        plan = recipe_plan(model, engine="deepspeed", precision="fp16")
        stated: dict[str, Any] = {
            field: known.value(f"recipe_{field}", model) for field in hlat_recipes.OPTIMIZER
        }
        stated["cosine_floor"] = known.only("recipe_cosine_floor", model).value
    else:
        plan, released = _hlat_plan(known, model), hlat_recipes.recipe(model, "clamped")
        others = ("eps", "cosine_floor", "warmup_steps", "decay_steps", "seed", "num_steps")
        stated = {field: getattr(released, field) for field in (*hlat_recipes.OPTIMIZER, *others)}
        stated["checkpoint_every"] = int(known.value("recipe_checkpoint_every", model))
    return PublishedRecipe(
        name=name,
        model=MODELS[paper][model],
        plan=plan,
        stated=stated,
        not_stated=NOT_STATED[paper],
        source=known.only("recipe_learning_rate", model).source,
    )


def _hlat_plan(known: Facts, model: str) -> Plan:
    fields: dict[str, Any] = {field: int(known.value(f"recipe_{field}", model)) for field in LAYOUT}
    fields["recompute"] = known.only("recipe_recompute", model).value
    nodes = int(known.value("recipe_nodes_of_script", model))
    devices = nodes * Site.load(hlat_model.TRN1).devices_per_node
    return Plan(
        **fields,
        data_parallel=devices // (fields["tensor_parallel"] * fields["pipeline_parallel"]),
        sequence_parallel=known.only("recipe_sequence_parallel", model).value == "on",
        precision="bf16",
        engine="neuron",
    )
