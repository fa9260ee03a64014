"""Text of a run that another user may have written. No command prints its control characters, and
no exported table holds a spreadsheet formula.
"""

import contextlib
import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.record import ConfigError
from cluster.state import log_path
from kit.monitor.export import scalars
from kit.monitor.runs import compare_figure
from kit.run import Run
from kit.show.style import plain_cell, save_figure
from kit.show.terminal import PlainConsole, PlainStream
from tests.support.hostile import ESCAPES, kit
from tests.support.recorded_runs import recorded_run
from tests.untrusted.planted import whole_run

ATTACK = f"=1+1{ESCAPES}\x0b\x7f\x00\r\u2066\u061c\u200f\u2028"
ARGUMENT = ATTACK.replace("\x00", "").replace("/", "_")
"""The attack text without the characters that a command line argument or a folder name cannot
contain.
"""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
FORMULA = re.compile(r"[=+\-@\t\r]")
FILES = """
spec.json recipe.json site.json job.json state.json exit.json history.jsonl alerts.jsonl
plan.attempt_01.json site.attempt_01.json eval/step_00000040.json import.json metrics.jsonl
""".split()
SETTLED = ("state", "kind", "level", "scheduler", "schedule", "engine", "precision", "recompute")
COMMANDS = """
status RUN
status RUN --json
status RUN --why
watch RUN
watch RUN --html OUT/page.html
logs RUN
logs RUN --rank 9
runs FOLDER
runs FOLDER --json
runs RUN
figure RUN --out OUT/figure.csv
figure hlat-loss --run RUN --out OUT/loss.csv
export RUN --out OUT/steps.csv --format csv
export RUN --format tensorboard
launch RUN --show
launch RUN --steps 2
launch ATTACK/run --data ATTACK
resume RUN --set plan.x=ATTACK
stop RUN
checkpoint RUN
generate ATTACK x
plan ATTACK
plan --site ATTACK
calibrate RUN
import ATTACK --out OUT/imported
import LOG --out OUT/imported --format nanogpt --pattern x
data build OUT/data --source ATTACK
ATTACK
status --ATTACK
""".strip().splitlines()
"""Commands that print text from a run's files or from an argument."""


def attacked(value: Any, name: str = "") -> Any:
    """Returns a JSON value in which every text begins with a spreadsheet formula and contains
    control characters. Fields with few allowed values are not changed.
    """
    if isinstance(value, dict):
        return {key: attacked(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [attacked(inner, name) for inner in value]
    return ATTACK + value if isinstance(value, str) and name not in SETTLED else value


def rewrite(file: Path, field: str) -> bool:
    """Puts the attack text into one field of each record in a JSON file. Returns whether a record
    has changed.
    """
    is_lines = file.suffix == ".jsonl"
    text = file.read_text()
    rows = [json.loads(line) for line in (text.splitlines() if is_lines else [text])]
    changed = [{**row, field: attacked(row[field], field)} if field in row else row for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in changed))
    return changed != rows


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose text fields all contain the attack text. A field keeps its value if the attack
    would make the run unreadable.
    """
    whole_run(tmp_path / "runs" / "run")
    run = Run.open((tmp_path / "runs" / "run").rename(tmp_path / "runs" / ARGUMENT))
    for file in (run.directory / name for name in FILES):
        fields = set[str]()
        if file.exists():
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            fields = {field for line in lines for field in json.loads(line)}
        for field in sorted(fields - {*SETTLED}):
            before = file.read_bytes()
            if not rewrite(file, field):
                continue
            try:
                Run.open(run.directory).job.status()
            except (ConfigError, ValueError, RuntimeError):
                file.write_bytes(before)
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row[ATTACK] = 1.0
        row["note"] = ATTACK
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log_path(run.directory, 1, 0).write_text(f"{ATTACK}\nstep 1/2\rstep 2/2\n{ATTACK}")
    return Run.open(run.directory)


def words_of(command: str, run: Run, out: Path) -> list[str]:
    """Returns the words of a command, with its placeholders (such as RUN) replaced by paths."""
    folder, log = run.directory.parent, log_path(run.directory, 1, 0)
    places = {"RUN": run.directory, "FOLDER": folder, "OUT": out, "LOG": log, "ATTACK": ARGUMENT}
    words = []
    for word in command.split():
        for name, place in places.items():
            word = re.sub(rf"\b{name}\b", lambda _, place=place: str(place), word)
        words.append(word)
    return words


def test_no_command_prints_control_characters(run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    out = tmp_path / "out"
    out.mkdir()
    shown = ""
    for command in COMMANDS:
        limit_s = 2.0 if command.startswith("watch") else 60.0
        said = kit(*words_of(command, run, out), ctrl_c_after_s=limit_s)
        found = CONTROL.search(said.text)
        assert not found, f"{command}: {said.text[max(0, found.start() - 80) : found.end() + 80]!r}"
        assert "Traceback" not in said.text, f"{command}: {said.text}"
        shown += said.text
    assert shown.count("␛]0;owned") > 20
    tables = list(out.glob("*.csv"))
    assert {table.name for table in tables} >= {"steps.csv", "loss.csv"}
    for table in tables:
        _check_csv(table)


def _check_csv(file: Path) -> None:
    """Asserts that no cell of a CSV file is a spreadsheet formula or contains a control
    character.
    """
    with file.open(newline="", encoding="utf-8") as stream:
        for cells in csv.reader(stream):
            for cell in cells:
                assert not CONTROL.search(cell), (file, cell)
                with contextlib.suppress(ValueError):
                    float(cell)
                    continue
                assert not FORMULA.match(cell), (file, cell)


def test_figure_table_has_no_formula(tmp_path: Path) -> None:
    runs = []
    for number, start in enumerate("=+-@\t"):
        made = recorded_run(tmp_path / str(number), steps=20)
        name = f"{start}cmd|' /C calc'!A0{ESCAPES}".replace("/", "_")
        runs.append(Run.open(made.directory.rename(tmp_path / name)))
    figure, rows = compare_figure(runs)
    table = [{"run": name, name: 1.0, ATTACK: ATTACK} for name in rows]
    save_figure(figure, table, [tmp_path / "a.csv"])
    _check_csv(tmp_path / "a.csv")
    for start in "=+-@\t\r":
        assert plain_cell(f"{start}1").startswith("'")


def test_sink_names_have_no_control_characters(run: Run) -> None:
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    names = {name for values in scalars(run, rows) for name in values}
    assert len(names) > 3
    assert not any(CONTROL.search(name) for name in names)


def test_plain_stream_keeps_only_console_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", PlainStream(screen))
    print(f"\x1b[31mred{ESCAPES}")
    console = PlainConsole(force_terminal=True, color_system="truecolor", width=80)
    console.print(ESCAPES, style="red")
    printed = screen.getvalue()
    assert printed.startswith("\x1b[31mred␛]0;owned␇␛[2J")
    styles = re.findall("\x1b[^m]*m", printed)
    assert set(styles) <= {"\x1b[31m", "\x1b[0m"} and len(styles) >= 3
