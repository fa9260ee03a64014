"""The picture of simulated pipeline schedules: what each device does when, and where it waits."""

from typing import Any

import numpy as np

from cluster.record import counted
from kit.estimate.theory.orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    PADDING,
    Array,
)
from kit.estimate.theory.schedule import Simulation
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE, GREEN, GROUND, INK, VERMILION

COLOURS = {FORWARD: BLUE, BACKWARD: VERMILION, BACKWARD_INPUT: VERMILION, BACKWARD_WEIGHT: GREEN}
NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward",
    BACKWARD_WEIGHT: "weight gradient alone",
}
TITLES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved 1F1B",
    "zero_bubble": "Zero bubble (H1)",
    "zbv": "Zero bubble (V)",
}
IDLE = "#ECECEC"
LABELLED_DEVICES = 16
DIGIT_WIDTH = 1 / 50
"""Width of a digit of a micro-batch's number, as a share of the time axis."""


def timeline_figure(*simulations: Simulation) -> tuple[Any, Rows]:
    """Returns a picture of simulations on one time axis, a panel each, and their table.

    Devices are rows; the numbers are micro-batches, where they fit; a device's second and further
    stages are paler; grey is waiting, its share of the time at the right. Table: one row per
    simulation and device.
    """
    rows = [
        {
            "schedule": simulation.order.name,
            "device": device,
            "busy_s": float(simulation.busy_s[device]),
            "idle_fraction": float(simulation.idle_fraction[device]),
            "peak_in_flight": float(simulation.order.peak_in_flight[device]),
        }
        for simulation in simulations
        for device in range(simulation.order.num_devices)
    ]
    heights = [min(0.26, 4 / s.order.num_devices) * s.order.num_devices + 0.5 for s in simulations]
    width_s = max(simulation.makespan_s for simulation in simulations)
    unit, name = (1.0, "s") if width_s >= 1 else (1e-3, "ms")
    with new_figure(
        len(simulations),
        height=sum(heights) + 0.75,
        sharex=True,
        squeeze=False,
        height_ratios=heights,
    ) as (figure, axes):
        for axis, simulation in zip(axes[:, 0], simulations, strict=True):
            _draw(axis, simulation, unit, width_s)
        axes[-1, 0].set(xlabel=f"time, {name}", xlim=(0, width_s / unit))
        _legend(figure, simulations)
    return figure, rows


def _draw(axis: Any, simulation: Simulation, unit: float, width_s: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    order, devices = simulation.order, simulation.order.num_devices
    height = 0.86 if devices <= LABELLED_DEVICES else 1.0
    whole = boxes(
        np.zeros(devices),
        np.full(devices, simulation.makespan_s / unit),
        np.arange(devices),
        height,
    )
    axis.add_collection(PolyCollection(whole, facecolor=IDLE, linewidth=0, zorder=1))
    row = np.broadcast_to(np.arange(devices)[:, None], order.kind.shape)
    crowded = np.nanmedian(simulation.end_s - simulation.start_s) < width_s / 500
    chunk = _chunks(simulation)
    for kind, colour in COLOURS.items():
        for paleness in np.unique(chunk):
            work = (order.kind == kind) & (chunk == paleness)
            drawn = boxes(
                simulation.start_s[work] / unit, simulation.end_s[work] / unit, row[work], height
            )
            axis.add_collection(
                PolyCollection(
                    drawn,
                    facecolor=to_rgba(colour, 1 - 0.5 * paleness),
                    linewidth=0 if crowded else 0.4,
                    edgecolor="none" if crowded else "white",
                    zorder=2,
                    antialiased=not crowded,
                )
            )
    _number(axis, simulation, unit, width_s, chunk)
    if devices <= LABELLED_DEVICES:
        axis.set_yticks(range(devices), [str(device) for device in range(devices)])
        for device, idle in enumerate(simulation.idle_fraction):
            axis.annotate(
                f"{100 * idle:.0f} %",
                (1, device),
                xycoords=("axes fraction", "data"),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
    axis.set(title=_title(simulation), ylabel="device", ylim=(devices - 0.5, -0.5))
    axis.grid(visible=False)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def _title(simulation: Simulation) -> str:
    order = simulation.order
    stages = order.num_stages // order.num_devices
    layout = counted(order.num_devices, "device") + (f" x {stages} stages" if stages > 1 else "")
    batches = counted(order.num_microbatches, "micro-batch", "micro-batches")
    return (
        f"{TITLES.get(order.name, order.name)}: {layout},"
        f" {batches}\n{100 * simulation.bubble_fraction:.1f} % idle; at most"
        f" {order.peak_in_flight.max():.3g} of them held"
    )


def _chunks(simulation: Simulation) -> Array:
    """Returns 0 for a device's first stage and 1 for its last, shape of the order."""
    order = simulation.order
    device = order.device_of_stage
    nth = np.array([np.sum(device[:stage] == device[stage]) for stage in range(order.num_stages)])
    return np.where(order.kind == PADDING, 0, nth[order.stage] / max(1, nth.max()))


def boxes(start: Array, end: Array, middle: Array, height: Any) -> Any:
    """Returns the corners of boxes from `start` to `end`, of a height around a middle; shape
    (boxes, 4, 2).
    """
    top, bottom = middle - height / 2, middle + height / 2
    corners = [(start, top), (end, top), (end, bottom), (start, bottom)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)


def _number(axis: Any, simulation: Simulation, unit: float, width_s: float, chunk: Array) -> None:
    order = simulation.order
    digits = len(str(order.num_microbatches - 1)) + 0.4
    fits = (simulation.end_s - simulation.start_s > digits * DIGIT_WIDTH * width_s) & (
        order.kind != PADDING
    )
    for device, index in np.argwhere(fits):
        middle = (simulation.start_s[device, index] + simulation.end_s[device, index]) / 2
        axis.text(
            middle / unit,
            device,
            str(order.micro_batch[device, index]),
            ha="center",
            va="center_baseline",
            color=INK if chunk[device, index] > 0.6 else GROUND,
        )


def _legend(figure: Any, simulations: tuple[Simulation, ...]) -> None:
    from matplotlib.patches import Patch

    patches = {
        NAMES[kind]: Patch(color=colour, label=NAMES[kind])
        for kind, colour in COLOURS.items()
        if any((simulation.order.kind == kind).any() for simulation in simulations)
    }
    figure.legend(
        handles=[*patches.values(), Patch(color=IDLE, label="waiting")],
        loc="outside lower left",
        ncols=4,
    )
