"""`python -m tests.gallery [NAME ...]`: runs the notebooks and writes a page with pictures for each
of them to notebooks/gallery.

For notebooks that redraw a paper, each figure is written as SVG with its table as CSV, each table
as CSV, and the paper's claims as one page.
"""

import argparse
import base64
import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from rich.console import Console
from rich.markup import escape

from cluster.record import ConfigError
from kit.demo import REPOSITORY, NotebookError, execute
from kit.papers import FRONTIER, HLAT, save_all
from kit.papers.claims import Paper, claims_page
from kit.show.theme import DARK, PIXELS_PER_INCH, WIDTH

NOTEBOOKS = REPOSITORY / "notebooks"
GALLERY = NOTEBOOKS / "gallery"
COLOURS = 128
"""Number of colours of each PNG in the gallery. Lines and text need no more colours, and the files
are a third as large."""
ON_DARK = "".join(
    f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}\n'
    for light, dark in DARK.items()
    for kind in ("fill", "stroke")
)
DRAWING = "kit-figure"
"""Class of the HTML element that holds a figure as SVG."""
PAPERS: dict[str, tuple[Paper, dict[str, Any], str]] = {
    "06_frontier_figures": ("frontier", FRONTIER, "frontier-demo"),
    "07_hlat_figures": ("hlat", HLAT, "hlat-demo"),
}
"""Notebooks that redraw a paper, by notebook name. Value: (paper, its figures, folder below runs/
with the demo-scale runs of the notebook)."""
SHOWN = ("image/png", "text/markdown", "text/html", "text/plain")
"""MIME types of a cell's output, the preferred type first. The gallery shows the static image of a
live view."""
LIVE = "application/vnd.jupyter.widget-view+json"
INVITATION = "[Read it here with all pictures](gallery/{name}.md), without running anything."
"""Sentence in the first cell of each notebook, with a link to the notebook's gallery page."""
FOLD = "<details>\n<summary>Checks</summary>"
"""Beginning of a part of a gallery page that the reader can open."""
MADE = "Made by `make gallery` from [the notebook](../{name}.ipynb), which runs on two CPU cores."


def write_page(name: str, executed: Path) -> None:
    """Replaces a notebook's Markdown page in the gallery, and the images of the page, named
    NAME--CELL.png.
    """
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    for old in GALLERY.glob(f"{name}--*"):
        old.unlink()
    document = nbformat.read(executed, as_version=4)
    document.cells = list(_with_folds(document.cells))
    for cell in document.cells:
        if cell.cell_type == "markdown":
            cell.source = as_on_the_page(name, cell.source)
        # The outputs of a cell with a live view contain a static image too, which is kept instead
        # of the live view.
        if "outputs" in cell:
            cell.outputs = [
                each
                for each in cell.outputs
                if LIVE not in each.get("data", {}) or SHOWN[0] in each.data
            ]
        for number, output in enumerate(cell.get("outputs", [])):
            stem = f"{name}--{cell.id}{number or ''}"
            output.setdefault("metadata", {})["filename"] = f"{stem}.png"
            _clean(output, stem, cell.source)
    extract = Config(
        {"ExtractOutputPreprocessor": {"enabled": True, "extract_output_types": {"image/png"}}}
    )
    text, resources = MarkdownExporter(config=extract).from_notebook_node(document)
    for file, picture in resources["outputs"].items():
        (GALLERY / file).write_bytes(fewer_colours(picture))
    text = re.sub(r"!\[png\]\((\w+?--([\w-]+)\.png)\)", _with_words, text)
    lines = (line.rstrip() for line in text.strip().splitlines())
    (GALLERY / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _with_folds(cells: Iterable[NotebookNode]) -> Iterator[NotebookNode]:
    """Yields the cells of a notebook. Cells that JupyterLab shows folded are surrounded by the HTML
    of a part of the page that the reader can open.
    """
    for cell in cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            yield nbformat.v4.new_markdown_cell(FOLD)
            yield cell
            yield nbformat.v4.new_markdown_cell("</details>")
        else:
            yield cell


def as_on_the_page(name: str, text: str) -> str:
    """Returns the text of a Markdown cell for the gallery page. Links are adapted to the page.
    Formulas use a syntax in which code hosts keep the backslash before a comma.
    """
    text = re.sub(r"^\$\$(.+?)\$\$$", r"```math\n\1\n```", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?<!\$)\$([^$`\n]*\\[,;!{}][^$`\n]*)\$(?!\$)", r"$`\1`$", text)
    text = re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", text).replace("](../", "](../../")
    text = text.replace(INVITATION.format(name=name), MADE.format(name=name))
    return text.replace("](gallery/", "](")


def _with_words(picture: re.Match[str]) -> str:
    """Returns the HTML of an image, as wide as a figure. Its alternative text is the name of the
    notebook cell.
    """
    words = picture[2].rstrip("0123456789").replace("-", " ")
    return f"<img src='{picture[1]}' width='{WIDTH * PIXELS_PER_INCH:.0f}' alt='{words}'>"


def index() -> str:
    """Returns the gallery's front page. The page lists each notebook and each figure of a paper,
    with a small image, its files and its command.
    """
    lines = [
        "# Gallery",
        "",
        "Made by `make gallery`: every notebook, executed on two CPU cores, and every figure of",
        "both papers as SVG and CSV.",
        "",
        "| notebook | a picture of it |",
        "|---|---|",
    ]
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        name = notebook.stem
        title = nbformat.read(notebook, as_version=4).cells[0].source.splitlines()[0].strip("# ")
        shown = next(iter(sorted(GALLERY.glob(f"{name}--*.svg"))), None)
        picture = f'<img src="{shown.name}" width="260" alt="{title}">' if shown else ""
        lines.append(f"| [{name[:2]}]({name}.md) {title} | {picture} |")
    for paper, figures, _ in PAPERS.values():
        lines += ["", f"## Figures of the {paper.upper() if paper == 'hlat' else 'Frontier'} paper"]
        lines += ["", f"[Its claims, and what was found](claims_{paper}.md)", ""]
        lines += ["| figure | what it shows | files | command |", "|---|---|---|---|"]
        for name, figure in figures.items():
            kinds = [kind for kind in ("svg", "csv") if (GALLERY / f"{name}.{kind}").exists()]
            files = ", ".join(f"[{kind.upper()}]({name}.{kind})" for kind in kinds)
            drawn = f'<img src="{name}.svg" width="200" alt="{figure.title}">'
            cells = [drawn if "svg" in kinds else "a table", figure.title, files]
            lines.append(f"| {' | '.join(cells)} | `kit figure {name}` |")
    return "\n".join(lines) + "\n"


def fewer_colours(picture: bytes) -> bytes:
    """Returns a PNG image with at most COLOURS colours, on a white background."""
    from PIL import Image

    drawn = Image.open(io.BytesIO(picture)).convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn).convert("RGB")
    stream = io.BytesIO()
    flat.quantize(COLOURS, dither=Image.Dither.NONE).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def in_both_themes(svg: str) -> str:
    """Returns an SVG image that a browser with a dark theme shows in dark colours."""
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{ON_DARK}}}</style>"
    # A hundredth of a point is precise enough for coordinates.
    svg = re.sub(r'( [xy]="-?\d+\.\d\d)\d+', r"\1", svg)
    return re.sub(r"<svg[^>]*>", lambda found: f"{found[0]}\n{style}", svg, count=1)


