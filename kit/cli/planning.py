"""The command `plan`: chooses a layout, lists models, recipes and sites, and rehearses (dry-runs) a
job.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from cluster.record import ConfigError, counted
from cluster.scheduler import EDIT
from cluster.site import Site
from kit.cli.options import (
    names_table,
    next_step,
    note,
    parse_settings,
    print_result,
    refuse_options,
)
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import PRESETS, ModelSpec
from kit.interop.weights.hugging_face_config import PLANNED
from kit.show.terminal import Table

if TYPE_CHECKING:
    from kit.estimate.choose.search import Search

app = typer.Typer()
SHOWN = 5
"""Number of layouts in the printed table. If the user chooses a later row by --choose, the table
ends with this row."""
FixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Fix a field of the plan: plan.engine=deepspeed; with --rehearse, also set a"
        " field of the recipe: recipe.num_steps=1000. Can be repeated.",
    ),
]
STEPS = 1000
"""Number of steps of a rehearsed (dry-run) job if the user has given no recipe."""


@app.command()
def plan(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Model: a preset (`kit plan --list`), a spec.json, a Hugging Face"
            f" config.json (model types {PLANNED}), torchtitan:FLAVOUR, or Megatron's"
            " arguments: a .txt or .sh file, or one quoted text after `--`. With --rehearse also a"
            " run directory or a recipe.",
            metavar="MODEL",
        ),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            help="Machine: the name of a packaged site (`kit plan --list`) or a .toml file. Several"
            " --site are compared side by side. Default for a published recipe: its machine."
        ),
    ] = None,
    devices: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of devices. The layout uses all of them. With several --site, one number"
            " for all sites or one for each."
        ),
    ] = None,
    nodes: Annotated[
        list[int] | None,
        typer.Option(help="Number of whole nodes, instead of --devices."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Global batch size: sequences in one optimizer step.")
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            help="Sequence length in training, in tokens. Default: the sequence length of the"
            " model. For a Hugging Face config.json: 8192, or the model's maximum length before"
            " RoPE scaling if this is smaller."
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            help="Training budget in tokens, such as 1.8e12, to see"
            " days and price. Default: neither is shown."
        ),
    ] = None,
    days: Annotated[
        float | None, typer.Option(help="Training time in days, to see how many tokens it allows.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Training budget in USD, to see how many tokens it buys.")
    ] = None,
    price: Annotated[
        list[float] | None,
        typer.Option(
            help="Price of one device for one hour, in USD. With several --site, one price for all"
            " sites or one for each. Default: the price in the site file."
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Your own runs on the planned machine, to which the step times are fitted: a"
            " run directory, or a CSV with the columns of the published runs. Can be repeated."
        ),
    ] = None,
    code_base: Annotated[
        str,
        typer.Option(
            help="Software whose kernels and overlap are assumed: kit, megatron-core or torchtitan."
        ),
    ] = "kit",
    optimizer: Annotated[
        Literal["adamw", "muon"],
        typer.Option(help="Optimizer whose memory and time are assumed.", metavar="NAME"),
    ] = "adamw",
    choose: Annotated[
        int, typer.Option(help="Number of the row whose layout is explained and written by --out.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write the layout to, NAME.json, for `kit launch --plan`."),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Compare the requirements of the job with the limits of its site: memory,"
            " start-up, checkpoints, storage, failures. Exit code 1 if it does not fit.",
        ),
    ] = False,
    listed: Annotated[
        bool,
        typer.Option(
            "--list",
            help="List the presets of models, the published recipes and the packaged sites.",
        ),
    ] = False,
    settings: FixOption = None,
) -> None:
    """Find the fastest layout of a model on a machine, and explain it.

    --set plan.FIELD=VALUE fixes a field, such as plan.engine=deepspeed or plan.precision=fp8. A
    list allows several values, as in 'plan.schedule=["1f1b", "interleaved"]'. A layout is left out
    if it runs out of memory with a probability above 5 %. kit.estimate.search(max_risk=...) changes
    this limit.

    If MODEL is a published recipe, the command explains the published layout on the machine of the
    publication. --devices changes the number of replicas, and --batch the batch. hlat-7b and
    hlat-70b are names of a recipe and of a preset of models: without --batch, the command explains
    the published layout. With --batch, it searches for layouts of the preset.
    """
    if listed:
        _list()
        return
    if name is None:
        raise ConfigError("MODEL: missing. Give a preset (`kit plan --list`) or a file.")
    records = ("plan", "recipe") if rehearse else ("plan",)
    changes = parse_settings(settings, records)
    sites = site or []
    if rehearse and (known := _known(name, sites[0] if sites else None, changes)):
        refuse_options(
            {"--devices": devices, "--nodes": nodes, "--batch": batch, "--seq": seq},
            f"{name} has a layout of its own. Change it by --set plan.KEY=VALUE.",
        )
        _rehearse(*known)
        if not (Path(name) / "recipe.json").exists():
            place = sites[0] if sites else known[3].name
            words = ("launch", "runs/first", "--recipe", name, "--site", place, "--show")
            next_step("See the job's script, and what is still to fill in:", *words)
        return
    question: dict[str, Any] = {
        "model": name,
        "batch": batch,
        "tokens": tokens,
        "days": days,
        "budget": budget,
        "runs": runs or (),
        "sequence_length": seq,
        "code_base": code_base,
        "optimizer": optimizer,
    }
    question |= _kept(changes["plan"])
    if (batch is None or name not in PRESETS) and _is_recipe(name):
        sites, devices = _ask_published(question, sites, devices, nodes)
        nodes = None
    machines = _machines(question, sites, devices, nodes, price)
    if len(machines) > 1:
        refuse_options(
            {"--out": out, "--rehearse": rehearse, "--choose": choose > 1},
            "not with several --site. Give one site.",
        )
        _compare(question, machines)
    else:
        _plan_one(question | machines[0], choose, out, changes["recipe"] if rehearse else None)


def _plan_one(
    question: dict[str, Any], choose: int, out: Path | None, recipe: dict[str, Any] | None
) -> None:
    """Prints the fastest layouts on one machine, and writes the layout number `choose` to `out`. If
    `recipe` is not None, rehearses this layout with the fields of a recipe instead.
    """
    if out is not None:
        _check_out(out)
    from kit.estimate.choose.report import plan_report

    report = plan_report(**question, count=max(SHOWN, choose), choose=choose)
    chosen = report.chosen.plan
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        chosen.write(out)
    if recipe is not None:
        fields = {"data": EDIT, "num_steps": STEPS, **recipe}
        _rehearse(report.search.spec, chosen, fields, Site.load(question["site"]))
        return
    kept = [Text(f"Layout {choose} is in {out}.")] if out is not None else []
    print_result(
        report.to_dict,
        Table(*report.header, title=report.search.title, rows=report.rows),
        names_table("", [report.parameters, *report.chosen.facts()]),
        *(Text(f"- {text}.") for text in report.notes),
        *kept,
    )
    if out is None:
        next_step("Keep this layout in a file:", "plan", "--out", "plan.json", *sys.argv[2:])
    else:
        _tell_launch(question["model"], out, question["site"], report.search)


def _is_recipe(name: str) -> bool:
    """Returns whether `name` is a published recipe. A file or another name is none."""
    if Path(name).suffix or ":" in name:
        return False
    from kit.papers.recipes import names

    return name in names()


def _ask_published(
    question: dict[str, Any],
    sites: list[str],
    devices: list[int] | None,
    nodes: list[int] | None,
) -> tuple[list[str], list[int]]:
    """Changes `question` so that it asks for the published layout of the recipe that it names.
    Returns (sites, devices) of this layout.

    Raises:
        ConfigError: Several numbers of devices are given, or a replica needs another number.
    """
    from kit.papers.recipes import plan_arguments, published_recipe

    name = question["model"]
    if len(devices or []) > 1 or len(nodes or []) > 1:
        raise ConfigError(f"--devices: {name} has one layout. Give one number.")
    sites = sites or [published_recipe(name).site]
    if nodes:
        devices = [nodes[0] * Site.load(sites[0]).devices_per_node]
    published = plan_arguments(name, devices[0] if devices else None)
    del published["site"]
    devices = [published.pop("devices")]
    if question["batch"] is not None:
        del published["batch"]
    only = published.pop("only") | question.pop("only")
    question |= {"engine": published.pop("engine")} | question | published | {"only": only}
    return sites, devices


def _machines(
    question: dict[str, Any],
    sites: list[str],
    devices: list[int] | None,
    nodes: list[int] | None,
    prices: list[float] | None,
) -> list[dict[str, Any]]:
    """Returns the arguments `site`, `devices` or `nodes`, and `price` of `plan_report` for each
    site.

    Raises:
        ConfigError: Site, devices or batch are missing, devices and nodes are given, or an option
            has neither one value nor one for each site.
    """
    sizes = {"--site": sites, "--devices": devices or nodes, "--batch": question["batch"]}
    lacking = [flag for flag, value in sizes.items() if value in (None, [])]
    if lacking:
        raise ConfigError(f"{lacking[0]}: missing. A layout needs {', '.join(sizes)}.")
    if devices and nodes:
        raise ConfigError("--nodes: not with --devices. Give one of them.")
    options = {"devices": devices, "nodes": nodes, "price": prices}
    machines: list[dict[str, Any]] = [{"site": site} for site in sites]
    for name, values in options.items():
        if not values:
            continue
        if len(values) not in (1, len(sites)):
            raise ConfigError(
                f"--{name}: {len(values)} values for {counted(len(sites), 'site')}. Give one value"
                " for all sites, or one for each."
            )
        for number, machine in enumerate(machines):
            machine[name] = values[number % len(values)]
    return machines


def _compare(question: dict[str, Any], machines: list[dict[str, Any]]) -> None:
    """Prints the fastest layout of each machine side by side."""
    from kit.estimate.choose.report import compare_sites

    found = compare_sites(machines, **question, count=1)
    print_result(
        found.to_dict,
        Table(*found.header, title=found.title, rows=found.rows),
        *(Text(f"- {text}.") for text in found.notes),
    )
    first = machines[0]
    words = ["plan", question["model"], "--site", first["site"]]
    for name in ("devices", "nodes"):
        if name in first:
            words += [f"--{name}", str(first[name])]
    next_step("Explain the layout of one site:", *words, "--batch", str(question["batch"]))


def _tell_launch(name: str, out: Path, site: str, found: "Search") -> None:
    """Prints the command that launches the chosen layout, or the reason why it cannot be launched.

    If there is a published recipe for the model, the command contains it only if batch size and
    sequence length are the published ones. The learning rate and number of steps of a recipe were
    chosen for both.
    """
    from kit.cli.launch_settings import DEMO
    from kit.interop.weights.hugging_face_config import load_spec
    from kit.papers.recipes import names, published_recipe

    try:
        default_length = load_spec(name).sequence_length
    except ConfigError as error:
        note(f"This layout cannot be launched, since the kit cannot train the model. {error}")
        return
    batch = found.global_batch_size
    length = found.spec.sequence_length
    recipe = "recipe.toml"
    text = "Launch it, with the fields of kit.Recipe in recipe.toml"
    for each in names():
        published = published_recipe(each)
        if published.model != name:
            continue
        size = published.plan.global_batch_size, published.spec.sequence_length
        if size == (batch, length):
            recipe = each
            text = "Launch it"
        else:
            text += (
                f" (the published {each} is for batches of {size[0]:,} sequences of"
                f" {size[1]:,} tokens)"
            )
    words = ["--model", name, "--plan", str(out), "--site", site]
    if name == DEMO:
        text = "Launch it"
    else:
        words += ["--recipe", recipe]
    if length != default_length:
        words += ["--set", f"spec.sequence_length={length}"]
    if found.layouts.muon.any():
        words += ["--set", "recipe.optimizer=muon"]
    next_step(f"{text}:", "launch", "runs/first", *words)


def _kept(fields: dict[str, Any], only: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the keyword arguments of a search of layouts in which the fields of the plan in
    `fields` are fixed to the given values, and all fields in `only` to their values.

    Raises:
        ConfigError: An engine or a precision is unknown.
    """
    settings = {name: fields[name] for name in ("engine", "precision") if name in fields}
    Plan(**settings)  # This raises ConfigError for a wrong value.
    only = dict(only or {})
    for name, value in fields.items():
        if name not in settings:
            only[name] = value if isinstance(value, list) else [value]
    return {**settings, "only": only}


