"""Text views of a run: its status as plain values, and a status view that is drawn again and again
in the terminal.
"""

from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.record import counted
from cluster.state import GIVEN_UP, JobState, read_history
from kit.errors import kit_command
from kit.monitor.dashboard import Dashboard, complete_dashboard
from kit.monitor.on_alert import AlertCommand
from kit.monitor.quantities import QUANTITIES, quantity_text
from kit.monitor.scores import last_scores, scoring_seconds
from kit.monitor.states import STOPPED
from kit.run import Run
from kit.run.alerts import Alert
from kit.show.terminal import PlainConsole, format_time, keep_drawing

STATE_COLOURS: dict[str, str] = {
    JobState.RUNNING: "green",
    JobState.DONE: "green",
    STOPPED: "yellow",
    JobState.IMPORTED: "cyan",
    JobState.STARTING: "cyan",
    JobState.QUEUED: "cyan",
    JobState.STOPPING: "yellow",
    JobState.STALLED: "yellow",
    JobState.FAILED: "red",
    JobState.LOST: "red",
}
"""Colour of the word for a state (`state_word`)."""
STEP_QUANTITIES = (
    "loss",
    "validation_loss",
    "grad_norm",
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "hfu",
)
"""Names of the quantities of the last step that the status view shows above its curves, in this
order."""
BARS = "▁▂▃▄▅▆▇█"
BAR_LABELS = {"tokens_per_s": "tok/s", "mfu": "MFU"}
"""Label of the line of bars that shows a speed, at most eight characters long, by name of the
quantity."""
SHOWN_ENDS = 3
"""Largest number of earlier attempts whose end the status view shows."""
SHOWN_ALERTS = 10
"""Largest number of alerts that the status view shows."""
MARKS = {"warning": ("⚠", "yellow"), "error": ("✖", "red")}


def status_row(run: Run) -> dict[str, Any]:
    """Returns the present status of a run as plain values, by name.

    The values are state, the word for the state that views show, reason, step, loss, speed, MFU,
    time left, checkpoints and scores. `unreadable` lists the checkpoint folders that this user
    has no permission to enter. `eval_s` is the number of seconds for which the checkpoints were
    scored. `devices` has the numbers about the devices of all ranks, and is empty on a CPU.
    """
    dashboard = Dashboard(run).read_all()
    dashboard.run_view.ranks.read_heartbeats()
    return {
        "run": run.name,
        **dashboard.row(),
        "devices": dashboard.run_view.ranks.device_facts(),
        "checkpoints": run.checkpoints.steps(),
        "unreadable": run.checkpoints.unreadable(),
        "scores": last_scores(run),
        "eval_s": scoring_seconds(run),
    }


def status_table(run: Run, width: int = 80) -> Group:
    """Returns the status view of a run as text, at most `width` characters wide: state with its
    reason, numbers of the last step, curves, requests and alerts.
    """
    dashboard = complete_dashboard(run)
    # The view is printed only once, so it must contain the comparison.
    dashboard.update_speed(wait=True)
    return _text_view(dashboard, width)


def watch(run: Run, *, console: Console | None = None) -> None:
    """Shows the status view of a run in the terminal until the job ends or the user presses Ctrl-C.
    Ctrl-C does not affect the job.

    The user's `on_alert` command is run for each new alert.

    Raises:
        ConfigError: The user's config.toml cannot be read.
    """
    console = console or PlainConsole()
    dashboard = Dashboard(run)
    alert_command = AlertCommand(run, dashboard.run_view.alert_monitor.log)

    def view() -> Group:
        dashboard.catch_up()
        dashboard.update_speed()
        width = console.picture_width if isinstance(console, PlainConsole) else console.width
        text = _text_view(dashboard, width)
        alert_command.run_for_new_alerts()
        return text

    keep_drawing(view, console, every_s=1.0, over=lambda: dashboard.status.state.is_final)
    if dashboard.status.state.is_final:
        alert_command.run_for_waiting_alerts()


def recorded_alerts(run: Run) -> list[Alert]:
    """Returns all alerts of a run in the order in which they were recorded. First the alert rules
    examine all steps. Alert rules run only in an open view, and perhaps no view of this run was
    open.
    """
    return complete_dashboard(run).run_view.alert_monitor.log.alerts


