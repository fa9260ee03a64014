"""Import of logs that are built like public logs: the imported run, its times and its alerts."""

import datetime
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.site import Site
from kit.cli.app import app
from kit.errors import DataError, RunError
from kit.interop.logs.importers import import_log
from kit.launcher import resume
from kit.monitor import alerts, run_figure, status_row, status_table
from kit.monitor.export import export_table, scalars
from kit.monitor.goodput import ledger
from kit.monitor.text import recorded_alerts
from kit.run import Run
from tests.interop.conftest import DEGREES, assert_told
from tests.support.foreign_logs import (
    ARGUMENTS,
    MODERN,
    REDRAWN,
    START,
    arguments,
    frontier,
    head,
    line,
    lines,
    lumi,
    titan,
)
from tests.support.recorded_runs import looked_at

NODE = DEGREES | {"global_batch_size": 8}


def test_views_work_on_an_imported_run(read):
    _, run = read(frontier(), "frontier")
    row = status_row(run)
    assert (row["state"], row["step"], row["num_steps"]) == ("imported", 5, 5)
    assert row["reason"] == "the log says that training is done, at step 5"
    assert status_table(run) and len(run_figure(run)[1]["step"]) == 5
    rows = [json.loads(row) for row in (run.directory / "metrics.jsonl").read_text().splitlines()]
    told = [
        looked_at(run).facts()["hfu"],
        export_table(run)["hfu"].to_pylist()[-1],
        scalars(run, rows)[-1]["hfu"],
    ]
    # HFU counts the FLOPs of full recomputation, which Megatron runs and also counts.
    assert told == pytest.approx([37.4 / 191.5] * 3, rel=0.01)
    assert "149.46" in run.job.logs()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(alerts.shutil, "disk_usage", lambda path: usage())


@pytest.mark.parametrize("age_s", [0, 1e6])
def test_finished_log_gives_no_live_alerts(log, read, age_s, full_disk, monkeypatch):
    changed = time.time() - age_s
    log.write_text(START + lines(*range(1, 9)))
    os.utime(log, (changed, changed))
    _, run = read(recipe={"checkpoint_every": 2})
    row = status_row(run)
    assert (row["state"], row["reason"]) == ("imported", "the log was read to its end, at step 8")
    counted_back = [changed - 346 * i for i in range(7, -1, -1)]
    assert row["eta_s"] is None and run.metrics()["time"].tolist() == pytest.approx(counted_back)
    dashboard = looked_at(run)
    now = time.monotonic()
    monkeypatch.setattr(alerts.time, "monotonic", lambda: now + 1e6)
    dashboard.update_status()
    facts = dashboard.facts()
    assert "iteration        8/" in dashboard.log(), "its log is a link, and is read all the same"
    assert recorded_alerts(run) == dashboard.alerts() == []
    assert facts["eta_s"] is None and facts["allowed"] == []
    with pytest.raises(RunError, match="nothing to stop, it was imported"):
        CliRunner().invoke(app, ["stop", str(run.directory)], catch_exceptions=False)
    with pytest.raises(RunError, match="was imported from a log"):
        resume(run.directory)


def test_followed_log_gives_only_a_stall_alert(log, read, full_disk):
    seen = []

    def look(_: float) -> None:
        run = Run.open(log.parent / "run")
        dashboard = looked_at(run)
        now = time.monotonic()
        with pytest.MonkeyPatch.context() as later:
            # Only the clock of the alerts is changed. The importer that follows the log still
            # writes its heartbeats with the real clock.
            later.setattr(
                alerts, "time", SimpleNamespace(monotonic=lambda: now + 1e5, time=time.time)
            )
            dashboard.update_status()
        seen.append((status_row(run)["state"], [alert["kind"] for alert in dashboard.alerts()]))
        raise KeyboardInterrupt

    _, run = read(lumi(range(1, 9)), recipe={"checkpoint_every": 2}, follow=True, idle=look)
    assert seen == [("running", ["stall"])], "not our disk, nor checkpoints that are elsewhere"
    assert status_row(run)["state"] == "imported", "nobody follows it any more"


def test_log_timestamps_give_the_times_of_steps(read):
    stamped = [f" [2025-04-13 23:4{i}:12]" + line(i, 50.0, tflops=400) for i in range(1, 4)]
    small = {"num_layers": 2}  # few layers, so that a step time of 50 s is plausible
    times = read(START + "".join(stamped), spec=small)[1].metrics()["time"]
    assert (times[1:] - times[:-1]).tolist() == [60.0, 60.0]


