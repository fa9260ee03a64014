"""Figures of the planner: memory of each pipeline device, shares of the step time, fitted
coefficients, the Pareto front of step time and memory, and errors of predicted step times.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.record import counted
from kit.estimate.choose.search import Search
from kit.estimate.fit.calibrate import Calibration
from kit.estimate.fit.fitting import HIGH, LOW
from kit.estimate.fit.interval import NORMAL
from kit.estimate.theory.hardware import NAMES, Coefficients
from kit.estimate.theory.layouts import Array
from kit.estimate.theory.memory import StageMemory
from kit.estimate.theory.out_of_memory import RESERVE, Reserve
from kit.estimate.theory.timeline import boxes
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE, GREEN, GREY, GRID, GROUND, INK, VERMILION

MEMORY_COLOURS = (
    "#0072B2",
    "#56A0D3",
    "#A9CBE6",
    "#B34D00",
    "#E39A63",
    "#9A4A78",
    "#CC97B6",
    "#BFBFBF",
)
"""Colours of the sections of a stacked memory bar. The first colours are for the terms of the
modelled memory, e.g. weights, in the order of `kit.estimate.theory.memory.TERMS`. The last colour
is for the reserve for memory that is not modelled."""
TIME_COLOURS = {
    "gemm": "#0072B2",
    "attention": "#56A0D3",
    "elementwise": "#A9CBE6",
    "recompute": "#5E7F99",
    "host_launch": "#B8C4CC",
    "tensor_parallel": "#B34D00",
    "context_parallel": "#D27A3C",
    "pipeline_send": "#E39A63",
    "data_parallel": "#F0C39C",
    "bubble": "#9A4A78",
    "imbalance": "#CC97B6",
    "embedding_logits": "#007A5A",
    "optimizer": "#6DBFA4",
    "overhead": "#BFBFBF",
}
"""Maps each term of the step time to the colour of its bar. Computation is blue, communication
brown, waiting purple. Embedding, logits and optimizer are green, overhead is grey."""
SMALLEST = 0.005
"""Smallest share of the step time, 0 to 1, at which a term is drawn by itself. Smaller terms are
drawn together as `other`."""
DARK_GROUNDS = ("gemm", "recompute", "tensor_parallel", "bubble", "embedding_logits")
"""Terms of the step time whose bars are dark. The percentages on these bars are printed in a light
colour."""


def memory_figure(
    stages: Mapping[str, StageMemory], device_bytes: float, reserve: Reserve = RESERVE
) -> tuple[Any, Rows]:
    """Returns (figure, rows). The figure has stacked bars of the memory of each pipeline device in
    GiB, with one panel per layout. The rows are a table of the total memory of each device.

    Args:
        stages: Maps the title of a panel to the memory of each pipeline device for one layout
            (result of `memory_by_stage`). The memory of the fullest device is added to the title.
        device_bytes: Memory of a device in bytes, drawn as a line.
        reserve: Reserve for memory that is not modelled. It is drawn on top of each bar.
    """
    from matplotlib.collections import PolyCollection

    rows: Rows = []
    with new_figure(1, len(stages), height=3.7, sharey=True, squeeze=False) as (figure, axes):
        for axis, (title, stage) in zip(axes[0], stages.items(), strict=True):
            count = np.size(stage.total_bytes)
            bottom = np.zeros(count)
            places = np.arange(count)
            for (name, held), colour in zip(
                stage.with_reserve(reserve).items(), MEMORY_COLOURS, strict=True
            ):
                size = np.broadcast_to(held, count) / 2**30
                bars = boxes(places - 0.425, places + 0.425, bottom + size / 2, size)
                axis.add_collection(
                    PolyCollection(bars, facecolor=colour, label=name.replace("_", " "))
                )
                bottom = bottom + size
            rows += [
                {"layout": title, "stage": i, "GiB": float(total)} for i, total in enumerate(bottom)
            ]
            axis.autoscale_view()
            axis.axhline(
                device_bytes / 2**30,
                color=GREY,
                linestyle="--",
                linewidth=1,
                label="memory of a device",
            )
            axis.set(
                title=f"{title}\nat most {bottom.max():.1f} GiB",
                xlabel="pipeline device",
                xticks=places[:: -(-count // 5)],
            )
        axes[0, 0].set(
            ylabel="GiB per device",
            ylim=(0, 1.2 * max(device_bytes / 2**30, *(row["GiB"] for row in rows))),
        )
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure, rows


def breakdown_figure(
    terms: Mapping[str, Mapping[str, Any]], *, title: str = ""
) -> tuple[Any, Rows]:
    """Returns (figure, rows). The figure has one horizontal bar per layout, divided into the terms
    of its step time in %, and the title `title`. The rows are a table of the terms in seconds.

    `terms` maps the title of a bar to the layout's terms (`StepTime.terms_s`), which map a name to
    seconds. Terms below the share SMALLEST in all layouts are drawn together as `other`, so that
    each bar ends at 100 %.
    """
    seconds = {
        name: np.array([float(np.squeeze(step[name])) for step in terms.values()])
        for name in TIME_COLOURS
    }
    total = sum(seconds.values())
    shown = {
        name: 100 * each / total
        for name, each in seconds.items()
        if (each / total).max() >= SMALLEST
    }
    shown["other"] = np.maximum(0.0, 100 - sum(shown.values()))
    with new_figure(height=0.42 * len(terms) + 2.0) as (figure, axis):
        left = np.zeros(len(terms))
        for name, shares in shown.items():
            axis.barh(
                range(len(terms)),
                shares,
                left=left,
                color=TIME_COLOURS.get(name, GRID),
                height=0.72,
                label=name.replace("_", " "),
            )
            for place, share in enumerate(shares):
                if share >= 6:
                    axis.text(
                        left[place] + share / 2,
                        place,
                        f"{share:.0f}",
                        ha="center",
                        va="center",
                        color=GROUND if name in DARK_GROUNDS else INK,
                    )
            left = left + shares
        axis.set(
            title=title,
            xlim=(0, 100),
            ylim=(len(terms) - 0.5, -0.5),
            xlabel="% of the step",
            yticks=range(len(terms)),
            yticklabels=list(terms),
        )
        axis.grid(visible=False)
        figure.legend(loc="outside lower left", ncols=3)
    return figure, [
        {"step": title} | {name: float(column[i]) for name, column in seconds.items()}
        for i, title in enumerate(terms)
    ]


def coefficients_figure(calibration: Calibration) -> tuple[Any, Rows]:
    """Returns (figure, rows). The figure shows the 90 % interval of each coefficient before the fit
    (prior) and after it (posterior), relative to the mean of the prior. The coefficient whose
    interval the runs narrowed most is on top. The rows are a table of the coefficients.

    In the rows, `value` is the fitted value. `low` and `high` are the ends of the interval of the
    posterior. `narrowed_to` is the standard deviation of the posterior over that of the prior, both
    on the log scale. An interval ends at the physical bounds of its coefficient.
    """
    prior = calibration.prior
    deviation = np.sqrt(np.diag(calibration.covariance))
    value = np.array([getattr(calibration.coefficients, name) for name in NAMES])
    mean = np.exp(prior.mean)
    prior_low, prior_high = _interval(prior.mean, prior.spread)
    low, high = _interval(np.log(value), deviation)
    columns = {
        "coefficient": np.array(NAMES),
        "meaning": np.array([each.metadata["doc"] for each in dataclasses.fields(Coefficients)]),
        "value": value,
        "low": low,
        "high": high,
        "prior": mean,
        "prior_low": prior_low,
        "prior_high": prior_high,
        "narrowed_to": deviation / prior.spread,
    }
    order = np.argsort(columns["narrowed_to"], kind="stable")
    ordered = {name: column[order] for name, column in columns.items()}
    mean = ordered["prior"]
    places = np.arange(len(NAMES))
    with new_figure(height=0.26 * len(NAMES) + 1.4) as (figure, axis):
        axis.axvline(1, color=GREY, linewidth=1)
        for start, shift, colour, label in (
            ("prior_", -0.17, GREY, "prior: before the runs"),
            ("", 0.17, BLUE, "posterior: after the runs"),
        ):
            ends = ordered[f"{start}low"] / mean, ordered[f"{start}high"] / mean
            axis.hlines(places + shift, *ends, color=colour, linewidth=3, label=label)
        axis.plot(ordered["value"] / mean, places + 0.17, "o", color=GROUND, markeredgecolor=BLUE)
        axis.set(
            title=f"90 % intervals of the coefficients, {calibration.label}",
            xlabel="relative to the mean of the prior (ring and number: fitted value)",
            xscale="log",
            ylim=(len(NAMES) - 0.4, -0.6),
        )
        plain_ticks(axis)
        axis.set_yticks(places, ordered["coefficient"])
        fitted = axis.secondary_yaxis("right")
        fitted.set_yticks(places, [f"{each:.3g}" for each in ordered["value"]])
        figure.legend(loc="outside lower left", ncols=2)
    cells = zip(*(column.tolist() for column in ordered.values()), strict=True)
    return figure, [dict(zip(ordered, row, strict=True)) for row in cells]


def _interval(mean: Array, deviation: Array) -> tuple[Array, Array]:
    """Returns (low, high), the ends of the 90 % interval of each coefficient. `mean` and
    `deviation` are those of its logarithm.
    """
    low = np.clip(mean - NORMAL * deviation, LOW, HIGH)
    high = np.clip(mean + NORMAL * deviation, LOW, HIGH)
    return np.exp(low), np.exp(high)


def pareto_figure(search: Search, *, marked: Mapping[str, int] | None = None) -> tuple[Any, Rows]:
    """Returns (figure, rows). The figure shows the layouts of a search as points of memory in GiB
    and step time in seconds, and the Pareto front as a line. The rows are a table of the front.

    Layouts with more than 6 times the shortest time or 4 times the memory of a device are not
    drawn. Of 40,000 or more layouts, only every second, third, ... layout is drawn. `marked` maps a
    label to the index of the layout that is marked with this label.
    """
    rows = [search.row(int(index)) for index in search.pareto]
    used = search.used_bytes / 2**30
    time_s = search.step_time_s
    capacity = float(search.machine.hardware.memory_bytes) / 2**30
    near = (time_s < 6 * time_s.min()) & (used < 4 * capacity)
    with new_figure(height=3.9) as (figure, axis):
        cloud = np.flatnonzero(near)
        cloud = cloud[:: max(1, len(cloud) // 20_000)]
        # The colour is a medium blue. The points are a raster image, whose colours do not change
        # on a dark page.
        blue = MEMORY_COLOURS[1]
        axis.plot(
            used[cloud], time_s[cloud], ".", color=blue, alpha=0.3, markersize=2.5, rasterized=True
        )
        front = search.pareto[near[search.pareto]]
        axis.step(
            used[front],
            time_s[front],
            where="post",
            color=VERMILION,
            label="no layout is both faster and smaller",
        )
        axis.axvline(capacity, color=GREY, linestyle="--", linewidth=1, label="memory of a device")
        for name, index in (marked or {}).items():
            axis.plot(used[index], time_s[index], "o", color=GREEN, markersize=6, zorder=4)
            axis.annotate(
                name,
                (used[index], time_s[index]),
                xytext=(-6, -5),  # No layout lies to the left below a marked layout.
                textcoords="offset points",
                color=GREEN,
                ha="right",
                va="top",
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="GiB used on the fullest device",
            ylabel=f"seconds per step, {search.machine.calibration.label}",
            title=f"{search.spec.name} on {counted(search.num_devices, 'device')}:"
            f" {counted(len(search.layouts), 'layout')}",
        )
        figure.legend(loc="outside lower left", ncols=2)
        plain_ticks(axis)
    return figure, rows


def predicted_figure(groups: Mapping[str, tuple[Array, Array]], *, title: str) -> tuple[Any, Rows]:
    """Returns (figure, rows). The figure shows errors of predicted step times in %, with one line
    per data set. The rows are a table of mean errors.

    `groups` maps the name of a data set to (measured seconds, predicted seconds), two arrays with
    one element per run. A dot is one run, the line contains nine of ten runs, and the ring is the
    median. The error is the predicted over the measured time, minus 1. The mean error in the table
    is the mean absolute error as a fraction.
    """
    rows: Rows = []
    jitter = np.random.default_rng(0)  # Dots have random heights, so that none hides another.
    with new_figure(height=0.8 + 0.36 * len(groups)) as (figure, axis):
        for place, (name, (measured, predicted)) in enumerate(groups.items()):
            percent = 100 * (predicted / measured - 1)
            low, middle, high = np.quantile(percent, (0.05, 0.5, 0.95))
            heights = place + jitter.uniform(-0.28, 0.28, len(percent))
            axis.plot(percent, heights, ".", color=BLUE, alpha=0.3, markersize=3)
            axis.plot([low, high], [place, place], color=INK, linewidth=2)
            axis.plot(middle, place, "o", color=GROUND, markeredgecolor=INK, markersize=6)
            mean = float(np.abs(percent).mean()) / 100
            rows.append({"rows": name, "number": len(measured), "mean error": mean})
        axis.axvline(0, color=GREY, linewidth=1)
        axis.set(
            title=title,
            xlabel="predicted against measured step time, %\n(dot: a run; line: nine runs of ten;"
            " ring: median)",
            ylim=(len(groups) - 0.4, -0.6),
        )
        axis.set_yticks(range(len(groups)), list(groups))
        counts = [f"{row['number']} runs, mean {row['mean error']:.1%}" for row in rows]
        axis.secondary_yaxis("right").set_yticks(range(len(groups)), counts)
    return figure, rows


def plain_ticks(axis: Any) -> None:
    """Labels logarithmic axes with numbers such as 1, 2, 5 and 10 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        side.set_minor_formatter(NullFormatter())
