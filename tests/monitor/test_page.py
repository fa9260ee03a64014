"""The HTML page of a run: its numbers, its size, and the file that is written. tests/browser opens
it in a browser.
"""

import base64
import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.cli.app import app
from kit.config.plan import Plan
from kit.errors import ConfigError
from kit.monitor.curves import PlotRange
from kit.monitor.page import page_html, write_page
from kit.run import Run
from tests.support.hostile import SCRIPT
from tests.support.recorded_runs import looked_at, made, recorded_run, row


@pytest.fixture(autouse=True)
def no_estimate(monkeypatch):
    """The estimate of the speed takes seconds, and test_speed.py tests it."""
    monkeypatch.setattr("kit.monitor.speed.SpeedMonitor.update_comparison", lambda *_, **__: None)


def data_of(page: str) -> dict[str, Any]:
    """Returns the data in a page as its script reads them."""
    [text] = re.findall(r'<script type="application/json" id="kit-data">(.*?)</script>', page)
    return json.loads(text)


def numbers(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def test_page_has_the_numbers_of_all_charts(tmp_path):
    run = recorded_run(tmp_path / "run", steps=3000, planned=5000, second_attempt_at=1800)
    data = data_of(page_html(looked_at(run)))
    frame = data["frames"]["tokens"]
    assert frame["charts"][-1] == "validation_loss" and data["values"]["facts"]["step"] == 3000
    dashboard = looked_at(run)
    dashboard.show_charts(frame["charts"])
    for axis in ("step", "tokens", "time"):
        description, window = dashboard.frame(PlotRange(axis=axis, width=2400))
        places = numbers(data["places"][axis], "<f8")
        np.testing.assert_array_equal(places, np.frombuffer(window, "<f8", len(places)), axis)
        assert data["frames"][axis]["attempts"] == description["attempts"]
    _, window = dashboard.frame(PlotRange(width=2400))
    assert base64.b64decode(data["rows"]) == window[8 * frame["n"] :]


def test_page_of_many_columns_and_steps_is_small(tmp_path):
    columns = {f"hook/{number}": 0.123456 for number in range(300)}
    rows = [row(step, **columns) for step in range(1, 3001)]
    page = page_html(looked_at(made(tmp_path / "run", rows, Plan(global_batch_size=1))))
    data = data_of(page)
    assert len(data["values"]["metrics"]) == 202, "step_time_s, tokens and 200 of the hook"
    assert data["frames"]["step"]["n"] > 500 and len(page) < 4_700_000


def test_page_needs_no_other_file(tmp_path):
    page = page_html(looked_at(recorded_run(tmp_path / "run", steps=10)))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none';")
    assert not re.search(r"<(link|img|iframe|script src)|@import|url\(|\bfetch\(", page)


def test_hostile_names_are_escaped_in_the_page(tmp_path):
    name = SCRIPT.replace("/", "_")
    run = recorded_run(tmp_path / name, steps=10)
    with (run.directory / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(row(11, **{f"hook/{SCRIPT}": 1.0})) + "\n")
    page = page_html(looked_at(Run.open(run.directory)))
    assert "<img" not in page and page.count("<script") == page.count("</script>") == 2
    assert data_of(page)["values"]["metrics"][-1] == {"key": f"hook/{SCRIPT}", "meaning": ""}


def test_page_replaces_a_planted_link(tmp_path):
    run = recorded_run(tmp_path / "run", steps=10)
    target, file = tmp_path / "thesis.tex", tmp_path / "page.html"
    target.write_text("mine")
    file.symlink_to(target)
    write_page(run, file)
    assert target.read_text() == "mine" and file.read_text().startswith("<!doctype html>")
    assert stat.S_ISREG(file.lstat().st_mode)
    assert [each.name for each in tmp_path.glob(".*")] == [], "no temporary file is left"


@pytest.mark.parametrize("name", ["run/metrics.jsonl", "page", "folder.html"])
def test_page_refuses_other_files(tmp_path, name):
    run = recorded_run(tmp_path / "run", steps=10)
    before = (run.directory / "metrics.jsonl").read_bytes()
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match="not an ending of an HTML page|it is a folder"):
        write_page(run, tmp_path / name)
    assert (run.directory / "metrics.jsonl").read_bytes() == before


def test_watch_writes_the_page_of_a_live_run_and_exits(tmp_path, capsys):
    run, file = recorded_run(tmp_path / "run"), tmp_path / "new" / "page.html"
    app(["watch", str(run.directory), "--html", str(file)], standalone_mode=False)
    said = capsys.readouterr()
    assert Path(said.out.splitlines()[0]) == file and "kit watch" in said.err
    assert "<title>run</title>" in file.read_text()
