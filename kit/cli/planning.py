"""The command `plan`: chooses a layout, lists models, recipes and sites, and rehearses (dry-runs) a
job.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from cluster.record import ConfigError
from cluster.scheduler import EDIT
from cluster.site import Site
from kit.cli.launch_settings import DEMO, gather_settings
from kit.cli.options import (
    SiteOption,
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
from kit.run import Run
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
        help="Fix a field of the plan: plan.engine=deepspeed; with --rehearse also set one of"
        " the recipe: recipe.num_steps=1000. Can be repeated.",
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
            " arguments (a .txt or .sh file, or one text after --). With --rehearse also a run"
            " directory or a recipe.",
            metavar="MODEL",
        ),
    ] = None,
    site: SiteOption = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of devices. The layout uses all of them.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Global batch size: sequences in one optimizer step.")
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            help="Training length: tokens of a sequence. Default: the model's; of a Hugging Face"
            " config.json, 8192 or its smaller original maximum."
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            help="Training budget in tokens, such as 1.8e12, to see"
            " days and price. Default: neither is shown."
        ),
    ] = None,
    code_base: Annotated[
        str,
        typer.Option(help="Whose kernels and overlap it has: kit, megatron-core or torchtitan."),
    ] = "kit",
    choose: Annotated[
        int, typer.Option(help="Row of the table whose layout is explained, and written by --out.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write the layout to, NAME.json, for `kit launch --plan`."),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Dry-run the job against the limits of its site: memory, start-up, checkpoints,"
            " storage, failures. Exit code 1 if it does not fit.",
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

    --set plan.FIELD=VALUE fixes a field, such as plan.engine=deepspeed or plan.precision=fp8; a
    list allows several values, as in 'plan.schedule=["1f1b", "interleaved"]'. Layouts with a risk
    above 5 % of running out of memory are left out; kit.estimate.search(max_risk=...) changes that
    limit.
    """
    if listed:
        _list()
        return
    if name is None:
        raise ConfigError("MODEL: missing. Give a preset (`kit plan --list`) or a file.")
    records = ("plan", "recipe") if rehearse else ("plan",)
    changes = parse_settings(settings, records)
    sizes = {"--site": site, "--devices": devices, "--batch": batch}
    if rehearse and (known := _known(name, site, changes)):
        refuse_options(
            {"--devices": devices, "--batch": batch, "--seq": seq},
            f"{name} has a layout of its own. Change it by --set plan.KEY=VALUE.",
        )
        _rehearse(*known)
        if not (Path(name) / "recipe.json").exists():
            words = ("launch", "runs/first", "--recipe", name, "--site", str(site), "--show")
            next_step("See the job's script, and what is still to fill in:", *words)
        return
    if site is None or devices is None or batch is None:
        lacking = next(flag for flag, value in sizes.items() if value is None)
        raise ConfigError(f"{lacking}: missing. A layout needs {', '.join(sizes)}.")
    if out is not None:
        _check_out(out)
    from kit.estimate.choose.report import plan_report

    report = plan_report(
        name,
        site=site,
        devices=devices,
        batch=batch,
        tokens=tokens,
        sequence_length=seq,
        code_base=code_base,
        count=max(SHOWN, choose),
        choose=choose,
        **_kept(changes["plan"]),
    )
    chosen = report.chosen.plan
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        chosen.write(out)
    if rehearse:
        fields = {"data": EDIT, "num_steps": STEPS, **changes["recipe"]}
        _rehearse(report.search.spec, chosen, fields, Site.load(site))
        return
    kept = [Text(f"Layout {choose} is in {out}.")] if out is not None else []
    print_result(
        report.to_dict(),
        Table(*report.header, title=report.search.title, rows=report.rows),
        names_table("", report.chosen.facts()),
        *(Text(f"- {text}.") for text in report.notes),
        *kept,
    )
    if out is None:
        next_step("Keep this layout in a file:", "plan", "--out", "plan.json", *sys.argv[2:])
    else:
        _tell_launch(name, out, site, report.search)


def _tell_launch(name: str, out: Path, site: str, found: "Search") -> None:
    """Prints the command that launches the chosen layout, or the reason why it cannot be launched.

    If there is a published recipe for the model, the command contains it only if batch size and
    sequence length are the published ones. The learning rate and number of steps of a recipe were
    chosen for both.
    """
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
    next_step(f"{text}:", "launch", "runs/first", *words)


def _kept(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a search of layouts in which the fields of the plan in
    `fields` are fixed to the given values.

    Raises:
        ConfigError: An engine or a precision is unknown.
    """
    settings = {name: fields[name] for name in ("engine", "precision") if name in fields}
    Plan(**settings)  # This raises ConfigError for a wrong value.
    only = {}
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
        ConfigError: The site or the number of steps is missing, or a field of the recipe must still
            be edited.
    """
    from kit.papers.recipes import names

    if (Path(name).expanduser() / "recipe.json").exists():
        run = Run.open(name)
        fields = run.recipe.to_dict() | changes["recipe"]
        place = Site.load(site) if site else run.site
        return run.spec, run.plan.replace(**changes["plan"]), fields, place
    if name not in names() and Path(name).suffix != ".toml":
        return None
    if site is None:
        raise ConfigError(f"--site: missing. Name the machine on which to rehearse {name}.")
    gathered = gather_settings(None, name, None, {}, {"spec": {}, **changes})
    if "num_steps" in gathered.missing:
        raise ConfigError("recipe.num_steps: missing. Give --set recipe.num_steps=VALUE.")
    gathered.refuse_to_edit(unused=("data",))
    fields = {"data": EDIT, **gathered.recipe_fields}
    return gathered.spec, gathered.plan, fields, Site.load(site)


def _rehearse(spec: ModelSpec, layout: Plan, fields: dict[str, Any], site: Site) -> None:
    """Rehearses (dry-runs) a job on its site and prints the result. Exits with code 1 if the job
    does not fit the site's limits.
    """
    from kit.estimate.rehearsal import rehearse

    rehearsal = rehearse(spec, layout, Recipe.from_dict(fields), site)
    untested = [Text(f"Not yet tested: {text}.", style="dim") for text in rehearsal.never_run]
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
