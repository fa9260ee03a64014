"""Gallery of the notebooks: the files that are written for each notebook, and their content."""

import base64
import io
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from PIL import Image

from kit.errors import ConfigError
from kit.papers import FIGURES
from kit.show.style import new_figure
from kit.show.theme import BLUE
from tests import gallery


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "gallery"
    monkeypatch.setattr(gallery, "GALLERY", folder)
    monkeypatch.setattr(gallery, "REPOSITORY", tmp_path)
    (tmp_path / "runs" / "study").mkdir(parents=True)
    return folder


def picture() -> str:
    stream = io.BytesIO()
    Image.linear_gradient("L").save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def test_page_shows_outputs_without_machine_details(folder: Path, tmp_path: Path) -> None:
    """The page has no terminal colours, no paths of this machine and no dark figures. Images from
    an earlier execution of the notebook are removed.
    """
    folder.mkdir()
    for name in ("a--old.png", "b--other.png"):
        (folder / name).write_bytes(b"old")
    drawing = base64.b64encode(b"<svg/>").decode()
    twins = "".join(
        f"<img class='kit-{twin}' src='data:image/svg+xml;base64,{drawing}'>"
        for twin in ("light", "dark")
    )
    new = nbformat.v4.new_output
    outputs = [
        new("stream", text=f"\x1b[31mred\x1b[0m {tmp_path}/runs/x"),
        new(
            "display_data",
            {"image/png": picture(), "application/vnd.jupyter.widget-view+json": {"model_id": "1"}},
        ),
        new(
            "display_data",
            {"text/html": f"<style>b</style><div>{twins}\n\n</div>", "text/plain": "Live"},
        ),
    ]
    told = f"# A\n\n{gallery.INVITATION.format(name='a')} Then [b](b.ipynb)."
    cells = [
        nbformat.v4.new_markdown_cell(told),
        nbformat.v4.new_code_cell("1 + 1", id="draw", outputs=outputs),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    gallery.keep("a", tmp_path / "a.ipynb")
    assert sorted(file.name for file in folder.iterdir()) == [
        "a--draw1.png",
        "a--draw2.svg",
        "a.md",
        "b--other.png",
    ]
    page = (folder / "a.md").read_text()
    assert (
        page.startswith("# A\n\nMade by `make gallery` from [the notebook](../a.ipynb)")
        and "[b](b.md)" in page
    )
    assert (
        "red ../runs/x" in page
        and "<img src='a--draw1.png' width='600' alt='draw'>" in page
        and "src='a--draw2.svg'" in page
    )
    assert not any(
        word in page for word in ("widget", "style", "dark", "base64", "\x1b", str(tmp_path))
    )
    with Image.open(folder / "a--draw1.png") as kept:
        assert kept.mode == "P"


@pytest.mark.parametrize(
    "notebook", sorted(gallery.NOTEBOOKS.glob("*.ipynb")), ids=lambda notebook: notebook.stem
)
def test_gallery_page_matches_its_notebook(notebook: Path) -> None:
    page, again = (
        gallery.GALLERY / f"{notebook.stem}.md",
        f"python -m tests.gallery {notebook.stem}",
    )
    cells = nbformat.read(notebook, as_version=4).cells
    assert gallery.INVITATION.format(name=notebook.stem) in cells[0].source, "the way to the page"
    without_answers = re.sub(
        r"<details>\n<summary>Answers.*?</details>", "", page.read_text(), flags=re.DOTALL
    )
    shown = re.findall(r"^```python\n(.*?)^```$", without_answers, flags=re.MULTILINE | re.DOTALL)
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert [source.strip() for source in code] == [text.strip() for text in shown], again
    pictures = re.findall(r"(?:\]\(|src=')([\w-]+--[\w-]+\.(?:png|svg))", page.read_text())
    kept = [file.name for file in gallery.GALLERY.glob(f"{notebook.stem}--*")]
    assert sorted(pictures) == sorted(kept) and pictures, again


def test_gallery_is_small_and_linked_from_readme() -> None:
    assert sum(file.stat().st_size for file in gallery.GALLERY.iterdir()) < 6e6
    readme = (gallery.REPOSITORY / "README.md").read_text()
    index = (gallery.GALLERY / "README.md").read_text()
    assert "(notebooks/gallery/README.md)" in readme
    assert all(f"({page.stem}.md)" in index for page in gallery.NOTEBOOKS.glob("*.ipynb"))
    for paper, *_ in gallery.PAPERS.values():
        assert f"(notebooks/gallery/claims_{paper}.md)" in readme


def test_gallery_saves_every_figure_of_a_paper(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a figure cannot be drawn, an error is raised."""
    quick = {name: FIGURES[name] for name in ("hlat-data-mix", "hlat-averaging")}
    monkeypatch.setattr(gallery, "PAPERS", {"paper": ("hlat", quick, "study")})
    monkeypatch.setattr(gallery, "write_page", lambda name, executed: None)
    monkeypatch.setattr(gallery, "claims_page", lambda paper, runs: f"claims of {paper}")
    folder.mkdir()
    (folder / "hlat-averaging.svg").write_text("of a time when tables were pictures")
    gallery.keep("paper", tmp_path / "unused.ipynb")
    names = [
        "claims_hlat.md",
        "hlat-averaging.csv",
        *(f"hlat-data-mix.{ending}" for ending in ("csv", "svg")),
    ]
    assert sorted(file.name for file in folder.iterdir()) == names
    monkeypatch.setattr(
        gallery,
        "PAPERS",
        {"paper": ("hlat", {"hlat-precision": FIGURES["hlat-precision"]}, "study")},
    )
    with pytest.raises(ConfigError, match=r"hlat-precision: runs: no precision\.json"):
        gallery.keep("paper", tmp_path / "unused.ipynb")


def test_gallery_figure_follows_the_dark_theme(folder: Path) -> None:
    folder.mkdir()
    with new_figure(height=2) as (figure, axis):
        axis.plot([1, 2], color=BLUE)
        axis.set_title("a title")
    shown = nbformat.v4.new_output("display_data", figure.to_bundle(alt="a <line>"))
    gallery._clean(shown, "x")
    assert set(shown.data) == {"text/html"} and "base64" not in shown.data["text/html"]
    assert "alt='a &lt;line&gt;'" in shown.data["text/html"]
    drawing = (folder / "x.svg").read_text()
    assert f'[style*="stroke: {BLUE.lower()}"]' in drawing
    left = re.sub(r"<style>.*?</style>", "", drawing, flags=re.DOTALL)
    assert f"stroke: {BLUE.lower()}" in left, "the colour that the rule turns"
    ElementTree.fromstring(drawing)


def test_every_notebook_of_a_paper_exists() -> None:
    assert all((gallery.NOTEBOOKS / f"{name}.ipynb").exists() for name in gallery.PAPERS)


def test_gallery_index_links_every_page_and_figure() -> None:
    page = gallery.index()
    assert page == (gallery.GALLERY / "README.md").read_text(encoding="utf-8"), "make gallery"
    linked = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", page)
    assert all((gallery.GALLERY / (a or b)).exists() for a, b in linked)
    assert all(f"`kit figure {name}`" in page for name in FIGURES)


def test_gallery_html_keeps_only_text_alignment() -> None:
    html = "<div style='a'><b>72</b></div><td style='text-align:right'>"
    assert gallery._hosted(html, "x") == "<div><b>72</b></div><td align='right'>"


def test_shown_code_is_fenced_without_machine_paths() -> None:
    new = nbformat.v4.new_output
    code = f"cd {gallery.REPOSITORY} && exec {sys.prefix}/bin/python\n"
    html = '<div class="highlight"><pre>...</pre></div>'
    shown = new("execute_result", {"text/html": html, "text/plain": code}, execution_count=1)
    gallery._clean(shown, "x", 'Code(text, language="bash")')
    assert shown.data == {
        "text/markdown": "```bash\ncd /path/of/kit && exec /path/of/environment/bin/python\n```"
    }


def test_page_folds_cells_that_jupyterlab_folds(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    check = nbformat.v4.new_code_cell("assert 1", metadata={"jupyter": {"source_hidden": True}})
    cells = [nbformat.v4.new_markdown_cell("# A"), nbformat.v4.new_code_cell("2"), check]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    gallery.write_page("a", tmp_path / "a.ipynb")
    shown, folded = (folder / "a.md").read_text().split("<details>\n<summary>Checks</summary>\n")
    assert "```\n2\n```" in shown
    assert "\n```\nassert 1\n```\n" in folded and folded.endswith("\n</details>\n")


def test_page_formulae_keep_their_backslashes() -> None:
    cell = "With $a\\,b$, $c$ and `$HOME, $X`:\n\n$$x\\;y\n  = \\{z\\}.$$\n\nEnd."
    page = gallery.as_on_the_page("a", cell)
    assert page == (
        "With $`a\\,b`$, $c$ and `$HOME, $X`:\n\n```math\nx\\;y\n  = \\{z\\}.\n```\n\nEnd."
    )
