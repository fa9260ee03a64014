"""Views of all runs below a folder: a table with their present states and the settings in which
they differ, and a figure that compares up to eight runs.

For the table, only the end of each `metrics.jsonl` is read, so the table takes no longer for long
runs.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from cluster.state import JobError
from cluster.status import watch_silent
from kit.errors import RunError, kit_command
from kit.monitor.curves import mask_undrawable
from kit.monitor.figure import moving_average, use_log_axis_if_wide
from kit.monitor.quantities import QUANTITIES, quantity_text
from kit.monitor.settings import differing_settings, run_settings
from kit.monitor.states import state_word
from kit.run import Run
from kit.run.columns import parse_row, valid_rows
from kit.run.metrics import SPEED_STEPS
from kit.run.tail import last_lines
from kit.show.style import new_figure, short
from kit.show.table import Table
from kit.show.terminal import format_number
from kit.show.theme import HUES

MAX_COMPARED = 8
"""Largest number of runs that one figure compares."""
TAIL_BYTES = 16 << 10
"""Number of bytes at the end of each metrics.jsonl that are read for the table of runs."""
LONG_TAIL_BYTES = 1 << 20
"""Number of bytes that are read instead if the last TAIL_BYTES have fewer than SPEED_STEPS valid
rows, since a restart has replaced the others."""
LIVE_COLUMNS = ("run", "state_word", "step", "num_steps", "loss", "tokens_per_s", "mfu", "attempt")
"""Columns that the table of runs always has. The settings in which the runs differ follow them."""
DASHES = ("solid", (0, (5, 2)))
"""Line styles of the compared curves. Each of the four colours is used with both line styles, which
suffices for eight runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsTable:
    """Table of all runs below a folder, at one moment."""

    folder: Path
    rows: list[dict[str, Any]]
    """One dictionary per run with its state, the numbers of its last step, and all its settings by
    dotted name."""
    settings: list[str]
    """Dotted names, such as `plan.tensor_parallel`, of the settings in which the runs differ."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the table. They include `heard`, the age of the data in a row, if
        any run is on another machine.
        """
        heard = ["heard"] if any("heard" in row for row in self.rows) else []
        return [*LIVE_COLUMNS, *heard, *self.settings]

    @property
    def notes(self) -> list[str]:
        """Lines of text below the table: one for each damaged file of a run, and one with the
        number of steps over which the speeds are medians.
        """
        notes = []
        for row in self.rows:
            notes += [f"{row['run']}: {note}" for note in row.get("notes", ())]
        if any(row.get("speed_steps") for row in self.rows):
            notes.append(
                f"tokens/s, MFU: median of the last {SPEED_STEPS} steps or fewer; loss: last step"
            )
        return notes

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns the rows as dictionaries for JSON. They have the columns of the table, the name
        and the reason of the state, the directory, and the age of the data in seconds.
        """
        names = [*self.columns, "state", "heard_s", "reason", "directory"]
        return [{name: row.get(name) for name in names} for row in self.rows]

    def _repr_html_(self) -> str:
        rows = []
        for row in self.rows:
            names = (*self.columns, "reason")
            rows.append({column_heading(name): cell_text(name, row.get(name)) for name in names})
        return Table(rows)._repr_html_()


def find_runs(folder: Path) -> list[Path]:
    """Returns the run directories below a folder, sorted by path. The folder itself is included if
    it is a run directory. Hidden folders are not searched.

    Raises:
        RunError: The folder does not exist.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder. Give one that holds run directories.")
    found = []
    for path, folders, names in os.walk(folder):
        if "spec.json" in names and "plan.json" in names:
            found.append(Path(path))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return sorted(found)


def runs_table(folder: str | Path) -> RunsTable:
    """Returns the table of all runs below a folder. If a run cannot be read, its row gives the
    reason.

    Raises:
        RunError: The folder does not exist.
    """
    folder = Path(folder).expanduser().resolve()
    rows: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    directories = find_runs(folder)
    watch_silent(directories)
    for directory in directories:
        name = str(directory.relative_to(folder)) if directory != folder else directory.name
        row: dict[str, Any] = {"run": name, "directory": str(directory)}
        rows.append(row)
        try:
            run = Run.open(directory)
            row |= live_row(run)
            of_run = run_settings(run)
        except Exception as error:
            # The run is incomplete, damaged, hostile, or was deleted meanwhile. The other runs must
            # still be shown.
            reason = "deleted while it was looked at"
            if directory.is_dir():
                reason = str(error)
            row |= {"state": "unreadable", "state_word": "unreadable", "reason": reason}
        else:
            row |= of_run
            settings.append(of_run)
    differing = differing_settings(settings)
    # The table always has a column for the number of steps.
    shown = [name for name in differing if name != "recipe.num_steps"]
    return RunsTable(folder=folder, rows=rows, settings=shown)


