"""Commands that start jobs: launch, resume."""

import contextlib
import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from cluster.login.submit import attach as attach_run
from cluster.record import counted
from cluster.render import scripts, to_fill_in
from cluster.scheduler import EDIT
from cluster.site import Site
from cluster.state import JobError
from kit import launcher
from kit.commands.options import DeviceOption, MinutesOption, RunArgument, SetOption, console, hint, parse_settings
from kit.convert.hugging_face_config import load_spec
from kit.errors import ConfigError, DataError, RunError
from kit.measure.device import on_device
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.show.terminal import PlainConsole
from kit.spec import ModelSpec

app = typer.Typer()
DEMO = "demo"
DEMO_PLAN = Plan(global_batch_size=16, micro_batch_size=4)
SELECTIVE = """Selective recomputation that is not compiled costs some 4 ms of Python a layer and micro-batch, in \
which a GPU may wait. Compile it (--set plan.compile=true), or use --set plan.recompute=full."""
NEEDED = {"data": "--data FOLDER, made by `kit data build`", "num_steps": "--steps N"}
"""Fields of a recipe that have no default, and how to give them."""


@app.command()
def launch(
    run: RunArgument,
    model: Annotated[
        str | None, typer.Option(help="preset, spec.json or config.json; default: the recipe's, or demo")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="a .toml or .json of Recipe's fields, or a published one: frontier-175b, hlat-7b")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="layout made by `kit plan --out`; default: the recipe's")] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="folder of Hugging Face's: start from its weights, and by default its model")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="folder made by `kit data build` (demo: data/demo), or a mix: 0.7=WEB, and again 0.3=CODE"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps; demo: 100")] = None,
    devices: Annotated[int | None, typer.Option(help="as many replicas as fill so many")] = None,
    nodes: Annotated[int | None, typer.Option(help="the same in nodes of the site")] = None,
    site: Annotated[str, typer.Option(help="where: a name or a .toml file")] = "laptop",
    measure_peak: Annotated[bool, typer.Option(help="time matrix products first, so that MFU is known")] = True,
    device: DeviceOption = None,
    minutes: MinutesOption = None,
    show: Annotated[
        bool, typer.Option("--show", help="print all scripts, and what is still to fill in; start and write nothing")
    ] = False,
    settings: SetOption = None,
) -> None:
    """Start a training job in a new run directory. It goes on when this command ends.

    On GPUs a plan of neither file nor paper is bf16 and compiled; change it by --set plan.precision and plan.compile.
    """
    place, changes = Site.load(site), parse_settings(settings)
    given = {**read_data(data or []), "num_steps": steps, "init_from": init_from and str(init_from)}
    asked = ask_for(model, recipe, plan, given, changes)
    asked = dataclasses.replace(asked, plan=on_devices(asked.plan, place, devices, nodes))
    place = on_device(place, asked.plan, device)
    if place.device.is_gpu:
        asked = dataclasses.replace(asked, plan=asked.plan.replace(**asked.unsaid))
        if asked.plan.recompute == "selective" and asked.plan.engine == "native" and not asked.plan.compile:
            PlainConsole(stderr=True, soft_wrap=True).print(Text(SELECTIVE))
    time_limit_s = _seconds(minutes)
    if show:
        is_own = site.endswith(".toml")
        where = f"in {site}" if is_own else f"in a site file of your own, with base = {place.name!r}"
        _show(run, asked, place, time_limit_s, where)
        return
    if asked.lacking:
        raise ConfigError(f"{'; '.join(f'recipe.{name}: {how}' for name, how in asked.lacking.items())}.")
    chosen = Recipe.from_dict(asked.fields)
    if place.login is None:
        _tell_epochs(asked, chosen)
    with told_if_interrupted(run):
        if measure_peak:
            place = _measured(place, asked.plan, run)
        started = launcher.launch(
            run, spec=asked.spec, plan=asked.plan, recipe=chosen, site=place, time_limit_s=time_limit_s
        )
    hint(f"Started {_processes(asked.plan)}{_where(place)}. Watch:", "watch", started.directory)


