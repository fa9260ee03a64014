"""The static figures of a run: loss with validation losses, MFU (tokens/s where there is none), and
its scores; and the picture that a dashboard leaves in a saved notebook.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kit.config.plan import Plan
from kit.data import mix_words
from kit.monitor.curves import Average, PlotRange, drawable
from kit.monitor.dashboard import Dashboard
from kit.monitor.quantities import QUANTITIES
from kit.monitor.scores import draw_scores, eval_curve
from kit.monitor.speed import BAND_LABEL, Band, speed_facts
from kit.run import Run
from kit.run.columns import Columns
from kit.run.metrics import Metrics, median
from kit.show.style import legend_under_title, new_figure, short
from kit.show.theme import BLUE, GREEN, GREY, GRID, INK, SLATE, TEXT, VERMILION, WIDTH

EMA_STEPS = 5
MAX_BAND_RATIO = 4
"""Factor up to which the axis of speeds is extended for the band. Beyond it the curve would look
flat."""
OFFSET = {"textcoords": "offset points", "color": GREY}
LOG_AXIS_RATIO = 100
"""Ratio of the largest to the least loss from which on a chart of losses is logarithmic."""
AT_STEP = {"xycoords": ("data", "axes fraction")}


def run_figure(
    run: Run, *, baselines: dict[str, float] | None = None
) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns a matplotlib figure of a run and the table that it shows; a run without a step gives
    an empty figure.

    The table's columns: step, attempt, loss, loss_ema, validation_loss (NaN between validations),
    tokens_per_s and, where the site's peak is known and believable, mfu. `baselines` are losses in
    nats per token, drawn as dashed lines.
    """
    metrics = run.metrics()
    table = _table(metrics)
    accuracies = [curve for curve in eval_curve(run) if np.isfinite(curve.chance)]
    mosaic = "aaabb"
    height = 3.2
    if accuracies:
        mosaic = "aaabb;ccccc"
        height = 6.2
    with new_figure(mosaic, height=height) as (figure, (left, right, *below)):
        for axis in below:
            draw_scores(axis, accuracies)
        _draw_loss(left, table, _steps_not_finite(metrics), baselines or {})
        _draw_speed(right, table, run, metrics)
        facts = speed_facts(run, metrics)
        notes = [facts["verdict"]]
        if len(metrics):
            speed = "mfu" if "mfu" in table else "tokens_per_s"
            firsts = _first_steps(table)
            draw_band(right, facts["band"], firsts, float(table["step"][-1]), speed)
            seen = int(metrics.total_tokens[-1])
            notes.append(mix_words(run.recipe, run.spec.sequence_length, seen))
        figure.notes = tuple(filter(None, notes))
    return figure, table


