"""The HTML page of a run that `kit watch --html` writes, opened from a file in real Chromium."""

from pathlib import Path

import pytest

from cluster.state import JobState
from kit.monitor.export import SinkState
from kit.monitor.page import write_page
from kit.run import Run
from tests.browser.test_charts import hooked_run
from tests.browser.test_hostile_run import OWNED
from tests.browser.test_layout import OVERLAPS
from tests.support.hostile import SCRIPT
from tests.support.lab import photograph
from tests.support.recorded_runs import add_row, recorded_run, say
from tests.untrusted.test_words import hostile_run


@pytest.fixture
def open_page(browser, tmp_path):
    """Yields a function that writes the page of a run and opens it. The test fails if the page
    throws an error, or asks for anything but its own file.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    asked: list[str] = []
    file = tmp_path / "page.html"

    def opened(run: Run, theme: str = "light"):
        write_page(run, file)
        page.emulate_media(color_scheme=theme)
        page.goto(file.as_uri())
        page.wait_for_selector(".kit-monitor[data-points]")
        page.wait_for_timeout(300)
        return page

    opened.faults = faults
    yield opened
    context.close()
    assert faults == []
    assert {*asked} == {file.as_uri()}


def label(page, name: str) -> str:
    return page.get_by_role("img", name=name).get_attribute("aria-label")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_shows_state_and_charts(open_page, tmp_path, theme):
    page = open_page(hooked_run(tmp_path / "my-run", steps=900), theme)
    assert page.title() == "my-run"
    assert page.locator(".kit-badge").inner_text() == "▶ running"
    assert page.locator(".kit-notice").inner_text().startswith("as of 20")
    assert "at step 900, from step 1 on" in label(page, "Loss")
    for words in ("Checkpoint now", "Smoothing", "follow", "log x"):
        assert not page.get_by_text(words, exact=True).is_visible(), "needs a kernel"
    dark = "kit-on-dark" in page.locator(".kit-monitor").get_attribute("class")
    assert dark == (theme == "dark")
    page.get_by_label("Add a curve").select_option("hook/weight_norm")
    page.wait_for_timeout(300)
    assert "at step 900" in label(page, "hook/weight_norm")
    for width in (1280, 700):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(500)
        assert page.evaluate(OVERLAPS) == [], width
        photograph(page, f"page-{theme}-{width}", whole=True)
    page.emulate_media(color_scheme="light" if dark else "dark")
    page.wait_for_timeout(500)
    assert ("kit-on-dark" in page.locator(".kit-monitor").get_attribute("class")) != dark


def test_page_zooms_and_changes_the_axis(open_page, tmp_path):
    run = recorded_run(tmp_path / "run", steps=6000, planned=9000, second_attempt_at=3000)
    say(run, JobState.FAILED, step=6000)
    page = open_page(run)
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + 60, steps=4)
    page.mouse.up()
    assert page.get_by_role("button", name="Whole run").is_enabled()
    page.get_by_role("button", name="Whole run").click()
    page.get_by_label("x axis").select_option("tokens")
    page.wait_for_timeout(300)
    assert "at tokens 24.6 M, from tokens 4.1 k on; attempt 2 from tokens 12.3 M" in label(
        page, "Loss"
    )
    page.get_by_label("x axis").select_option("time")
    page.wait_for_timeout(300)
    assert "at elapsed time 1 h 41 min" in label(page, "Loss")
    page.get_by_role("button", name="table").click()
    with page.expect_download() as expected:
        page.get_by_role("button", name="Download as CSV").click()
    lines = Path(expected.value.path()).read_text().splitlines()
    assert lines[0].startswith('"time","loss, least","loss, largest","loss, smoothed",')
    assert len(lines) > 2400 and float(lines[-1].split(",")[0]) == pytest.approx(1.02 * 5999)


def test_hostile_run_cannot_act_in_its_page(open_page, tmp_path):
    """Texts of the run are shown as text. Even a script that came into the page would not run."""
    run = hostile_run(tmp_path)
    add_row(run, 1001, **{f"hook/{SCRIPT}": 1.0, "__proto__": 2.0})
    (run.directory / "notes.txt").write_text(f"see {SCRIPT}\x1b]0;x")
    SinkState(address=f"javascript:{SCRIPT}").write(run.directory / "wandb" / "sink.json")
    page = open_page(run)
    name = SCRIPT.replace("/", "_")
    assert page.title() == page.locator(".kit-name").inner_text() == name
    for metric in (f"hook/{SCRIPT}", "__proto__"):
        page.get_by_label("Add a curve").select_option(metric)
        page.wait_for_timeout(300)
    page.locator("summary").filter(has_text="Notes").click()
    assert page.locator("pre.kit-notes").inner_text() == f"see {SCRIPT}␛]0;x"
    assert not page.get_by_role("button", name="Save notes").is_visible(), "needs a kernel"
    page.locator("summary").filter(has_text="Settings").click()
    assert "learning_rate" in page.locator(".kit-settings").inner_text()
    assert page.locator(".kit-title").nth(6).inner_text() == f"hook/{SCRIPT}"
    assert page.locator(".kit-monitor img, .kit-monitor script").count() == 0
    assert page.evaluate(OWNED) == [name, 1, 0], "the one other script is the data"
    page.evaluate("""() => document.body.append(Object.assign(document.createElement('script'),
        {textContent: "document.title = 'owned'"}))""")
    assert page.title() == name and "Content Security Policy" in open_page.faults.pop()


def test_page_of_a_run_without_steps(open_page, tmp_path):
    page = open_page(recorded_run(tmp_path / "run", steps=0, state=JobState.STARTING))
    assert page.locator(".kit-badge").inner_text() == "… starting"
    assert page.locator(".kit-notice").inner_text().startswith("as of 20")
