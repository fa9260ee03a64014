"""`python -m kit.gallery [NAME ...]`: runs the notebooks and keeps their pictures in notebooks/gallery.

Of the notebooks that redraw papers every figure is kept as SVG and PNG with its table as CSV, every table as CSV.
"""

import argparse
import base64
import sys
from pathlib import Path

import nbformat
from rich.console import Console
from rich.markup import escape

from cluster.record import ConfigError
from kit.demo import REPOSITORY, NotebookError, execute
from kit.papers import FRONTIER, HLAT, save_all

NOTEBOOKS = REPOSITORY / "notebooks"
GALLERY = NOTEBOOKS / "gallery"
DPI = 120
"""Of the papers' figures there; the SVG has all detail."""
PAPERS = {"06_frontier_figures": (FRONTIER, "frontier-demo"), "07_hlat_figures": (HLAT, "hlat-demo")}
"""Notebooks of papers: their figures, and the folder below runs/ with the demo-scale runs that they have made."""


def pictures(executed: Path) -> dict[str, bytes]:
    """Returns the PNG pictures of an executed notebook, by the id of the cell that shows them."""
    found = {}
    for cell in nbformat.read(executed, as_version=4).cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                found[cell.id] = base64.b64decode(output.data["image/png"])
    return found


def keep(name: str, executed: Path) -> None:
    """Replaces the pictures of a notebook in the gallery.

    Raises:
        ConfigError: a figure of a paper cannot be drawn.
    """
    GALLERY.mkdir(exist_ok=True)
    if name in PAPERS:
        figures, study = PAPERS[name]
        for old in (file for figure in figures for file in GALLERY.glob(f"{figure}.*")):
            old.unlink()
        told = save_all(figures, GALLERY, [REPOSITORY / "runs" / study], dpi=DPI)
        if missing := [f"{figure}: {why}" for figure, why in told.items() if why]:
            raise ConfigError("; ".join(missing))
        return
    for old in GALLERY.glob(f"{name}--*.png"):
        old.unlink()
    for cell, picture in pictures(executed).items():
        (GALLERY / f"{name}--{cell}.png").write_bytes(picture)


def main() -> int:
    """Runs the named notebooks, by default all, replaces their pictures and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kit.gallery", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="e.g. 00_quickstart; default all")
    options = parser.parse_args()
    notebooks = {file.stem: file for file in sorted(NOTEBOOKS.glob("*.ipynb"))}
    if unknown := set(options.names) - set(notebooks):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. There are {', '.join(notebooks)}.")
    console = Console(highlight=False)
    for name in options.names or notebooks:
        executed = REPOSITORY / "build" / "gallery" / f"{name}.ipynb"
        console.rule(name)
        try:
            execute(notebooks[name], executed, console=console)
        except NotebookError as error:
            console.print(f"[red]{name} failed; its old pictures stay.[/] {escape(str(error))}", soft_wrap=True)
            return 1
        keep(name, executed)
        console.print(f"{len(list(GALLERY.glob('*.png')))} pictures in {GALLERY}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
