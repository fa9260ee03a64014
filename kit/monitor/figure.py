"""Static figures of a run: the figure of loss, MFU and scores, and the picture of a dashboard that
is saved in a notebook.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kit.config.plan import Plan
from kit.data import mix_text
from kit.monitor.curves import Average, PlotRange, mask_undrawable
from kit.monitor.dashboard import Dashboard
from kit.monitor.quantities import QUANTITIES
from kit.monitor.scores import draw_scores, eval_curve
from kit.monitor.speed import BAND_LABEL, Band, speed_facts
from kit.monitor.states import state_word
from kit.run import Run
from kit.run.columns import Columns
from kit.run.metrics import Metrics, median
from kit.show.style import legend_under_title, new_figure, short
from kit.show.theme import BLUE, GREEN, GREY, GRID, INK, SLATE, TEXT, VERMILION, WIDTH

EMA_STEPS = 5
"""Window of the exponential moving average in a static figure, in training steps."""
MAX_BAND_RATIO = 4
"""Largest factor by which the axis of a speed chart is extended so that the predicted speed is
visible. With a larger factor, the measured curve would look flat."""
OFFSET = {"textcoords": "offset points", "color": GREY}
LOG_AXIS_RATIO = 100
"""Ratio of the largest to the least loss above which the axis of losses is logarithmic."""
AT_STEP = {"xycoords": ("data", "axes fraction")}


def run_figure(
    run: Run, *, baselines: dict[str, float] | None = None
) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns (matplotlib figure, table of its data) with the loss, speed and scores of a run. For
    a run without steps the figure is empty.

    The columns of the table are step, attempt, loss, loss_ema (moving average), validation_loss
    (NaN between validations) and tokens_per_s. If the peak of the site is known and believable, mfu
    is a column too. `baselines` are losses in nats per token by name, which are drawn as dashed
    lines.
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
            notes.append(mix_text(run.recipe, run.spec.sequence_length, seen))
        figure.notes = tuple(filter(None, notes))
    return figure, table


def snapshot(dashboard: Dashboard) -> Any:
    """Returns a static figure of what a dashboard shows: loss and MFU with their moving averages.
    If no step has an MFU, tokens per second are shown instead.
    """
    # This function runs in a thread. Matplotlib's styles are global to the process, so no style is
    # set.
    from kit.show.themed_figure import ThemedFigure

    with dashboard.lock:
        speed = dashboard.curves.shown_speed()
        x, rows = dashboard.curves.window(("loss", speed), PlotRange(width=120))
        lost = dashboard.columns["step"][_steps_not_finite(dashboard.columns)]
    status = dashboard.status
    num_steps = dashboard.run.recipe.num_steps
    word = state_word(status, num_steps)
    step = "no step yet"
    figure = ThemedFigure(figsize=(WIDTH, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_pane(left, QUANTITIES["loss"].title, x, rows[:3], BLUE)
    use_log_axis_if_wide(left, rows[2])
    speeds = rows[3:] * QUANTITIES[speed].chart_factor
    _draw_pane(right, QUANTITIES[speed].title, x, speeds, GREEN)
    if len(x):
        band = dashboard.run_view.speed_monitor.facts["band"]
        firsts = dashboard.columns.first_steps
        draw_band(right, band, firsts, x[-1], speed)
        step = f"step {int(x[-1]):,} of {num_steps:,}"
        figure.supxlabel(
            f"pale: each step; line: {smoothing_text(dashboard.curves.smoothing)}",
            fontsize=TEXT,
            x=0.01,
            ha="left",
            color=GREY,
        )
    draw_levels(left, dashboard.baseline_losses)
    _mark_not_finite(left, lost)
    figure.suptitle(
        f"{short(dashboard.run.name)}: {word}, attempt {status.attempt}, {step}",
        fontsize=TEXT,
        x=0.01,
        ha="left",
        color=INK,
        parse_math=False,
    )
    return figure


def smoothing_text(smoothing: float) -> str:
    """Returns a phrase such as `smoothed over about 10 steps`, for a moving average. `smoothing` is
    the weight of past values.
    """
    if not smoothing:
        return "each step"
    return f"smoothed over about {1 / (1 - smoothing):,.0f} steps"


def draw_levels(axis: Any, levels: Mapping[str, float]) -> None:
    """Draws losses, in nats per token, as dashed horizontal lines with their names."""
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
    """Draws the 90 % interval of the predicted speed into a chart of speed over training steps.

    Args:
        axis: matplotlib axis of the chart, which shows `mfu` in per cent or `tokens_per_s`.
        band: predicted intervals for one attempt. If None, nothing is drawn.
        first_steps: first step of each attempt, by its number. The interval is drawn from the first
            step of the attempt that it is predicted for.
        last: last training step in the chart.
        name: quantity that the chart shows, `mfu` or `tokens_per_s`.
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


def moving_average(values: np.ndarray) -> np.ndarray:
    """Returns the exponential moving average of `values` with a window of about EMA_STEPS values.
    The average has no bias at its start.

    Values that cannot be drawn (`mask_undrawable`) are left out of the average. The result is NaN
    at these values.
    """
    known = mask_undrawable(values)
    return np.where(np.isfinite(known), Average(1 - 1 / EMA_STEPS).update(known), np.nan)


