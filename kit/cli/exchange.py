"""Commands that draw results (figure), export results (export), and import logs and checkpoints of
other training codes (import).
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from cluster.record import counted
from cluster.site import Site
from kit import monitor
from kit.cli.options import (
    MODEL,
    OverwriteOption,
    RunArgument,
    StepOption,
    advice,
    next_step,
    note,
    owned_output,
    parse_settings,
    print_record,
    print_result,
    refuse_options,
)
from kit.errors import ConfigError, DataError, RunError, check_known, did_you_mean
from kit.interop.weights.hugging_face_config import load_spec, training_spec
from kit.interop.weights.other_trainers import named
from kit.papers import FIGURES, paper_figure, save_all
from kit.run import Run
from kit.show.style import check_picture, save_figure
from kit.show.table import Table as PaperTable
from kit.show.terminal import Table

app = typer.Typer()
TABLES = ("csv", "parquet")
SINKS = ("wandb", "tensorboard")
FOLDERS = ("hf",)
DRAW = "Draw the same steps:"
FORMATS = (*TABLES, *SINKS, *FOLDERS)
TAKEN_BY = {
    "--out": TABLES + FOLDERS,
    "--step": FOLDERS,
    "--precision": FOLDERS,
    "--follow": SINKS,
    "--overwrite": TABLES,
}
"""Formats of `kit export` that accept an option. The key is the option."""
CHECKPOINTS = {
    "nxd": ("neuron:import_nxd", "**/dp_rank_*_tp_rank_*"),
    "megatron-deepspeed": ("megatron:import_megatron_deepspeed", "layer_*-model_*-model_states.pt"),
}
"""Reader and file pattern of checkpoints of other training codes, by format. The reader is
MODULE:FUNCTION in kit.interop.weights. A folder has the format if a file matches the pattern."""


@app.command()
def export(
    run: RunArgument,
    format: Annotated[
        str,
        typer.Option(
            help="csv or parquet: the steps, with tokens/s, MFU and HFU. wandb (offline,"
            " unless WANDB_MODE=online) or tensorboard: steps and scores. hf: a"
            " checkpoint as a Hugging Face folder."
        ),
    ] = "parquet",
    out: Annotated[
        Path | None,
        typer.Option(help="File to write, or folder for hf. Default: RUN/export.FORMAT."),
    ] = None,
    step: StepOption = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="Precision of the weights for hf: float32 (exact), bfloat16 or"
            " float16. Default: float32.",
            metavar="TYPE",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="With wandb or tensorboard: after the present steps and scores, copy new steps"
            " and scores until the job ends.",
        ),
    ] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Export the steps of a run to a table, wandb or TensorBoard, or a checkpoint with its
    tokenizer to a Hugging Face folder. The run may still be training.
    """
    check_known("format", format, FORMATS)
    given = (out, step, precision, follow, overwrite)
    for (flag, formats), value in zip(TAKEN_BY.items(), given, strict=True):
        if format not in formats:
            refuse_options({flag: value}, f"only with --format {' or '.join(formats)}.")
    opened = Run.open(run)
    if format in SINKS:
        copied = monitor.copy_metrics(opened, format, follow=follow)
        print_record(f"Sink {format}", copied.to_dict())
        next_step(DRAW, "figure", run)
    elif format in TABLES:
        from kit.monitor.export import export as write

        file = owned_output(out, opened.directory / f"export.{format}")
        rows = write(opened, file, format=format, overwrite=overwrite)
        print_record(f"Export of {opened.name}", {"file": str(file), "rows": rows})
        next_step(DRAW, "figure", run)
    else:
        from kit.interop.weights.hugging_face import export_run

        folder = owned_output(out, opened.directory / "export.hf")
        note("Checking and reading the checkpoint, then writing ...")
        _tell_folder(export_run(opened, step, folder, precision=precision or "float32"))


@app.command()
def average(
    run: RunArgument,
    last: Annotated[
        int, typer.Option(help="Number of newest checkpoints to average, 2 or more.", metavar="N")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder to make. Default: RUN/average.hf."),
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Precision of the written weights.", metavar="TYPE"),
    ] = "float32",
) -> None:
    """Average the weights of the last checkpoints of a run, and write the mean with the tokenizer
    to a Hugging Face folder, which `kit eval` scores. The run may still be training.

    HLAT reports such an average of two checkpoints (arXiv 2404.10630, Table IV).
    """
    from kit.interop.weights.hugging_face import export_average

    opened = Run.open(run)
    folder = owned_output(out, opened.directory / "average.hf")
    note("Checking and reading the checkpoints, then writing ...")
    written, steps = export_average(opened, last, folder, precision=precision)
    print_result(
        {"folder": str(written), "steps": steps},
        f"Average of the checkpoints of steps {', '.join(map(str, steps))}: {written}.",
        advice("Score it:", "eval", written),
    )


