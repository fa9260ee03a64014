"""No part of the dashboard overlaps another part, and no CSS style of the kit changes elements of
the page outside the kit's output. A real browser computes bounding boxes and styles.
"""

import json
import re

import numpy as np
import pytest

from kit.config.plan import Plan
from kit.estimate import Panel
from kit.monitor.figure import run_figure
from kit.monitor.widget import Monitor
from kit.run import Run
from kit.show.table import Table
from tests.browser.conftest import Screen
from tests.support.environments import ROOT
from tests.support.recorded_runs import beat, recorded_run

OVERLAPS = """() => {
  const seen = (e) => e.getClientRects().length && e.getBoundingClientRect().width;
  const box = (e) => e.getBoundingClientRect(), root = document.querySelector('.kit-monitor');
  const groups = [
    '.kit-monitor > *:not(style):not(.kit-hover)', '.kit-tile', '.kit-tile > *', '.kit-tools > *', '.kit-acts > *',
    '.kit-chart', 'figcaption > *', '.kit-chart > figcaption, .kit-plot, .kit-heat, .kit-log',
  ];
  const faults = [];
  for (const group of groups) {
    const all = [...root.querySelectorAll(group.replaceAll('.kit-monitor', ':scope'))].filter(seen);
    all.forEach((a, i) => all.slice(i + 1).forEach((b) => {
      const p = box(a), q = box(b);
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left), high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 1 && high > 1) faults.push(`${a.className || a.textContent} over ${b.className || b.textContent}`);
    }));
  }
  const all = box(root);
  for (const e of root.querySelectorAll('*:not(style)')) {
    if (!seen(e) || e.closest('.u-wrap, .kit-scroll > *, .kit-fold:not([open]) > :not(summary)')) continue;
    const p = box(e);
    if (p.left < all.left - 1 || p.right > all.right + 1 || p.top < all.top - 1 || p.bottom > all.bottom + 1)
      faults.push(`${e.className || e.tagName} sticks out`);
  }
  for (const e of root.querySelectorAll('.kit-label, .kit-value, .kit-small, figcaption, figcaption > span'))
    if (seen(e) && e.parentElement.getBoundingClientRect().right < e.getBoundingClientRect().left + e.scrollWidth - 1)
      faults.push(`${e.textContent} is cut`);
  if (document.documentElement.scrollWidth > innerWidth) faults.push('the page scrolls sideways');
  return faults; }"""  # noqa: E501
PLACES = """() => [...document.querySelectorAll('.kit-monitor *')].filter((e) => !e.closest('.kit-hover, .u-wrap'))
  .map((e) => JSON.stringify(e.getBoundingClientRect()))"""  # noqa: E501
CUT_CELLS = """(e) => [...e.querySelectorAll('th, td')].filter((cell) => cell.scrollWidth > cell.clientWidth)
  .map((cell) => cell.textContent)"""  # noqa: E501
# CSS style of the pictures in notebooks that were saved by an earlier version of the kit.
EARLIER_STYLE = "<style>[data-jp-theme-light=false] .kit-dark { display: inline; }</style>"
# Width in pixels that JupyterLab's file browser and cell prompt leave in a window of 1,280 pixels.
BESIDE_FILE_BROWSER = 880


def full_screen(open_screen, folder, **options) -> Screen:
    """Returns a screen with every element that a dashboard can show. The picture of a saved
    dashboard is shown below it.
    """
    run = recorded_run(
        folder / "run", steps=900, spike_at=700, second_attempt_at=500, ranks=4, pipeline=2
    )
    other = recorded_run(folder / "another-run-with-quite-a-long-name", steps=600)
    baselines = {"published": 2.2, other.name: other}
    screen = open_screen(run, baselines=baselines, **options)
    for step in range(900, 930):
        beat(run, step, slow_rank=2, attempt=2)
        screen.dashboard.run_view.ranks.read_heartbeats()
    screen.dashboard.update_speed(wait=True)
    still = screen.widget._still()["text/html"] + EARLIER_STYLE
    screen.page.evaluate(
        """([still, theme]) => { document.body.dataset.jpThemeLight = theme;
        document.body.insertAdjacentHTML('beforeend', still); }""",
        [still, "false" if options.get("dark") else "true"],
    )
    screen.refresh()
    return screen


