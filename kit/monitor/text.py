"""A run in text: one status row, and a view that refreshes in the terminal."""

import time
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.state import JobState
from kit.monitor.scores import eval_reports, last_scores
from kit.run import Run

COLOURS = {
    JobState.RUNNING: "green",
    JobState.DONE: "green",
    JobState.STARTING: "cyan",
    JobState.QUEUED: "cyan",
    JobState.STOPPING: "yellow",
    JobState.STALLED: "yellow",
    JobState.FAILED: "red",
    JobState.LOST: "red",
}
BARS = "▁▂▃▄▅▆▇█"


def status_row(run: Run) -> dict[str, Any]:
    """Returns what is known of a run now, as plain values: state, reason, step, loss, speed, MFU, time left."""
    status, summary = run.job.status(), run.metrics().summary()
    left = run.recipe.num_steps - summary["step"]
    running = not status.state.is_final and "step_time_s" in summary
    return {
        "run": run.name,
        "state": str(status.state),
        "reason": status.reason,
        **summary,
        "num_steps": run.recipe.num_steps,
        "eta_s": left * summary["step_time_s"] if running else None,
        "checkpoints": run.checkpoints.steps(),
        "scores": last_scores(run),
        "eval_s": sum(report.seconds for report in eval_reports(run)),
    }


def status_table(run: Run) -> Group:
    """Returns the text view of a run: state with its reason, numbers, and the loss as a line of bars."""
    row, metrics = status_row(run), run.metrics()
    colour = COLOURS.get(JobState(row["state"]), "white")
    title = Text.assemble((run.name, "bold"), "  ", (f"● {row['state']}", colour), "  ", (row["reason"], "dim"))
    cells = {
        "step": f"{row['step']:,} / {row['num_steps']:,}",
        "loss": _show(row.get("loss"), ".4f"),
        "held out": _show(_last_validation(metrics), ".4f"),
        "grad norm": _show(row.get("grad_norm"), ".3f"),
        "s/step": _show(row.get("step_time_s"), ".3f"),
        "tokens/s": _show(row.get("tokens_per_s"), ",.0f"),
        "MFU": "peak unknown" if row["step"] and row["mfu"] is None else _show(row.get("mfu"), ".1%"),
        "attempt": _show(row.get("attempt"), "d"),
        "left": _show(row["eta_s"], ".0f", " s"),
        "checkpoints": ", ".join(map(str, row["checkpoints"])) or "none",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    pairs = [part for name, value in cells.items() for part in (Text(name, style="dim"), value)]
    for start in range(0, len(pairs), 6):
        table.add_row(*pairs[start : start + 6])
    scores = (
        [Text.assemble(("scores  ", "dim"), _scores(row["scores"]), (f"  {row['eval_s']:.0f} s in all", "dim"))]
        if row["scores"]
        else []
    )
    return Group(title, table, *scores, Text(_sparkline(metrics["loss"]), style="blue"))


def watch(run: Run, *, refresh_s: float = 1.0, console: Console | None = None) -> None:
    """Shows the text view of a run until it ends or the user presses Ctrl-C, which leaves the job alone."""
    with Live(status_table(run), console=console, auto_refresh=False) as live:
        try:
            while not run.job.status().state.is_final:
                live.update(status_table(run), refresh=True)
                time.sleep(refresh_s)
        except KeyboardInterrupt:
            pass
        live.update(status_table(run), refresh=True)


def _last_validation(metrics: Any) -> float | None:
    values = metrics.columns.get("validation_loss", np.array([]))
    known = values[~np.isnan(values)]
    return float(known[-1]) if known.size else None


def _scores(scores: dict[str, dict[str, Any]]) -> str:
    """Returns `piqa 0.61 ± 0.02 at step 200 (partial)` for each task."""
    words = []
    for task, last in scores.items():
        error = "" if last["stderr"] is None else f" ± {last['stderr']:.3f}"
        partial = " (partial)" if last["partial"] else ""
        words.append(f"{task} {last['metric']} {last['score']:.3f}{error} at step {last['step']:,}{partial}")
    return ", ".join(words)


def _show(value: Any, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _sparkline(values: np.ndarray, width: int = 60) -> str:
    """Returns the values as a line of block characters, each the mean of its share."""
    if not len(values):
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    low, high = np.nanmin(means), np.nanmax(means)
    levels = (means - low) / (high - low) if high > low else np.zeros_like(means)
    bars = "".join(BARS[round(level * (len(BARS) - 1))] if np.isfinite(level) else "?" for level in levels)
    return f"loss {high:.2f} {bars} {means[-1]:.2f}"
