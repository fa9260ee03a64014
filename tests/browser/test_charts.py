"""The user adds curves to the dashboard, hides, enlarges and downloads charts, and compares runs.
The choice of charts is stored in the browser.
"""

import csv
import json
import xml.etree.ElementTree as ElementTree
from importlib.resources import files
from pathlib import Path

import pytest

from kit.run import Run
from tests.browser.test_layout import OVERLAPS
from tests.support.hostile import SCRIPT
from tests.support.lab import wait_until
from tests.support.recorded_runs import add_row, add_rows, recorded_run

BLUE, LIGHT_BLUE = "#0072B2", "#56B4E9"
PARTS = ("least", "largest", "line")


def hooked_run(folder, steps: int = 400) -> Run:
    """Returns a run with numbers of a hook in each step, and a validation loss by set in every 40th
    step.
    """
    run = recorded_run(folder, steps=steps)
    file = run.directory / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        step = row["step"]
        row |= {"hook/weight_norm": 10 + step / 100, "z_loss": 1e-5 * row["loss"]}
        row |= {"grad_norm/matrices": 0.8 * row["grad_norm"]}
        if step % 40 == 0:
            row["validation/web"] = row["loss"] + 0.1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run.open(run.directory)


@pytest.fixture
def empty_page(tmp_path) -> str:
    """Address of an empty page, for which the browser stores settings."""
    file = tmp_path / "page.html"
    file.write_text("")
    return file.as_uri()


def settle(screen) -> None:
    """Waits until the kernel has sent the charts that the page has asked for."""
    asked = screen.sent("charts")[-1]["keys"]
    wait_until(
        lambda: screen.widget.frame["charts"] == asked, lambda: f"{asked}", pause=screen.settle
    )
    screen.settle()


def add(screen, name: str) -> None:
    screen.page.get_by_label("Add a curve").select_option(name)
    settle(screen)


def hide(screen, title: str) -> None:
    screen.click(f"Hide {title}")
    settle(screen)


def charts(screen) -> list[str]:
    return screen.page.locator(".kit-title").all_inner_texts()


def test_any_number_can_be_added_as_a_chart(open_screen, tmp_path):
    screen = open_screen(hooked_run(tmp_path / "run"))
    default = charts(screen)
    assert len(default) == 6 and not screen.sent("charts"), "the kernel sends them unasked"
    offered = screen.page.get_by_label("Add a curve").locator("option").all_inner_texts()
    assert {"hook/weight_norm", "z_loss", "validation/web", "grad_norm/matrices"} < {*offered}
    assert not {"Loss, nats per token", "loss", "step", "time"} & {*offered}
    add(screen, "hook/weight_norm")
    add(screen, "validation/web")
    assert charts(screen) == [*default, "hook/weight_norm", "validation/web"]
    assert screen.sent("charts")[-1]["keys"][6:] == ["hook/weight_norm", "validation/web"]
    assert "smoothed 13.91 at step 400" in screen.label("hook/weight_norm")
    assert screen.coloured(6, BLUE) > 50, "a line"
    assert screen.coloured(7, "#222222") > 50, "circles"
    assert "another number that few steps have" in screen.text(".kit-legend")
    screen.click("table")
    assert "hook/weight_norm\t13.91\t10.01\t14" in screen.text(".kit-table")
    box = screen.page.locator(".u-over").nth(7).bounding_box()
    screen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    screen.settle()
    assert "validation/web" in screen.text(".kit-hover")
    add_rows(Run.open(tmp_path / "run"), 401, 410)
    screen.refresh()
    assert "at step 410" in screen.label("validation/web"), "the last value stays"


