"""A run below a notebook cell: one view in HTML with a drawn curve, redrawn in place until the job ends.

It needs no front-end extension, and a saved notebook shows its last state.
"""

import asyncio
import base64
import html
import math
import time
from typing import Any

import numpy as np
from IPython.display import DisplayHandle

from cluster.job import JobStatus
from cluster.state import JobState, read_exit
from kit.metrics import Metrics
from kit.monitor.figure import smooth
from kit.monitor.text import COLOURS, status_row
from kit.run import Run

BADGES = {"green": "#007A5A", "cyan": "#00658C", "yellow": "#8A5A00", "red": "#B00020"}
"""Dark enough for white text on them, so that they can be read on a light and on a dark page."""
ICONS = {JobState.RUNNING: "▶", JobState.DONE: "✔", JobState.FAILED: "✖", JobState.LOST: "✖", JobState.STALLED: "⚠",
         JobState.IMPORTED: "↧"}  # fmt: skip
MUTED = "color:var(--jp-ui-font-color2,gray)"
BORDER = "1px solid var(--jp-border-color2,#8884)"
BLUE = "#1F83C6"  # a contrast above 3 on white and on dark grey
RED = "#E0433B"  # so has this
WIDTH, HEIGHT = 640, 150


async def follow(
    run: Run, *, baselines: dict[str, float] | None = None, refresh_s: float = 1.0, limit_s: float = 900
) -> JobStatus:
    """Shows a run below the cell until its job ends, and returns how it ended.

    Awaited at the top level of a cell it leaves the kernel's event loop free, and it only reads the run directory:
    interrupt the cell, restart the kernel or close the notebook, and the job goes on. Call it again to look again.

    Args:
        run: at any time of its life.
        baselines: losses in nats per token drawn as dashed lines with their name.
        refresh_s: time between two looks.
        limit_s: stop looking after this time.

    Raises:
        TimeoutError: the job has not ended after `limit_s`; it goes on.
    """
    handle, start = DisplayHandle(), time.monotonic()
    handle.display(_bundle(run, baselines), raw=True)
    while True:
        status = run.job.status()  # before the view, which then shows at least this state
        handle.update(_bundle(run, baselines), raw=True)
        if status.state.is_final:
            return status
        if time.monotonic() - start > limit_s:
            raise TimeoutError(f"{run.directory}: still {status.state} after {limit_s:g} s ({status.reason}). The job "
                               f"goes on; call follow again, or end it with run.job.stop().")  # fmt: skip
        await asyncio.sleep(refresh_s)


def view_html(run: Run, baselines: dict[str, float] | None = None) -> str:
    """Returns the view of a run as it is now: state with its reason, progress, numbers, and the loss as a curve."""
    row, metrics = status_row(run), run.metrics()
    state = JobState(row["state"])
    done, colour = row["step"] / row["num_steps"], BADGES[COLOURS.get(state, "cyan")]
    tiles = {
        "step": f"{row['step']:,} / {row['num_steps']:,}",
        "loss": _show(row.get("loss"), ".3f"),
        "tokens": _show(row.get("tokens"), ",d"),
        "tokens/s": _show(row.get("tokens_per_s"), ",.0f"),
        "MFU": _show(row.get("mfu"), ".1%"),
        "left": _show(row["eta_s"], ".0f", " s"),
    }
    boxes = "".join(
        f"<div style='border:{BORDER};border-radius:6px;padding:2px 10px;min-width:74px'>"
        f"<div style='font-size:11px;{MUTED}'>{name}</div><b>{value}</b></div>"
        for name, value in tiles.items()
    )
    return (
        f"<div style='border:{BORDER};border-radius:8px;padding:10px 12px;max-width:{WIDTH + 40}px;"
        f"font:13px/1.4 system-ui,sans-serif;font-variant-numeric:tabular-nums'>"
        f"<div><b>{html.escape(run.name)}</b> <span role='status' style='background:{colour};color:white;"
        f"border-radius:9px;padding:1px 9px'>{ICONS.get(state, '…')} {state}</span> "
        f"<span style='{MUTED}'>attempt {run.job.status().attempt}: {html.escape(row['reason'])}</span></div>"
        f"<div style='height:4px;margin:8px 0;border-radius:2px;background:var(--jp-border-color2,#8884)'>"
        f"<div style='height:4px;border-radius:2px;width:{done:.1%};background:{BLUE}'></div></div>"
        f"<div style='display:flex;flex-wrap:wrap;gap:6px'>{boxes}</div>"
        f"{_curve(metrics, row['num_steps'], baselines or {})}{_last_words(run, state)}</div>"
    )