def _known(
    name: str, site: str | None, changes: dict[str, dict[str, Any]]
) -> tuple[ModelSpec, Plan, dict[str, Any], Site] | None:
    """Returns (model, layout, fields of the recipe, site) if `name` is a run directory or a recipe,
    for which no layout must be searched. Returns None if `name` is neither.

    Raises:
        ConfigError: The site of a recipe file is missing, or a field of the recipe must still be
            edited.
    """
    from kit.cli.launch_settings import gather_settings
    from kit.papers.recipes import names, published_recipe

    if (Path(name).expanduser() / "recipe.json").exists():
        from kit.run import Run

        run = Run.open(name)
        fields = run.recipe.to_dict() | changes["recipe"]
        place = Site.load(site) if site else run.site
        return run.spec, run.plan.replace(**changes["plan"]), fields, place
    if name not in names() and Path(name).suffix != ".toml":
        return None
    if site is None and name in names():
        site = published_recipe(name).site
    if site is None:
        raise ConfigError(f"--site: missing. Name the machine on which to rehearse {name}.")
    gathered = gather_settings(None, name, None, {}, {"spec": {}, **changes})
    fields = {"data": EDIT, **gathered.recipe_fields}
    if "num_steps" in gathered.missing:
        fields["num_steps"] = STEPS
        note(f"{name} states no number of steps: {STEPS:,} are assumed (--set recipe.num_steps=N).")
    gathered.refuse_to_edit(unused=("data",))
    return gathered.spec, gathered.plan, fields, Site.load(site)


