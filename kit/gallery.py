"""`python -m kit.gallery [NAME ...]`: runs the notebooks and keeps their pictures in notebooks/gallery."""

import argparse
import base64
import sys
from pathlib import Path

import nbformat
from rich.console import Console
from rich.markup import escape

from kit.demo import REPOSITORY, NotebookError, execute

NOTEBOOKS = REPOSITORY / "notebooks"


def pictures(executed: Path) -> dict[str, bytes]:
    """Returns the PNG pictures of an executed notebook, by the id of the cell that shows them."""
    found = {}
    for cell in nbformat.read(executed, as_version=4).cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                found[cell.id] = base64.b64decode(output.data["image/png"])
    return found


def main() -> int:
    """Runs the named notebooks, by default all, replaces their pictures and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kit.gallery", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="e.g. 00_quickstart; default all")
    options = parser.parse_args()
    notebooks = {file.stem: file for file in sorted(NOTEBOOKS.glob("*.ipynb"))}
    if unknown := set(options.names) - set(notebooks):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. There are {', '.join(notebooks)}.")
    console, gallery = Console(highlight=False), NOTEBOOKS / "gallery"
    for name in options.names or notebooks:
        executed = REPOSITORY / "build" / "gallery" / f"{name}.ipynb"
        console.rule(name)
        try:
            execute(notebooks[name], executed, console=console)
        except NotebookError as error:
            console.print(f"[red]{name} failed; its old pictures stay.[/] {escape(str(error))}", soft_wrap=True)
            return 1
        gallery.mkdir(exist_ok=True)
        for old in gallery.glob(f"{name}--*.png"):
            old.unlink()
        for cell, picture in pictures(executed).items():
            (gallery / f"{name}--{cell}.png").write_bytes(picture)
        console.print(f"{len(list(gallery.glob(f'{name}--*.png')))} pictures in {gallery}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