def _bundle(run: Run, baselines: dict[str, float] | None) -> dict[str, str]:
    row = status_row(run)
    text = f"{run.name}: {row['state']}, step {row['step']} of {row['num_steps']}, loss {_show(row.get('loss'), '.3f')}"
    return {"text/html": view_html(run, baselines), "text/plain": text}


def _curve(metrics: Metrics, num_steps: int, baselines: dict[str, float]) -> str:
    """Returns the training loss, raw and averaged, over the whole planned length of the run, as SVG."""
    if not len(metrics):
        return f"<div style='height:{HEIGHT}px;{MUTED};padding-top:12px'>Waiting for the first step.</div>"
    levels = np.array([*metrics["loss"], *baselines.values()])
    levels = levels[np.isfinite(levels)] if np.isfinite(levels).any() else np.zeros(1)  # nothing but NaN: diverged
    low, high = levels.min(), levels.max()
    left, bottom = 44, HEIGHT - 18
    x = left + (WIDTH - left - 8) * metrics["step"] / num_steps
    scale = (bottom - 12) / max(high - low, 1e-9)
    dashed = "".join(
        f"<line x1='{left}' x2='{WIDTH - 8}' y1='{bottom - scale * (loss - low):.1f}' "
        f"y2='{bottom - scale * (loss - low):.1f}' stroke='gray' stroke-dasharray='5 4'/>"
        f"{_label(WIDTH - 8, bottom - scale * (loss - low) - 4, f'{name} {loss:.2f}', 'end')}"
        for name, loss in baselines.items()
    )
    lines = "".join(
        f"<polyline fill='none' stroke='{BLUE}' {style} points='{points}'/>"
        for loss, style in ((metrics["loss"], "opacity='0.35'"), (smooth(metrics["loss"]), "stroke-width='2'"))
        for points in _stretches(x, bottom - scale * (loss - low))
    )
    lost = ~np.isfinite(metrics["loss"])
    marks = "".join(
        f"<line class='lost' x1='{at:.1f}' x2='{at:.1f}' y1='4' y2='{bottom}' stroke='{RED}'/>" for at in x[lost]
    )
    labels = (
        _label(left - 6, 16, f"{high:.2f}", "end")
        + _label(left - 6, bottom, f"{low:.2f}", "end")
        + _label(WIDTH - 8, HEIGHT - 4, f"step {num_steps}", "end")
        + _label(left, HEIGHT - 4, "training loss, nats per token", "start")
    )
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"font-family='system-ui,sans-serif' font-size='11'>{dashed}{marks}{lines}{labels}</svg>"
    )
    # As an image: JupyterLab strips drawings, though not images, from pages that the reader did not execute.
    source = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    first, last = (_show(float(metrics["loss"][row]), ".2f") for row in (0, -1))
    alt = f"training loss from {first} to {last} in {len(metrics)} steps"
    note = f"<div style='color:{RED}'>✖ {lost.sum():,} losses were not finite (red lines).</div>" if lost.any() else ""
    return f"<img alt='{alt}' src='{source}' style='width:100%;margin-top:8px'>{note}"


def _stretches(x: np.ndarray, y: np.ndarray) -> list[str]:
    """Returns the points of each stretch of finite heights, so that a line breaks where a value was lost."""
    finite = np.isfinite(y)
    edges = np.flatnonzero(np.diff(finite)) + 1
    return [
        " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs, ys, strict=True))
        for xs, ys in zip(np.split(x, edges), np.split(y, edges), strict=True)
        if np.isfinite(ys[0])
    ]


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x='{x}' y='{y:.1f}' fill='#808080' text-anchor='{anchor}'>{html.escape(text)}</text>"


def _last_words(run: Run, state: JobState) -> str:
    """Returns the end of the failing rank's log, where the job has failed."""
    report = read_exit(run.directory) if state is JobState.FAILED else None
    return f"<pre>{html.escape(report.log_tail)}</pre>" if report else ""


def _show(value: Any, form: str, unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:{form}}{unit}" if math.isfinite(value) else "not finite"
