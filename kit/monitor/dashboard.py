"""Dashboard: computes the content of all views of a run from its run directory. It does not use
widgets.

`read` and `frame` read and reduce the metrics, which is quick. `update_status` reads the state of
the job, the heartbeats of ranks and the alerts. It is called about once per second and may wait for
a scheduler. All methods may be called from several threads.
"""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cluster.job import log_file, read_status
from cluster.state import JobError, read_exit, read_state
from kit.data import mix_text
from kit.errors import ConfigError, RunError
from kit.monitor.alerts import ROWS_PER_LOOK, peak_advice
from kit.monitor.curves import SERIES, Curves, PlotRange
from kit.monitor.export import tracker_address
from kit.monitor.notes import notes_are_editable, read_notes, write_notes
from kit.monitor.run_view import RunView, site_written_at
from kit.monitor.scores import score_series
from kit.monitor.settings import settings_table
from kit.monitor.states import state_word
from kit.run import Run
from kit.run.columns import COLUMN_MEANINGS, Columns, parse_row
from kit.run.metrics import Metrics, last_step_values, time_left_s
from kit.run.tail import CHUNK_BYTES, last_lines

ALERTS_SHOWN = 50
"""Largest number of alerts that are sent to the dashboard's front end in the browser."""
HEAT_ROWS = 512
"""Largest number of rows in the heat map of step times by rank. No screen shows more rows, and a
browser's canvas cannot have 100,000 rows."""
TAIL_BYTES = 32 * 2**10
"""Number of bytes at the end of a log file from which lines are shown."""
SEARCH_BYTES = 16 * 2**20
"""Number of bytes at the end of a log file in which a text is searched."""
MAX_LINES = 200
"""Largest number of lines of a log file that are shown."""


