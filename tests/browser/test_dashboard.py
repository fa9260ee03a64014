"""The dashboard's front end in Chromium: its drawings, its requests to the kernel, and its
texts.
"""

import math
import os
import shutil

import pytest

from cluster.site import Site
from cluster.state import JobState, read_pending_request, take_request
from kit.run import Run
from tests.support.recorded_runs import (
    add_row,
    add_rows,
    beat,
    dead_process,
    recorded_run,
    say,
    write,
)

BLUE, LIGHT_BLUE = "#0072B2", "#56B4E9"


def test_dashboard_draws_curves_tiles_and_new_steps(open_screen, tmp_path):
    screen = open_screen(run := recorded_run(tmp_path / "run", steps=400))
    page = screen.page
    assert page.get_by_role("status").first.inner_text() == "▶ running"
    assert screen.coloured(0, BLUE) > 300, "the loss curve"
    assert "smoothed" in screen.label("MFU")
    tiles = screen.text(".kit-tiles")
    for words in ("Loss", "MFU", "HFU", "400", "of 1,000", "Time left"):
        assert words in tiles
    page.locator("button.kit-tile").click()
    assert "FLOPs per token" in screen.text(".kit-note") and "TFLOP/s" in screen.text(".kit-note")
    screen.photograph("light")
    add_rows(run, 401, 460)
    screen.refresh()
    assert screen.data("step") == "460" and screen.data("points") == "460"
    page.set_viewport_size({"width": 700, "height": 900})
    screen.settle(500)
    assert screen.coloured(0, BLUE) > 200
    assert screen.sent("view")[-1]["width"] < 700, "the kernel is told the new width"


def test_drag_zooms_into_the_charts(open_screen, tmp_path):
    screen = open_screen(recorded_run(tmp_path / "run", steps=6000, planned=9000))
    page = screen.page
    coarse = int(screen.data("points"))
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 60, steps=4)
    page.mouse.up()
    screen.settle(500)
    asked = screen.sent("view")[-1]
    assert 0 < asked["start"] < asked["end"] < 6000
    assert screen.view.start == asked["start"] and coarse < 1200
    assert int(screen.data("points")) == screen.widget.frame["n"]
    screen.photograph("zoomed")
    screen.click("Whole run")
    screen.settle()
    assert screen.view.start == -math.inf


def test_keyboard_axes_smoothing_and_hover_work(open_screen, tmp_path):
    """Keys that the dashboard handles are not passed on to the page around it."""
    screen = open_screen(recorded_run(tmp_path / "run", steps=401))
    page = screen.page
    page.evaluate("document.addEventListener('keydown', e => { window.leaked = e.key; })")
    page.locator(".kit-plot").first.focus()
    page.keyboard.press("+")
    assert (screen.sent("view")[-1]["start"], screen.sent("view")[-1]["end"]) == (101, 301)
    page.keyboard.press("ArrowRight")
    assert screen.sent("view")[-1]["start"] == pytest.approx(141)
    page.keyboard.press("Escape")
    assert screen.sent("view")[-1]["start"] is None
    assert page.evaluate("window.leaked") is None
    page.get_by_label("x axis").select_option("tokens")
    screen.click("log x")
    screen.click("log y")
    screen.settle(400)
    assert {"axis": "tokens", "log_x": True}.items() <= screen.sent("view")[-1].items()
    page.get_by_role("slider").focus()
    before = screen.dashboard.curves.smoothing
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    screen.settle(600)
    assert screen.dashboard.curves.smoothing > before
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    screen.settle()
    numbers = screen.text(".kit-hover")
    assert numbers.startswith("tokens "), "the place on the x axis"
    assert all(name in numbers for name in ("Loss", "MFU", "Learning rate")), "of all charts"
    screen.photograph("axes")