@app.command()
def resume(
    run: RunArgument,
    steps: Annotated[int | None, typer.Option(help="new total of optimizer steps")] = None,
    device: DeviceOption = None,
    minutes: MinutesOption = None,
    settings: SetOption = None,
) -> None:
    """Continue a run from its last checkpoint, on the same plan or another (--set plan...)."""
    plan = Run.open(run).plan.replace(**parse_settings(settings, allowed=("plan",))["plan"])
    limit_s = _seconds(minutes)
    with told_if_interrupted(run):
        started = launcher.resume(run, plan=plan, num_steps=steps, device=device, time_limit_s=limit_s)
    hint(f"Started {_processes(plan)}{_where(started.site)}. Watch:", "watch", started.directory)


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
    model: str | None, recipe: str | None, plan: Path | None, given: dict[str, Any], changes: dict[str, dict[str, Any]]
) -> Asked:
    """Returns what a launch asks for; only the demo model has a recipe of its own.

    `given` are fields of the recipe that have an option of their own, `changes` those of all records by `--set`.

    Raises:
        ConfigError: model, recipe or layout is missing or unknown.
    """
    is_file = recipe is not None and Path(recipe).suffix in (".toml", ".json")
    published = None
    if recipe is not None and not is_file:
        from kit.papers.recipes import published_recipe

        published = published_recipe(recipe)
    begin = given.get("init_from")
    name = model or begin or (published.model if published else DEMO)
    spec = load_spec(name).replace(**changes["spec"])
    given = {key: value for key, value in given.items() if value is not None}
    if recipe is None:
        fields = _demo_fields(name, given)
    else:
        fields = published.stated if published else read_fields(Path(recipe))
    fields = {**fields, **given, **changes["recipe"]}
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
    elif published and published.model == name:
        layout = published.plan.to_dict()
    elif name == DEMO:
        layout = DEMO_PLAN.to_dict()
    elif "global_batch_size" in changes["plan"]:
        layout = {}
    else:
        raise ConfigError(
            f"--plan: {name!r} needs a layout and a batch. Give --plan FILE, made by `kit plan {name} --out FILE`, or "
            f"--set plan.global_batch_size=VALUE with the degrees that are not 1."
        )
    whole = Plan.from_dict({**layout, **changes["plan"]})
    is_given = plan is not None or (published is not None and published.model == name)
    unsaid = {} if is_given else {k: v for k, v in whole.gpu_defaults.items() if k not in changes["plan"]}
    return Asked(spec=spec, plan=whole, fields=fields, lacking=lacking, unsaid=unsaid)


def _demo_fields(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe of the demo model, or raises ConfigError for another model."""
    if name != DEMO:
        from kit.papers.recipes import names

        raise ConfigError(
            f"--recipe: {name!r} needs one, since the learning rate and batch of the demo would not train it. Give a "
            f".toml or .json file with the fields of Recipe, or a published one: {', '.join(names())}."
        )
    steps = given.get("num_steps", 100)
    rates = {"learning_rate": 3e-3, "min_learning_rate": 3e-4, "warmup_steps": steps // 10}
    return {"data": "data/demo", "num_steps": steps, **rates}


def read_data(words: list[str]) -> dict[str, Any]:
    """Returns the fields of a recipe that `--data` gives: one folder, or a mix whose first has the held-out text.

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
            f"--data {' --data '.join(words)}: not allowed. Give one folder, or a mix as WEIGHT=FOLDER for each: "
            f"--data 0.7=data/web --data 0.3=data/code."
        ) from error
    return {"data": pairs[0][1], "sources": sources}


def read_fields(file: Path) -> dict[str, Any]:
    """Returns the fields that a recipe file gives, all or some.

    Raises:
        ConfigError: the file is missing, is neither TOML nor JSON, or has a key that is no field.
    """
    try:
        text = file.read_text(encoding="utf-8")
        fields = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(f"--recipe {file}: no such file. Give one, or a published recipe's name.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--recipe {file}: not valid {file.suffix[1:].upper()} ({error}).") from error
    Recipe.from_dict({"data": "", "num_steps": 2**40} | {k: v for k, v in dict(fields).items() if v != EDIT}, str(file))
    return fields