class Dashboard:
    """Content of the views of one run, which is updated while the files of the run grow.

    Args:
        run: run before, during or after training.
        baselines: comparisons by name: other runs, which are drawn as dashed curves in all charts,
            or losses in nats per token, which are drawn as dashed horizontal lines.
        smoothing: weight of past values in the moving averages, from 0 to below 1.
    """

    def __init__(
        self,
        run: Run,
        *,
        baselines: Mapping[str, "Run | float"] | None = None,
        smoothing: float = 0.9,
    ) -> None:
        self.lock = threading.RLock()
        self.baseline_curves: dict[str, Curves] = {}
        self.baseline_losses: dict[str, float] = {}
        for name, baseline in (baselines or {}).items():
            if isinstance(baseline, Run):
                self.baseline_curves[name] = Curves(baseline, smoothing)
            else:
                self.baseline_losses[name] = float(baseline)
        self.shown: tuple[str, ...] = SERIES
        """Names of the series whose charts are shown."""
        self.log_rank = 0
        self.log_search = ""
        self.notes_error = ""
        """Reason why the last text for the notes was not stored. Empty if it was stored."""
        self.status = read_status(run.directory)
        written_at = site_written_at(run.directory)
        self.run_view = RunView(
            run, self.status.attempt, written_at, self.lock, smoothing=smoothing
        )

        self.settings = self._settings()
        """Settings of the run and of the baseline runs (`kit.monitor.settings.settings_table`)."""

    @property
    def run(self) -> Run:
        """The run, as it was opened after the last new attempt or change of its site.json."""
        return self.run_view.run

    @property
    def curves(self) -> Curves:
        """The series of the run (loss, MFU and others) with their moving averages."""
        return self.run_view.curves

    @property
    def columns(self) -> Columns:
        """The recorded training steps of the run, as columns."""
        return self.run_view.curves.columns

    def read(self, limit_bytes: int = CHUNK_BYTES) -> bool:
        """Reads new training steps, at most `limit_bytes` of the file metrics.jsonl. Returns
        whether there is more to read.
        """
        with self.lock:
            for other in self.baseline_curves.values():
                if not other.columns.position:
                    other.read_all().set_scores(score_series(other.run))
            return self.curves.read(limit_bytes)

    def update_status(self) -> None:
        """Updates the status of the job, the step times of its ranks, and its alerts."""
        # The call may wait for a scheduler, so it is made without the lock.
        status = read_status(self.run.directory)
        self._replace_if_changed(status.attempt)
        view = self.run_view
        view.ranks.read_heartbeats()
        scores = view.read_new_scores()
        with self.lock:
            self.status = status
            if scores is not None:
                view.curves.set_scores(scores)
            view.alert_monitor.evaluate_rules(view.curves, status, view.ranks)

    def update_speed(self, *, wait: bool = False) -> None:
        """Starts a new comparison of the measured and the predicted speed of the run, if the last
        comparison is too old. The comparison runs in a thread. With `wait`, the method waits for
        the result.
        """
        self.run_view.speed_monitor.update_comparison(wait=wait)

    def start_action(self, name: str) -> None:
        """Starts the action of a button, such as a checkpoint or a stop, in a thread. `name` is one
        of `kit.monitor.actions.ACTION_NAMES`.
        """
        self.run_view.actions.start(name, self.status)

    def set_smoothing(self, smoothing: float) -> None:
        """Sets the weight of past values in the moving averages of the run and of its baselines."""
        with self.lock:
            for curves in (self.curves, *self.baseline_curves.values()):
                curves.set_smoothing(smoothing)

    def show_charts(self, names: Iterable[str]) -> None:
        """Selects the series whose numbers the method `frame` returns. A name that the run does not
        have is left out as long as the run does not have it.
        """
        self.shown = tuple(dict.fromkeys(names))

    def further_metrics(self) -> list[dict[str, str]]:
        """Returns the key and the meaning of each column of metrics.jsonl, and of each score of
        checkpoints, that can be added as a chart. The meaning is empty for a column that is not the
        kit's own.
        """
        with self.lock:
            names = self.curves.further_names()
            meanings = COLUMN_MEANINGS | dict.fromkeys(self.curves.scores, "score of checkpoints")
        return [{"key": name, "meaning": meanings.get(name, "")} for name in names]

    def write_notes(self, text: str) -> None:
        """Stores a text as the notes of the run. If it is refused, `notes` gives the reason."""
        self.notes_error = ""
        try:
            write_notes(self.run, text)
        except (ConfigError, JobError, OSError) as error:
            self.notes_error = str(error)

    def notes(self) -> dict[str, Any]:
        """Returns the text of the run's notes, whether this user may edit them, and the reason why
        the last text was not stored.
        """
        return {
            "text": read_notes(self.run.directory),
            "is_editable": notes_are_editable(self.run),
            "error": self.notes_error,
        }

    def select_log(self, rank: int = 0, search: str = "") -> None:
        """Selects the text that the method `log` returns: the end of a rank's log. If `search` is
        given, it is the lines of this log that contain `search`.
        """
        self.log_rank = max(0, rank)
        self.log_search = search

    def read_all(self) -> "Dashboard":
        """Reads all new training steps. Returns the dashboard itself."""
        while self.read():
            pass
        return self

    def catch_up(self) -> None:
        """Reads all new training steps, and then calls `update_status`."""
        self.read_all().update_status()

    def metrics(self) -> Metrics:
        """Returns the training steps that were read so far."""
        return self.run_view.metrics()

    def frame(self, plot_range: PlotRange) -> tuple[dict[str, Any], bytes]:
        """Returns (description, numbers) of the shown charts for one range of the x axis. The
        numbers are bytes: x (float64, [n]), followed by the rows (float32, [rows, n]).

        Each row has one value per pixel. The rows are, in this order:

        - minimum, maximum and line (`Curves.line`) of each series in `charts` of the description;
        - largest validation loss;
        - for each series in `charts`, two rows of each baseline run: its line, and its value at the
          last step up to this x.
        """
        with self.lock:
            known = (*SERIES, *self.curves.further_names())
            charts = [name for name in self.shown if name in known]
            x, rows = self.curves.window((*charts, "validation_loss"), plot_range)
            *rows_of_series, _, largest_validation_loss, _ = rows
            rows = [*rows_of_series, largest_validation_loss]
            for name in charts:
                for other in self.baseline_curves.values():
                    rows += _values_at(other, name, plot_range.axis, x)
            description = {
                "charts": charts,
                "smoothed": [name for name in charts if self.curves.is_smoothed(name)],
                "others": list(self.baseline_curves),
                "levels": self.baseline_losses,
                "n": len(x),
                "axis": plot_range.axis,
                "log_x": plot_range.log_x,
                "attempts": self.attempt_starts(plot_range.axis),
                "rows": len(self.columns),
                "smoothing": self.curves.smoothing,
                "read": self._share_read(),
            }
        return description, x.astype("<f8").tobytes() + np.vstack(rows).astype("<f4").tobytes()

    def row(self) -> dict[str, Any]:
        """Returns the state of the job with its reason, and the numbers of the last step, by name.
        `state_word` is the word for the state that views show.

        A number that was recorded as not finite is NaN or infinity. A number that was never
        recorded or is unknown is None.
        """
        with self.lock:
            run = self.run
            status = self.status
            step = self._last_step() if len(self.curves) else {"step": 0}
            mix = mix_text(run.recipe, run.spec.sequence_length, step.get("tokens", 0))
            left_s = None
            if not status.state.is_final:
                left_s = time_left_s(self.columns, run.recipe.num_steps)
            return {
                "state": str(status.state),
                "state_word": state_word(status, run.recipe.num_steps),
                "reason": status.reason,
                "attempt": status.attempt,
                "num_steps": run.recipe.num_steps,
                **step,
                "eta_s": left_s,
                "data": "; ".join(filter(None, (mix, hook_text(run)))),
            }

    def facts(self) -> dict[str, Any]:
        """Returns the items of `row` and further information for the front end, as plain values for
        JSON. A number that is not finite is None.
        """
        with self.lock:
            view = self.run_view
            run = view.run
            ranks = view.ranks
            speed = view.speed_monitor.facts
            status = self.status
            state = read_state(run.directory)
            process = state.process if state else None
            host = process.host if process else None
            job = state.scheduler_job if state else None
            job_id = f"{job.scheduler} job {job.id}" if job else None
            memory = run.site.device.memory_bytes
            device_bytes = memory.value if memory else None
            straggler = str(ranks.slowest) if ranks.slowest else None
            cost = None
            if speed["goodput"] and speed["goodput"]["usd"] is not None:
                price = str(run.site.price_per_node_hour)
                cost = {"value": speed["goodput"]["usd"], "note": price}
            row = self.row()
            not_finite = [
                name
                for name in ("loss", "grad_norm")
                if row.get(name) is not None and not np.isfinite(row[name])
            ]
            return {
                **{name: _json_value(value) for name, value in row.items()},
                "not_finite": not_finite,
                "name": run.name,
                "directory": str(run.directory),
                "final": status.state.is_final,
                "host": host,
                "job_id": job_id,
                "tracker": tracker_address(run.directory),
                "devices": run.plan.num_devices,
                "checkpoints": run.checkpoints.steps()[-3:],
                "unreadable_note": _unreadable_note(run),
                "allowed": view.actions.allowed(status),
                "actions": view.actions.report(status),
                "skipped_lines": self.columns.skipped_lines,
                "straggler": straggler,
                "ranks": ranks.num_ranks,
                "ranks_per_row": -(-ranks.num_ranks // HEAT_ROWS),
                "split": ranks.step_parts(),
                "device_text": ranks.device_text(),
                "speed": speed,
                "as_of": status.late_age,
                "device_bytes": device_bytes,
                "cost": cost,
                "formula": self._formula(),
            }

    def alerts(self) -> list[dict[str, Any]]:
        """Returns the newest alerts of the run as dictionaries, newest first, at most
        ALERTS_SHOWN.
        """
        with self.lock:
            newest = self.run_view.alert_monitor.log.alerts[-ALERTS_SHOWN:]
            return [alert.to_dict() for alert in reversed(newest)]

    def step_time_heat_map(self) -> bytes:
        """Returns the heat map of step times by rank, as the bytes of an array uint8 [row, sample].
        A value encodes a step time divided by the median of all ranks: 0 for 0.8, 254 for 1.4, 255
        for an unknown step time.

        Each row is one rank. With more than HEAT_ROWS ranks, a row is the slowest of several
        neighbouring ranks.
        """
        relative = self.run_view.ranks.relative_times(HEAT_ROWS)
        with np.errstate(invalid="ignore"):
            scaled = np.clip((relative - 0.8) / 0.6 * 254, 0, 254)
        return np.where(np.isfinite(scaled), scaled, 255).astype(np.uint8).tobytes()

    def log(self) -> str:
        """Returns the part of a rank's log that `select_log` has selected, at most MAX_LINES lines.
        If the log of a failed job is empty, returns the end of the log that the exit report quotes.
        """
        directory = self.run.directory
        per_node = self.run.site.devices_per_node
        file = log_file(directory, self.status.attempt, self.log_rank, per_node)
        text = log_lines(file, self.log_search)
        if text or self.log_search or not self.status.exit_code:
            return text
        # The log file is empty, or was deleted. The exit report of a failed job quotes the end of
        # the log.
        report = read_exit(directory)
        return report.log_tail if report else ""

    def _share_read(self) -> float:
        """Returns the fraction of metrics.jsonl that was read, from 0 to 1."""
        left = self.columns.unread_bytes
        if left < CHUNK_BYTES:
            return 1.0
        return self.columns.position / (self.columns.position + left)

    def _last_step(self) -> dict[str, Any]:
        """Returns the numbers of the last training step by name. Speeds are medians over several
        steps, as in `kit.run.metrics.last_step_values`.
        """
        columns = self.columns
        curves = self.curves
        speeds = {name: curves[name] for name in ("tokens_per_s", "mfu", "hfu")}
        speeds["step_time_s"] = columns["step_time_s"][: len(curves)]
        known = last_step_values(columns, speeds, curves["layout"])
        steps_left = max(0, self.run.recipe.num_steps - known["step"])
        validation_losses = columns["validation_loss"]
        return {
            **known,
            "tokens": int(_finite_or_none(curves["tokens"][-1]) or 0),
            "tokens_left": _finite_or_none(columns["tokens"][-1] * steps_left),
            "validation_loss": _last(validation_losses[np.isfinite(validation_losses)]),
            "learning_rate": _last(columns["learning_rate"]),
            "memory_bytes": _last(columns["memory_bytes"]),
            "why_no_mfu": curves.why_no_mfu,
        }

    def _formula(self) -> str:
        """Returns a text that says how MFU is computed, or why it is unknown."""
        spec = self.run.spec
        plan = self.run.plan
        site = self.run.site
        peak = site.peak_flops_per_s(plan.precision)
        if peak is None:
            return (
                f"No MFU: site {site.name!r} has no {plan.precision} peak. {peak_advice(self.run)}"
            )
        attended = "hidden x sequence length"
        executed = f"recomputation ({plan.recompute})"
        if spec.attention_size != spec.hidden_size or spec.num_local_layers:
            attended = "width of the query heads x sequence length"
        if spec.num_local_layers:
            attended += f", or the window of {spec.sliding_window} tokens in layers that have it"
            executed += " and the masked tokens outside the window"
        fact = site.device.peak_flops_per_s.get(plan.precision)
        source = f" ({fact.source})" if fact else ""
        return (
            "MFU = tokens/s x model FLOPs per token / (devices x peak).  Model FLOPs per token"
            f" {spec.flops_per_token():.4g}: 6 per weight of the matrix products + 12 x layers x"
            f" {attended}.  Peak {peak / 1e12:.4g} TFLOP/s, {plan.precision}, per"
            f" device{source}.  HFU also counts {executed}."
        )

    def attempt_starts(self, axis: str) -> list[dict[str, float]]:
        """Returns one dictionary per attempt of the run. `attempt` is its number, and `x` the
        position on the axis at which the attempt begins.
        """
        x = self.curves[axis]
        steps = self.curves["step"]
        if not len(x):
            return []
        attempts = []
        for attempt, first_step in sorted(self.columns.first_steps.items()):
            row = min(np.searchsorted(steps, first_step), len(x) - 1)
            attempts.append({"attempt": attempt, "x": float(x[row])})
        return attempts

    def _replace_if_changed(self, attempt: int) -> None:
        """Replaces the `RunView` if there is a new attempt or a changed site.json.

        A run that is being written or was removed cannot be opened. In this case the present
        `RunView` stays, and the next call of `update_status` tries again.
        """
        view = self.run_view
        written_at = site_written_at(view.run.directory)
        if (attempt, written_at) == (view.attempt, view.site_written_at):
            return
        try:
            run = Run.open(view.run.directory)
        except (ConfigError, RunError):
            return
        with self.lock:
            self.run_view = RunView(run, attempt, written_at, self.lock, earlier=view)
            self.settings = self._settings()
            self.read()

    def _settings(self) -> dict[str, Any]:
        others = {name: curves.run for name, curves in self.baseline_curves.items()}
        return settings_table(self.run, others)


def complete_dashboard(run: Run) -> Dashboard:
    """Returns a dashboard of a run whose alert rules have examined all recorded steps."""
    dashboard = Dashboard(run)
    dashboard.catch_up()
    for _ in range(len(dashboard.columns) // ROWS_PER_LOOK):
        dashboard.update_status()
    return dashboard


def log_lines(file: Path, search: str = "") -> str:
    """Returns the last lines of a log file, at most MAX_LINES. With `search`, returns only lines
    that contain this text, without regard to case.

    Only the last TAIL_BYTES of the file are read, or the last SEARCH_BYTES for a search, so the
    cost does not depend on the size of the file.
    """
    read_bytes = SEARCH_BYTES if search else TAIL_BYTES
    wanted = search.casefold()
    texts = []
    for line in last_lines(file, read_bytes, follows=True):
        # A progress bar rewrites its line after a carriage return. Only its last state is shown.
        text = line.decode(errors="replace").rsplit("\r", 1)[-1]
        if wanted in text.casefold():
            texts.append(text)
    return "\n".join(texts[-MAX_LINES:])


def _unreadable_note(run: Run) -> str:
    """Returns a sentence that names the checkpoint folders that this user has no permission to
    enter. Returns "" if there are none.
    """
    folders = run.checkpoints.unreadable()
    if not folders:
        return ""
    return f"you may not enter {', '.join(folders)}: its checkpoints are not counted"


def hook_text(run: Run) -> str:
    """Returns the newest numbers that the user's hook of a run has recorded, in one line. Returns
    "" for a run without a hook.
    """
    if run.recipe.hook is None:
        return ""
    lines = last_lines(run.directory / "metrics.jsonl", TAIL_BYTES)
    last_row: dict[str, Any] = next(filter(None, map(parse_row, reversed(lines))), {})
    numbers = [
        f"{name.removeprefix('hook/')} {value:.4g}"
        for name, value in last_row.items()
        if name.startswith("hook/") and name != "hook/seconds"
    ]
    return f"hook: {', '.join(numbers) or 'nothing'}"


def _values_at(other: Curves, name: str, axis: str, x: np.ndarray) -> list[np.ndarray]:
    """Returns [line, values] of a series of another run at each position in `x`. The line is
    interpolated. A value is the value of the last step up to the position. Both are NaN outside the
    range of that run, and for a series that it does not have. `axis` is "step", "tokens" or "time".
    """
    places = other[axis]
    if not len(places) or name not in (*SERIES, *other.further_names()):
        return [np.full(len(x), np.nan)] * 2
    line = np.interp(x, places, other.line(name), left=np.nan, right=np.nan)
    rows = np.searchsorted(places, x, side="right") - 1
    return [line, np.where((rows >= 0) & (x <= places[-1]), other[name][rows], np.nan)]


def _last(values: np.ndarray) -> float | None:
    """Returns the last value of a series, which may be NaN. Returns None if the series has no
    recorded value at all.
    """
    # The last value is tested first. In most cases it is known, so that a long series is not
    # searched.
    if np.isnan(values[-1:]).all() and np.isnan(values).all():
        return None
    return float(values[-1])


def _json_value(value: Any) -> Any:
    """Returns a value in a form for JSON. NaN and infinity become None, since JSON has neither."""
    return _finite_or_none(value) if isinstance(value, float) else value


def _finite_or_none(value: float) -> float | None:
    """Returns a number as a float, or None if it is not finite."""
    return float(value) if np.isfinite(value) else None