def test_stop_button_needs_a_second_click(open_screen, tmp_path):
    run = recorded_run(tmp_path / "run")
    screen = open_screen(run)
    screen.click("Stop after step")
    assert not screen.sent("action") and read_pending_request(run.directory, "stop") is None
    screen.click("Really stop after step?")
    screen.settle(700)
    screen.tick()
    assert read_pending_request(run.directory, "stop") is not None
    assert "Stop after step: asked " in screen.text(".kit-history")
    assert "stopping" in screen.text(".kit-badge")
    assert take_request(run.directory, "stop")


LATER = "(ms) => { const now = Date.now; Date.now = () => now() + ms; }"
JUPYTERLAB = """() => { window.manager = { kernel: { id: 'a', status: 'idle', connectionStatus: 'connected', statusChanged: {
  connect: (f) => { window.tellStatus = (status) => { window.manager.kernel.status = status; f(null, status); }; }, disconnect() {} } } }; }"""  # noqa: E501


def is_stale(screen) -> bool:
    return "kit-stale" in screen.page.locator(".kit-monitor").get_attribute("class")


def test_click_during_busy_kernel_is_kept(open_screen, tmp_path):
    screen = open_screen(recorded_run(tmp_path / "run"))
    screen.busy = True
    screen.click("Checkpoint now")
    for _ in range(4):  # the kernel's threads may still send updates
        screen.settle(500)
        screen.tick()
    assert "waits for the kernel" in screen.text(".kit-history")
    assert "has not answered your request yet" in screen.text(".kit-notice")
    screen.page.evaluate("tell({type: 'beat', busy: true, looked_s_ago: 0})")
    assert "busy with another cell" in screen.text(".kit-notice")
    assert "the picture continues" in screen.text(".kit-notice")
    screen.busy = False
    screen.answer(screen.sent("action")[-1])
    screen.settle(300)
    screen.tick()
    assert "Checkpoint now: asked" in screen.text(".kit-history")
    assert screen.text(".kit-notice") == ""


def test_resize_during_busy_kernel_shows_no_notice(open_screen, tmp_path):
    screen = open_screen(recorded_run(tmp_path / "run"))
    screen.page.evaluate("tell({type: 'beat', busy: true, looked_s_ago: 0})")
    screen.busy = True
    screen.page.set_viewport_size({"width": 900, "height": 700})
    screen.settle(2500)
    assert screen.text(".kit-notice") == "", "the user has asked for nothing"
    screen.page.get_by_label("Smoothing").fill("0.5")
    screen.page.get_by_text("Your request is answered when that cell ends").wait_for()


def test_heartbeat_alone_keeps_the_dashboard_live(open_screen, tmp_path):
    screen = open_screen(recorded_run(tmp_path / "run"))
    for _ in range(3):
        screen.page.evaluate(LATER, 6000)
        screen.page.evaluate("tell({type: 'beat', busy: false, looked_s_ago: 1})")
        screen.settle(1100)
        assert not is_stale(screen) and screen.text(".kit-notice") == ""
    screen.page.evaluate("tell({type: 'beat', busy: false, looked_s_ago: 90})")
    assert "the state is 1 min 30 s old" in screen.text(".kit-notice")
    screen.page.evaluate(LATER, 60_000)
    # the page checks the time of the last message once a second
    screen.page.get_by_text("has sent nothing for").wait_for()
    assert is_stale(screen)
    assert "If it was restarted, run this cell again" in screen.text(".kit-notice")


def test_finished_run_never_becomes_stale(open_screen, tmp_path):
    run = recorded_run(tmp_path / "run")
    say(run, JobState.FAILED, step=400)
    screen = open_screen(run)
    screen.page.evaluate(LATER, 3_600_000)
    screen.settle(1500)
    assert not is_stale(screen) and screen.text(".kit-notice") == ""


