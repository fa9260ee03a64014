"""What a launch asks for: model, layout and recipe, from options, files, published recipes and
the demo's own.
"""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from cluster.scheduler import EDIT
from kit.cli.options import note
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.interop.weights.hugging_face_config import training_spec
from kit.run import Run

DEMO = "demo"
DEMO_PLAN = Plan(global_batch_size=16, micro_batch_size=4)
NEEDED = {"data": "--data FOLDER, made by `kit data build`", "num_steps": "--steps N"}
"""Fields of a recipe that have no default, and how to give them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a launch asks for, as far as it is known."""

    spec: ModelSpec
    plan: Plan
    fields: dict[str, Any]
    """Of the recipe."""
    lacking: dict[str, str]
    """Fields of the recipe that nobody has given yet, and how to give them."""
    unsaid: dict[str, Any]
    """Fields of the plan that nobody has given, and what they are on GPUs."""
    notes: tuple[str, ...] = ()
    """Warnings about settings that do not fit each other."""


def ask_for(
    model: str | None,
    recipe: str | None,
    plan: Path | None,
    given: dict[str, Any],
    changes: dict[str, dict[str, Any]],
    begun: Run | None = None,
) -> Asked:
    """Returns what a launch asks for; only the demo model has a recipe of its own.

    `given` are fields of the recipe that have an option of their own, `changes` those of all
    records by `--set`. What nobody gives is that of `begun`, the run that is in the directory
    already.

    Raises:
        ConfigError: model, recipe or layout is missing or unknown.
    """
    if recipe is None or Path(recipe).suffix in (".toml", ".json"):
        published = None
    else:
        from kit.papers.recipes import published_recipe

        published = published_recipe(recipe)
    begin = changes["recipe"].get("init_from")
    if begin is not None and model is None and not Path(str(begin)).is_dir():
        raise ConfigError(
            f"recipe.init_from: {begin}: no such folder. Give one with config.json and"
            " *.safetensors, or, where it lies behind a login node, its --model too."
        )
    named = model or begin or (published.model if published else None)
    name = str(named or DEMO)
    if begun and named is None:
        spec = begun.spec
    else:
        length = changes["spec"].get("sequence_length")
        spec, notes = training_spec(name, sequence_length=length, purpose="import")
        for text in notes:
            note(f"{name}: {text}. Another: --set spec.sequence_length=TOKENS.")
    given = {key: value for key, value in given.items() if value is not None}
    if begun:
        fields = begun.recipe.to_dict()
    else:
        fields = {} if recipe else _demo_fields(name, given)
    stated = published.stated if published else read_fields(Path(recipe)) if recipe else {}
    fields = {**fields, **stated, **given, **changes["recipe"]}
    not_stated = published.not_stated if published else {}
    wanted = NEEDED | {
        key: f"{recipe} does not state it ({why}). Give --set recipe.{key}=VALUE"
        for key, why in not_stated.items()
    }
    wanted |= {key: f"still {EDIT!r} in {recipe}" for key, value in fields.items() if value == EDIT}
    lacking = {key: how for key, how in wanted.items() if fields.get(key, EDIT) == EDIT}
    known = published.plan if published and published.model == name else None
    known = Plan.read(plan) if plan is not None else begun.plan if begun else known
    whole = _layout(known, name, changes["plan"])
    defaults = {} if known else whole.gpu_defaults
    notes = []
    if published and published.plan.global_batch_size != whole.global_batch_size:
        notes.append(
            f"Recipe {recipe} was published for batches of"
            f" {published.plan.global_batch_size:,} sequences, and the plan has"
            f" {whole.global_batch_size:,}. The recipe's learning rate and number of steps are used"
            " unchanged: check them (--set recipe.learning_rate=VALUE, --steps N)."
        )
    return Asked(
        spec=spec.replace(**changes["spec"]),
        plan=whole,
        fields=fields,
        lacking=lacking,
        unsaid={k: v for k, v in defaults.items() if k not in changes["plan"]},
        notes=tuple(notes),
    )


def _layout(known: Plan | None, name: str, changes: dict[str, Any]) -> Plan:
    """Returns the layout that is known, or that of the demo, with changes; another model needs
    one, or at least a batch.
    """
    known = known or (DEMO_PLAN if name == DEMO else None)
    if known is None and "global_batch_size" not in changes:
        raise ConfigError(
            f"--plan: {name!r} needs a layout and a batch. Give --plan FILE, made by `kit plan"
            f" {name} --out FILE`, or --set plan.global_batch_size=VALUE with the degrees that are"
            " not 1."
        )
    return Plan.from_dict({**(known.to_dict() if known else {}), **changes})


def _demo_fields(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe of the demo model, or raises ConfigError for another model."""
    if name != DEMO:
        from kit.papers.recipes import names

        raise ConfigError(
            f"--recipe: {name!r} needs one, since the learning rate and batch of the demo would not"
            " train it. Give a .toml or .json file with the fields of Recipe, or a published one:"
            f" {', '.join(names())}."
        )
    steps = given.get("num_steps", 100)
    return {
        "data": "data/demo",
        "num_steps": steps,
        "learning_rate": 3e-3,
        "min_learning_rate": 3e-4,
        "warmup_steps": steps // 10,
    }


def read_fields(file: Path) -> dict[str, Any]:
    """Returns the fields that a recipe file gives, all or some.

    Raises:
        ConfigError: the file is missing, is neither TOML nor JSON, or has a key that is no field.
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
    as_given(dict(fields), str(file))
    return fields


def as_given(fields: dict[str, Any], path: str = "recipe") -> Recipe:
    """Returns the recipe of some fields, of which those that are missing or say EDIT may not lack a
    default.

    Raises:
        ConfigError: a key that is no field, or a value that is not allowed.
    """
    return Recipe.from_dict(
        {"data": EDIT, "num_steps": 2**40} | {k: v for k, v in fields.items() if v != EDIT}, path
    )