@pytest.mark.parametrize("dark", [False, True])
def test_dashboard_parts_do_not_overlap(open_screen, tmp_path, dark):
    screen = full_screen(open_screen, tmp_path, dark=dark, width=1280)
    for width in (1280, 900, 700, 480):
        screen.page.set_viewport_size({"width": width, "height": 900})
        screen.settle(400)
        assert screen.page.evaluate(OVERLAPS) == [], width
        screen.photograph(f"layout-{'dark' if dark else 'light'}-{width}")


def run_with_last_rows(folder, *losses, **options):
    """Returns a run whose last steps have the losses `losses`, and a gradient norm that
    overflows.
    """
    run = recorded_run(folder, **options)
    file = run.directory / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, loss in zip(rows[-len(losses) :], losses, strict=True):
        row |= {"loss": loss, "grad_norm": 3.95e15}
    rows[-1]["grad_norm"] = "inf"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run.open(run.directory)


def test_numbers_of_a_diverged_run_fit_their_tiles(open_screen, tmp_path):
    run = run_with_last_rows(tmp_path / "run", 2.64e6, 9178547.0, steps=300)
    screen = open_screen(run, width=1280)
    assert screen.page.evaluate(OVERLAPS) == []
    values = [tile.inner_text() for tile in screen.page.locator(".kit-value").all()]
    assert values[0] == "9.179e+6" and "not finite" in values


WRITTEN = """() => { const write = CanvasRenderingContext2D.prototype.fillText; window.written = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { actualBoundingBoxLeft: left, actualBoundingBoxRight: right } = this.measureText(text);
    const hosts = [...document.querySelectorAll('.kit-plot canvas')];
    window.written.push({ text, left: x - left, right: x + right, y, width: this.canvas.width, pane: hosts.indexOf(this.canvas) });
    write.call(this, text, x, y); }; }"""  # noqa: E501


def test_texts_in_charts_are_not_cut_at_the_edge(open_screen, tmp_path):
    """Attempt 2 begins near the right edge of the charts, so its label has little space."""
    run = recorded_run(tmp_path / "run", steps=900, second_attempt_at=870)
    screen = open_screen(run, width=1280, before=f"({WRITTEN})()")
    screen.refresh()
    labels = [each for each in screen.page.evaluate("written") if each["text"] == "attempt 2"]
    assert {label["pane"] for label in labels} >= {0, 1}
    # uPlot leaves 22 pixels to the right of each chart for labels. The first drawing has no data
    # and thus no labels of attempts.
    seen = [label for label in labels if label["left"] < label["width"]]
    cut = [label for label in seen if label["left"] < 0 or label["right"] > label["width"] - 22]
    assert seen
    assert not cut


def test_tables_keep_their_width_beside_long_texts(browser):
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    names = ("run", "state", "step", "loss", "MFU", "attempt", "recompute", "warmup steps")
    row = {name: "4.0504" for name in names}
    reason = "rank 0 ended with code 78: RunError: stopped at step 160: the gradient norm is inf. "
    caption = "70% of the run's device-hours were productive; shares are of all time"
    style = "<style>table {table-layout: fixed} td, th {padding: 0.5em; max-width: none}</style>"
    tables = (Table([row | {f"setting {i}": "none" for i in range(7)} | {"reason": 3 * reason}]),)
    tables += (Table([{"part": "waiting", "share": "1%"}], caption),)
    page.set_content(style + "".join(table._repr_html_() for table in tables))
    heights = page.evaluate(
        "() => [...document.querySelectorAll('tr, caption')].map(e => e.clientHeight)"
    )  # noqa: E501
    assert heights[1] < 320, "a row of a dozen lines"
    assert heights[2] < 25, "a caption in one line"
    page.close()


