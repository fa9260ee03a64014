"""Collects the settings of a launch (model, layout and recipe) from all places that may contain
them.

The places are command-line options, --set, a recipe or plan that the user names, a run that has
begun, and the demo. If several places contain a setting, `gather_settings` defines which place
takes precedence.
"""

import dataclasses
import json
import math
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
"""Layout of the demo model if the user names none. For another batch or more replicas,
`fit_micro_batch` lowers the micro-batch size."""
REQUIRED = {"data": "--data FOLDER, made by `kit data build`", "num_steps": "--steps N"}
"""Advice to the user on how to set the fields of a recipe that have no default. The key is the name
of the field."""
PLACEHOLDERS = {"data": EDIT, "num_steps": 2**40}
"""Values that stand in for missing required fields of a recipe while its other fields are checked.
The number of steps is larger than any warm-up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Model, layout and recipe of a launch, as far as the user has specified them."""

    spec: ModelSpec
    plan: Plan
    recipe_fields: dict[str, Any]
    """Fields of the recipe that are set, by name. Other fields have the default of `Recipe`, or are
    in `missing`."""
    missing: dict[str, str]
    """Recipe fields that the user must still set before a launch, with advice on how to set each,
    by name of the field."""
    to_edit: tuple[str, ...]
    """Names of missing recipe fields that have the value EDIT in the user's file. The user must
    replace this value."""
    is_micro_batch_default: bool
    """Whether the micro-batch size of the plan is the default of the demo. `fit_micro_batch` may
    then change it."""
    gpu_defaults: dict[str, Any]
    """Values that fields of the plan get if the ranks compute on GPUs, by name of the field. Fields
    that the user has set are left out."""
    notes: tuple[str, ...]
    """Warnings to the user about settings that do not fit each other."""

    def refuse_to_edit(self, unused: Collection[str]) -> None:
        """Raises ConfigError if a field of the recipe still has the value EDIT, except the fields
        in `unused`. The message names the first such field.
        """
        for name in self.to_edit:
            if name not in unused:
                raise ConfigError(f"recipe.{name}: {self.missing[name]}. Give a value.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedRecipe:
    """The recipe that the user names with --recipe. If the user names none, all fields are
    empty.
    """

    name: str = ""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    not_stated: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reasons why recipe fields are missing in the publication, by name of the field."""
    published: "PublishedRecipe | None" = None
    """The published recipe with this name. None if the recipe is read from a file."""


def gather_settings(
    model: str | None,
    recipe: str | None,
    plan: Path | None,
    options: dict[str, Any],
    changes: dict[str, dict[str, Any]],
    begun: Run | None = None,
) -> LaunchSettings:
    """Returns the settings of a launch, collected from all places.

    For each setting, the first of these places that contains it takes precedence. `changes` are the
    settings of --set, and `begun` is the run that is resumed.

    - model: `model`, the folder in `recipe.init_from`, the published recipe, `begun`, the demo.
    - layout: `changes`, `plan`, `begun`, the published recipe for its own model, the demo.
    - recipe: `changes`, `options`, `recipe`, `begun`, the demo.

    Args:
        model: model that the user names.
        recipe: name of a published recipe, or a .toml or .json file.
        plan: file of a layout.
        options: fields of the recipe that have their own command-line option. The value None means
            that the option is not given.
        changes: fields of `spec`, `plan` and `recipe` that are set by --set, by record and field.
        begun: run that is already in the directory.

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
    is_micro_batch_default = False
    if base is not None:
        layout = Plan.from_dict({**base.to_dict(), **changes["plan"]})
    else:
        layout = _new_layout(name, changes["plan"])
        is_micro_batch_default = name == DEMO and "micro_batch_size" not in changes["plan"]
        for field, value in layout.gpu_defaults.items():
            if field not in changes["plan"]:
                gpu_defaults[field] = value

    return LaunchSettings(
        spec=spec.replace(**changes["spec"]),
        plan=layout,
        recipe_fields=known_fields,
        missing=_missing(known_fields, to_edit, named_recipe),
        to_edit=to_edit,
        is_micro_batch_default=is_micro_batch_default,
        gpu_defaults=gpu_defaults,
        notes=_batch_notes(published, layout),
    )


def _named_recipe(recipe: str | None) -> NamedRecipe:
    """Returns the recipe that the user names: a file, or a published recipe. Raises ConfigError if
    there is no recipe of this name.
    """
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
    """Returns (name, sizes) of the model of a launch. The arguments have the meaning that
    `gather_settings` describes.

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
    """Returns the layout of a launch if the user has not named a plan. Only the demo model has a
    default layout. For another model, `changes` must contain the batch size.

    Raises:
        ConfigError: The model is not the demo, and no batch size is given.
    """
    if name == DEMO:
        layout = Plan.from_dict({**DEMO_PLAN.to_dict(), "micro_batch_size": 1, **changes})
        return layout if "micro_batch_size" in changes else fit_micro_batch(layout)
    if "global_batch_size" not in changes:
        raise ConfigError(
            f"--plan: {name!r} has no default layout. Give --plan FILE, made by `kit plan {name}"
            " --out FILE`, or set the batch, --set plan.global_batch_size=VALUE, and each parallel"
            " degree above 1, such as --set plan.tensor_parallel=8."
        )
    return Plan.from_dict(changes)


def fit_micro_batch(plan: Plan) -> Plan:
    """Returns the plan with the largest micro-batch size that divides both the sequences of a
    replica and the micro-batch size of DEMO_PLAN.
    """
    sequences = plan.global_batch_size // plan.data_parallel
    return plan.replace(micro_batch_size=math.gcd(DEMO_PLAN.micro_batch_size, sequences))


def _demo_fields(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe fields with which the demo model is trained. Raises ConfigError for
    another model, which needs its own recipe.
    """
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
    """Returns the required recipe fields that are not set. The key is the name of the field, and
    the value is advice on how to set it.
    """
    how_to_give = dict(REQUIRED)
    for field, why in named_recipe.not_stated.items():
        how_to_give[field] = (
            f"{named_recipe.name} does not state it ({why}). Give --set recipe.{field}=VALUE"
        )
    for field in to_edit:
        how_to_give[field] = f"still {EDIT!r} in {named_recipe.name or '--set'}"
    return {field: how for field, how in how_to_give.items() if field not in known_fields}


def _batch_notes(published: "PublishedRecipe | None", layout: Plan) -> tuple[str, ...]:
    """Returns a warning if a published recipe is used with a batch size other than the published
    one.
    """
    if published is None or published.plan.global_batch_size == layout.global_batch_size:
        return ()
    return (
        f"Recipe {published.name} was published for batches of"
        f" {published.plan.global_batch_size:,} sequences, and the plan has"
        f" {layout.global_batch_size:,}. The recipe's learning rate and number of steps are used"
        " unchanged: check them (--set recipe.learning_rate=VALUE, --steps N).",
    )


def read_fields(file: Path) -> dict[str, Any]:
    """Returns the fields of a recipe file, by name. The file may contain only some fields, and a
    field may have the value EDIT.

    Raises:
        ConfigError: The file is missing, is neither TOML nor JSON, or has a key that is not a field
            of Recipe.
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
    """Returns a recipe from some of its fields. Missing required fields take the values of
    PLACEHOLDERS. Other missing fields take their default. A field with the value EDIT is treated as
    missing.

    Raises:
        ConfigError: A key is not a field of Recipe, or a value is not allowed.
    """
    known = {field: value for field, value in fields.items() if value != EDIT}
    return Recipe.from_dict({**PLACEHOLDERS, **known}, path)