@app.command(name="import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="Log file of another trainer, output_dir of transformers' Trainer, or folder with"
            " a checkpoint.",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Run directory to make from a log, or Hugging Face folder to"
            " make from a checkpoint."
        ),
    ],
    site: Annotated[
        str | None,
        typer.Option(
            help="Machine on which the log was written: a packaged site (`kit plan --list`) or a"
            " .toml file."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="Format of a log: megatron (Megatron-LM, Megatron-DeepSpeed, GPT-NeoX), nemo"
            " (NeMo 2), nxdt (NxDT, HLAT), torchtitan, nanogpt, maxtext, hf-trainer"
            " (trainer_state.json, or its printed lines), llama-factory, nanotron, olmo, composer,"
            " litgpt, nanochat, deepspeed. Format of a checkpoint: nxd, megatron-deepspeed."
            " Default: detected."
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Regular expression for other logs, e.g."
            r" 'it (?P<step>\d+) loss=(?P<loss>\S+)'. If the log has several lines for one step,"
            r" join one expression for each line by '|': 'step (?P<step>\d+)|loss=(?P<loss>\S+)'."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"{MODEL} Default: the model that the log describes.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="After the present lines of a log, import each new line, until the log says that"
            " training has ended. Also ends with Ctrl-C, or when the log is deleted.",
        ),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set a field of spec, plan or recipe that is not in the log:"
            " plan.tensor_parallel=8. Can be repeated.",
        ),
    ] = None,
) -> None:
    """Import a training log as a run directory, or another trainer's checkpoint as a Hugging Face
    folder. The commands status, watch, figure and runs then read the log as a run.

    A log needs --site, the machine on which it was written; a checkpoint needs --model. Time stamps
    without a time zone are read as UTC, or in the zone of `--set import.zone=Europe/Berlin`. Lines
    of transformers' Trainer have no step: `--set import.logging_steps=10` gives the number of steps
    per line.
    """
    changes = parse_settings(settings, ("spec", "plan", "recipe", "import"))
    if states := _trainer_states(source, format):
        source = states[-1]
    if source.is_dir():
        refuse_options(
            {"--site": site, "--pattern": pattern, "--follow": follow, "--set": settings},
            f"only with a log, and {source} is a folder.",
        )
        if model is None:
            if format is None and named(source, "importable"):
                # This raises the error that names the format of the folder.
                _reader(source, format)
            raise ConfigError("--model: missing. The files of a checkpoint do not say its shapes.")
        from kit.interop.weights.hugging_face import export_hugging_face

        spec = load_spec(model)
        _tell_folder(export_hugging_face(_reader(source, format)(source, spec), out))
        return
    from kit.interop.logs.importers import import_log
    from kit.interop.logs.suggest import check_text

    if source.is_file():
        check_text(source)
    if site is None:
        raise ConfigError("--site: missing. Name the machine on which the log was written.")
    spec = None
    notes = ()
    if model is not None:
        length = changes["spec"].get("sequence_length")
        spec, notes = training_spec(model, sequence_length=length)
    report = import_log(
        source,
        out,
        format=format,
        pattern=pattern,
        site=Site.load(site),
        spec=spec,
        changes=changes,
        spec_notes=notes,
        follow=follow,
    )
    text = (
        f"{report.format}: {counted(report.steps, 'step')} in {counted(report.attempts, 'attempt')}"
        f" from {counted(report.lines, 'line')}"
    )
    if report.skipped_lines:
        text += f", {counted(report.skipped_lines, 'torn line')} skipped"
    print_result(
        report.to_dict(),
        f"{text}.",
        *(Text(f"- {text}") for text in report.notes),
        advice("Watch:", "watch", out),
    )


def _trainer_states(source: Path, format: str | None) -> list[Path]:
    """Returns the logs of transformers' Trainer in a folder that is the output_dir of this Trainer.
    Returns an empty list for any other path.
    """
    if not source.is_dir() or format in CHECKPOINTS:
        return []
    from kit.interop.logs.importers import trainer_states

    return trainer_states(source)


def _reader(folder: Path, format: str | None) -> Any:
    """Returns the function that reads a checkpoint of another training code. If `format` is None,
    the names of the folder's files determine the format.

    Raises:
        DataError: The files have no known format.
        ConfigError: The format is unknown.
    """
    if format is None:
        for name, (_, pattern) in CHECKPOINTS.items():
            if any(folder.glob(pattern)):
                format = name
                break
        else:
            raise DataError(
                f"{folder}: no checkpoint that can be imported. {named(folder, 'importable')}"
                f"Formats: {', '.join(CHECKPOINTS)}."
            )
    check_known("format", format, CHECKPOINTS)
    module, _, function = CHECKPOINTS[format][0].partition(":")
    return getattr(importlib.import_module(f"kit.interop.weights.{module}"), function)


