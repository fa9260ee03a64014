"""Gathers the settings of a launch, model, layout and recipe, from all places that may give them.

The places are options, --set, a recipe or plan that the user names, a run that has begun, and the
demo. `gather_settings` says which place takes precedence.
"""

import dataclasses
import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.scheduler import EDIT
from kit.cli.options import note
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.interop.weights.hugging_face_config import training_spec
from kit.run import Run

if TYPE_CHECKING:
    from kit.papers.recipes import PublishedRecipe

DEMO = "demo"
DEMO_PLAN = Plan(global_batch_size=16, micro_batch_size=4)
REQUIRED = {"data": "--data FOLDER, made by `kit data build`", "num_steps": "--steps N"}
"""Advice on how to give each field of a recipe that has no default, by field."""
PLACEHOLDERS = {"data": EDIT, "num_steps": 2**40}
"""Placeholders for missing required fields, with which the other fields of a recipe can be checked.
The number of steps is larger than any warm-up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Model, layout and recipe of a launch, as far as they are known."""

    spec: ModelSpec
    plan: Plan
    recipe_fields: dict[str, Any]
    """Known fields of the recipe. Other fields have the default of `Recipe` or are in `missing`."""
    missing: dict[str, str]
    """Advice on how to give each recipe field that must be given before a launch, by field."""
    to_edit: tuple[str, ...]
    """Names of missing fields with the value EDIT, which the user must replace."""
    gpu_defaults: dict[str, Any]
    """Values on GPUs of the plan's fields that are not given, by field."""
    notes: tuple[str, ...]
    """Warnings about settings that do not fit each other."""

    def refuse_to_edit(self, unused: Collection[str]) -> None:
        """Raises ConfigError for the first field of the recipe that the user must edit. The fields
        in `unused` may be left as they are.
        """
        for name in self.to_edit:
            if name not in unused:
                raise ConfigError(f"recipe.{name}: {self.missing[name]}. Give a value.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedRecipe:
    """The recipe that the user names. All fields are empty if the user names none."""

    name: str = ""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    not_stated: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reason for each recipe field that the publication does not state, by field."""
    published: "PublishedRecipe | None" = None
    """Published recipe of this name. None for a recipe from a file."""


def gather_settings(
    model: str | None,
    recipe: str | None,
    plan: Path | None,
    options: dict[str, Any],
    changes: dict[str, dict[str, Any]],
    begun: Run | None = None,
) -> LaunchSettings:
    """Returns the settings of a launch.

    The first of these places that gives a setting takes precedence:

    - model: `model`, the folder in `recipe.init_from`, the published recipe, `begun`, the demo.
    - layout: `changes`, `plan`, `begun`, the published recipe for its own model, the demo.
    - recipe: `changes`, `options`, `recipe`, `begun`, the demo.

    Args:
        model: model that the user names.
        recipe: name of a published recipe, or a .toml or .json file.
        plan: file of a layout.
        options: fields of the recipe that have their own command-line option. The value None means
            that the option is not given.
        changes: fields of `spec`, `plan` and `recipe` that are given by --set.
        begun: run that is in the directory already.

    Raises:
        ConfigError: Model, recipe or layout is missing or unknown.
    """
    named_recipe = _named_recipe(recipe)
    published = named_recipe.published
    name, spec = _model(model, published, changes, begun)

    given_options = {field: value for field, value in options.items() if value is not None}
    if begun is not None:
        base_fields = begun.recipe.to_dict()
    elif recipe is None:
        base_fields = _demo_fields(name, given_options)
    else:
        base_fields = {}
    fields = {**base_fields, **named_recipe.fields, **given_options, **changes["recipe"]}
    to_edit = tuple(field for field, value in fields.items() if value == EDIT)
    known_fields = {field: value for field, value in fields.items() if value != EDIT}

    base: Plan | None = None
    if plan is not None:
        base = Plan.read(plan)
    elif begun is not None:
        base = begun.plan
    elif published is not None and published.model == name:
        base = published.plan
    gpu_defaults = {}
    if base is not None:
        layout = Plan.from_dict({**base.to_dict(), **changes["plan"]})
    else:
        layout = _new_layout(name, changes["plan"])
        for field, value in layout.gpu_defaults.items():
            if field not in changes["plan"]:
                gpu_defaults[field] = value

    return LaunchSettings(
        spec=spec.replace(**changes["spec"]),
        plan=layout,
        recipe_fields=known_fields,
        missing=_missing(known_fields, to_edit, named_recipe),
        to_edit=to_edit,
        gpu_defaults=gpu_defaults,
        notes=_batch_notes(published, layout),
    )


def _named_recipe(recipe: str | None) -> NamedRecipe:
    """Returns the recipe that the user names. Raises ConfigError if the name is unknown."""
    if recipe is None:
        return NamedRecipe()
    if Path(recipe).suffix in (".toml", ".json"):
        return NamedRecipe(name=recipe, fields=read_fields(Path(recipe)))
    from kit.papers.recipes import published_recipe

    published = published_recipe(recipe)
    return NamedRecipe(
        name=recipe,
        fields=published.stated,
        not_stated=published.not_stated,
        published=published,
    )


def _model(
    model: str | None,
    published: "PublishedRecipe | None",
    changes: dict[str, dict[str, Any]],
    begun: Run | None,
) -> tuple[str, ModelSpec]:
    """Returns (name, shape) of the model. The arguments are those of `gather_settings`.

    Raises:
        ConfigError: The model is unknown, or the folder of its weights does not exist.
    """
    weights = changes["recipe"].get("init_from")
    if weights is not None and model is None and not Path(str(weights)).is_dir():
        raise ConfigError(
            f"recipe.init_from: {weights}: no such folder. Give one with config.json and"
            " *.safetensors, or, where it lies behind a login node, its --model too."
        )
    named = model or weights
    if not named and published is not None:
        named = published.model
    if not named and begun is not None:
        return DEMO, begun.spec
    name = str(named or DEMO)
    length = changes["spec"].get("sequence_length")
    spec, notes = training_spec(name, sequence_length=length, purpose="import")
    for text in notes:
        note(f"{name}: {text}. Another: --set spec.sequence_length=TOKENS.")
    return name, spec


def _new_layout(name: str, changes: dict[str, Any]) -> Plan:
    """Returns the layout for a launch without a plan. Only the demo model has a default layout.

    Raises:
        ConfigError: The model is not the demo, and no batch size is given.
    """
    if name == DEMO:
        return Plan.from_dict({**DEMO_PLAN.to_dict(), **changes})
    if "global_batch_size" not in changes:
        raise ConfigError(
            f"--plan: {name!r} needs a layout and a batch. Give --plan FILE, made by `kit plan"
            f" {name} --out FILE`, or --set plan.global_batch_size=VALUE with the degrees that are"
            " not 1."
        )
    return Plan.from_dict(changes)


def _demo_fields(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe fields of the demo model. Raises ConfigError for another model."""
    if name != DEMO:
        from kit.papers.recipes import names

        raise ConfigError(
            f"--recipe: {name!r} needs one, since the learning rate and batch of the demo would not"
            " train it. Give a .toml or .json file with the fields of Recipe, or a published one:"
            f" {', '.join(names())}."
        )
    steps = options.get("num_steps", 100)
    return {
        "data": "data/demo",
        "num_steps": steps,
        "learning_rate": 3e-3,
        "min_learning_rate": 3e-4,
        "warmup_steps": steps // 10,
    }


def _missing(
    known_fields: dict[str, Any], to_edit: tuple[str, ...], named_recipe: NamedRecipe
) -> dict[str, str]:
    """Returns advice on how to give each required field that is not known, by field."""
    how_to_give = dict(REQUIRED)
    for field, why in named_recipe.not_stated.items():
        how_to_give[field] = (
            f"{named_recipe.name} does not state it ({why}). Give --set recipe.{field}=VALUE"
        )
    for field in to_edit:
        how_to_give[field] = f"still {EDIT!r} in {named_recipe.name or '--set'}"
    return {field: how for field, how in how_to_give.items() if field not in known_fields}


def _batch_notes(published: "PublishedRecipe | None", layout: Plan) -> tuple[str, ...]:
    """Returns a warning if a published recipe is used with another batch size than its own."""
    if published is None or published.plan.global_batch_size == layout.global_batch_size:
        return ()
    return (
        f"Recipe {published.name} was published for batches of"
        f" {published.plan.global_batch_size:,} sequences, and the plan has"
        f" {layout.global_batch_size:,}. The recipe's learning rate and number of steps are used"
        " unchanged: check them (--set recipe.learning_rate=VALUE, --steps N).",
    )


def read_fields(file: Path) -> dict[str, Any]:
    """Returns the fields of a recipe file. The file may give only some fields, and may have EDIT as
    value of a field.

    Raises:
        ConfigError: The file is missing, is neither TOML nor JSON, or has a key that is no field.
    """
    try:
        text = file.read_text(encoding="utf-8")
        fields = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(
            f"--recipe {file}: no such file. Give one, or a published recipe's name."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--recipe {file}: not valid {file.suffix[1:].upper()} ({error})."
        ) from error
    draft_recipe(dict(fields), str(file))
    return fields


def draft_recipe(fields: dict[str, Any], path: str = "recipe") -> Recipe:
    """Returns a recipe from some of its fields. Missing required fields get the values of
    PLACEHOLDERS. Other missing fields get their default. A field with the value EDIT counts as
    missing.

    Raises:
        ConfigError: A key is no field, or a value is not allowed.
    """
    known = {field: value for field, value in fields.items() if value != EDIT}
    return Recipe.from_dict({**PLACEHOLDERS, **known}, path)
