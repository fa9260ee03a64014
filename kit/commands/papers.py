"""Commands on the figures of papers: their list; `kit figure NAME` draws one."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from cluster.record import write_atomic
from kit.commands.options import JsonOption, console
from kit.papers import FIGURES, paper_figure

app = typer.Typer()


@app.command()
def figures(as_json: JsonOption = False) -> None:
    """List the figures of papers that `kit figure NAME` draws."""
    if as_json:
        print(json.dumps({name: figure.title for name, figure in FIGURES.items()}))
        return
    table = Table(title="kit figure NAME", title_justify="left", show_header=False)
    for name, figure in FIGURES.items():
        table.add_row(name, figure.title)
    console().print(table)


def draw_paper_figure(name: str, out: Path | None, runs: Sequence[Path], as_json: bool) -> None:
    """Draws a figure of a paper to a file (default: NAME.png here), its table to NAME.json beside it."""
    drawn, rows = paper_figure(name).draw(runs)
    file = out or Path(f"{name}.png")
    drawn.savefig(file, bbox_inches="tight")
    known = [{name: None if value != value else value for name, value in row.items()} for row in rows]  # NaN: no JSON
    write_atomic(file.with_suffix(".json"), json.dumps(known, indent=1) + "\n")
    print(json.dumps(known) if as_json else file)
