"""The command line: every button of the notebooks has a twin here. `kit --help` lists them."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cluster.site import Site
from cluster.state import JobError
from kit import launcher
from kit.errors import ConfigError, DataError, MissingPackageError, RunError
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
data_app = typer.Typer(no_args_is_help=True, help="Build token files, and look at them.")
app.add_typer(data_app, name="data")

RunArgument = Annotated[Path, typer.Argument(help="run directory", metavar="RUN")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="dotted.key=value, e.g. plan.tensor_parallel=2")]


@data_app.command("build")
def data_build(
    out: Annotated[Path, typer.Argument(help="folder to make")],
    source: Annotated[
        list[Path] | None, typer.Option(help="text, jsonl or parquet; default: Python's own texts")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, .model or folder; default: train one")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="of a trained tokenizer; default 4096")] = None,
    max_megabytes: Annotated[float | None, typer.Option(help="of text to read")] = None,
    validation_fraction: Annotated[float, typer.Option(help="of the documents, held out whole")] = 0.02,
    overwrite: Annotated[bool, typer.Option(help="replace another dataset in that folder")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn text into token files for training."""
    from kit.data import build_dataset

    limit: dict[str, Any] = {} if max_megabytes is None else {"max_bytes": int(max_megabytes * 1e6)}
    dataset = build_dataset(
        out,
        sources=source,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation_fraction=validation_fraction,
        overwrite=overwrite,
        progress=not as_json,
        **limit,
    )
    if as_json:
        print(json.dumps(dataset.info.to_dict()))
    else:
        _console().print(dataset)


@app.command()
def launch(
    run: RunArgument,
    model: Annotated[str, typer.Option(help="preset, or a spec.json")] = "demo",
    data: Annotated[Path, typer.Option(help="folder made by `kit data build`")] = Path("data/demo"),
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 100,
    site: Annotated[str, typer.Option(help="where: a name or a .toml file")] = "laptop",
    measure_peak: Annotated[bool, typer.Option(help="time matrix products first, so that MFU is known")] = True,
    settings: SetOption = None,
) -> None:
    """Start a training job in a new run directory. It goes on when this command ends."""
    spec = ModelSpec.read(Path(model)) if model.endswith(".json") else ModelSpec.preset(model)
    changes = _parse_settings(settings)
    spec, plan = spec.replace(**changes["spec"]), Plan(global_batch_size=16, micro_batch_size=4)
    recipe = Recipe(
        data=str(data), num_steps=steps, learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=steps // 10
    )
    plan, recipe = plan.replace(**changes["plan"]), recipe.replace(**changes["recipe"])
    place = Site.load(site)
    if place.scheduler == "local" and measure_peak and place.peak_flops_per_s(plan.precision) is None:
        from kit.bench.gemm import measured_site

        place = measured_site(place, plan.precision)
    started = launcher.launch(run, spec=spec, plan=plan, recipe=recipe, site=place)
    _console().print(f"Started {plan.num_devices} processes. Watch: [bold]kit watch {started.directory}[/]")


@app.command()
def resume(
    run: RunArgument,
    steps: Annotated[int | None, typer.Option(help="new total of optimizer steps")] = None,
    settings: SetOption = None,
) -> None:
    """Continue a run from its last checkpoint, on the same plan or another (--set plan...)."""
    plan = Run.open(run).plan.replace(**_parse_settings(settings, allowed=("plan",))["plan"])
    started = launcher.resume(run, plan=plan, num_steps=steps)
    _console().print(f"Started {plan.num_devices} processes. Watch: [bold]kit watch {started.directory}[/]")


@app.command()
def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Say what a run does now."""
    from kit.monitor import status_row, status_table

    opened = Run.open(run)
    if as_json:
        print(json.dumps(status_row(opened)))
    else:
        _console().print(status_table(opened))


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
    _console().print("Killed." if now else "Asked to stop after the current step; a checkpoint is written first.")


@app.command()
def checkpoint(run: RunArgument) -> None:
    """Ask a run for a checkpoint after its current step."""
    Run.open(run).job.checkpoint()


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(help="run directory, or `data` to fetch the benchmarks", metavar="RUN|data")],
    step: Annotated[int | None, typer.Option(help="which checkpoint; default: the newest")] = None,
    tasks: Annotated[str, typer.Option(help="comma-separated")] = "heldout,piqa,arc_easy",
    limit: Annotated[int | None, typer.Option(help="items per task, a seeded random part")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score a checkpoint with lm-eval, without conversion."""
    from kit import evaluate as evaluation

    if run == "data":
        manifest = evaluation.build_mirror()
        _print_record("Benchmark data", manifest.to_dict(), as_json)
        return
    report = evaluation.evaluate(Run.open(run), step=step, tasks=tuple(tasks.split(",")), limit=limit)
    print(report.to_json() if as_json else report.to_text())


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


def main() -> None:
    """Runs the command line; an error that the user can mend is told without a traceback."""
    try:
        app(standalone_mode=True)
    except (ConfigError, DataError, RunError, JobError, MissingPackageError) as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/]:", str(error), highlight=False, markup=True)
        sys.exit(1)


def _parse_settings(
    settings: list[str] | None, allowed: tuple[str, ...] = ("spec", "plan", "recipe")
) -> dict[str, dict]:
    """Returns {"plan": {"tensor_parallel": 2}, ...} from `plan.tensor_parallel=2`; values are JSON or plain words."""
    changes: dict[str, dict[str, Any]] = {name: {} for name in allowed}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        record, dot, field = key.partition(".")
        if not (equals and dot and record in allowed):
            wanted = " or ".join(f"{name}.KEY=VALUE" for name in allowed)
            raise ConfigError(f"--set {setting!r} is not allowed. Give {wanted}.")
        try:
            changes[record][field] = json.loads(value)
        except json.JSONDecodeError:
            changes[record][field] = value
    return changes


def _print_record(title: str, values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    table = Table(title=title, title_justify="left", show_header=False)
    for key, value in values.items():
        table.add_row(key, f"{value:,}" if isinstance(value, int) else str(value))
    _console().print(table)


def _console() -> Console:
    return Console(highlight=False)


if __name__ == "__main__":
    main()