def every_ten_minutes(first: datetime.datetime, lines: int = 12) -> list[datetime.datetime]:
    return [first + datetime.timedelta(minutes=10 * i) for i in range(lines)]


def test_imported_run_ends_at_its_last_log_line(read):
    """The modification time of the log file is not used."""
    text = titan(every_ten_minutes(datetime.datetime(2025, 6, 1, 12)))  # the log was copied today
    found = ledger(read(text, "trn1.32xlarge", "llama3-8b", plan=NODE)[1])
    assert found.goodput == 1 and found.wall_s == pytest.approx(2 * 3600)
    assert found.usd == pytest.approx(2 * 21.50), "two hours of one node"


@pytest.fixture
def berlin(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("night", ["2025-10-26 01:30", "2025-03-30 01:30"])
def test_timestamps_without_zone_are_read_as_utc(read, berlin, night):
    """Neither the time zone of the user's machine nor a change to summer time changes the imported
    times.
    """
    first = datetime.datetime.fromisoformat(night)
    report, run = read(titan(every_ten_minutes(first)), "trn1.32xlarge", "llama3-8b", plan=NODE)
    assert set(run.metrics()["step_time_s"]) == {600.0}
    assert ledger(run).seconds["productive"] == 7200
    assert run.metrics()["time"][0] == first.replace(tzinfo=datetime.UTC).timestamp()
    assert any("read as UTC" in note for note in report.notes)


@pytest.mark.parametrize("night", ["2025-10-25 23:30", "2025-03-29 23:30"])
def test_timestamps_of_given_zone_survive_clock_change(read_node, night):
    first = datetime.datetime.fromisoformat(night).replace(tzinfo=datetime.UTC)
    zone = ZoneInfo("Europe/Berlin")
    local = [when.astimezone(zone) for when in every_ten_minutes(first, 18)]
    metrics = read_node(titan(local), **{"import": {"zone": "Europe/Berlin"}})[1].metrics()
    assert set(metrics["step_time_s"]) == {600.0} and metrics["time"][0] == first.timestamp()


def test_timestamp_with_utc_offset_needs_no_zone(read_node):
    text = [f"2025-06-01T12:0{step}:00+02:00 it {step} loss=2.{step}\n" for step in (1, 2, 3)]
    pattern = r"(?P<time>\S+) it (?P<step>\d+) loss=(?P<loss>\S+)"
    report, run = read_node("".join(text), pattern=pattern)
    ten = datetime.datetime(2025, 6, 1, 10, 1, tzinfo=datetime.UTC)
    assert run.metrics()["time"][0] == ten.timestamp()
    assert not any("zone" in note for note in report.notes)


def test_total_tokens_follow_the_count_of_the_log(read):
    """Iterations 5,001 to 5,100 have a batch of 32 sequences. Earlier iterations had 16, which
    these log lines do not show, so the total must come from the log's own token count.
    """
    told = "".join(
        line(step, 60.0, batch=32, tflops=390).replace(
            f"{32 * step:12d}", f"{16 * 5000 + 32 * (step - 5000):12d}"
        )
        for step in range(5010, 5101, 10)
    )
    _, run = read(head(MODERN, vocabulary=128256) + told, "dgx-h100")
    seen = [(16 * 5000 + 32 * number) * 8192 for number in range(1, 101)]
    assert run.metrics().total_tokens.tolist() == seen
    assert looked_at(run).facts()["tokens"] == status_row(run)["tokens"] == seen[-1]
    assert export_table(run)["total_tokens"].to_pylist() == seen


# Cumulative tokens under Megatron-DeepSpeed's curriculum: 3,000 steps with sequences of 1,024
# tokens, then steps with 2,048.
GROWN = [(3000 * 1024 + number * 2048) * 1024 for number in range(1, 5)]


TORN, MIXED = line(3)[:120] + "\n", line(4)[:90] + line(5)
ODD = "srun: error: node died\n\x00\xff\n"
NO_LOSS = line(2).replace(" lm loss: 6.071495E+01 |", "")
VALIDATED = (
    " validation loss at iteration 2 | lm loss value: 1.111471E+01 | lm loss PPL: 6.715179E+04 | \n"
)
BY_TEN = head(ARGUMENTS | {"log_interval": 10}, vocabulary=51200)
LINES = {
    "a restart, and a line printed twice": (
        START + lines(1, 2, 3, 3, 4) + START + lines(3, 4, 5, seconds=350),
        {"attempts": 2, "steps": 7, "step": [1, 2, 3, 4, 5], "attempt": [1, 1, 2, 2, 2]},
    ),
    "a restart without arguments is seen by its repeated steps": (
        START + lines(1, 2, 3) + lines(2, 3, seconds=350),
        {"attempts": 2, "step": [1, 2, 3], "attempt": [1, 2, 2]},
    ),
    "torn, mixed, reordered and foreign lines; the last has no end yet": (
        START + lines(1) + ODD + TORN + MIXED + lines(7, 6) + line(8)[:-9],
        {"attempts": 1, "skipped_lines": 2, "step": [1, 6, 7]},
    ),
    "lost losses, one line twice though NaN is not equal to NaN": (
        START + line(1, loss="nan") * 2 + NO_LOSS + line(3, loss="inf"),
        {"attempts": 1, "step": [1, 2, 3], "loss": [math.nan, math.nan, math.inf]},
    ),
    "a line for several steps; a gap stays a gap": (
        BY_TEN + lines(10, 20, 50),
        {
            "attempts": 1,
            "steps": 30,
            "step": [*range(1, 21), *range(41, 51)],
            "notes": "one line stands for 10 steps; each of them is recorded with the line's means",
        },
    ),
    "tokens of sequences that grew are those that the log counts": (
        START
        + "".join(
            line(step).replace(
                "| elapsed", f"| consumed tokens: {tokens:12d} | actual seqlen: 2048 | elapsed"
            )
            for step, tokens in enumerate(GROWN, 3001)
        ),
        {"total_tokens": GROWN},
    ),
    "a held-out loss belongs to its step": (
        START + lines(1, 2) + VALIDATED + lines(3),
        {"attempts": 1, "validation_loss": [math.nan, 11.11471, math.nan]},
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_log_lines_give_steps_and_attempts(log, read, case):
    text, told = LINES[case]
    log.write_bytes(text.encode("latin-1"))
    report, run = read()
    note = told.get("notes", "")
    assert_told(report, run, {name: value for name, value in told.items() if name != "notes"})
    assert sorted(run.plans()) == list(range(1, report.attempts + 1))
    assert note in " ".join(report.notes)
    report, run = read(START + line(1))
    assert report.attempts == 1 and sorted(run.plans()) == [1], "nothing of the first import"
    assert run.job.status().attempt == 1 and len(run.job.history) == 1


SMALL = ARGUMENTS | arguments(
    "hidden_size=1024 num_layers=24 bf16=False fp16=True num_attention_heads=16"
    " ffn_hidden_size=4096 seq_length=512"
)


def lines_of(every: int, losses: list[float], changed: dict[int, str] | None = None) -> str:
    """Returns a log with one line per `every` steps. `changed` maps the number of a line to the
    text that replaces the line's end, from the loss on.
    """
    text = head(SMALL | {"log_interval": every}, vocabulary=51200)
    for number, loss in enumerate(losses, 1):
        told = line(number * every, 20.0, loss=f"{loss:.6E}", tflops=1)
        before, words, after = told.partition(" lm loss:")
        text += before + (changed or {}).get(number, (words + after).rstrip("\n")) + "\n"
    return text


@pytest.fixture
def alerts_of(read):
    """Returns a function that imports a log and returns (kind, step, message) of each alert."""
    return lambda text: [
        (alert.kind, alert.step, alert.message) for alert in recorded_alerts(read(text)[1])
    ]


BLOWN_UP = [*np.interp(range(1, 39), [1, 15, 16, 17, 38], [9.61, 3.56, 4.61, 5.19, 6.94])]
"""Losses of a diverging run, one per log line of 200 steps. The lowest loss 3.56 at step 3,000 and
the loss 6.94 at step 7,600 are of a public 350M run on LUMI, 4-alibi-bf16-nods. The losses in
between are invented."""


def test_blow_up_gives_one_rise_alert_with_lowest_step(alerts_of):
    ((kind, step, message),) = alerts_of(lines_of(200, BLOWN_UP))
    assert kind == "rise" and 3201 <= step <= 3400
    assert message.startswith("lowest 3.56 at step 3,000, now 5.19 and not back for 400 steps; go")
    bump = [*BLOWN_UP[:16], 3.51, 3.45, 3.4, 3.36, 3.33, 3.3]
    assert alerts_of(lines_of(200, bump)) == [], "a bump of one line"


NAN_LINE = (
    " loss scale: 1.0 | grad norm: 0.000 | number of skipped iterations:  81 | number of nan"
    " iterations:  81 | samples per second: 51.200 | TFLOPs: 1.00 |"
)
SKIPPED = (
    " loss scale: {} | number of skipped iterations:   1 | number of nan iterations:   0 | "
    "samples per second: 51.200 | TFLOPs: 1.00 |"
)


def test_megatron_nan_and_loss_scale_give_alerts(alerts_of):
    """Megatron's `training_log` counts steps with NaN losses and excludes them from the mean
    loss.
    """
    scaled = lines_of(200, BLOWN_UP[:9], {7: " lm loss: 1.110000E+01 |" + NAN_LINE}).replace(
        "loss scale: 1.0 | grad norm: 23", "loss scale: 65536.0 | grad norm: 23"
    )
    nan, (kind, step, message) = alerts_of(scaled)
    assert nan == ("nan", 1201, "the loss of 81 of 200 steps is not finite")
    assert (kind, step) == ("loss_scale", 1201) and "fell to 1, from up to 65,536" in message
    unprinted = scaled.replace("81 |", "200 |").replace("lm loss: 1.110000E+01 |", "")
    assert alerts_of(unprinted)[0] == ("nan", 1201, "the loss of 200 steps is not finite")


def test_loss_scale_search_in_a_log_gives_no_alert(alerts_of):
    scales = {number: 2.0 ** max(16, 33 - number) for number in (*range(1, 16), 40)}
    skipped = {number: SKIPPED.format(scale) for number, scale in scales.items()}
    text = lines_of(1, [10.9 - 0.02 * number for number in range(1, 60)], skipped)
    text = text.replace("loss scale: 1.0 |", "loss scale: 131072.0 |")
    assert alerts_of(text) == []
    lost = alerts_of(text.replace("1.030000E+01", "nan"))
    assert [(kind, step) for kind, step, _ in lost] == [("nan", 30)]


def test_import_refuses_missing_log_and_foreign_folder(log, read):
    with pytest.raises(DataError, match="cannot be read"):
        read()
    (log.parent / "run").mkdir()
    (log.parent / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="was not imported from"):
        read(lumi())
    assert [file.name for file in (log.parent / "run").iterdir()] == ["thesis.txt"]


def growing(log: Path, parts: list[str]) -> Callable[[float], None]:
    """Returns a function that appends the next part to a log at each call. After the last part it
    raises KeyboardInterrupt.
    """
    left = iter(parts)

    def grow(_: float) -> None:
        if (part := next(left, None)) is None:
            raise KeyboardInterrupt
        with log.open("a") as stream:
            stream.write(part)

    return grow


def test_follow_records_new_lines_until_training_ends(log, read):
    text = frontier()
    second = text.index(" iteration        2/")
    idle = growing(log, [text[second : second + 50], text[second + 50 :]])
    report, run = read(text[:second], "frontier", follow=True, idle=idle)
    assert_told(report, run, {"steps": 5, "skipped_lines": 0, "step": [1, 2, 3, 4, 5]})
    assert status_row(run)["state"] == "imported"


@pytest.mark.parametrize("deleted", ["log", "run"])
def test_follow_ends_when_log_or_run_is_deleted(log, deleted):
    log.write_text(lumi())
    site, out = Site.load("lumi"), log.parent / "run"
    delete = {"log": log.unlink, "run": lambda: shutil.rmtree(out)}[deleted]
    report = import_log(log, out, site=site, follow=True, idle=lambda _: delete())
    assert report.steps == 4 and out.exists() == (deleted == "log")
    assert deleted == "run" or status_row(Run.open(out))["state"] == "imported"


def test_progress_bars_without_newline_are_followed(log, read_node):
    first, second, third, fourth, fifth = REDRAWN
    parts = ["\r" + third[:60], third[60:] + "\r" + fourth, "\r" + fifth]
    idle = growing(log, parts)
    report, run = read_node(f"{first}\r{second}", batch=128, follow=True, idle=idle)
    told = {"steps": 4, "attempts": 1, "skipped_lines": 0, "step": [189, 190, 191, 192]}
    assert_told(report, run, told)