CHANGE_THEME = """async () => { const view = document.getElementById('view');
  view.style.display = 'none'; document.body.style.setProperty('--jp-layout-color1', '#1e1e1e');
  document.body.dataset.theme = 'dark'; await Promise.resolve(); view.style.display = ''; }"""
WIDTHS = """() => [...document.querySelectorAll('.kit-plot')].map(
  (plot) => [plot.clientWidth, plot.querySelector('.u-wrap').clientWidth])"""


def test_charts_fill_their_panes_after_theme_change(open_screen, tmp_path):
    """JupyterLab changes its theme while the page is hidden and has no layout."""
    screen = open_screen(recorded_run(tmp_path / "run", steps=100), width=1280)
    screen.page.evaluate(CHANGE_THEME)
    screen.page.wait_for_selector(".kit-monitor.kit-on-dark")
    screen.settle(1300)
    assert all(pane == chart for pane, chart in screen.page.evaluate(WIDTHS))


@pytest.mark.parametrize("width", [BESIDE_FILE_BROWSER, 700])
def test_hover_fits_the_dashboard_and_moves_nothing(open_screen, tmp_path, width):
    screen = full_screen(open_screen, tmp_path, width=width)
    page = screen.page
    for number in range(6):
        plot = page.locator(".u-over").nth(number)
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        for share in (0.02, 0.5, 0.98):
            page.mouse.move(1, 1)
            screen.settle(50)
            before = page.evaluate(PLACES)
            page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
            screen.settle(50)
            hover = page.locator(".kit-hover")
            assert hover.is_visible(), (number, share)
            during = page.evaluate(PLACES)
            inside = hover.bounding_box()
            view = page.locator(".kit-monitor").bounding_box()
            assert inside["x"] >= view["x"] and inside["y"] >= max(0, view["y"])
            assert inside["x"] + inside["width"] <= view["x"] + view["width"]
            assert inside["y"] + inside["height"] <= min(900, view["y"] + view["height"])
            assert hover.evaluate(CUT_CELLS) == []
            page.mouse.move(1, 1)
            screen.settle(50)
            # On a busy machine, the lines above the charts may change meanwhile.
            assert during in (before, page.evaluate(PLACES)), (number, share)


def test_hover_shows_recorded_and_smoothed_values(open_screen, tmp_path):
    run = recorded_run(tmp_path / "run", steps=300)
    other = recorded_run(tmp_path / "other", steps=280)
    screen = open_screen(run, width=1280, baselines={"other": other})
    box = screen.page.locator(".u-over").first.bounding_box()
    screen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    screen.settle(100)
    rows = screen.page.locator(".kit-hover tr")
    cells = [row.inner_text().split("\t") for row in rows.all()]
    assert cells[0][1:] == ["each step", "smoothed"]
    step = int(cells[0][0].removeprefix("step "))
    shown = {row[0]: row[1:] for row in cells}
    metrics, theirs = run.metrics(), other.metrics()
    averages = {}
    for name, losses in (("Loss", metrics["loss"]), ("other", theirs["loss"])):
        weights = 0.9 ** np.arange(step)[::-1]
        averages[name] = weights @ losses[:step] / weights.sum()
        assert float(shown[name][0]) == pytest.approx(losses[step - 1], abs=6e-4)
        assert float(shown[name][1]) == pytest.approx(averages[name], abs=6e-4)
    validated = step // 50 * 50
    validation = next(row for row in cells if row[0].startswith("○ validation"))
    assert validation[0].endswith(f"step {validated}") or step == validated
    recorded = metrics["validation_loss"][validated - 1]
    assert float(validation[1]) == pytest.approx(recorded, abs=6e-4)
    norm = float(metrics["grad_norm"][step - 1])
    assert float(shown["Gradient norm"][0]) == pytest.approx(norm, rel=6e-3)
    assert {"MFU", "Tokens/s", "Learning rate", "Memory of rank 0"} <= set(shown)