def test_only_kernel_restart_requires_running_the_cell(open_screen, tmp_path):
    screen = open_screen(recorded_run(tmp_path / "run"), before=JUPYTERLAB)
    page = screen.page
    page.evaluate("window.tellStatus('busy')")
    page.evaluate(LATER, 60_000)
    page.get_by_text("the kernel is busy with another cell and has sent nothing").wait_for()
    assert "run this cell" not in screen.text(".kit-notice").lower()
    page.evaluate("window.tellStatus('idle')")
    page.evaluate("window.manager.kernel.connectionStatus = 'connecting'")
    page.get_by_text("not connected to the kernel").wait_for()
    assert "run this cell" not in screen.text(".kit-notice").lower()
    page.evaluate("window.manager.kernel.connectionStatus = 'connected'")
    for status in ("restarting", "starting", "idle"):
        page.evaluate("(status) => window.tellStatus(status)", status)
    assert "was restarted or has ended. Run this cell again" in screen.text(".kit-notice")
    assert is_stale(screen)


def test_alert_button_shows_its_steps_and_log_lines(open_screen, tmp_path):
    run = recorded_run(tmp_path / "run", steps=900, spike_at=700)
    screen = open_screen(run)
    assert "step 700: loss spike" in screen.text(".kit-alerts")
    screen.click("show step 700")
    screen.settle(700)
    assert (screen.view.start, screen.view.end) == (600, 750)
    assert screen.text(".kit-log").startswith("step 700 of 1000")
    screen.photograph("alert")
    screen.click("Whole run")
    screen.settle(700)
    assert "from step 1 on" in screen.label("Loss")


def test_dashboard_shows_ranks_attempts_and_baselines(open_screen, tmp_path):
    run = recorded_run(
        tmp_path / "run", steps=3000, planned=5000, ranks=16, pipeline=4, second_attempt_at=1800
    )
    other = recorded_run(tmp_path / "other", steps=2000)
    screen = open_screen(run, baselines={"published": 2.2, "last week": other})
    for step in range(3000, 3060):
        beat(run, step, slow_rank=11, attempt=2)
        screen.dashboard.run_view.ranks.read_heartbeats()
    screen.refresh()
    assert f"rank 11 on {os.uname().nodename} takes 1.40" in screen.label("rank 11")
    assert "rank 11" in screen.text(".kit-alerts")
    warm = screen.page.evaluate(
        """() => { const c = document.querySelector('.kit-heat');
        const d = c.getContext('2d').getImageData(0, 11, c.width, 1).data; return d[0] > 150 && d[2] < 80; }"""  # noqa: E501
    )
    assert warm, "row 11 is warm"
    assert [attempt["attempt"] for attempt in screen.widget.frame["attempts"]] == [1, 2]
    rows = screen.page.locator(".kit-split tr")
    assert rows.count() == 5
    assert rows.filter(has_text="rank 11").inner_text().endswith("waits 0.0936 s")
    bars = screen.page.evaluate(
        """() => [...document.querySelectorAll('.kit-split .kit-goodput')].map(
        (bar) => [bar.offsetWidth, [...bar.children].reduce((sum, piece) => sum + piece.offsetWidth, 0)])"""  # noqa: E501
    )
    assert all(abs(whole - filled) < 5 for whole, filled in bars), bars
    screen.photograph("ranks")


@pytest.mark.parametrize("width", [1180, 480])
def test_dashboard_is_usable_dark_and_narrow(open_screen, tmp_path, width):
    screen = open_screen(
        recorded_run(tmp_path / "run", steps=900, spike_at=700), width=width, dark=True
    )
    screen.settle(400)
    assert "kit-on-dark" in screen.page.locator(".kit-monitor").get_attribute("class")
    assert screen.coloured(0, LIGHT_BLUE) > 200
    assert screen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    small = screen.page.evaluate(
        """() => [...document.querySelectorAll('.kit-button,.kit-monitor select')]
        .filter(e => e.offsetParent && e.getBoundingClientRect().height < 26).length"""
    )
    assert small == 0, "targets are at least 26 px high"
    screen.photograph(f"dark-{width}")


