"""A run in text: one status row, and a view that refreshes in the terminal."""

from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.record import counted
from cluster.state import JobState
from kit.errors import kit_command
from kit.monitor.alerts import ROWS_PER_LOOK
from kit.monitor.dashboard import Dashboard
from kit.monitor.on_alert import AlertCommand
from kit.monitor.scores import eval_reports, last_scores
from kit.run import Run
from kit.run.alerts import Alert
from kit.show.terminal import PlainConsole, clock, keep_drawing, number

COLOURS = {
    JobState.RUNNING: "green",
    JobState.DONE: "green",
    JobState.IMPORTED: "cyan",
    JobState.STARTING: "cyan",
    JobState.QUEUED: "cyan",
    JobState.STOPPING: "yellow",
    JobState.STALLED: "yellow",
    JobState.FAILED: "red",
    JobState.LOST: "red",
}
BARS = "▁▂▃▄▅▆▇█"
ALERTS_SHOWN = 10
MARKS = {"warning": ("⚠", "yellow"), "error": ("✖", "red")}


def status_row(run: Run) -> dict[str, Any]:
    """Returns what is known of a run now, as plain values: state, reason, step, loss, speed,
    MFU, time left, checkpoints, scores. `unreadable` names folders of checkpoints that this user
    may not enter.
    """
    return {
        "run": run.name,
        **Dashboard(run).read_all().row(),
        "checkpoints": run.checkpoints.steps(),
        "unreadable": run.checkpoints.unreadable(),
        "scores": last_scores(run),
        "eval_s": sum(report.seconds for report in eval_reports(run)),
    }


def status_table(run: Run, width: int = 80) -> Group:
    """Returns the text view of a run: state with its reason, numbers, curves, what was asked of
    it, and alerts.
    """
    dashboard = _complete_dashboard(run)
    dashboard.refresh_speed(wait=True)  # nobody looks a second time
    return _text_view(dashboard, width)


def watch(run: Run, *, console: Console | None = None) -> None:
    """Shows the text view of a run until it ends, or until Ctrl-C, which leaves the job alone.

    Meanwhile the user's `on_alert` command is run for each new alert.

    Raises:
        ConfigError: the file that names this command cannot be read.
    """
    console = console or PlainConsole()
    dashboard = Dashboard(run)
    alert_command = AlertCommand(run, dashboard.run_view.alert_monitor.log)

    def view() -> Group:
        dashboard.catch_up()
        dashboard.refresh_speed()
        width = console.picture_width if isinstance(console, PlainConsole) else console.width
        drawn = _text_view(dashboard, width)
        alert_command.run_for_new_alerts()
        return drawn

    keep_drawing(view, console, every_s=1.0, over=lambda: dashboard.status.state.is_final)
    if dashboard.status.state.is_final:
        alert_command.run_for_waiting_alerts()


def recorded_alerts(run: Run) -> list[Alert]:
    """Returns all alerts of a run, oldest first, after a look for new ones: nobody may have
    watched it so far.
    """
    return _complete_dashboard(run).run_view.alert_monitor.log.alerts


