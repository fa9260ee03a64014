"""Commands on runs: launch, engine, resume, status, watch, logs, stop, checkpoint, figure."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from cluster.render import render
from cluster.site import Site
from kit import launcher
from kit.commands.options import JsonOption, RunArgument, SetOption, console, parse_settings
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec

app = typer.Typer()
MinutesOption = Annotated[float | None, typer.Option(help="time limit of one job; a longer run comes back")]


@app.command()
def launch(
    run: RunArgument,
    model: Annotated[str, typer.Option(help="preset, or a spec.json")] = "demo",
    data: Annotated[Path, typer.Option(help="folder made by `kit data build`")] = Path("data/demo"),
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 100,
    site: Annotated[str, typer.Option(help="where: a name or a .toml file")] = "laptop",
    measure_peak: Annotated[bool, typer.Option(help="time matrix products first, so that MFU is known")] = True,
    minutes: MinutesOption = None,
    show: Annotated[
        bool, typer.Option("--show", help="print the script that would be submitted, start nothing")
    ] = False,
    settings: SetOption = None,
) -> None:
    """Start a training job in a new run directory. It goes on when this command ends."""
    spec = ModelSpec.read(Path(model)) if model.endswith(".json") else ModelSpec.preset(model)
    changes = parse_settings(settings)
    spec, plan = spec.replace(**changes["spec"]), Plan(global_batch_size=16, micro_batch_size=4)
    recipe = Recipe(
        data=str(data), num_steps=steps, learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=steps // 10
    )
    plan, recipe = plan.replace(**changes["plan"]), recipe.replace(**changes["recipe"])
    place = Site.load(site)
    time_limit_s = None if minutes is None else 60 * minutes
    if show:
        prepared = Run(run.absolute(), spec=spec, plan=plan, recipe=recipe, site=place)
        print(render(launcher.job_spec(prepared, time_limit_s), place), end="")
        return
    if place.scheduler == "local" and measure_peak and place.peak_flops_per_s(plan.precision) is None:
        from kit.bench.gemm import measured_site

        place = measured_site(place, plan.precision)
    started = launcher.launch(run, spec=spec, plan=plan, recipe=recipe, site=place, time_limit_s=time_limit_s)
    console().print(f"Started {plan.num_devices} processes. Watch: [bold]kit watch {started.directory}[/]")


@app.command()
def engine(run: RunArgument) -> None:
    """Print what a run's engine is told: DeepSpeed's JSON and, for a GPT, Megatron-DeepSpeed's arguments."""
    from kit.engines.deepspeed_config import deepspeed_config, megatron_arguments

    opened = Run.open(run)
    if opened.plan.engine != "deepspeed":
        print(f"engine {opened.plan.engine!r}: it has no configuration beside plan.json and recipe.json")
        return
    print(json.dumps(deepspeed_config(opened.plan, opened.recipe), indent=2))
    if opened.spec.family == "gpt":
        print("pretrain_gpt.py", shlex.join(megatron_arguments(opened.spec, opened.plan, opened.recipe)))


@app.command()
def resume(
    run: RunArgument,
    steps: Annotated[int | None, typer.Option(help="new total of optimizer steps")] = None,
    minutes: MinutesOption = None,
    settings: SetOption = None,
) -> None:
    """Continue a run from its last checkpoint, on the same plan or another (--set plan...)."""
    plan = Run.open(run).plan.replace(**parse_settings(settings, allowed=("plan",))["plan"])
    started = launcher.resume(run, plan=plan, num_steps=steps, time_limit_s=None if minutes is None else 60 * minutes)
    console().print(f"Started {plan.num_devices} processes. Watch: [bold]kit watch {started.directory}[/]")


@app.command()
def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Say what a run does now."""
    from kit.monitor import status_row, status_table

    opened = Run.open(run)
    if as_json:
        print(json.dumps(status_row(opened)))
    else:
        console().print(status_table(opened))


@app.command()
def watch(run: RunArgument) -> None:
    """Follow a run in the terminal until it ends. Ctrl-C leaves the job alone."""
    from kit.monitor import watch as watch_run

    watch_run(Run.open(run))


@app.command()
def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option(help="which process")] = 0,
    follow: Annotated[bool, typer.Option(help="go on until the job ends")] = False,
) -> None:
    """Print the log of one rank."""
    job = Run.open(run).job
    if not follow:
        print(job.logs(rank), end="")
        return
    for line in job.follow(rank):
        print(line, end="", flush=True)


@app.command()
def stop(run: RunArgument, now: Annotated[bool, typer.Option(help="kill it, without a checkpoint")] = False) -> None:
    """Ask a run to checkpoint and stop after its current step, or with --now to end at once."""
    job = Run.open(run).job
    if now:
        job.cancel()
    else:
        job.stop()
    console().print("Killed." if now else "Asked to stop after the current step; a checkpoint is written first.")


@app.command()
def checkpoint(run: RunArgument) -> None:
    """Ask a run for a checkpoint after its current step."""
    Run.open(run).job.checkpoint()


@app.command()
def figure(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="file (.png, .svg, .pdf); default: RUN/figure.png")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw loss and MFU of a run."""
    from kit.monitor import run_figure

    opened = Run.open(run)
    drawn, table = run_figure(opened)
    file = out or opened.directory / "figure.png"
    drawn.savefig(file)
    print(json.dumps({name: column.tolist() for name, column in table.items()}) if as_json else file)