def _table(metrics: Metrics) -> dict[str, np.ndarray]:
    """Returns the table of data that belongs to `run_figure`."""
    speeds = metrics.speeds()
    table = {
        "step": metrics["step"],
        "attempt": metrics["attempt"],
        "loss": metrics["loss"],
        "loss_ema": moving_average(metrics["loss"]),
        "validation_loss": metrics.columns.get("validation_loss", np.full(len(metrics), np.nan)),
        "tokens_per_s": speeds["tokens_per_s"],
    }
    if "mfu" in speeds:
        table["mfu"] = speeds["mfu"]
    return table


def _draw_loss(
    axis: Any, table: dict[str, np.ndarray], lost: np.ndarray, baselines: dict[str, float]
) -> None:
    """Draws losses, their moving average, validation losses and baselines. `lost` is a mask of the
    steps whose loss or gradient norm is not finite.
    """
    axis.set_title(QUANTITIES["loss"].title)
    step = table["step"]
    loss = mask_undrawable(table["loss"])
    axis.plot(step, loss, color=BLUE, alpha=0.3, linewidth=0.8)
    axis.plot(step, table["loss_ema"], color=BLUE, label=f"smoothed, {EMA_STEPS} steps")
    _mark_not_finite(axis, step[lost])
    validated = np.isfinite(mask_undrawable(table["validation_loss"]))
    if validated.any():
        x = step[validated]
        y = table["validation_loss"][validated]
        axis.plot(x, y, "o", color=VERMILION, markerfacecolor="white", label="validation")
    use_log_axis_if_wide(axis, loss)
    draw_levels(axis, baselines)
    legend_under_title(axis)
    _draw_attempts(axis, table)


def _steps_not_finite(columns: Columns | Metrics) -> np.ndarray:
    """Returns a mask of the steps whose loss cannot be drawn or whose gradient norm is not finite.
    Gradient norms before the first finite one count as not logged.
    """
    is_finite = np.isfinite(columns["grad_norm"])
    is_logged = np.maximum.accumulate(is_finite)
    return ~np.isfinite(mask_undrawable(columns["loss"])) | is_logged & ~is_finite


def _mark_not_finite(axis: Any, steps: np.ndarray) -> None:
    """Marks steps with a cross at the top of the chart of losses. A loss that is not finite cannot
    be drawn at its own height.
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


def use_log_axis_if_wide(axis: Any, losses: np.ndarray) -> None:
    """Makes the loss axis logarithmic if the ratio of the largest to the least loss is above
    LOG_AXIS_RATIO. On a linear axis, the curve before a jump of the loss would look flat.
    """
    from matplotlib.ticker import LogFormatter

    known = losses[np.isfinite(losses)]
    if len(known) and 0 < LOG_AXIS_RATIO * known.min() < known.max():
        axis.set_yscale("log")
        # Matplotlib's own labels contain TeX, which the style of the kit's files does not parse.
        axis.yaxis.set_major_formatter(LogFormatter())


def _draw_speed(axis: Any, table: dict[str, np.ndarray], run: Run, metrics: Metrics) -> None:
    """Draws the MFU of each step, or tokens/s if the run has no MFU. For each attempt, adds the
    median and the layout.
    """
    name = "mfu" if "mfu" in table else "tokens_per_s"
    values = QUANTITIES[name].chart_factor * mask_undrawable(table[name])
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
    """Returns the degrees of parallelism of a plan that are above 1, such as `TP2 PP2`. Returns `1
    device` if there are none.
    """
    degrees = {"TP": plan.tensor_parallel, "PP": plan.pipeline_parallel, "DP": plan.data_parallel}
    words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    return " ".join(words) or "1 device"


def _first_steps(table: dict[str, np.ndarray]) -> dict[int, float]:
    """Returns the first step of each attempt in the table, by the number of the attempt."""
    attempts, rows = np.unique(table["attempt"], return_index=True)
    return dict(zip(attempts.tolist(), table["step"][rows].tolist(), strict=True))


def _draw_attempts(axis: Any, table: dict[str, np.ndarray]) -> None:
    """Labels the x axis, and marks the first step of each attempt except the first attempt."""
    axis.set_xlabel("optimizer step")
    for attempt, first in list(_first_steps(table).items())[1:]:
        axis.axvline(first - 0.5, color=GREY, linewidth=0.8, linestyle=":")
        is_in_left_half = 2 * first < table["step"][-1]
        side = "left" if is_in_left_half else "right"
        away = 3 if is_in_left_half else -3
        place = {"xytext": (away, 4), "ha": side, **AT_STEP, **OFFSET}
        axis.annotate(f"attempt {attempt}", (first - 0.5, 0), **place)


def _draw_pane(pane: Any, title: str, x: np.ndarray, rows: np.ndarray, colour: str) -> None:
    """Draws one panel of the figure of `snapshot`. `rows`, [3, pixels], are the least value, the
    largest value and the moving average in each pixel.
    """
    low, high, average = mask_undrawable(rows)
    pane.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0)
    pane.plot(x, average, color=colour, linewidth=1.6)
    pane.set_title(title, fontsize=TEXT, loc="left", color=INK)
    pane.set_xlabel("optimizer step", fontsize=TEXT, color=INK)
    pane.tick_params(labelsize=TEXT, colors=SLATE)
    pane.grid(axis="y", color=GRID, linewidth=0.8)
    pane.spines[:].set_color(SLATE)
    pane.spines[["top", "right"]].set_visible(False)