def _complete_dashboard(run: Run) -> Dashboard:
    """Returns a dashboard that has read a whole run and looked for alerts in all of it."""
    dashboard = Dashboard(run)
    dashboard.catch_up()
    for _ in range(len(dashboard.columns) // ROWS_PER_LOOK):
        dashboard.look()
    return dashboard


def _text_view(dashboard: Dashboard, width: int) -> Group:
    """Returns the view of a run as it is now. The alerts come last, the newest first: a terminal
    that is too low leaves out the oldest.
    """
    width = max(40, min(width, 120))
    row = dashboard.row()
    facts = dashboard.facts()
    return Group(
        *_heading(row, facts, width),
        *_curves(dashboard, row, facts, width),
        *_details(dashboard, facts),
        *_alerts(dashboard),
    )


def _heading(row: dict[str, Any], facts: dict[str, Any], width: int) -> list[RenderableType]:
    """Returns name, state with its reason, and the numbers of the last step."""
    title = Text.assemble(
        (facts["name"], "bold"),
        "  ",
        (f"● {row['state']}", COLOURS.get(JobState(row["state"]), "white")),
        "  ",
        (row["reason"], "dim"),
    )
    speed = facts["speed"]
    style = "yellow" if speed["verdict"].startswith("slower") else "dim"
    goodput = speed["goodput"] and speed["goodput"]["share"]
    counts = "" if goodput is None else f" Goodput {goodput:.1%}."
    pace = [Text(f"{speed['verdict']}.{counts}", style=style)] if speed["verdict"] else []
    data = [Text(row["data"], style="dim")] if row["data"] else []
    numbers = [_tiles(row, facts["checkpoints"], width), *_kinds_of_numbers(row)]
    return [title, *numbers, *pace, *data]


def _kinds_of_numbers(row: dict[str, Any]) -> list[Text]:
    """Returns a line that says over which steps the numbers of the heading are taken. Empty before
    the first step.
    """
    if not (steps := row.get("speed_steps")):
        return []
    recent = counted(steps, "step")
    text = f"s/step, tokens/s, MFU, HFU: median of the last {recent}; loss, grad norm: last step"
    return [Text(text, style="dim")]


def _tiles(row: dict[str, Any], checkpoints: list[int], width: int) -> Table:
    """Returns the numbers of the last step, as many in a line as fit."""
    cells = {
        "step": f"{row['step']:,} / {row['num_steps']:,}",
        "loss": number(row.get("loss"), ".4f"),
        "validation": number(row.get("validation_loss"), ".4f"),
        "grad norm": number(row.get("grad_norm"), ".3f"),
        "s/step": number(row.get("step_time_s"), ".3g"),
        "tokens/s": number(row.get("tokens_per_s"), ",.0f"),
        "MFU": row.get("why_no_mfu") or number(row.get("mfu"), ".1%"),
        "HFU": number(row.get("hfu"), ".1%"),
        "left": duration(row["eta_s"]),
        "attempt": str(row["attempt"]),
        "checkpoints": ", ".join(map(str, checkpoints)) or "none",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    in_a_line = 3 if width >= 76 else 2 if width >= 52 else 1
    pairs = [part for name, value in cells.items() for part in (Text(name, style="dim"), value)]
    for start in range(0, len(pairs), 2 * in_a_line):
        table.add_row(*pairs[start : start + 2 * in_a_line])
    return table


def _curves(
    dashboard: Dashboard, row: dict[str, Any], facts: dict[str, Any], width: int
) -> list[Text]:
    """Returns a line of bars of the loss and one of the speed, each with its number of the heading,
    and the speed that is expected. A bar is a mean over several steps.
    """
    if not len(dashboard.columns):
        return [Text("no step yet", style="dim")]
    key, name, form = (
        ("tokens_per_s", "tok/s", ",.0f") if row["why_no_mfu"] else ("mfu", "MFU", ".1%")
    )
    loss, speed = (bars(dashboard.curves[series], width - 20) for series in ("loss", key))
    lines = [
        Text(f"{'loss':>8} {loss} {number(row['loss'], '.4f')}", style="blue"),
        Text(f"{name:>8} {speed} {number(row[key], form)}", style="green"),
    ]
    if band := (facts["speed"]["band"] or {}).get(key):
        low, high = (number(speed, form) for speed in band)
        lines.append(Text(f"{'':>8} {facts['speed']['label']}: {low} to {high}", style="dim"))
    return lines


def bars(values: np.ndarray, width: int) -> str:
    """Returns a line of at most `width` bars, each as high as the mean of its share of the values;
    `?` where one of these is not finite.
    """
    means = np.array([share.mean() for share in np.array_split(values, min(width, len(values)))])
    means[~np.isfinite(means)] = np.nan
    low, high = np.fmin.reduce(means), np.fmax.reduce(means)  # of those that are there
    heights = (len(BARS) - 1) * (means - low) / (high - low or 1)
    return "".join(BARS[round(height)] if np.isfinite(height) else "?" for height in heights)


def _details(dashboard: Dashboard, facts: dict[str, Any]) -> list[RenderableType]:
    """Returns the lines on scores, on requests, and on the end of the run."""
    parts: list[RenderableType] = []
    if scores := last_scores(dashboard.run):
        spent = f"  {sum(report.seconds for report in eval_reports(dashboard.run)):.0f} s in all"
        parts.append(Text.assemble(("scores  ", "dim"), _scores(scores), (spent, "dim")))
    for name, request in facts["actions"].items():
        done = (
            f", done {clock(request['done_at'])}: {request['note']}" if request["done_at"] else " …"
        )
        parts.append(Text(f"{name}: asked {clock(request['asked_at'])}{done}", style="cyan"))
    if folders := facts["unreadable"]:
        text = f"you may not enter {', '.join(folders)}: its checkpoints are not counted"
        parts.append(Text(text, style="yellow"))
    if not dashboard.run.directory.is_dir():
        parts.append(
            Text(
                f"{dashboard.run.directory} was removed: this is what was read before", style="red"
            )
        )
    elif dashboard.status.state is JobState.FAILED:
        parts.append(Text("\n".join(dashboard.log().rstrip().splitlines()[-8:]), style="dim"))
    return parts


def _alerts(dashboard: Dashboard) -> list[Text]:
    """Returns the newest alerts, whole: what to do stands at their end."""
    alerts = dashboard.run_view.alert_monitor.log.alerts
    lines = []
    for alert in alerts[: -ALERTS_SHOWN - 1 : -1]:
        mark, colour = MARKS[alert.level]
        when = clock(alert.time, "%m-%d %H:%M:%S")
        told = f"{mark} {when} step {alert.step:,} {alert.kind}: {alert.message}"
        lines.append(Text(told, style=colour))
    if more := len(alerts) - len(lines):
        every = kit_command("status", dashboard.run.directory, "--json")
        lines.append(Text(f"and {counted(more, 'older alert')}: {every}", style="dim"))
    return lines


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
    minutes = seconds / 60
    hours = seconds / 3600
    return (
        f"{seconds:.0f} s"
        if minutes < 2
        else f"{minutes:.0f} min"
        if hours < 2
        else f"{hours:.1f} h"
    )
