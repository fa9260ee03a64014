"""The papers' training recipes, for `kit launch --recipe NAME`: what they state, and what is
left to whoever trains.
"""

import dataclasses
from typing import Any

from cluster.record import ConfigError, suggestion
from cluster.site import Site
from kit.papers import frontier_model, hlat_model, hlat_recipes
from kit.papers.frontier_scaling import recipe_plan
from kit.papers.layers import Facts
from kit.plan import Plan

OPTIMIZER = (
    "learning_rate",
    "min_learning_rate",
    "beta1",
    "beta2",
    "weight_decay",
    "gradient_clip",
)
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
    return tuple(f"{paper}-{size.lower()}" for paper, sizes in _sizes().items() for size in sizes)


def published_recipe(name: str) -> PublishedRecipe:
    """Returns a recipe by the name of its paper and model: `frontier-175b`, `hlat-7b`.

    Raises:
        ConfigError: there is none of that name.
    """
    paper, _, size = name.partition("-")
    if name not in names():
        raise ConfigError(
            f"recipe: {name!r} is unknown. {suggestion(name, names())} Or give a .toml or .json"
            " file."
        )
    model = size.upper()
    known = Facts.load(paper)
    plan, stated = _frontier(known, model) if paper == "frontier" else _hlat(known, model)
    return PublishedRecipe(
        name=name,
        model=_sizes()[paper][model],
        plan=plan,
        stated=stated,
        not_stated=NOT_STATED[paper],
        source=known.only("recipe_learning_rate", model).source,
    )


def _sizes() -> dict[str, dict[str, str]]:
    return {"frontier": frontier_model.MODELS, "hlat": hlat_model.MODELS}


def _frontier(known: Facts, model: str) -> tuple[Plan, dict[str, Any]]:
    stated: dict[str, Any] = {name: known.value(f"recipe_{name}", model) for name in OPTIMIZER}
    stated["cosine_floor"] = known.only("recipe_cosine_floor", model).value
    return recipe_plan(model, engine="deepspeed", precision="fp16"), stated


def _hlat(known: Facts, model: str) -> tuple[Plan, dict[str, Any]]:
    released = hlat_recipes.recipe(model, "clamped")
    fields = (*OPTIMIZER, "eps", "cosine_floor", "warmup_steps", "decay_steps", "seed", "num_steps")
    stated = {name: getattr(released, name) for name in fields}
    stated["checkpoint_every"] = int(known.value("recipe_checkpoint_every", model))
    names = (
        "tensor_parallel",
        "pipeline_parallel",
        "zero_stage",
        "micro_batch_size",
        "global_batch_size",
    )
    degrees: dict[str, Any] = {name: int(known.value(f"recipe_{name}", model)) for name in names}
    degrees["recompute"] = known.only("recipe_recompute", model).value
    devices = (
        int(known.value("recipe_nodes_of_script", model))
        * Site.load(hlat_model.TRN1).devices_per_node
    )
    plan = Plan(
        **degrees,
        data_parallel=devices // (degrees["tensor_parallel"] * degrees["pipeline_parallel"]),
        sequence_parallel=known.only("recipe_sequence_parallel", model).value == "on",
        precision="bf16",
        engine="neuron",
    )
    return plan, stated