def _text_view(dashboard: Dashboard, width: int) -> Group:
    """Returns the status view of a run at this moment. The alerts come last and the newest alert
    first, so that a terminal with too few lines cuts off only the oldest alerts.
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
    """Returns the first lines of the status view: name, state with its reason, numbers of the last
    step, and the comparison with the predicted speed.
    """
    title = Text.assemble(
        (facts["name"], "bold"),
        "  ",
        (f"● {row['state_word']}", STATE_COLOURS.get(row["state_word"], "white")),
        "  ",
        (row["reason"], "dim"),
    )
    lines = [title, _tiles(row, facts["checkpoints"], width)]
    if steps := row.get("speed_steps"):
        names = ("step_time_s", "tokens_per_s", "mfu", "hfu")
        medians = ", ".join(QUANTITIES[name].label for name in names)
        recent = counted(steps, "step")
        text = f"{medians}: median of the last {recent}; loss, grad norm: last step"
        lines.append(Text(text, style="dim"))
    verdict = facts["speed"]["verdict"]
    if verdict:
        style = "yellow" if verdict.startswith("slower") else "dim"
        lines.append(Text(f"{verdict}.{_goodput(facts)}", style=style))
    if row["data"]:
        lines.append(Text(row["data"], style="dim"))
    if facts["device_text"]:
        lines.append(Text(facts["device_text"], style="dim"))
    return lines


def _goodput(facts: dict[str, Any]) -> str:
    """Returns a sentence with the goodput of a run, preceded by a space. Returns "" if the goodput
    is unknown.
    """
    goodput = facts["speed"]["goodput"]
    if not goodput or goodput["share"] is None:
        return ""
    return f" Goodput {goodput['share']:.1%}."


def _tiles(row: dict[str, Any], checkpoints: list[int], width: int) -> Table:
    """Returns a table of the numbers of the last step. `width`, in characters, determines how many
    numbers are on one line.
    """
    cells = {"step": f"{row['step']:,} / {row['num_steps']:,}"}
    for name in STEP_QUANTITIES:
        cells[QUANTITIES[name].label] = quantity_text(name, row.get(name))
    if row.get("why_no_mfu"):
        cells[QUANTITIES["mfu"].label] = row["why_no_mfu"]
    cells["left"] = duration(row["eta_s"])
    cells["attempt"] = str(row["attempt"])
    cells["checkpoints"] = ", ".join(map(str, checkpoints)) or "none"
    if width >= 76:
        in_a_line = 3
    elif width >= 52:
        in_a_line = 2
    else:
        in_a_line = 1
    table = Table.grid(padding=(0, 2, 0, 0))
    names = list(cells)
    for start in range(0, len(names), in_a_line):
        line: list[RenderableType] = []
        for name in names[start : start + in_a_line]:
            line += [Text(name, style="dim"), cells[name]]
        table.add_row(*line)
    return table


def _curves(
    dashboard: Dashboard, row: dict[str, Any], facts: dict[str, Any], width: int
) -> list[Text]:
    """Returns up to three lines: bars for the loss, bars for the speed, and the predicted speed. A
    bar is a mean over several steps. The number after the bars is the number that the heading
    shows.
    """
    if not len(dashboard.columns):
        return [Text("no step yet", style="dim")]
    speed = dashboard.curves.shown_speed()
    lines = []
    for name, label, colour in (("loss", "loss", "blue"), (speed, BAR_LABELS[speed], "green")):
        drawn = bar_chart(dashboard.curves[name], width - 20)
        lines.append(Text(f"{label:>8} {drawn} {quantity_text(name, row[name])}", style=colour))
    band = facts["speed"]["band"]
    if band and band[speed]:
        low, high = (quantity_text(speed, end) for end in band[speed])
        lines.append(Text(f"{'':>8} {facts['speed']['label']}: {low} to {high}", style="dim"))
    return lines


def bar_chart(values: np.ndarray, width: int) -> str:
    """Returns a string of at most `width` bars that draws `values`. The height of a bar is the mean
    of several neighbouring values. A bar is `?` if one of its values is not finite.
    """
    parts = np.array_split(values, min(width, len(values)))
    means = np.array([part.mean() for part in parts])
    means[~np.isfinite(means)] = np.nan
    low = np.fmin.reduce(means)
    high = np.fmax.reduce(means)
    line = ""
    for height in (len(BARS) - 1) * (means - low) / (high - low or 1):
        line += BARS[round(height)] if np.isfinite(height) else "?"
    return line


def _details(dashboard: Dashboard, facts: dict[str, Any]) -> list[RenderableType]:
    """Returns the lines with the ends of earlier attempts, the scores of checkpoints, the requests
    to the job, checkpoint folders without permission, and the last log lines of a failed job.
    """
    run = dashboard.run
    ends = earlier_ends(run, dashboard.status.attempt)
    parts: list[RenderableType] = [Text(text, style="dim") for text in ends[-SHOWN_ENDS:]]
    if more := len(ends) - len(parts):
        every = kit_command("status", run.directory, "--why")
        parts.insert(0, Text(f"and {counted(more, 'earlier attempt')}: {every}", style="dim"))
    if scores := last_scores(run):
        spent = f"  {scoring_seconds(run):.0f} s in all"
        parts.append(Text.assemble(("scores  ", "dim"), _scores(scores), (spent, "dim")))
    for name, request in facts["actions"].items():
        progress = " …"
        if request["done_at"]:
            progress = f", done {format_time(request['done_at'])}: {request['note']}"
        parts.append(
            Text(f"{name}: asked {format_time(request['asked_at'])}{progress}", style="cyan")
        )
    if facts["unreadable_note"]:
        parts.append(Text(facts["unreadable_note"], style="yellow"))
    if not run.directory.is_dir():
        text = f"{run.directory} was removed: this is what was read before"
        parts.append(Text(text, style="red"))
    elif dashboard.status.state is JobState.FAILED:
        last_lines = dashboard.log().rstrip().splitlines()[-8:]
        # The reason in the heading ends with the last line of the log, in most cases.
        while last_lines and last_lines[-1].strip() in dashboard.status.reason:
            last_lines.pop()
        if last_lines:
            parts.append(Text("\n".join(last_lines), style="dim"))
    return parts


def earlier_ends(run: Run, attempt: int) -> list[str]:
    """Returns one line for each attempt before `attempt`, which says why it ended, in the order of
    the attempts. An imported run has no such lines.
    """
    if run.is_imported:
        return []
    last_events = {event.attempt: event for event in read_history(run.directory)}
    lines = []
    for number, event in sorted(last_events.items()):
        if number >= attempt:
            continue
        # A local supervisor records `stopping` before it ends the ranks of a failed attempt.
        is_recorded = event.state.is_final or event.state in (JobState.STOPPING, *GIVEN_UP)
        reason = event.reason if is_recorded and event.reason else "its end was not recorded"
        place = f" at step {event.step:,}" if event.step else ""
        lines.append(f"attempt {number} ended{place}: {reason}")
    return lines


def _alerts(dashboard: Dashboard) -> list[Text]:
    """Returns one line for each of the newest alerts, newest first. Long alerts are not shortened,
    since their end says what the user can do.
    """
    alerts = dashboard.run_view.alert_monitor.log.alerts
    lines = []
    for alert in alerts[: -SHOWN_ALERTS - 1 : -1]:
        mark, colour = MARKS[alert.level]
        when = format_time(alert.time, "%m-%d %H:%M:%S")
        message = alert.message
        if alert.kind == "job" and alert.attempt == dashboard.status.attempt:
            # The heading of the view has the reason.
            message = message.removesuffix(f": {dashboard.status.reason}")
        text = f"{mark} {when} step {alert.step:,} {alert.kind}: {message}"
        lines.append(Text(text, style=colour))
    if more := len(alerts) - len(lines):
        every = kit_command("status", dashboard.run.directory, "--json")
        lines.append(Text(f"and {counted(more, 'older alert')}: {every}", style="dim"))
    return lines


def _scores(scores: dict[str, dict[str, Any]]) -> str:
    """Returns a text with the score of each task and its 95 % interval, such as `piqa acc 0.610
    (0.588 to 0.632) at step 200, partial`.
    """
    texts = []
    for task, last in scores.items():
        text = f"{task} {last['metric']} {last['score']:.3f}"
        if last["low"] is not None:
            text += f" ({last['low']:.3f} to {last['high']:.3f})"
        text += f" at step {last['step']:,}"
        if last["partial"]:
            text += ", partial"
        texts.append(text)
    return "; ".join(texts)


def duration(seconds: float | None) -> str:
    """Returns a duration as text in seconds, minutes or hours. Returns a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 2 * 60:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
