"""A run below a notebook cell: one view in HTML with its loss drawn, redrawn in place until the job
ends.

It needs no front-end extension, and a saved notebook shows its last state.
"""

import asyncio
import html
import time

import numpy as np
from IPython.display import DisplayHandle

from cluster.job import JobStatus
from cluster.record import counted
from cluster.state import JobState, read_exit
from kit.monitor.dashboard import Dashboard
from kit.monitor.figure import loss_figure
from kit.monitor.text import COLOURS, duration
from kit.run import Run
from kit.show.terminal import number
from kit.show.theme import MUTED

BADGES = {"green": "#007A5A", "cyan": "#00658C", "yellow": "#8A5A00", "red": "#B00020"}
"""Dark enough for white text on them, so that they can be read on a light and on a dark page."""
ICONS = {
    JobState.RUNNING: "▶",
    JobState.DONE: "✔",
    JobState.FAILED: "✖",
    JobState.LOST: "✖",
    JobState.STALLED: "⚠",
    JobState.IMPORTED: "↧",
}
BORDER = "1px solid var(--jp-border-color2,#8884)"
BLUE = "#1F83C6"  # a contrast above 3 on white and on dark grey
WIDTH = 640
DRAW_S = 5.0
"""Between two drawings of a running job: each takes a quarter of a second of a core that may be
training."""


async def follow(
    run: Run,
    *,
    baselines: dict[str, float] | None = None,
    refresh_s: float = 1.0,
    limit_s: float = 900,
) -> JobStatus:
    """Shows a run below the cell until its job ends, and returns how it ended.

    Awaited at the top level of a cell it leaves the kernel's event loop free, and it only reads the
    run directory: interrupt the cell, restart the kernel or close the notebook, and the job goes
    on. Call it again to look again.

    `baselines` are losses in nats per token, drawn as dashed lines with their name.

    Raises:
        TimeoutError: the job has not ended after `limit_s`; it goes on.
    """
    handle, start = DisplayHandle(), time.monotonic()
    dashboard = Dashboard(run, baselines=baselines).read_all()
    curve, drawn = curve_html(dashboard), start
    handle.display(_bundle(dashboard, curve), raw=True)
    while True:
        status = dashboard.status = run.job.status()
        dashboard.read_all()
        if status.state.is_final or time.monotonic() - drawn > DRAW_S:
            curve, drawn = curve_html(dashboard), time.monotonic()
        dashboard.refresh_outlook(wait=status.state.is_final)
        handle.update(_bundle(dashboard, curve), raw=True)
        if status.state.is_final:
            return status
        if time.monotonic() - start > limit_s:
            raise TimeoutError(
                f"{run.directory}: still {status.state} after {limit_s:g} s ({status.reason}). The"
                " job goes on; call follow again, or end it with run.job.stop()."
            )
        await asyncio.sleep(refresh_s)


def _bundle(dashboard: Dashboard, curve: str) -> dict[str, str]:
    """Returns the same for a notebook, and in a line for pages that show no HTML."""
    row = dashboard.row()
    text = f"{dashboard.run.name}: {row['state']}, step {row['step']} of {row['num_steps']}"
    text += f", loss {number(row.get('loss'), '.3f')}"
    return {"text/html": view_html(dashboard, curve), "text/plain": text}


def view_html(dashboard: Dashboard, curve: str) -> str:
    """Returns the view of a run: state with its reason, progress, numbers, and the loss
    (`curve_html`).
    """
    run, row, verdict = dashboard.run, dashboard.row(), dashboard.run_view.outlook.facts["verdict"]
    state = JobState(row["state"])
    done, colour = row["step"] / row["num_steps"], BADGES[COLOURS.get(state, "cyan")]
    steps = row.get("speed_steps")
    recent = counted(steps, "step") if steps else ""
    kinds = f"tokens/s, MFU: median of the last {recent}; loss: last step" if steps else ""
    tiles = {
        "step": f"{row['step']:,} / {row['num_steps']:,}",
        "loss": number(row.get("loss"), ".3f"),
        "tokens": number(row.get("tokens"), ",d"),
        "tokens/s": number(row.get("tokens_per_s"), ",.0f"),
        "MFU": number(row.get("mfu"), ".1%"),
        "left": duration(row["eta_s"]),
    }
    boxes = "".join(
        f"<div style='border:{BORDER};border-radius:6px;padding:2px 10px;min-width:74px'>"
        f"<div style='font-size:11px;{MUTED}'>{name}</div><b>{value}</b></div>"
        for name, value in tiles.items()
    )
    report = read_exit(run.directory) if state is JobState.FAILED else None
    last_words = f"<pre>{html.escape(report.log_tail)}</pre>" if report else ""
    return (
        f"<div style='border:{BORDER};border-radius:8px;padding:10px"
        f" 12px;max-width:{WIDTH + 40}px;font:13px/1.4"
        " system-ui,sans-serif;font-variant-numeric:tabular-nums'>"
        f"<div><b>{html.escape(run.name)}</b>"
        f" <span role='status' style='background:{colour};color:white;border-radius:9px;padding:1px"
        f" 9px'>{ICONS.get(state, '…')} {state}</span> <span style='{MUTED}'>attempt"
        f" {row['attempt']}: {html.escape(row['reason'])}</span></div><div"
        " style='height:4px;margin:8px"
        " 0;border-radius:2px;background:var(--jp-border-color2,#8884)'><div"
        f" style='height:4px;border-radius:2px;width:{done:.1%};background:{BLUE}'></div></div><div"
        f" style='display:flex;flex-wrap:wrap;gap:6px'>{boxes}</div><div"
        f" style='font-size:11px;{MUTED}'>{kinds}</div><div"
        f" style='margin-top:6px;{MUTED}'>{html.escape(verdict)}</div><div"
        f" style='{MUTED}'>{html.escape(row['data'])}</div><div"
        f" style='margin-top:8px'>{curve}</div>{last_words}</div>"
    )


def curve_html(dashboard: Dashboard) -> str:
    """Returns the loss as `run_figure` draws it, over the whole planned length of the run, in
    the page's theme.
    """
    metrics, num_steps = dashboard.metrics(), dashboard.run.recipe.num_steps
    if not len(metrics):
        return f"<div style='{MUTED};padding-top:12px'>Waiting for the first step.</div>"
    first, last = (number(float(metrics["loss"][row]), ".2f") for row in (0, -1))
    alt = f"training loss from {first} to {last} in {counted(len(metrics), 'step')}"
    lost = np.sum(~np.isfinite(metrics["loss"]))
    note = f"<div>✖ {lost:,} losses were not finite.</div>" if lost else ""
    return loss_figure(metrics, num_steps, baselines=dashboard.levels).to_html(alt=alt) + note