def live_row(run: Run) -> dict[str, Any]:
    """Returns the row of one run: its state with the reason, the numbers of its last step, and its
    median speed over the last steps, as `kit status` prints them.
    """
    num_steps = run.recipe.num_steps
    try:
        status = run.job.status()
        state = str(status.state)
        word = state_word(status, num_steps)
        reason = status.reason
    except JobError:
        status = None
        state = word = "not started"
        reason = "no job was submitted for it"
    row = {"state": state, "state_word": word, "reason": reason, "num_steps": num_steps}
    if status and status.heard_at is not None:
        row |= {"heard": f"{status.age} ago", "heard_s": status.age_s}
    newest = _newest_rows(run)
    if not newest:
        return {**row, "step": 0}
    metrics = run.metrics(newest)
    if metrics.why_no_mfu == "above the peak":
        row["reason"] = (
            f"{reason}; no MFU: {metrics.why_no_mfu}, see {kit_command('status', run.directory)}"
        )
    notes = [f"no MFU of attempt {attempt}: {why}" for attempt, why in metrics.damaged.items()]
    row |= {"reason": "; ".join([row["reason"], *notes]), "notes": notes}
    return {**row, **metrics.summary()}


def compare_figure(runs: list[Run]) -> tuple[Any, dict[str, dict[str, np.ndarray]]]:
    """Returns (matplotlib figure, tables). The figure shows loss and speed of up to eight runs. The
    tables are the data of each run by its name, with the columns `step`, `loss`, and `mfu` or
    `tokens_per_s`.

    The speed is MFU if every run has an MFU. Otherwise it is tokens per second.

    Raises:
        RunError: `runs` is empty, has more than eight runs, or contains a run twice.
    """
    if not 1 <= len(runs) <= MAX_COMPARED:
        raise RunError(
            f"{len(runs)} runs cannot be compared. Name 1 to {MAX_COMPARED} of them with --compare."
        )
    metrics_of = dict(zip(_labels(runs), [run.metrics() for run in runs], strict=True))
    speed = "mfu"
    title = QUANTITIES["mfu"].title
    reasons = {metrics.why_no_mfu for metrics in metrics_of.values()} - {None}
    if reasons:
        speed = "tokens_per_s"
        title = f"Tokens/s\n(no MFU: {', '.join(sorted(map(str, reasons)))})"
    scale = QUANTITIES[speed].chart_factor
    table = {}
    for label, metrics in metrics_of.items():
        columns = {"step": metrics["step"], "loss": metrics["loss"]}
        table[label] = {**columns, speed: metrics.speeds()[speed]}
    height = 3.2 + 0.25 * (len(runs) // 3)
    with new_figure(1, 2, height=height, width_ratios=[3, 2]) as (figure, (left, right)):
        left.set(title="Loss, mean of ~5 steps", xlabel="optimizer step")
        for i, (label, columns) in enumerate(table.items()):
            style = {"color": HUES[i % 4], "linestyle": DASHES[i // 4], "linewidth": 1.4}
            left.plot(columns["step"], moving_average(columns["loss"]), label=short(label), **style)
            right.plot(columns["step"], scale * mask_undrawable(columns[speed]), **style)
        averages = [moving_average(columns["loss"]) for columns in table.values()]
        use_log_axis_if_wide(left, np.concatenate(averages))
        right.set(title=title, xlabel="optimizer step", ylim=(0, None))
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure, table


def column_heading(column: str) -> str:
    """Returns the heading of a column of the table of runs. For a setting, it is the last part of
    its dotted name.
    """
    headings = {
        "state_word": "state",
        "num_steps": "of steps",
        "heard": "as of",
        "spec.name": "model",
    }
    if column in headings:
        return headings[column]
    if column in QUANTITIES:
        return QUANTITIES[column].label
    return column.rpartition(".")[2].replace("_", " ")


def cell_text(column: str, value: Any) -> str:
    """Returns the text of a cell of the table of runs, in the format of its column."""
    if value is None or isinstance(value, float):
        return quantity_text(column, value) if column in QUANTITIES else format_number(value, "g")
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _newest_rows(run: Run) -> list[dict[str, Any]]:
    """Returns the newest valid rows, sorted by step. Only the last TAIL_BYTES or LONG_TAIL_BYTES of
    metrics.jsonl are read.
    """
    newest: list[dict[str, Any]] = []
    for size in (TAIL_BYTES, LONG_TAIL_BYTES):
        lines = last_lines(run.directory / "metrics.jsonl", size)
        rows = [row for row in map(parse_row, lines) if row is not None]
        valid = valid_rows([row["step"] for row in rows], [row["attempt"] for row in rows])
        newest = [rows[i] for i in valid]
        if len(newest) >= SPEED_STEPS:
            break
    return newest


def _labels(runs: list[Run]) -> list[str]:
    """Returns a distinct name for each run: its path relative to the common parent folder of all
    runs.

    Raises:
        RunError: `runs` contains a run twice.
    """
    root = os.path.commonpath([run.directory.parent for run in runs])
    labels = [os.path.relpath(run.directory, root) for run in runs]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise RunError(
            f"a run cannot be compared with itself: {', '.join(twice)}. Name each run once."
        )
    return labels