def snapshot(dashboard: Dashboard) -> Any:
    """Returns a static picture of loss and MFU (tokens/s where the peak is unknown) with their
    averages.
    """
    # This runs in a thread, so no style of matplotlib is set, since styles are global.
    from kit.show.themed_figure import ThemedFigure

    with dashboard.lock:
        speed = dashboard.curves.shown_speed()
        x, rows = dashboard.curves.window(("loss", speed), PlotRange(width=120))
        lost = dashboard.columns["step"][_steps_not_finite(dashboard.columns)]
    status = dashboard.status
    step = "no step yet"
    figure = ThemedFigure(figsize=(WIDTH, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_pane(left, QUANTITIES["loss"].title, x, rows[:3], BLUE)
    _use_log_axis_if_wide(left, rows[2])
    speeds = rows[3:] * QUANTITIES[speed].chart_factor
    _draw_pane(right, QUANTITIES[speed].title, x, speeds, GREEN)
    if len(x):
        band = dashboard.run_view.speed_monitor.facts["band"]
        firsts = dashboard.columns.first_steps
        draw_band(right, band, firsts, x[-1], speed)
        step = f"step {int(x[-1]):,}"
        figure.supxlabel(
            f"pale: each step; line: {smoothing_words(dashboard.curves.smoothing)}",
            fontsize=TEXT,
            x=0.01,
            ha="left",
            color=GREY,
        )
    draw_levels(left, dashboard.baseline_losses)
    _mark_not_finite(left, lost)
    figure.suptitle(
        f"{short(dashboard.run.name)}: {status.state}, attempt {status.attempt}, {step}",
        fontsize=TEXT,
        x=0.01,
        ha="left",
        color=INK,
        parse_math=False,
    )
    return figure


def smoothing_words(smoothing: float) -> str:
    """Returns the number of steps over which an average is smoothed, in words. `smoothing` is the
    weight of the past.
    """
    if not smoothing:
        return "each step"
    return f"smoothed over about {1 / (1 - smoothing):,.0f} steps"


def draw_levels(axis: Any, levels: Mapping[str, float]) -> None:
    """Draws losses as dashed lines with their names."""
    for name, loss in levels.items():
        axis.axhline(loss, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
        axis.annotate(
            f"{short(name)} {loss:.2f}",
            (1, loss),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            ha="right",
            fontsize=TEXT,
            **OFFSET,
        )


def draw_band(
    axis: Any, band: Band | None, first_steps: Mapping[int, float], last: float, name: str
) -> None:
    """Draws the expected speed into a chart of `mfu` (in per cent) or `tokens_per_s` over steps,
    from the first step of its attempt on.
    """
    if band is None or band[name] is None:
        return
    low, high = (QUANTITIES[name].chart_factor * speed for speed in band[name])
    start = first_steps.get(band["attempt"], 0)
    bottom, top = axis.get_ylim()
    axis.fill_between(
        (start, max(last, start)), low, high, color=GREY, alpha=0.16, linewidth=0, zorder=0
    )
    axis.set_ylim(min(bottom, low), max(top, min(high, MAX_BAND_RATIO * top)))
    axis.set_xlabel(f"{axis.get_xlabel()}\ngrey: {BAND_LABEL}", loc="right")


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the exponential moving average with a window of about EMA_STEPS, which is unbiased
    from the first value on.

    Values that cannot be drawn are left out of the average. They are NaN in the result.
    """
    known = drawable(values)
    return np.where(np.isfinite(known), Average(1 - 1 / EMA_STEPS).update(known), np.nan)


def _table(metrics: Metrics) -> dict[str, np.ndarray]:
    """Returns the table of `run_figure`."""
    speeds = metrics.speeds()
    table = {
        "step": metrics["step"],
        "attempt": metrics["attempt"],
        "loss": metrics["loss"],
        "loss_ema": smooth(metrics["loss"]),
        "validation_loss": metrics.columns.get("validation_loss", np.full(len(metrics), np.nan)),
        "tokens_per_s": speeds["tokens_per_s"],
    }
    if "mfu" in speeds:
        table["mfu"] = speeds["mfu"]
    return table


def _draw_loss(
    axis: Any, table: dict[str, np.ndarray], lost: np.ndarray, baselines: dict[str, float]
) -> None:
    """Draws losses, their average, validation losses and baselines."""
    axis.set_title(QUANTITIES["loss"].title)
    step = table["step"]
    loss = drawable(table["loss"])
    axis.plot(step, loss, color=BLUE, alpha=0.3, linewidth=0.8)
    axis.plot(step, table["loss_ema"], color=BLUE, label=f"smoothed, {EMA_STEPS} steps")
    _mark_not_finite(axis, step[lost])
    validated = np.isfinite(drawable(table["validation_loss"]))
    if validated.any():
        x = step[validated]
        y = table["validation_loss"][validated]
        axis.plot(x, y, "o", color=VERMILION, markerfacecolor="white", label="validation")
    _use_log_axis_if_wide(axis, loss)
    draw_levels(axis, baselines)
    legend_under_title(axis)
    _draw_attempts(axis, table)


def _steps_not_finite(columns: Columns | Metrics) -> np.ndarray:
    """Returns a mask of the steps with a loss that cannot be drawn or a gradient norm that was not
    finite. A gradient norm before the first finite one was not logged.
    """
    is_finite = np.isfinite(columns["grad_norm"])
    is_logged = np.maximum.accumulate(is_finite)
    return ~np.isfinite(drawable(columns["loss"])) | is_logged & ~is_finite


def _mark_not_finite(axis: Any, steps: np.ndarray) -> None:
    """Marks steps at the top of the chart of losses, since a loss that is not finite has no place
    on the axis.
    """
    if len(steps):
        axis.plot(
            steps,
            np.ones(len(steps)),
            "x",
            color=VERMILION,
            label=f"not finite ({len(steps):,})",
            transform=axis.get_xaxis_transform(),
            clip_on=False,
        )


def _use_log_axis_if_wide(axis: Any, losses: np.ndarray) -> None:
    """Makes the axis logarithmic if losses span a wide range. On a linear axis, a loss that has
    jumped would make the curve before it flat.
    """
    known = losses[np.isfinite(losses)]
    if len(known) and 0 < LOG_AXIS_RATIO * known.min() < known.max():
        axis.set_yscale("log")


def _draw_speed(axis: Any, table: dict[str, np.ndarray], run: Run, metrics: Metrics) -> None:
    """Draws MFU, or tokens/s if there is no MFU, and the median and layout of each attempt."""
    name = "mfu" if "mfu" in table else "tokens_per_s"
    values = QUANTITIES[name].chart_factor * drawable(table[name])
    axis.plot(table["step"], values, ".", color=GREEN, alpha=0.35, markersize=3)
    for attempt in np.unique(table["attempt"]):
        here = table["attempt"] == attempt
        if (level := median(values[here])) is None:
            continue
        axis.plot(table["step"][here][[0, -1]], [level, level], color=GREEN)
        text = f"{level:.1f} %" if name == "mfu" else f"{level:,.0f}"
        if attempt in metrics.plans:
            text += f"\n{_layout(metrics.plans[attempt])}"
        axis.annotate(
            text, (table["step"][here].mean(), 0.98), ha="center", va="top", color=GREEN, **AT_STEP
        )
    title = f"Tokens/s, line: median\nno MFU: {metrics.why_no_mfu}"
    top = 1.25 * np.nanmax(values, initial=1)
    if name == "mfu":
        title = f"{QUANTITIES['mfu'].title} ({run.plan.precision})\nline: attempt's median"
        top = 10 * math.ceil(top / 10)
    axis.set(title=title, ylim=(0, top))
    _draw_attempts(axis, table)


def _layout(plan: Plan) -> str:
    """Returns the degrees of parallelism above 1, such as `TP2 PP2`. `1 device` if all are 1."""
    degrees = {"TP": plan.tensor_parallel, "PP": plan.pipeline_parallel, "DP": plan.data_parallel}
    words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    return " ".join(words) or "1 device"


def _first_steps(table: dict[str, np.ndarray]) -> dict[int, float]:
    """Returns the first step of each attempt, by attempt. Steps of newer attempts come later in the
    table.
    """
    attempts, rows = np.unique(table["attempt"], return_index=True)
    return dict(zip(attempts.tolist(), table["step"][rows].tolist(), strict=True))


def _draw_attempts(axis: Any, table: dict[str, np.ndarray]) -> None:
    """Labels the axis of steps, and marks the first step of each attempt after the first."""
    axis.set_xlabel("optimizer step")
    for attempt, first in list(_first_steps(table).items())[1:]:
        axis.axvline(first - 0.5, color=GREY, linewidth=0.8, linestyle=":")
        is_in_left_half = 2 * first < table["step"][-1]
        side = "left" if is_in_left_half else "right"
        away = 3 if is_in_left_half else -3
        place = {"xytext": (away, 4), "ha": side, **AT_STEP, **OFFSET}
        axis.annotate(f"attempt {attempt}", (first - 0.5, 0), **place)


def _draw_pane(pane: Any, title: str, x: np.ndarray, rows: np.ndarray, colour: str) -> None:
    """Draws one series of `snapshot`: its range and its average in each pixel, [3, pixels]."""
    low, high, average = drawable(rows)
    pane.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0)
    pane.plot(x, average, color=colour, linewidth=1.6)
    pane.set_title(title, fontsize=TEXT, loc="left", color=INK)
    pane.set_xlabel("optimizer step", fontsize=TEXT, color=INK)
    pane.tick_params(labelsize=TEXT, colors=SLATE)
    pane.grid(axis="y", color=GRID, linewidth=0.8)
    pane.spines[:].set_color(SLATE)
    pane.spines[["top", "right"]].set_visible(False)
