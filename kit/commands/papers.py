"""Commands on the figures of papers: their list, or all of them as files; `kit figure NAME`
draws one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from cluster.record import ConfigError
from kit.commands.options import JsonOption, console, tell
from kit.papers import FIGURES, paper_figure, save_all
from kit.show.terminal import PlainConsole, Table

app = typer.Typer()


@app.command()
def figures(
    out: Annotated[
        Path | None, typer.Option(help="draw them all into this folder, as SVG, PNG and CSV")
    ] = None,
    own: Annotated[
        list[Path] | None, typer.Option("--run", help="your runs, added to what is drawn")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the figures of papers that `kit figure NAME` draws, or draw all of them (--out
    FOLDER).
    """
    if out is not None:
        if out.exists() and not out.is_dir():
            raise ConfigError(
                f"--out {out}: is a file. Give a folder; it is made if it is not there."
            )
        for name, problem in save_all(FIGURES, out, own or ()).items():
            told = (
                Text.assemble((f"{name} is not drawn: ", "yellow"), problem)
                if problem
                else Text(str(out / name))
            )
            console().print(told, soft_wrap=True)
        return
    if own:
        raise ConfigError(
            "--run: a list has no use for runs. Name a folder for the figures too: --out FOLDER."
        )
    rows = [(name, figure.paper, figure.title) for name, figure in FIGURES.items()]
    table = Table("name", "in the paper", "what it shows", title="kit figure NAME", rows=rows)
    tell({name: title for name, _, title in rows}, as_json, table)


def draw_paper_figure(
    name: str, out: Path | None, runs: Sequence[Path], as_json: bool, points: Path | None = None
) -> None:
    """Draws a figure of a paper to a file (default: NAME.png here), and writes its table to a .csv
    beside it.

    `points` is a file of the paper's own points. What the paper prints as a table is written to a
    .csv only (default: NAME.csv); `out` may name one for a figure too. What was given and is not
    drawn is told on standard error.
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
        PlainConsole(stderr=True).print(Text(text, style="yellow"), soft_wrap=True)
    known = [
        {name: None if value != value else value for name, value in row.items()} for row in rows
    ]  # NaN: no JSON
    print(json.dumps(known) if as_json else file)
