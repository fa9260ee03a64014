"""A run in text: one status row, and a view that refreshes in the terminal."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.record import counted
from cluster.state import JobState
from kit.data import mix_words
from kit.errors import kit_command
from kit.monitor.alerts import ROWS_PER_LOOK
from kit.monitor.dashboard import Dashboard
from kit.monitor.on_alert import OnAlert
from kit.monitor.scores import eval_reports, last_scores
from kit.run import Run
from kit.run.alerts import Alert
from kit.run.metrics import time_left_s
from kit.show.terminal import PlainConsole, Trimmed, clock, keep_drawing, number

STATES = {
    "green": (JobState.RUNNING, JobState.DONE),
    "cyan": (JobState.IMPORTED, JobState.STARTING, JobState.QUEUED),
    "yellow": (JobState.STOPPING, JobState.STALLED),
    "red": (JobState.FAILED, JobState.LOST),
}
COLOURS = {state: colour for colour, states in STATES.items() for state in states}
BARS = " ▁▂▃▄▅▆▇█"
ALERTS_SHOWN = 10
LOSS_LEAST = 4
CURVES_LEAST = LOSS_LEAST + 2
"""Lines: of the loss, of its axis and of the speed."""
COLOURS_OF_LEVELS = {"warning": "yellow", "error": "red"}


def status_row(run: Run) -> dict[str, Any]:
    """Returns what is known of a run now, as plain values: state, reason, step, loss, speed,
    MFU, time left.
    """
    status, metrics = run.job.status(), run.metrics()
    summary = metrics.summary()
    return {
        "run": run.name,
        "state": str(status.state),
        "reason": status.reason,
        **summary,
        "data": mix_words(run.recipe, run.spec.sequence_length, summary.get("tokens") or 0),
        "num_steps": run.recipe.num_steps,
        "eta_s": None if status.state.is_final else time_left_s(metrics, run.recipe.num_steps),
        "checkpoints": run.checkpoints.steps(),
        "scores": last_scores(run),
        "eval_s": sum(report.seconds for report in eval_reports(run)),
    }


def status_table(run: Run, width: int = 80) -> Group:
    """Returns the text view of a run: state with its reason, numbers, curves, alerts and what
    was asked of it.
    """
    return _looked_at(_read(run), width)


def watch(run: Run, *, console: Console | None = None) -> None:
    """Shows the text view of a run until it ends, or until Ctrl-C, which leaves the job alone.

    Meanwhile the user's `on_alert` command is told of each alert that comes.

    Raises:
        ConfigError: the file that names this command cannot be read.
    """
    console = console or PlainConsole()
    dashboard = Dashboard(run)
    on_alert = OnAlert(run, dashboard.watchman.log)

    def view() -> Group:
        width = console.picture_width if isinstance(console, PlainConsole) else console.width
        drawn = _looked_at(dashboard, width, console.height if console.is_terminal else None)
        on_alert.tell()
        return drawn

    keep_drawing(view, console, every_s=1.0, over=lambda: dashboard.status.state.is_final)


def recorded_alerts(run: Run) -> list[Alert]:
    """Returns all alerts of a run, oldest first, after a look for new ones: nobody may have
    watched it so far.
    """
    return _read(run).watchman.log.alerts


def _read(run: Run) -> Dashboard:
    """Returns a dashboard that has read a whole run and looked for alerts in all of it."""
    dashboard = Dashboard(run)
    dashboard.catch_up()
    for _ in range(len(dashboard.columns) // ROWS_PER_LOOK):
        dashboard.look()
    return dashboard


def _looked_at(dashboard: Dashboard, width: int, height: int | None = None) -> Group:
    """Returns the view of a run as it is now, its curves as high as the screen leaves room for."""
    dashboard.catch_up()
    # Nobody looks a second time at a view that is printed once.
    dashboard.outlook.refresh(wait=height is None)
    width = max(40, min(width, 120))
    # Asked once: what the estimate says may come at any moment, and takes a line.
    facts = dashboard.facts()
    above, below = _heading(dashboard, facts, width), _told(dashboard, facts)
    if height is None:
        told = _alerts(dashboard, ALERTS_SHOWN)
        if more := len(dashboard.watchman.log.alerts) - len(told):
            every = kit_command("status", dashboard.run.directory, "--json")
            told.append(Text(f"and {counted(more, 'older alert')}: {every}", style="dim"))
        return Group(*above, *_curves(dashboard, facts, width), *told, *below)
    # The band has a line below the speed.
    least = CURVES_LEAST + (facts["outlook"]["band"] is not None)
    # One line is the cursor's.
    alerts, free = (
        [],
        height - 1 - least - _lines([*above, *below], width),
    )
    for alert in _alerts(dashboard, height):
        if (free := free - _lines([alert], width)) < 0:
            break
        alerts.append(alert)
    return Group(*above, *_curves(dashboard, facts, width, spare=max(0, free)), *alerts, *below)


def _lines(parts: Sequence[RenderableType], width: int) -> int:
    console = Console(width=width, file=io.StringIO())
    return len(console.render_lines(Group(*parts), pad=False)) if parts else 0


def _heading(dashboard: Dashboard, facts: dict[str, Any], width: int) -> list[RenderableType]:
    """Returns name, state with its reason, and the numbers of the last step."""
    title = Text.assemble(
        (facts["name"], "bold"),
        "  ",
        (f"● {facts['state']}", COLOURS.get(JobState(facts["state"]), "white")),
        "  ",
        (facts["reason"], "dim"),
    )
    outlook = facts["outlook"]
    style = "yellow" if outlook["verdict"].startswith("slower") else "dim"
    goodput = outlook["goodput"] and outlook["goodput"]["share"]
    counts = "" if goodput is None else f" Goodput {goodput:.1%}."
    pace = [Text(f"{outlook['verdict']}.{counts}", style=style)] if outlook["verdict"] else []
    mix = [Text(facts["data"], style="dim")] if facts.get("data") else []
    return [title, _tiles(dashboard, facts, width), *pace, *mix]


def _told(dashboard: Dashboard, facts: dict[str, Any]) -> list[RenderableType]:
    """Returns scores, what was asked of the run, and its last words."""
    parts: list[RenderableType] = []
    if scores := last_scores(dashboard.run):
        spent = f"  {sum(report.seconds for report in eval_reports(dashboard.run)):.0f} s in all"
        parts.append(Text.assemble(("scores  ", "dim"), _scores(scores), (spent, "dim")))
    for name, request in facts["actions"].items():
        done = (
            f", done {clock(request['done_at'])}: {request['note']}" if request["done_at"] else " …"
        )
        parts.append(Text(f"{name}: asked {clock(request['asked_at'])}{done}", style="cyan"))
    if not dashboard.run.directory.is_dir():
        parts.append(
            Text(
                f"{dashboard.run.directory} was removed: this is what was read before", style="red"
            )
        )
    elif dashboard.status.state is JobState.FAILED:
        parts.append(Text("\n".join(dashboard.log().rstrip().splitlines()[-8:]), style="dim"))
    return parts


def _tiles(dashboard: Dashboard, facts: dict[str, Any], width: int) -> Trimmed:
    """Returns the numbers of the last step, as many in a line as fit."""
    columns = dashboard.columns
    cells = {
        "step": f"{facts['step']:,} / {facts['num_steps']:,}",
        "loss": _last(columns["loss"], ".4f", always=True),
        "held out": number(_last_finite(columns["validation_loss"]), ".4f"),
        "grad norm": _last(columns["grad_norm"], ".3f"),
        "s/step": number(facts.get("step_time_s"), ".3g"),
        "tokens/s": number(facts.get("tokens_per_s"), ",.0f"),
        "MFU": facts.get("why_no_mfu") or number(facts.get("mfu"), ".1%"),
        "HFU": number(facts.get("hfu"), ".1%"),
        "left": duration(facts.get("eta_s")),
        "attempt": str(facts["attempt"]),
        "checkpoints": ", ".join(map(str, facts["checkpoints"])) or "none",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    in_a_line = 3 if width >= 76 else 2 if width >= 52 else 1
    pairs = [part for name, value in cells.items() for part in (Text(name, style="dim"), value)]
    for start in range(0, len(pairs), 2 * in_a_line):
        table.add_row(*pairs[start : start + 2 * in_a_line])
    return Trimmed(table)


def _curves(dashboard: Dashboard, facts: dict[str, Any], width: int, spare: int = 1) -> list[Text]:
    """Returns the loss as a curve of some lines, and the speed as one or a few; `spare` lines
    more than the least.
    """
    if not len(dashboard.columns):
        return [Text("no step yet", style="dim")]
    steps = dashboard.columns["step"]
    high = LOSS_LEAST + spare - spare // 4
    lines = [
        Text(line, style="blue") for line in curve(dashboard.columns["loss"], width - 10, high)
    ]
    ends = f"step {int(steps[0]):,}", f"{int(steps[-1]):,}"
    lines.append(Text(" " * 9 + ends[0] + ends[1].rjust(width - 10 - len(ends[0])), style="dim"))
    # Beside the bars stands the number of the heading, the median of the last steps, and not that
    # of the last alone.
    key, name, form = (
        ("tokens_per_s", "tok/s", ",.0f") if facts.get("why_no_mfu") else ("mfu", "MFU", ".1%")
    )
    bars = [line[9:] for line in curve(dashboard.curves[key], width - 18, 1 + spare // 4)]
    lines += [Text(f"{'':>8} {line}", style="green") for line in bars[:-1]]
    lines.append(Text(f"{name:>8} {bars[-1]} {number(facts.get(key), form)}", style="green"))
    if band := (facts["outlook"]["band"] or {}).get(key):
        low, high = (number(speed, form) for speed in band)
        lines.append(Text(f"{'':>8} {facts['outlook']['label']}: {low} to {high}", style="dim"))
    return lines


def curve(values: np.ndarray, width: int, height: int = 5) -> list[str]:
    """Returns a curve as lines of block characters, each column the mean of its share of the
    values.

    The first and last line begin with the highest and lowest mean, in 8 characters. Where a value
    is not finite, its column ends in `?`.
    """
    shares = np.array_split(values, min(width, len(values)))
    means = np.array([share.mean() for share in shares])
    known = np.isfinite(means)
    if not known.any():
        return ["not finite ".rjust(9) + "?" * len(means)]
    low, high = means[known].min(), means[known].max()
    eighths = np.full(len(means), -1)
    scale = (8 * height - 1) / (high - low) if high > low else 0.0
    eighths[known] = 1 + np.round(scale * (means[known] - low)).astype(int)
    lines = []
    for line in range(height - 1, -1, -1):
        label = f"{high:.4g}" if line == height - 1 else f"{low:.4g}" if line == 0 else ""
        filled = (
            "?" * (line == 0) or " " if e < 0 else BARS[min(max(e - 8 * line, 0), 8)]
            for e in eighths
        )
        lines.append(f"{label:>8} " + "".join(filled))
    return lines


def _alerts(dashboard: Dashboard, count: int) -> list[Text]:
    """Returns the newest alerts, whole: what to do stands at their end."""
    lines = []
    for alert in dashboard.watchman.log.alerts[: -count - 1 : -1]:
        mark = "✖" if alert.level == "error" else "⚠"
        line = Text(
            f"{mark} {clock(alert.time, '%m-%d %H:%M:%S')} step {alert.step:,} {alert.kind}:"
            f" {alert.message}"
        )
        line.stylize(COLOURS_OF_LEVELS[alert.level])
        lines.append(line)
    return lines


def _last_finite(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else None


def _last(values: np.ndarray, form: str, *, always: bool = False) -> str:
    """Returns the last value in words; a series that was never there, unless it is `always`, is
    not an alarm.
    """
    recorded = len(values) and (always or np.isfinite(values).any())
    return number(float(values[-1]), form) if recorded else "–"


def _scores(scores: dict[str, dict[str, Any]]) -> str:
    """Returns `piqa acc 0.610 (0.588 to 0.632) at step 200, partial` for each task, with its 95
    % interval.
    """
    words = []
    for task, last in scores.items():
        interval = "" if last["low"] is None else f" ({last['low']:.3f} to {last['high']:.3f})"
        partial = ", partial" if last["partial"] else ""
        words.append(
            f"{task} {last['metric']} {last['score']:.3f}{interval} at step"
            f" {last['step']:,}{partial}"
        )
    return "; ".join(words)


def duration(seconds: float | None) -> str:
    """Returns a time in seconds, minutes or hours; none is a dash."""
    if seconds is None:
        return "–"
    minutes, hours = seconds / 60, seconds / 3600
    return (
        f"{seconds:.0f} s"
        if minutes < 2
        else f"{minutes:.0f} min"
        if hours < 2
        else f"{hours:.1f} h"
    )