def keep(name: str, executed: Path) -> None:
    """Replaces all gallery files of a notebook: its page, and for a paper its figures and claims.

    Raises:
        ConfigError: A figure of a paper cannot be drawn.
    """
    GALLERY.mkdir(exist_ok=True)
    write_page(name, executed)
    if name not in PAPERS:
        return
    paper, figures, study = PAPERS[name]
    runs = [REPOSITORY / "runs" / study]
    for old in (file for figure in figures for file in GALLERY.glob(f"{figure}.*")):
        old.unlink()
    told = save_all(figures, GALLERY, runs)
    if missing := [f"{figure}: {why}" for figure, why in told.items() if why]:
        raise ConfigError("; ".join(missing))
    for drawn in (file for figure in figures for file in GALLERY.glob(f"{figure}.png")):
        # The gallery shows the SVG of this figure, which has all detail, so the PNG is removed.
        drawn.unlink()
    (GALLERY / f"claims_{paper}.md").write_text(claims_page(paper, runs), encoding="utf-8")


def _clean(output: NotebookNode, stem: str, source: str = "") -> None:
    """Reduces a cell output to the MIME type that the gallery page shows. Removes terminal colours
    and paths of this machine.
    """
    from nbconvert.filters import strip_ansi

    holder, kind = output, "text"
    language = re.search(r"Code\(.*language=\"(\w+)\"", source, re.DOTALL)
    if language and "highlight" in output.get("data", {}).get("text/html", ""):
        output.data = NotebookNode({"text/markdown": _fenced(output.data, language[1])})
    if "data" in output:
        drawn = DRAWING in output.data.get("text/html", "")
        kind = "text/html" if drawn else next(kind for kind in SHOWN if kind in output.data)
        holder = output.data = NotebookNode({kind: output.data[kind]})
    if kind in holder and kind != "image/png":
        text = strip_ansi(holder[kind])
        for place, word in {
            str(REPOSITORY): "..",
            sys.prefix: "ENVIRONMENT",
            str(Path.home()): "~",
        }.items():
            text = text.replace(place, word)
        holder[kind] = _hosted(text, stem) if kind == "text/html" else text


def _fenced(data: NotebookNode, language: str) -> str:
    """Returns code as a Markdown code block, in which general paths replace the paths of this
    machine.

    Python code has the language name `py`, because `python` already marks the notebook's cells.
    """
    code = data["text/plain"].replace(sys.prefix, "/path/of/environment")
    code = code.replace(str(REPOSITORY), "/path/of/kit").rstrip()
    return f"```{language.replace('python', 'py')}\n{code}\n```"


def _hosted(text: str, stem: str) -> str:
    """Returns HTML in a form that a code host displays: without styles and blank lines, and with
    links to image files of the light theme.
    """
    text = re.sub(r"<style>.*?</style>|<img class='kit-dark'[^>]*>", "", text, flags=re.DOTALL)
    text = re.sub(r" style='(?:min-width:\w+;)?text-align:(\w+)'", r" align='\1'", text)
    text = re.sub(r" style='[^']*'", "", text)
    if drawing := re.search(r"data:image/svg\+xml;base64,([^'\"]+)", text):
        svg = base64.b64decode(drawing[1]).decode()
        (GALLERY / f"{stem}.svg").write_text(in_both_themes(svg), encoding="utf-8")
        text = text.replace(drawing[0], f"{stem}.svg")
    # An empty line would end the HTML block in Markdown.
    return re.sub(r"\n(?=\s*\n)", "\n<!-- -->", text)


def main() -> int:
    """Runs the named notebooks, by default all notebooks, and replaces their gallery files. Returns
    the exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gallery", description=__doc__)
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
            console.print(
                f"[red]{name} failed; its old pictures stay.[/] {escape(str(error))}",
                soft_wrap=True,
            )
            return 1
        keep(name, executed)
        console.print(f"{len(list(GALLERY.glob('*--*')))} pictures in {GALLERY}")
    (GALLERY / "README.md").write_text(index(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
