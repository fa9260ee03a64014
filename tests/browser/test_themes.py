"""Figures in a real JupyterLab page of 1,000 pixels have the theme and the text size of the
page.
"""

from collections.abc import Iterator

import pytest

from kit.show.theme import DARK, GROUND
from tests.support.lab import Notebook

pytestmark = pytest.mark.slow
CELL = """from kit.papers import paper_figure
figure, rows = paper_figure("hlat-data-mix").draw(["../runs/mine"])
figure"""
TABLE = 'paper_figure("hlat-averaging").draw()[0]'
SHOWN = """() => [...document.querySelectorAll('.kit-figure img')].filter(i => i.offsetWidth).map(i => {
    const drawing = atob(i.src.split(',')[1]);
    const svg = new DOMParser().parseFromString(drawing, 'image/svg+xml').documentElement;
    svg.style = `width: ${i.offsetWidth}px; height: auto`;
    document.body.appendChild(svg);
    const heights = [...svg.querySelectorAll('g[id^=text_]')].map(text => text.getBoundingClientRect().height);
    svg.remove();
    return [i.className, heights, drawing]; })"""  # noqa: E501
DIGIT = 0.72
"""Height of digits and capital letters as a share of the font size."""
PAGE = """() => [document.querySelector('.jp-RenderedHTMLCommon'), document.querySelector('.jp-Notebook')].map(e =>
    [getComputedStyle(e).fontSize, getComputedStyle(e).backgroundColor])"""  # noqa: E501
THEME = """async (name) => { await window.jupyterapp.commands.execute('apputils:change-theme', {theme: name}); }"""  # noqa: E501


@pytest.fixture(scope="module")
def page(browser, lab) -> Iterator[Notebook]:
    """Yields a notebook that shows a figure and a table of a paper, in a window of 1,000 pixels."""
    notebook = Notebook(browser, lab, [CELL, TABLE], "figures.ipynb")
    notebook.open(width=1000)
    notebook.run_cell(0)
    notebook.run_cell(1)
    yield notebook
    notebook.context and notebook.context.close()


@pytest.mark.parametrize(("theme", "shown"), [("Light", "kit-light"), ("Dark", "kit-dark")])
def test_figure_has_the_pages_theme_and_text_size(page, theme, shown):
    page.evaluate(THEME, f"JupyterLab {theme}")
    page.until(lambda: [found[0] for found in page.evaluate(SHOWN)] == [shown])
    [[_, heights, drawing]] = page.evaluate(SHOWN)
    [[text, _], [_, ground]] = page.evaluate(PAGE)
    smallest = DIGIT * float(text.removesuffix("px"))
    assert len(heights) > 8 and min(heights) >= smallest, "as it is drawn"
    colour = GROUND if shown == "kit-light" else DARK[GROUND.lower()]
    parts = ", ".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
    assert colour.lower() in drawing and ground == f"rgb({parts})", "the ground is the page's"
    page.photograph(f"figure-{theme.lower()}")


def test_figure_names_missing_run_and_lists_sources(page):
    assert "../runs/mine is not drawn. Drawn here: no runs." in page.text(".kit-figure")
    assert "Published (billion tokens)" not in page.text(".kit-figure")
    page.page.locator(".kit-figure summary").click()
    assert "Published (billion tokens)" in page.text(".kit-figure")
    cells = page.page.locator("table td", has_text="HLAT, 1740B tokens")
    assert cells.count() == 1, "a table is a table"