def _tell_folder(folder: Path) -> None:
    """Prints the path and the size of the Hugging Face folder that was written."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print_record("Written", {"folder": str(folder), "bytes": size})
    next_step("Score it:", "eval", folder)


@app.command()
def figure(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Run directory, or name of a paper's figure. Default: list the names, or"
            " with --out draw all figures.",
            metavar="RUN|NAME",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: .png, .svg or .pdf; .csv for a table. Default:"
            " RUN/figure.png or NAME.png. Without a name, all figures of the papers are"
            " drawn into this folder."
        ),
    ] = None,
    own: Annotated[
        list[Path] | None,
        typer.Option("--run", help="Run directory to add to a paper's figure. Can be repeated."),
    ] = None,
    points: Annotated[
        Path | None,
        typer.Option(
            help="CSV of points that you digitised from the paper's figure. They are drawn"
            " beside the other points."
        ),
    ] = None,
    points_template: Annotated[
        bool, typer.Option("--points-template", help="Print a CSV to fill in for --points.")
    ] = False,
) -> None:
    """Draw the loss and MFU of a run, or a figure of a paper with its table. Without a name, list
    the figures of the papers.
    """
    if name is None:
        _all(out, own or ())
    elif name in FIGURES and points_template:
        print(FIGURES[name].points_template(name, own or ()), end="")
        words = (name, "--points", "points.csv")
        next_step("Fill it in, as points.csv, and draw it:", "figure", *words)
    elif name in FIGURES:
        _draw(name, out, own or (), points)
    elif not Path(name).exists():
        near = did_you_mean(name, FIGURES).strip() or "`kit figure` lists those of papers."
        raise RunError(f"{name} is neither a run directory nor a figure of a paper. {near}")
    else:
        refuse_options(
            {"--run": own, "--points": points or points_template},
            f"only with a figure of a paper, which {name} is not. `kit figure` lists them.",
        )
        _draw_run(Run.open(Path(name)), out)


def _draw_run(run: Run, out: Path | None) -> None:
    """Draws the loss and MFU of a run to a file, `out` or figure.png in the run directory. Prints
    the path of the file.
    """
    file = check_picture(owned_output(out, run.directory / "figure.png"))
    drawn, table = monitor.run_figure(run)
    save_figure(drawn, [], [file])
    print_result({name: column.tolist() for name, column in table.items()}, str(file))
    next_step("List the runs beside it:", "runs", run.directory.parent)


def _all(out: Path | None, runs: Sequence[Path]) -> None:
    """If `out` is None, lists the figures of papers. Otherwise draws all of them into the folder
    `out`, with the user's `runs` added.
    """
    if out is None:
        refuse_options(
            {"--run": [*runs]},
            "a list of figures does not use runs. To draw the figures, give --out FOLDER.",
        )
        rows = [(name, figure.paper, figure.title) for name, figure in FIGURES.items()]
        print_result(
            {name: title for name, _, title in rows},
            Table("name", "in the paper", "what it shows", title="kit figure NAME", rows=rows),
        )
        next_step("Draw one, for example:", "figure", "frontier-strong-scaling")
        return
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file. Give a folder; it is made if it is not there.")
    problems = save_all(FIGURES, out, runs)
    lines = []
    for name, problem in problems.items():
        lines.append(Text(f"{name} is not drawn: {problem}" if problem else str(out / name)))
    print_result(problems, *lines)
    next_step("Add runs of your own:", "figure", "--out", out, "--run", "runs/first")


def _draw(name: str, out: Path | None, runs: Sequence[Path], points: Path | None) -> None:
    """Draws a figure of a paper to a file. Writes the numbers of the figure to a .csv file of the
    same name.

    If the paper's figure is a table, only the .csv file is written. If `out` is a .csv file, no
    picture is drawn. The user's runs and points that cannot be drawn are named on standard error.

    Args:
        name: name of the figure.
        out: file of the picture, or a .csv file.
        runs: directories of the user's own runs.
        points: file of points that the user has digitised from the paper's figure.
    """
    only_table = out is not None and out.suffix.lower() == ".csv"
    file = out if out and only_table else check_picture(out or Path(f"{name}.png"))
    drawn, rows = paper_figure(name).draw(runs, points=points)
    if isinstance(drawn, PaperTable) and not only_table:
        if out is not None:
            raise ConfigError(f"--out {out}: {name} is a table. Name a .csv file.")
        file = Path(f"{name}.csv")
    save_figure(drawn, rows, sorted({file, file.with_suffix(".csv")}))
    for text in drawn.left_out:
        note(Text(text, style="yellow"))
    print_result([_without_nan(row) for row in rows], str(file))
    next_step("Add a run of your own:", "figure", name, "--run", "runs/first")


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of a table with None in place of NaN, which JSON does not have."""
    values = dict(row)
    for key, value in values.items():
        if value != value:  # NaN
            values[key] = None
    return values