def _rehearse(spec: ModelSpec, layout: Plan, fields: dict[str, Any], site: Site) -> None:
    """Rehearses (dry-runs) a job on its site and prints the result. Exits with code 1 if the job
    does not fit the site's limits.
    """
    from kit.estimate.rehearsal import rehearse

    rehearsal = rehearse(spec, layout, Recipe.from_dict(fields), site)
    untested = [
        Text(f"Not yet tested: {text}.", style="dim") for text in rehearsal.untested_conditions
    ]
    table = Table(*rehearsal.header, title=rehearsal.title, rows=rehearsal.rows)
    print_result(rehearsal.to_dict(), table, *untested)
    if not rehearsal.fits:
        raise typer.Exit(1)


def _list() -> None:
    """Prints the names of models, recipes and sites that MODEL, --recipe and --site accept."""
    from kit.papers.recipes import names, published_recipe

    described = {
        "model": {name: f"{ModelSpec.preset(name).num_params:,} parameters" for name in PRESETS},
        "recipe": {name: f"that of {published_recipe(name).model}" for name in names()},
        "site": {name: Site.load(name).description for name in Site.names()},
    }
    rows = []
    for kind, texts in described.items():
        rows += [(kind, name, text) for name, text in texts.items()]
    print_result(described, Table("", "name", "what it is", rows=rows))
    example = "llama3-8b --site dgx-h100 --devices 64 --batch 1024"
    next_step("Choose a layout, for example:", "plan", *example.split())


def _check_out(out: Path) -> None:
    """Raises ConfigError if `out` does not end with .json, or exists already."""
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: not a .json file. Give a name that ends in .json.")
    if out.exists():
        raise ConfigError(
            f"--out {out}: already exists, and may belong to a run. Give a new file, NAME.json."
        )
