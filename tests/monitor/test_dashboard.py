"""What the dashboard shows beside the metrics: notes, settings, scores and places of a run."""

import errno
import json
import subprocess

import numpy as np
import pytest

from cluster.site import Site
from kit.config.plan import Plan
from kit.evaluate.report import EvalReport, Metric, TaskScore
from kit.monitor.curves import PlotRange
from kit.monitor.export import SinkState
from kit.monitor.notes import CONVERT, MOST_CHARACTERS, read_notes
from kit.run import Run
from tests.support.recorded_runs import looked_at, made, recorded_run, row


def test_notes_are_stored_and_shown(tmp_path):
    """A text of another program may have control characters and any length."""
    run = recorded_run(tmp_path / "run", steps=20)
    dashboard, file = looked_at(run), run.directory / "notes.txt"
    assert dashboard.notes() == {"text": "", "is_editable": True, "error": ""}
    dashboard.write_notes("two <b>new</b> nodes\nfrom step 300")
    assert file.read_text() == "two <b>new</b> nodes\nfrom step 300"
    assert dashboard.notes()["text"] == file.read_text()
    assert [each.name for each in run.directory.glob(".notes*")] == [], "no temporary file is left"
    dashboard.write_notes("x" * (MOST_CHARACTERS + 1))
    assert "too many" in dashboard.notes()["error"] and file.read_text().startswith("two")
    file.write_bytes(b"a\x1b[31m\r\nb\xff" + b"y" * 10**6)
    text = read_notes(run.directory)
    assert text.startswith("a\u241b[31m\nb\ufffdy") and len(text) < MOST_CHARACTERS + 100
    dashboard.write_notes("short")
    assert file.stat().st_size > 10**6, "a text that is not shown as a whole is not replaced"
    assert "editor" in dashboard.notes()["error"] and not dashboard.notes()["is_editable"]


def test_notes_that_are_not_utf_8_are_shown_and_kept(tmp_path):
    run = recorded_run(tmp_path / "run", steps=20)
    dashboard, file = looked_at(run), run.directory / "notes.txt"
    file.write_bytes("größeres Modell".encode("latin-1"))
    notes = dashboard.notes()
    assert notes["text"].startswith("gr\ufffd\ufffderes Modell\n[notes.txt is not UTF-8 text")
    assert not notes["is_editable"]
    dashboard.write_notes("a larger model")
    assert "not saved" in dashboard.notes()["error"]
    assert file.read_bytes() == "größeres Modell".encode("latin-1")
    subprocess.run(CONVERT, shell=True, check=True, cwd=run.directory)
    assert dashboard.notes()["text"] == "größeres Modell" and dashboard.notes()["is_editable"]
    dashboard.write_notes("größer")
    assert dashboard.notes()["error"] == "" and file.read_text() == "größer"


def test_notes_that_cannot_be_read_are_kept(tmp_path, monkeypatch):
    run = recorded_run(tmp_path / "run", steps=20)
    dashboard, file = looked_at(run), run.directory / "notes.txt"
    file.write_text("mine")

    def fail(file):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr("kit.monitor.notes.open_for_reading", fail)
    dashboard.write_notes("new")
    assert "cannot be read (Permission denied)" in dashboard.notes()["error"]
    assert not dashboard.notes()["is_editable"] and file.read_text() == "mine"


@pytest.mark.parametrize("obstacle", ["another user's run", "a run on a cluster"])
def test_notes_of_other_places_are_only_read(tmp_path, monkeypatch, obstacle):
    run = recorded_run(tmp_path / "run", steps=20)
    (run.directory / "notes.txt").write_text("theirs")
    if obstacle == "another user's run":
        monkeypatch.setattr("cluster.ownership.other_owner", lambda _: "anna")
    else:
        monkeypatch.setattr(Run, "is_mirror", True)
    dashboard = looked_at(run)
    dashboard.write_notes("mine")
    notes = dashboard.notes()
    assert notes["text"] == "theirs" and not notes["is_editable"]
    assert "anna" in notes["error"] or "cluster" in notes["error"]


def test_notes_replace_a_planted_link(tmp_path):
    run = recorded_run(tmp_path / "run", steps=20)
    target, file = tmp_path / "thesis.tex", run.directory / "notes.txt"
    target.write_text("secret")
    file.symlink_to(target)
    assert read_notes(run.directory) == ""
    looked_at(run).write_notes("mine")
    assert target.read_text() == "secret" and file.read_text() == "mine"
    assert not file.is_symlink()


