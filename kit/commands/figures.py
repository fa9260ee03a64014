"""The command that draws: figure, of a run or of a paper."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kit.commands.options import check_not_in_a_strangers_run, note, tell
from kit.errors import ConfigError, RunError
from kit.papers import FIGURES, paper_figure, save_all
from kit.run import Run
from kit.show.terminal import Table

app = typer.Typer()


@app.command()
def figure(
    name: Annotated[
        str | None,
        typer.Argument(help="Run directory, or figure of a paper.", metavar="RUN|NAME"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File (.png, .svg, .pdf; .csv for a table). Default: RUN/figure.png or NAME.png."
            " Without a name: folder for all figures of papers."
        ),
    ] = None,
    own: Annotated[
        list[Path] | None,
        typer.Option("--run", help="Your runs, added to a paper's figure. Can be repeated."),
    ] = None,
    points: Annotated[
        Path | None, typer.Option(help="CSV of a paper's points, digitised by you.")
    ] = None,
    points_template: Annotated[
        bool, typer.Option("--points-template", help="Print such a CSV to fill in.")
    ] = False,
) -> None:
    """Draw loss and MFU of a run, or a figure of a paper and its table beside it; without a name,
    list the figures of papers.
    """
    if name is None:
        _all(out, own or ())
    elif name in FIGURES and points_template:
        print(FIGURES[name].points_template(name, own or ()), end="")
    elif name in FIGURES:
        _draw(name, out, own or (), points)
    elif not Path(name).exists():
        close = difflib.get_close_matches(name, FIGURES, n=1)
        near = f"Did you mean {close[0]!r}?" if close else "`kit figure` lists those of papers."
        raise RunError(f"{name} is neither a run directory nor a figure of a paper. {near}")
    elif points or points_template or own:
        flag = "--run" if own else "--points"
        raise ConfigError(
            f"{flag}: only with a figure of a paper, which {name} is not. `kit figure` lists them."
        )
    else:
        _draw_run(Run.open(Path(name)), out)


def _draw_run(run: Run, out: Path | None) -> None:
    from kit.monitor import run_figure
    from kit.show.style import check_picture, save_figure

    file = check_not_in_a_strangers_run(check_picture(out or run.directory / "figure.png"))
    drawn, table = run_figure(run)
    save_figure(drawn, [], [file])
    tell({name: column.tolist() for name, column in table.items()}, str(file))


def _all(out: Path | None, runs: Sequence[Path]) -> None:
    """Lists the figures of papers, or draws all of them into a folder."""
    if out is None:
        if runs:
            raise ConfigError(
                "--run: a list has no use for runs. Name a folder for the figures: --out FOLDER."
            )
        rows = [(name, figure.paper, figure.title) for name, figure in FIGURES.items()]
        table = Table("name", "in the paper", "what it shows", title="kit figure NAME", rows=rows)
        tell({name: title for name, _, title in rows}, table)
        return
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file. Give a folder; it is made if it is not there.")
    problems = save_all(FIGURES, out, runs)
    told = [
        Text(f"{name} is not drawn: {problem}" if problem else str(out / name))
        for name, problem in problems.items()
    ]
    tell(problems, *told)


def _draw(name: str, out: Path | None, runs: Sequence[Path], points: Path | None) -> None:
    """Draws a figure of a paper to a file, and writes its table to a .csv beside it.

    `points` is a file of the paper's own points. What the paper prints as a table is written to a
    .csv only; `out` may name one for a figure too. What was given and is not drawn is told on
    standard error.
    """
    from kit.show import table
    from kit.show.style import check_picture, save_figure

    only_table = out is not None and out.suffix.lower() == ".csv"
    file = out if out and only_table else check_picture(out or Path(f"{name}.png"))
    drawn, rows = paper_figure(name).draw(runs, points=points)
    if isinstance(drawn, table.Table) and not only_table:
        if out is not None:
            raise ConfigError(f"--out {out}: {name} is a table. Name a .csv file.")
        file = Path(f"{name}.csv")
    save_figure(drawn, rows, sorted({file, file.with_suffix(".csv")}))
    for text in drawn.left_out:
        note(Text(text, style="yellow"))
    # NaN is no JSON.
    known = [{key: None if it != it else it for key, it in row.items()} for row in rows]
    tell(known, str(file))
