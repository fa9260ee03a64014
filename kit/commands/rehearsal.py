"""The command that plays a job before it is paid for: rehearse."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from cluster.scheduler import EDIT
from cluster.site import Site
from kit.commands.asked import ask_for, on_devices
from kit.commands.options import JsonOption, SetOption, parse_settings, tell
from kit.errors import ConfigError
from kit.recipe import Recipe
from kit.show.terminal import Table
from kit.spec import PRESETS

app = typer.Typer()


@app.command()
def rehearse(
    run: Annotated[
        Path | None,
        typer.Argument(help="run directory; or give --recipe or --model", metavar="RUN"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="preset, spec.json or config.json; default: the recipe's")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="as of `kit launch`: a file, or a published one")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="layout made by `kit plan --out`; default: the recipe's")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="folder made by `kit data build`")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps")] = None,
    devices: Annotated[int | None, typer.Option(help="as many replicas as fill so many")] = None,
    nodes: Annotated[int | None, typer.Option(help="the same in nodes of the site")] = None,
    site: Annotated[
        str | None, typer.Option(help="a name or a .toml file; default: the run's")
    ] = None,
    mtbf_hours: Annotated[
        float | None,
        typer.Option(help="mean time between failures of the job; default: published", min=0.01),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a job of full size would ask of its site, stage by stage, and whether it fits;
    nothing is started.
    """
    from kit.rehearsal import rehearse as play
    from kit.run import Run

    changes = parse_settings(settings)
    if run is not None:
        if other := [
            name for name, value in (("--model", model), ("--recipe", recipe)) if value is not None
        ]:
            raise ConfigError(f"{other[0]}: not with RUN, which has one. Give one of them.")
        if str(run) in PRESETS and not run.exists():
            raise ConfigError(
                f"{run}: there is no such run directory, but a model of that name. Give --model"
                f" {run}."
            )
        known = Run.open(run)
        spec, fields = (
            known.spec.replace(**changes["spec"]),
            known.recipe.to_dict() | changes["recipe"],
        )
        layout, place = (
            known.plan.replace(**changes["plan"]),
            Site.load(site) if site else known.site,
        )
    elif site is None or (model is None and recipe is None):
        raise ConfigError(
            "rehearse: nothing to play. Give RUN, or --site with --recipe or --model."
        )
    else:
        asked = ask_for(model, recipe, plan, {}, changes)
        spec, layout, fields, place = asked.spec, asked.plan, asked.fields, Site.load(site)
        if steps is None and "num_steps" in asked.lacking:
            raise ConfigError(f"recipe.num_steps: {asked.lacking['num_steps']}.")
    given = {"data": data and str(data), "num_steps": steps}
    fields = {
        "data": EDIT,
        **fields,
        **{name: value for name, value in given.items() if value is not None},
    }
    found = play(
        spec,
        on_devices(layout, place, devices, nodes),
        Recipe.from_dict(fields),
        place,
        hours_between_failures=mtbf_hours,
    )
    table = Table(*found.header, title=found.title, rows=found.rows)
    never = (Text(f"Never run: {text}.", style="dim") for text in found.never_run)
    tell(found.to_dict(), as_json, table, *never)
    if not found.fits:
        raise typer.Exit(1)