def test_charts_can_be_hidden_and_shown_again(open_screen, tmp_path):
    screen = open_screen(hooked_run(tmp_path / "run"))
    default = charts(screen)
    add(screen, "z_loss")
    for title in ("Loss, nats per token", "Learning rate", "z_loss"):
        hide(screen, title)
    assert charts(screen) == [title for title in default if title[:4] not in ("Loss", "Lear")]
    shown = ["mfu", "tokens_per_s", "grad_norm", "memory_bytes"]
    assert screen.widget.frame["charts"] == shown, "the kernel computes nothing else"
    assert screen.page.evaluate("document.activeElement.ariaLabel") == "Add a curve"
    screen.refresh()
    assert "at step 400" in screen.label("MFU")
    for title in charts(screen):
        hide(screen, title)
    screen.page.set_viewport_size({"width": 900, "height": 900})
    screen.refresh()
    assert charts(screen) == [] and screen.widget.frame["charts"] == []
    add(screen, "loss")
    assert charts(screen) == default[:1] and "at step 400" in screen.label("Loss")


def test_shown_charts_are_downloaded_as_csv(open_screen, tmp_path):
    """A CSV file has a formula in no cell, whatever another user has named a metric or a run."""
    run = hooked_run(tmp_path / "run", steps=300)
    add_row(run, 301, **{'=1+"1"': -0.5})
    other = recorded_run(tmp_path / "other", steps=200)
    screen = open_screen(run, baselines={"=cmd": other})
    add(screen, "validation/web")
    add(screen, '=1+"1"')
    for title in charts(screen)[1:6]:
        hide(screen, title)
    assert not screen.page.get_by_text("Download as CSV").is_visible()
    screen.click("table")
    with screen.page.expect_download() as expected:
        screen.click("Download as CSV")
    assert expected.value.suggested_filename == "run.csv"
    rows = list(csv.DictReader(Path(expected.value.path()).read_text().splitlines()))
    loss = ["loss, least", "loss, largest", "loss, smoothed", "validation_loss"]
    others = ["'=cmd, loss", "'=cmd, loss, smoothed"]
    added = []
    for name in ("validation/web", '\'=1+"1"'):
        added += [f"{name}, {part}" for part in PARTS]
        series = name.removeprefix("'")
        added += [f"'=cmd, {series}", f"'=cmd, {series}, line"]
    assert [*rows[0]] == ["step", *loss, *others, *added]
    metrics, compared = run.metrics(), other.metrics()
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 302)]
    assert [float(row["loss, least"]) for row in rows] == pytest.approx(metrics["loss"], rel=1e-6)
    assert float(rows[199]["'=cmd, loss"]) == pytest.approx(compared["loss"][-1], rel=1e-6)
    assert rows[200]["'=cmd, loss"] == "" and rows[300]['\'=1+"1", largest'] == "-0.5"


def test_choice_of_charts_is_remembered(open_screen, tmp_path, empty_page):
    """The choice holds for each run. A run shows an added metric as soon as it has the metric."""
    screen = open_screen(hooked_run(tmp_path / "run"), address=empty_page)
    add(screen, "hook/weight_norm")
    hide(screen, "Memory of rank 0")
    chosen = charts(screen)
    again = open_screen(hooked_run(tmp_path / "second"), address=empty_page)
    assert charts(again) == chosen and "at step 400" in again.label("hook/weight_norm")
    plain = recorded_run(tmp_path / "plain")
    other = open_screen(plain, address=empty_page)
    assert charts(other) == chosen[:-1]
    add_row(plain, 401, **{"hook/weight_norm": 3.5})
    other.refresh()
    settle(other)
    assert charts(other) == chosen and "3.5 at step 401" in other.label("hook/weight_norm")
    other.page.evaluate("localStorage.setItem('kit-monitor-charts', '{\"added\": 3}')")
    damaged = open_screen(plain, address=empty_page)
    assert len(charts(damaged)) == 6, "a damaged choice is not used"


def test_hostile_name_of_a_metric_is_shown_as_text(open_screen, tmp_path):
    names = (SCRIPT, "__proto__", "constructor", "speed")
    run = recorded_run(tmp_path / "run")
    add_row(run, 401, **{f"hook/{SCRIPT}": 1.0}, **dict.fromkeys(names, 2.0))
    screen = open_screen(run)
    for name in (f"hook/{SCRIPT}", *names):
        add(screen, name)
    assert charts(screen)[6:] == [f"hook/{SCRIPT}", *names]
    box = screen.page.locator(".u-over").first.bounding_box()
    screen.page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40)
    screen.settle()
    assert SCRIPT in screen.text(".kit-hover")
    assert screen.page.locator(".kit-monitor script, .kit-monitor img").count() == 0


