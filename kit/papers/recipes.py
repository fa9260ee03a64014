"""The papers' training recipes, for `kit launch --recipe NAME`: what they state, and what is
left to whoever trains.
"""

import dataclasses
from typing import Any

from cluster.record import ConfigError, suggestion
from kit.papers import frontier_model, hlat_model, hlat_recipes
from kit.plan import Plan
from kit.recipe import Recipe

PAPERS = {"frontier": frontier_model, "hlat": hlat_model}
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
    return tuple(
        f"{paper}-{size.lower()}" for paper, found in PAPERS.items() for size in found.MODELS
    )


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
    model, facts = size.upper(), PAPERS[paper].FACTS
    stated = facts.fields(Recipe, model)
    if paper == "frontier":
        plan = frontier_model.recipe_plan(model, engine="deepspeed", precision="fp16")
    else:
        stated["num_steps"] = hlat_recipes.last_step(model)
        nodes = int(facts.value("recipe_nodes_of_script", model))
        zero = int(facts.value("recipe_zero_stage", model))
        plan = hlat_model.trn1_plan(model, nodes, zero_stage=zero, engine="neuron")
    return PublishedRecipe(
        name=name,
        model=PAPERS[paper].MODELS[model],
        plan=plan,
        stated=stated,
        not_stated=NOT_STATED[paper],
        source=facts.only("recipe_learning_rate", model).source,
    )
