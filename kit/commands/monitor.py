"""Commands on what runs have recorded: runs, export, sink, import."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from cluster.record import counted
from cluster.site import Site
from kit.commands.options import (
    JsonOption,
    RunArgument,
    SetOption,
    check_not_in_a_strangers_run,
    console,
    hint,
    parse_settings,
    print_record,
    strict_json,
    tell,
)
from kit.errors import RunError, kit_command
from kit.run import Run
from kit.show.terminal import Table, keep_drawing

if TYPE_CHECKING:
    from kit.monitor.runs import RunsTable

app = typer.Typer()


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(help="folder that holds run directories", metavar="FOLDER")
    ],
    compare: Annotated[
        list[str] | None, typer.Option(help="a run of the table to draw; up to 8 times")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="figure of --compare; default: FOLDER/compare.png")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="refresh the table until Ctrl-C")] = False,
    as_json: JsonOption = False,
) -> None:
    """List all runs below a folder, with live states and the settings in which they differ."""
    from kit.monitor.runs import runs_table

    table = runs_table(folder)
    if compare:
        _compare(table.folder, compare, out, as_json)
    elif watch and not as_json:
        keep_drawing(lambda: _drawn(runs_table(folder)), console(), every_s=2.0, over=lambda: False)
    else:
        tell(table.to_dicts(), as_json, _drawn(table))


@app.command()
def export(
    run: RunArgument,
    format: Annotated[str, typer.Option(help="csv or parquet")] = "parquet",
    out: Annotated[Path | None, typer.Option(help="file; default: RUN/export.FORMAT")] = None,
    every_attempt: Annotated[
        bool, typer.Option("--every-attempt", help="repeated steps too, in the order of recording")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the steps of a run as a table, with tokens/s, MFU and HFU."""
    from kit.monitor.export import export as write

    opened = Run.open(run)
    file = check_not_in_a_strangers_run(out or opened.directory / f"export.{format}")
    rows = write(opened, file, format=format, every_attempt=every_attempt, overwrite=overwrite)
    print_record(f"Export of {opened.name}", {"file": str(file), "rows": rows}, as_json)


@app.command()
def sink(
    run: RunArgument,
    to: Annotated[
        str, typer.Option(help="wandb (offline, unless WANDB_MODE=online) or tensorboard")
    ],
    follow: Annotated[bool, typer.Option(help="go on until the job ends, or Ctrl-C")] = True,
    as_json: JsonOption = False,
) -> None:
    """Copy the steps of a run to Weights & Biases or TensorBoard while it trains.

    The job does not notice.
    """
    from kit.monitor.sinks import copy_metrics

    report = copy_metrics(Run.open(run), to, follow=follow)
    print_record(f"Sink {to}", report.to_dict(), as_json)


@app.command(name="import")
def import_(
    log: Annotated[Path, typer.Argument(help="log file of another trainer", metavar="LOG")],
    out: Annotated[Path, typer.Option(help="new run directory", metavar="RUN")],
    site: Annotated[str, typer.Option(help="where it ran: a name or a .toml file")],
    format: Annotated[
        str | None,
        typer.Option(
            help=(
                "megatron (Megatron-LM, Megatron-DeepSpeed, GPT-NeoX), nemo (NeMo 2), nxdt (NxDT,"
                " HLAT), torchtitan, "
                "nanogpt, maxtext, hf-trainer (trainer_state.json); default: found out"
            )
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help=r"for others: a regular expression, e.g. 'it (?P<step>\d+) loss=(?P<loss>\S+)'"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="preset, spec.json or config.json, where the log does not tell it"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="go on as the log grows")] = False,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a run directory from another trainer's log, so that status, watch, figure and runs work
    on it.

    Time stamps that name no zone are read as UTC, or in the one of `--set
    import.zone=Europe/Berlin`.
    """
    from kit.convert.hugging_face_config import load_spec
    from kit.foreign.importers import import_log

    spec = None if model is None else load_spec(model)
    changes = parse_settings(settings, ("spec", "plan", "recipe", "import"))
    place = Site.load(site)
    report = import_log(
        log,
        out,
        format=format,
        pattern=pattern,
        site=place,
        spec=spec,
        changes=changes,
        follow=follow,
    )
    skipped = (
        f", {counted(report.skipped_lines, 'torn line')} skipped" if report.skipped_lines else ""
    )
    told = (
        f"{report.format}: {counted(report.steps, 'step')} in {counted(report.attempts, 'attempt')}"
        f" from {counted(report.lines, 'line')}{skipped}."
    )
    tell(report.to_dict(), as_json, told, *(Text(f"- {note}") for note in report.notes))
    if not as_json:
        hint("Watch:", "watch", out)


def _compare(folder: Path, names: list[str], out: Path | None, as_json: bool) -> None:
    from kit.monitor.runs import compare_figure
    from kit.show.style import check_picture, save_figure

    file = check_not_in_a_strangers_run(check_picture(out or folder / "compare.png"))
    if missing := [name for name in names if not (folder / name).is_dir()]:
        raise RunError(
            f"--compare {missing[0]!r}: no such run below {folder}. `{kit_command('runs', folder)}`"
            " lists them."
        )
    figure, table = compare_figure([Run.open(folder / name) for name in names])
    save_figure(figure, [], [file])
    plain = {
        name: {key: column.tolist() for key, column in columns.items()}
        for name, columns in table.items()
    }
    print(strict_json(plain) if as_json else file)


def _drawn(table: "RunsTable") -> Table | str:
    from kit.monitor.runs import heading, show
    from kit.monitor.text import COLOURS

    if not table.rows:
        return f"no run below {table.folder}"
    names, colours = table.columns, {str(state): colour for state, colour in COLOURS.items()}
    headings = [heading(name) for name in names]
    rows = [
        [
            Text(
                show(name, row.get(name)), colours.get(row["state"], "") if name == "state" else ""
            )
            for name in names
        ]
        for row in table.rows
    ]
    return Table(*headings, rows=rows, right=headings[2:])