def compared_runs(folder, names: tuple[str, str]) -> tuple[Run, dict[str, Run]]:
    """Returns a run, and two runs by name with other losses, gradient norms and learning rates."""
    others = {}
    for number, name in enumerate(names, 2):
        other = recorded_run(folder / f"other-{number}", steps=300)
        file = other.directory / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row["grad_norm"] *= number
            row["loss"] += 0.4 * number
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        other.recipe.replace(learning_rate=number / 1000).write(other.directory / "recipe.json")
        others[name] = Run.open(other.directory)
    return recorded_run(folder / "run", steps=300), others


GREEN, PURPLE = "#007A5A", "#9A4A78"


def test_compared_runs_are_drawn_in_all_charts(open_screen, tmp_path):
    run, others = compared_runs(tmp_path, ("lower rate", SCRIPT))
    screen = open_screen(run, baselines=others)
    for pane in (0, 3):
        assert all(screen.coloured(pane, colour) > 30 for colour in (BLUE, GREEN, PURPLE)), pane
    legend = screen.text(".kit-runs")
    assert f"learning rate {run.recipe.learning_rate!r}" in legend
    assert "lower rate" in legend and "learning rate 0.002" in legend and SCRIPT in legend
    box = screen.page.locator(".u-over").nth(3).bounding_box()
    screen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    screen.settle()
    cells = [row.inner_text().split("\t") for row in screen.page.locator(".kit-hover tr").all()]
    step = int(cells[0][0].removeprefix("step "))
    shown = {row[0]: row[1:] for row in cells}
    for name, other in others.items():
        raw = float(other.metrics()["grad_norm"][step - 1])
        assert float(shown[name][0]) == pytest.approx(raw, rel=6e-3)
        assert float(shown[name][1]) == pytest.approx(raw, rel=0.2), "smoothed"
    screen.page.get_by_text("Settings (").click()
    differing = screen.page.locator(".kit-settings .kit-differs").all_inner_texts()
    rates = ["recipe.learning_rate", repr(run.recipe.learning_rate), "0.002", "0.003"]
    assert rates in [text.split() for text in differing]
    assert screen.page.evaluate(OVERLAPS) == []


def test_chart_is_enlarged_with_limits_of_its_y_axis(open_screen, tmp_path):
    screen = open_screen(recorded_run(tmp_path / "run"), width=1280)
    small = screen.page.locator(".u-over").nth(3).bounding_box()
    assert not screen.page.get_by_label("Gradient norm: lowest y").is_visible()
    screen.click("Enlarge Gradient norm")
    screen.settle()
    large = screen.page.locator(".u-over").nth(3).bounding_box()
    assert large["width"] > 3 * small["width"] and large["height"] > 2 * small["height"]
    assert screen.page.evaluate(OVERLAPS) == []
    drawn = screen.coloured(3, "#B34D00")
    assert drawn > 300
    for end, value in (("lowest", "50"), ("highest", "60")):
        screen.page.get_by_label(f"Gradient norm: {end} y").fill(value)
        screen.page.keyboard.press("Tab")
    screen.settle()
    assert screen.coloured(3, "#B34D00") == 0, "no norm is in this range"
    screen.refresh()
    assert screen.coloured(3, "#B34D00") == 0, "the range stays with new steps"
    screen.click("Automatic")
    screen.settle()
    assert screen.coloured(3, "#B34D00") > 300
    screen.click("Shrink Gradient norm")
    screen.settle()
    assert screen.page.locator(".u-over").nth(3).bounding_box() == small


