"""What a launch asks for: model, layout and recipe, from options, files, published recipes and
the demo's own.
"""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from cluster.scheduler import EDIT
from cluster.site import Site
from kit.convert.hugging_face_config import load_spec
from kit.errors import ConfigError
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec

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
    is_file = recipe is not None and Path(recipe).suffix in (".toml", ".json")
    published = None
    if recipe is not None and not is_file:
        from kit.papers.recipes import published_recipe

        published = published_recipe(recipe)
    begin = given.get("init_from")
    if begin is not None and model is None and not Path(begin).is_dir():
        raise ConfigError(
            f"--init-from {begin}: no such folder. Give one with config.json and *.safetensors, or,"
            " where it lies behind a login node, its --model too."
        )
    name = model or begin or (published.model if published else None)
    spec = (begun.spec if begun and name is None else load_spec(name or DEMO)).replace(
        **changes["spec"]
    )
    name = name or DEMO
    given = {key: value for key, value in given.items() if value is not None}
    if begun:
        fields = begun.recipe.to_dict()
    else:
        fields = {} if recipe else _demo_fields(name, given)
    stated = published.stated if published else read_fields(Path(recipe)) if recipe else {}
    fields = {**fields, **stated, **given, **changes["recipe"]}
    wanted = dict(NEEDED)
    if published:
        wanted |= {
            key: f"{recipe} does not state it ({why}). Give --set recipe.{key}=VALUE"
            for key, why in published.not_stated.items()
        }
    wanted |= {key: f"still {EDIT!r} in {recipe}" for key, value in fields.items() if value == EDIT}
    lacking = {key: how for key, how in wanted.items() if fields.get(key, EDIT) == EDIT}
    if plan is not None:
        layout = Plan.read(plan).to_dict()
    elif begun:
        layout = begun.plan.to_dict()
    elif published and published.model == name:
        layout = published.plan.to_dict()
    elif name == DEMO:
        layout = DEMO_PLAN.to_dict()
    elif "global_batch_size" in changes["plan"]:
        layout = {}
    else:
        raise ConfigError(
            f"--plan: {name!r} needs a layout and a batch. Give --plan FILE, made by `kit plan"
            f" {name} --out FILE`, or --set plan.global_batch_size=VALUE with the degrees that are"
            " not 1."
        )
    whole = Plan.from_dict({**layout, **changes["plan"]})
    is_given = (
        plan is not None or begun is not None or (published is not None and published.model == name)
    )
    unsaid = (
        {}
        if is_given
        else {k: v for k, v in whole.gpu_defaults.items() if k not in changes["plan"]}
    )
    return Asked(spec=spec, plan=whole, fields=fields, lacking=lacking, unsaid=unsaid)


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
    rates = {"learning_rate": 3e-3, "min_learning_rate": 3e-4, "warmup_steps": steps // 10}
    return {"data": "data/demo", "num_steps": steps, **rates}


def read_data(words: list[str]) -> dict[str, Any]:
    """Returns the fields of a recipe that `--data` gives: one folder, or a mix whose first has the
    held-out text.

    Raises:
        ConfigError: of several one has no weight, or its weight is no number.
    """
    parts = [re.fullmatch(r"(?:([^=/]*)=)?(.+)", word) for word in words]
    pairs = [part.groups() for part in parts if part]
    if not any(weight for weight, _ in pairs) and len(words) <= 1:
        return {"data": words[0]} if words else {}
    try:
        sources = [{"paths": [folder], "weight": float(weight or "")} for weight, folder in pairs]
    except ValueError as error:
        raise ConfigError(
            f"--data {' --data '.join(words)}: not allowed. Give one folder, or a mix as"
            " WEIGHT=FOLDER for each: --data 0.7=data/web --data 0.3=data/code."
        ) from error
    return {"data": pairs[0][1], "sources": sources}


def read_phases(
    words: list[str], sources: list[dict[str, Any]], tokens_per_step: int
) -> dict[str, Any]:
    """Returns the fields of a recipe that `--then` gives: from a token or step of the run on, other
    weights of a mix.

    Raises:
        ConfigError: there is no mix, or one is not written as FROM=WEIGHT,WEIGHT with a weight for
            each of `--data`.
    """
    mixes, ends = [[source["weight"] for source in sources]], []
    for word in words:
        found = re.fullmatch(r"([^=]+?)(steps)?=(.+)", word)
        try:
            begin, unit, weights = found.groups() if found else ("", "", "")
            ends.append(float(begin) * (tokens_per_step if unit else 1))
            mixes.append([float(weight) for weight in weights.split(",")])
            if not sources or len(mixes[-1]) != len(sources):
                raise ValueError
        except ValueError as error:
            raise ConfigError(
                f"--then {word}: not allowed. Give a mix by --data, and here the token or step from"
                " which on it is another, with a weight for each --data in their order"
                f" ({len(sources)} here): --then 1.4e12=0.3,0.7, or --then 5000steps=0.3,0.7."
            ) from error
    phases = [{"until_tokens": end, "weights": mix} for end, mix in zip(ends, mixes, strict=False)]
    last = [{**source, "weight": weight} for source, weight in zip(sources, mixes[-1], strict=True)]
    return {"phases": phases, "sources": last} if words else {}


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


def on_devices(plan: Plan, site: Site, devices: int | None, nodes: int | None) -> Plan:
    """Returns a plan with as many replicas as fill some devices, or some nodes of a site; without
    either, as it is.

    Raises:
        ConfigError: its tensor and pipeline parallel degrees, or its batch, do not divide them.
    """
    wanted = devices if nodes is None else nodes * site.devices_per_node
    if nodes is not None and devices not in (None, wanted):
        raise ConfigError(
            f"--nodes {nodes}: they have {wanted} devices, --devices says {devices}. Give one."
        )
    if nodes is not None and nodes > 1 and site.scheduler == "local":
        raise ConfigError(
            f"--nodes {nodes}: site {site.name!r} is this machine alone. Give --devices, or another"
            " --site."
        )
    if wanted is None:
        return plan
    held = plan.tensor_parallel * plan.pipeline_parallel
    if wanted < 1 or wanted % held:
        raise ConfigError(
            f"--devices: {wanted} cannot be filled by replicas of tensor {plan.tensor_parallel} x"
            f" pipeline {plan.pipeline_parallel} = {held} devices. Give a multiple of {held}."
        )
    return plan.replace(data_parallel=wanted // held)