def test_settings_name_the_differences_between_runs(tmp_path):
    run = recorded_run(tmp_path / "run", steps=20)
    other = recorded_run(tmp_path / "other", steps=20, ranks=2)
    changed = other.recipe.replace(learning_rate=2e-4, data="\x1b<b>" + "x" * 500)
    changed.write(other.directory / "recipe.json")
    table = looked_at(run, baselines={"other": Run.open(other.directory)}).settings
    values = {name: texts for name, *texts in table["rows"]}
    assert table["others"] == ["other"]
    names = ["plan.data_parallel", "plan.global_batch_size", "recipe.data", "recipe.learning_rate"]
    assert sorted(table["differing"]) == names
    assert values["plan.data_parallel"] == ["1", "2"]
    assert values["recipe.learning_rate"] == [repr(run.recipe.learning_rate), "0.0002"]
    assert (
        values["recipe.data"][1].startswith("\u241b<b>xx") and len(values["recipe.data"][1]) < 210
    )
    assert values["spec.hidden_size"] == [f"{run.spec.hidden_size:,}"] * 2
    assert values["site.devices_per_node"][0] == str(run.site.devices_per_node)
    assert json.loads(json.dumps(table)) == table


def test_page_and_dashboard_hide_the_scheduler_settings(tmp_path):
    """The environment of a site may be private, and other people read the page of a run."""
    site = Site.load("frontier").to_dict()
    site["slurm"]["environment"]["TEAM_QUEUE"] = "confidential"
    run = made(tmp_path / "run", [row(1)], Plan(global_batch_size=1))
    Site.from_dict(site).write(run.directory / "site.json")
    texts = json.dumps(looked_at(Run.open(run.directory)).settings)
    assert "MI250X" in texts and "confidential" not in texts


def test_scores_are_further_curves(tmp_path):
    run = recorded_run(tmp_path / "run", steps=100)
    dashboard = looked_at(run)
    for step, value in ((40, 0.25), (80, 0.5), (900, 0.75)):
        scored(run, step, value)
    (run.directory / "eval" / "step_00000050.json").write_text("{")
    dashboard.update_status()
    assert {"key": "eval/arc/acc", "meaning": "score of checkpoints"} in dashboard.further_metrics()
    dashboard.show_charts(["eval/arc/acc"])

    def shown() -> dict[int, float]:
        _, window = dashboard.frame(PlotRange())
        values = np.frombuffer(window, "<f4", offset=8 * 100).reshape(-1, 100)[0]
        return {int(at) + 1: float(values[at]) for at in np.flatnonzero(np.isfinite(values))}

    assert shown() == {40: 0.25, 80: 0.5}
    scored(run, 20, 0.125)
    dashboard.update_status()
    assert shown() == {20: 0.125, 40: 0.25, 80: 0.5}


def scored(run: Run, step: int, value: float) -> None:
    """Writes the score report of one checkpoint with the accuracy `value` of task `arc`."""
    metrics = (Metric.of("acc", value, 0.1, 20),)
    score = TaskScore(
        task="arc",
        metrics=metrics,
        num_items=20,
        total_items=40,
        num_fewshot=0,
        task_version="1.0",
        harness_version="0.4",
        data=(),
        seconds=1.0,
    )
    report = EvalReport(
        name=run.name,
        step=step,
        checkpoint="x",
        tokenizer_sha256="x",
        scores=(score,),
        tokens_seen=9,
    )
    report.write(run.directory / "eval" / f"step_{step:08d}.json")


@pytest.mark.parametrize(
    ("address", "shown"),
    [("https://wandb.ai/t/p/runs/a", True), ("javascript:alert(1)", False), ("https://a b", False)],
)
def test_only_web_addresses_of_a_tracker_are_shown(tmp_path, address, shown):
    run = recorded_run(tmp_path / "run", steps=20)
    SinkState(identity="a", address=address).write(run.directory / "wandb" / "sink.json")
    facts = looked_at(run).facts()
    assert facts["tracker"] == (address if shown else "")
    assert facts["job_id"] is None and facts["directory"] == str(run.directory)