def on_devices(plan: Plan, site: Site, devices: int | None, nodes: int | None) -> Plan:
    """Returns a plan with as many replicas as fill some devices, or some nodes of a site; without either, as it is.

    Raises:
        ConfigError: its tensor and pipeline parallel degrees, or its batch, do not divide them.
    """
    wanted = devices if nodes is None else nodes * site.devices_per_node
    if nodes is not None and devices not in (None, wanted):
        raise ConfigError(f"--nodes {nodes}: they have {wanted} devices, --devices says {devices}. Give one.")
    if nodes is not None and nodes > 1 and site.scheduler == "local":
        raise ConfigError(
            f"--nodes {nodes}: site {site.name!r} is this machine alone. Give --devices, or another --site."
        )
    if wanted is None:
        return plan
    held = plan.tensor_parallel * plan.pipeline_parallel
    if wanted < 1 or wanted % held:
        raise ConfigError(
            f"--devices: {wanted} cannot be filled by replicas of tensor {plan.tensor_parallel} x pipeline "
            f"{plan.pipeline_parallel} = {held} devices. Give a multiple of {held}."
        )
    return plan.replace(data_parallel=wanted // held)


def _processes(plan: Plan) -> str:
    return counted(plan.num_devices, "process", "processes")


def _where(site: Site) -> str:
    return f", device: {site.device.name}" if site.scheduler == "local" else ""


def _seconds(minutes: float | None) -> float | None:
    """Returns a time limit in seconds; raises ConfigError for one that is no time."""
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes {minutes:g}: not allowed. Give a number above 0.")
    return None if minutes is None else 60 * minutes


def _show(run: Path, asked: Asked, site: Site, time_limit_s: float | None, where: str) -> None:
    """Prints every script to standard output, and to standard error what nobody but the user can fill in."""
    shown = Recipe(data=EDIT, num_steps=1)  # no script holds a recipe
    prepared = Run(run.expanduser().absolute(), spec=asked.spec, plan=asked.plan, recipe=shown, site=site)
    asked.plan.check(asked.spec)
    texts = scripts(launcher.job_spec(prepared, time_limit_s), site)
    left = []
    for name, text in texts.items():
        print(text if len(texts) == 1 else f"#### {name} {'#' * 60}\n{text}", end="")
        for number, line in enumerate(text.splitlines(), start=1):
            if re.search(rf"\b{EDIT}\b", line):
                left.append(f"{name}, line {number}: {line.strip()}")
    left += [f"{field}: {where}" for field in to_fill_in(site)]
    left += [f"recipe.{name}: {how}" for name, how in asked.lacking.items()]
    if not asked.lacking and site.login is None:
        try:
            _tell_epochs(asked, Recipe.from_dict(asked.fields))
        except (ConfigError, DataError) as error:
            left.append(f"recipe.data: {error}")
    if left:
        said = PlainConsole(stderr=True, soft_wrap=True)
        said.print("Still to fill in:")
        for line in left:
            said.print(Text(f"  {line}"))


def _tell_epochs(asked: Asked, recipe: Recipe) -> None:
    for name, epochs in launcher.check_data(asked.spec, asked.plan, recipe):
        PlainConsole(stderr=True, soft_wrap=True).print(Text(f"Reads {epochs:.3g} epochs of {name}"))


def _measured(site: Site, plan: Plan, run: Path) -> Site:
    """Returns a local site with its peak, measured if nobody has given it; another site as it is."""
    from kit.measure.gemm import is_settled, measured_site

    if site.scheduler != "local" or site.peak_flops_per_s(plan.precision) is not None:
        return site
    PlainConsole(stderr=True).print("Measuring this machine's matrix products, for MFU ...")
    site = measured_site(site, plan.precision)
    if not is_settled(site.device.peak_flops_per_s[plan.precision]):
        hint("The peak was measured on a busy machine. For MFU, measure it again:", "bench", "site", "--apply", run)
    return site


@contextlib.contextmanager
def told_if_interrupted(run: Path) -> Iterator[None]:
    """Says after Ctrl-C whether a job runs, and how to end it; the command ends with the code that a shell expects."""
    try:
        yield
    except KeyboardInterrupt:
        try:
            status = Run.open(run).job.status()
        except (RunError, JobError, ConfigError):
            status = None
        if status is None or status.state.is_final:
            console().print("Interrupted: nothing was started.")
        else:
            hint(f"Interrupted, but the job runs: attempt {status.attempt} is {status.state}. End it:", "stop", run)
        raise typer.Exit(130) from None


@app.command()
def attach(
    run: RunArgument,
    there: Annotated[str, typer.Option(help="its run directory on the other side of the site's login node")],
    site: Annotated[str, typer.Option(help="a .toml file with login")],
) -> None:
    """Look from here at a run that was launched elsewhere: makes a mirror of it, a run directory like any other."""
    attach_run(run.expanduser().absolute(), Site.load(site), there)
    hint("Watch:", "watch", run)
