"""The run directory of an untrusted user, shown in real Chromium: the dashboard and the tables of a
notebook.
"""

from cluster.heartbeats import read_rank_heartbeats
from tests.support.hostile import SCRIPT
from tests.support.recorded_runs import beat, recorded_run
from tests.untrusted.test_words import hostile_run, pages

OWNED = """() => [document.title, document.querySelectorAll('script:not([type=module])').length,
    document.querySelectorAll('[onerror],[onload],[onclick],iframe,object,embed,a[href]').length]"""


def test_dashboard_shows_attacks_as_text(open_screen, tmp_path):
    screen = open_screen(hostile_run(tmp_path), baselines={SCRIPT: 2.0})
    screen.settle()
    assert SCRIPT.replace("/", "_") in screen.text(".kit-name")
    for selector in (".kit-alerts", ".kit-log", ".kit-reason"):
        assert SCRIPT in screen.text(selector), selector
    screen.page.locator("button.kit-tile").click()
    assert SCRIPT in screen.text(".kit-note"), "the source of the peak"
    assert screen.page.locator(".kit-monitor img, .kit-monitor script").count() == 0
    assert screen.page.evaluate(OWNED) == ["", 0, 0]


def test_host_name_of_slow_rank_is_shown_as_text(open_screen, tmp_path):
    run = recorded_run(tmp_path / "run", steps=300, ranks=4)
    screen = open_screen(run)
    for step in range(300, 360):
        beat(run, step, slow_rank=2)
        for heartbeat in read_rank_heartbeats(run.directory, 1):
            file = run.directory / "ranks" / f"rank_{heartbeat.rank:05d}.json"
            heartbeat.replace(host=SCRIPT).write(file)
        screen.dashboard.run_view.ranks.read_heartbeats()
    screen.refresh()
    assert SCRIPT in screen.page.locator(".kit-heat").get_attribute("aria-label")
    assert SCRIPT in screen.text(".kit-alerts")
    assert screen.page.evaluate(OWNED) == ["", 0, 0]


def test_notebook_tables_show_attacks_as_text(browser, tmp_path):
    page = browser.new_page()
    for name, html in pages(hostile_run(tmp_path)).items():
        page.set_content(html)
        page.wait_for_timeout(100)
        assert page.evaluate(OWNED) == ["", 0, 0], name
        alts = page.evaluate("[...document.images].map(image => image.alt)")
        text = " ".join([page.locator("body").inner_text(), *alts])
        assert "owned" in text or name in ("plan", "job spec"), name
    page.close()