def test_chart_is_downloaded_as_svg_and_csv(open_screen, tmp_path):
    """The picture needs no other file, and another user's texts in it are text."""
    run, others = compared_runs(tmp_path, ("lower rate", SCRIPT))
    screen = open_screen(run, baselines={**others, "published & <b>": 2.5})
    screen.click("Enlarge Loss, nats per token")
    texts = {}
    for kind in ("SVG", "CSV"):
        with screen.page.expect_download() as expected:
            screen.page.get_by_role("button", name=kind, exact=True).click()
        assert expected.value.suggested_filename == f"run-loss.{kind.lower()}"
        texts[kind] = Path(expected.value.path()).read_text()
    picture = ElementTree.fromstring(texts["SVG"])
    tags = [element.tag.rpartition("}")[2] for element in picture.iter()]
    assert {*tags} == {"svg", "style", "rect", "text", "g", "path", "circle"}
    assert "url(" not in texts["SVG"] and "href" not in texts["SVG"]
    words = [element.text for element in picture.iter() if element.tag.endswith("text")]
    title = "Loss, nats per token over step, smoothed over about 10 steps"
    assert {title, "run", "lower rate", SCRIPT} < {*words}
    assert "published & <b> 2.50" in words and "300" in words
    assert "NaN" not in texts["SVG"] and "undefined" not in texts["SVG"]
    curves = [e.get("d") for e in picture.iter() if e.get("class") == "curve"]
    assert max(d.count("L") for d in curves if d) == 299, "each step is drawn"
    names = next(csv.reader(texts["CSV"].splitlines()))
    assert names[:2] == ["step", "loss, least"] and "mfu, least" not in names
    file = tmp_path / "picture.svg"
    file.write_text(texts["SVG"])
    grounds = []
    for theme in ("light", "dark"):
        screen.page.emulate_media(color_scheme=theme)
        screen.page.goto(file.as_uri())
        grounds.append(
            screen.page.evaluate("getComputedStyle(document.querySelector('.ground')).fill")
        )  # noqa: E501
    screen.page.emulate_media(color_scheme="light")
    assert grounds == ["rgb(255, 255, 255)", "rgb(30, 30, 30)"]


def test_notes_are_edited_in_the_dashboard(open_screen, tmp_path):
    run = recorded_run(tmp_path / "run")
    file = run.directory / "notes.txt"
    file.write_text(f"first {SCRIPT}")
    screen = open_screen(run)
    assert screen.page.get_by_text("Notes: first").is_visible(), "the first line is shown folded"
    screen.page.get_by_text("Notes: first").click()
    box = screen.page.get_by_label("notes of the run")
    assert box.input_value() == f"first {SCRIPT}"
    file.write_text("second")
    screen.refresh()
    assert box.input_value() == "second"
    box.fill("mine")
    file.write_text("third")
    screen.refresh()
    assert box.input_value() == "mine", "a text that is being written is not replaced"
    screen.click("Save notes")
    screen.refresh()
    assert file.read_text() == "mine"
    assert screen.page.get_by_role("button", name="Save notes").is_disabled()
    assert screen.page.locator(".kit-monitor script, .kit-monitor img").count() == 0


@pytest.mark.parametrize("dark", [False, True])
def test_added_charts_fit_wide_and_narrow_pages(open_screen, tmp_path, dark):
    screen = open_screen(hooked_run(tmp_path / "run"), dark=dark, width=1280)
    for name in ("hook/weight_norm", "validation/web", "grad_norm/matrices"):
        add(screen, name)
    for width in (1280, 700, 480):
        screen.page.set_viewport_size({"width": width, "height": 900})
        screen.settle(400)
        assert screen.page.evaluate(OVERLAPS) == [], width
        screen.photograph(f"added-{'dark' if dark else 'light'}-{width}")
    assert screen.coloured(6, LIGHT_BLUE if dark else BLUE) > 50


def test_ticks_of_steps_are_whole_numbers(browser):
    """With three steps, ticks at 1.5 and 2.5 would be printed as 2 and 3, so 2 and 3 twice."""
    source = (files("kit.monitor") / "static" / "numbers.js").read_text()
    page = browser.new_page()
    page.add_script_tag(content=source)
    assert page.evaluate("splits(1, 4, false, 8, 1)") == [1, 2, 3, 4]
    assert page.evaluate("splits(1, 4, false, 8)") == [1, 1.5, 2, 2.5, 3, 3.5, 4]
    page.close()