def test_dashboard_follows_run_from_start_to_removal(open_screen, tmp_path):
    run = recorded_run(tmp_path / "run", steps=0, state=JobState.STARTING)
    screen = open_screen(run)
    assert screen.text(".kit-badge") == "… starting"
    assert "peak unknown" not in screen.text(".kit-tiles")
    say(run, JobState.RUNNING, step=20)
    add_rows(run, 1, 20)
    screen.refresh()
    button = screen.page.get_by_role("button", name="Checkpoint now")
    place = button.bounding_box()
    add_row(run, 21, loss=math.nan)
    write(run, ["not ours\n"])
    screen.refresh()
    assert "step 21: loss is not finite" in screen.text(".kit-alerts")
    assert button.bounding_box() == place, "no alert moves a button from under a hand"
    assert screen.text(".kit-notice") == "1 unreadable metric lines skipped"
    Site.load("laptop").write(run.directory / "site.json")
    again = open_screen(Run.open(run.directory))
    assert "peak unknown" in again.text(".kit-tiles")
    assert again.coloured(1, "#505050") > 150, "words on the empty chart"
    shutil.rmtree(run.directory)
    again.refresh()
    assert again.text(".kit-badge") == "✖ lost"
    assert "state.json is missing" in again.text(".kit-reason")
    assert again.data("step") == "21", "what was read stays"


def test_charts_are_available_as_a_table(open_screen, tmp_path):
    run = recorded_run(tmp_path / "run", steps=300)
    screen = open_screen(run)
    table = screen.page.get_by_role("table")
    assert table.count() == 0
    screen.click("table")
    assert screen.text(".kit-table caption") == "Charts in numbers, step 1 to step 300"
    loss = table.get_by_role("row").filter(has_text="Loss").inner_text().split("\t")
    metrics = run.metrics()
    assert [float(text) for text in loss[2:]] == pytest.approx(
        [metrics["loss"].min(), metrics["loss"].max()], abs=1e-3
    )
    add_rows(run, 301, 310)
    screen.refresh()
    assert "to step 310" in screen.text(".kit-table caption")
    assert table.get_by_role("row").count() == 7
    assert table.get_by_role("rowheader", name="MFU").count() == 1
    screen.photograph("table")


def test_screen_reader_regions_change_only_with_news(open_screen, tmp_path):
    """A screen reader announces a lost job. Event listeners are removed when a view is closed."""
    run = recorded_run(tmp_path / "run", steps=900, spike_at=700)
    screen = open_screen(run)
    screen.page.evaluate("""() => { window.spoken = [];
        const listen = new MutationObserver((all) => all.forEach(({target}) => window.spoken.push(target.textContent)));
        for (const region of document.querySelectorAll('[role=status],[role=log]'))
          listen.observe(region, {childList: true, characterData: true, subtree: true}); }""")  # noqa: E501
    for _ in range(3):
        screen.refresh()
    assert screen.page.evaluate("spoken") == []
    say(run, JobState.RUNNING, step=900, process=dead_process())
    screen.refresh()
    spoken = screen.page.evaluate("spoken")
    assert "✖ lost" in spoken and any("job lost" in text for text in spoken)
    assert "killed" in screen.text(".kit-reason")
    assert screen.page.get_by_role("button", name="Resume").is_enabled()
    assert not screen.page.get_by_role("button", name="Checkpoint now").is_visible()
    screen.photograph("lost")
    assert screen.page.evaluate("listening()") > 0
    screen.page.evaluate("stop()")
    assert screen.page.evaluate("listening()") == 0, "a view that is left removes all listeners"
    screen.refresh()


def test_unreadable_checkpoint_folder_is_named(open_screen, tmp_path, monkeypatch):
    run = recorded_run(tmp_path / "run", steps=40)
    closed = str(run.directory / "checkpoints" / "step_20")
    monkeypatch.setattr("kit.run.checkpoint.Checkpoints.unreadable", lambda _: [closed])
    screen = open_screen(run)
    assert f"you may not enter {closed}" in screen.text(".kit-notice")