# CSS styles ---------------------------------------------------------------------------------------

ALL_STYLES = """() => [...document.querySelectorAll('#foreign *')].map((e) => {
  const style = getComputedStyle(e); return e.className + ': ' + [...style].map((name) => name + style.getPropertyValue(name)).join(';'); })"""  # noqa: E501
TAGS = ("div", "span", "img", "table", "th", "td", "section", "figure", "button", "input", "pre")


def emitted(folder) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns a dict from the name of each notebook output of the kit to (HTML with its style
    sheet, CSS classes of the elements in which the styles may act).
    """
    run = recorded_run(folder / "run", steps=300)
    widget = Monitor(run)
    try:
        still, model = widget._still()["text/html"], widget.model_id
    finally:
        widget.close()
    panel = Panel("gpt-22b", "frontier", Plan(tensor_parallel=8, precision="bf16"))
    hides = f"<style>.kit-still-{model} {{ display: none !important; }}</style>"
    return {
        "dashboard": (
            f"<style>{Monitor._css}</style>{hides}",
            ("kit-monitor", f"kit-still-{model}"),
        ),
        "saved picture": (still, ("kit-figure", f"kit-still-{model}")),
        "figure": (run_figure(run)[0].to_html(), ("kit-figure",)),
        "panel": (panel.view.value, ("kit-panel", panel._still)),
    }


def kit_classes() -> set[str]:
    """Returns all CSS classes in the kit's source files and in the source of its chart library."""
    files = [*(ROOT / "kit").rglob("*.py"), *(ROOT / "kit/monitor/static").rglob("*.[cj]s*")]
    text = "".join(file.read_text() for file in files)
    return set(re.findall(r"\bkit-[a-z]+(?:-[a-z]+)*\b", text)) | set(
        re.findall(r"\.(u-[a-z]+|uplot)\b", text)
    )


def test_every_module_with_styles_is_listed():
    """A new module that writes a style sheet must be added to the function `emitted` of this
    file. The style sheet of page.py is excluded, since it stands in an HTML file of its own.
    """
    sources = {
        str(file.relative_to(ROOT / "kit"))
        for file in (ROOT / "kit").rglob("*.py")
        if "<style" in file.read_text() or "_css =" in file.read_text()
    }
    known = {"estimate/choose/panel.py", "monitor/widget.py", "show/themed_figure.py"}
    assert sources - {"monitor/page.py"} == known


@pytest.mark.parametrize("theme", ["true", "false"])
def test_styles_act_in_their_own_element_only(browser, tmp_path, theme):
    page, classes = browser.new_page(), sorted(kit_classes())
    assert {"kit-dark", "kit-on-dark", "kit-figure", "u-axis", "uplot"} <= set(classes)
    for name, (html, own) in emitted(tmp_path).items():
        foreign = "".join(
            f"<{tag} class='{each}'></{tag}>"
            for each in (*classes, "jp-OutputArea-child", "jupyter-widgets")
            if each not in own
            for tag in TAGS
        )
        message = "<div class=jp-OutputArea-child><p class=jupyter-widgets>no model</p></div>"
        page.set_content(
            f"<!doctype html><body data-jp-theme-light={theme}><div id=foreign>{foreign}"
            f"{message}</div><div id=kit></div>"
        )
        before = page.evaluate(ALL_STYLES)
        page.evaluate("html => { document.getElementById('kit').innerHTML = html; }", html)
        page.wait_for_timeout(50)
        changed = [
            new[:200]
            for old, new in zip(before, page.evaluate(ALL_STYLES), strict=True)
            if old != new
        ]
        assert len(before) > 500 and not changed, (name, changed[:5])
    page.close()
