"""Figures of simulated pipeline schedules. They show over time when each device computes and when
it waits, and how much memory it needs.
"""

from typing import Any

import numpy as np

from cluster.record import counted
from kit.estimate.theory.memory import StageMemory
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
from kit.show.theme import BLUE, GREEN, GREY, GROUND, INK, PURPLE, TEXT, VERMILION

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
"""Assumed width of one digit of a micro-batch's number, as a share of the time axis. A number is
written only into a box that is wide enough."""


TEETH = 9
"""Number of teeth of the zigzag line at the right edge of a panel. The line shows that the step
continues after the drawn part."""
TOOTH = 0.012
"""Depth of a tooth of the zigzag line, as a share of the time axis."""

STEP_MEMORY = {
    "state_bytes": ("weights, gradients, optimizer, buffers", BLUE),
    "saved_bytes": ("saved for backward", VERMILION),
    "workspace_bytes": ("workspace", PURPLE),
}
"""Maps the parts of `memory_over_step` to their name in a legend and their colour."""


def memory_over_step(simulation: Simulation, stages: StageMemory) -> list[dict[str, Array]]:
    """Returns the memory of each pipeline device over one step. Each device has a dict of arrays:
    `time_s`, and the bytes of each part of STEP_MEMORY from that time to the next.

    `stages` is the result of `memory_by_stage` for the simulated plan. A micro-batch is saved from
    the start of its forward pass to the end of its backward pass, or of its weight gradients if
    these are computed alone. The largest number of saved micro-batches needs the planner's
    activations and tensors of embedding and logits. The workspace is needed in each backward pass
    that computes gradients of the input. So the largest sum of a device is `stages.total_bytes`.
    """
    order = simulation.order
    saved = stages.activations + stages.embedding_logits
    found = []
    for device in range(order.num_devices):
        kind = order.kind[device]
        start_s, end_s = simulation.start_s[device], simulation.end_s[device]
        is_work = kind != PADDING
        is_backward = np.isin(kind, (BACKWARD, BACKWARD_INPUT))
        time_s = np.unique(np.concatenate([start_s[is_work], end_s[is_work]]))

        def count(times: Array, until_s: Array = time_s) -> Array:
            return np.searchsorted(np.sort(times), until_s, side="right")

        freed = end_s[np.isin(kind, (BACKWARD, BACKWARD_WEIGHT))]
        in_flight = count(start_s[kind == FORWARD]) - count(freed)
        running = count(start_s[is_backward]) - count(end_s[is_backward])
        state = stages.state_bytes[device] + np.broadcast_to(stages.buffers, saved.shape)[device]
        workspace = np.broadcast_to(stages.workspace, saved.shape)[device]
        found.append(
            {
                "time_s": time_s,
                "state_bytes": np.full_like(time_s, state),
                "saved_bytes": saved[device] * in_flight / in_flight.max(),
                "workspace_bytes": workspace * running,
            }
        )
    return found


def step_memory_figure(simulation: Simulation, stages: StageMemory) -> tuple[Any, Rows]:
    """Returns (figure, rows) of the memory of each pipeline device over one step, with one panel
    per device. The rows are a table of the parts of `memory_over_step` in GiB at their largest sum.
    """
    from matplotlib.collections import PolyCollection

    rows: Rows = []
    devices = memory_over_step(simulation, stages)
    with new_figure(
        len(devices), height=0.95 * len(devices) + 1.1, sharex=True, sharey=True, squeeze=False
    ) as (figure, axes):
        for device, (axis, parts) in enumerate(zip(axes[:, 0], devices, strict=True)):
            time_s = parts["time_s"]
            start_s = np.concatenate([[0.0], time_s])
            end_s = np.concatenate([time_s, [simulation.makespan_s]])
            bottom = np.zeros_like(start_s)
            for name, (label, colour) in STEP_MEMORY.items():
                # Before its first operation and after its last, a device has only its state.
                before = parts[name][0] if name == "state_bytes" else 0.0
                size = np.concatenate([[before], parts[name]]) / 2**30
                is_held = size > 0
                bars = boxes(start_s, end_s, bottom + size / 2, size)[is_held]
                # Without edges, neighbouring boxes of one colour would have a pale seam.
                axis.add_collection(
                    PolyCollection(
                        bars, facecolor=colour, edgecolor=colour, linewidth=0.4, label=label
                    )
                )
                bottom = bottom + size
            largest = bottom.argmax()
            row = {
                name.replace("_bytes", "_GiB"): float(parts[name][largest - 1] / 2**30)
                for name in STEP_MEMORY
            }
            rows.append({"device": device, **row, "GiB": float(bottom[largest])})
            axis.set_title(f"device {device}: at most {bottom[largest]:.1f} GiB")
        axes[-1, 0].set(xlabel="time, s", xlim=(0, simulation.makespan_s))
        axes[0, 0].set(ylim=(0, 1.08 * max(row["GiB"] for row in rows)))
        figure.supylabel("GiB", fontsize=TEXT)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure, rows


def timeline_figure(
    *simulations: Simulation, drawn_microbatches: int | None = None
) -> tuple[Any, Rows]:
    """Returns (figure, rows). The figure has one panel per simulation on a common time axis. The
    rows are a table with one row per simulation and device.

    Each panel has one line of boxes per device. A box is a forward or backward pass. It contains
    the number of its micro-batch if there is room. Boxes of the second and further stages of a
    device are paler. Grey means that a device waits. The share of the time in which it waits is
    written at the right. The table has numbers of the whole simulation, also if only a part is
    drawn.

    With `drawn_microbatches`, each panel ends where the first device starts the micro-batch with
    this number, counted from 0. A zigzag line marks the end. The end of the step, in which the
    pipeline drains, is then not drawn. Beside only a few micro-batches, the drain would look as
    long as the rest of the step.
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
    ends_s = [_end_s(simulation, drawn_microbatches) for simulation in simulations]
    width_s = max(ends_s)
    unit, name = (1.0, "s") if width_s >= 1 else (1e-3, "ms")
    with new_figure(
        len(simulations),
        height=sum(heights) + 0.75,
        sharex=True,
        squeeze=False,
        height_ratios=heights,
    ) as (figure, axes):
        for axis, simulation, end_s in zip(axes[:, 0], simulations, ends_s, strict=True):
            _draw(axis, simulation, unit, width_s, end_s)
        axes[-1, 0].set(xlabel=f"time, {name}", xlim=(0, width_s / unit))
        _legend(figure, simulations)
    return figure, rows


def _end_s(simulation: Simulation, drawn_microbatches: int | None) -> float:
    """Returns the end, in seconds, of the time axis of a simulation's panel: the end of the step,
    or the start of the first micro-batch that is not drawn.
    """
    order = simulation.order
    if drawn_microbatches is None or drawn_microbatches >= order.num_microbatches:
        return simulation.makespan_s
    is_next = (order.kind == FORWARD) & (order.micro_batch == drawn_microbatches)
    return float(simulation.start_s[is_next].min())


def _draw(axis: Any, simulation: Simulation, unit: float, width_s: float, end_s: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    order = simulation.order
    devices = simulation.order.num_devices
    height = 0.86 if devices <= LABELLED_DEVICES else 1.0
    whole = boxes(
        np.zeros(devices),
        np.full(devices, end_s / unit),
        np.arange(devices),
        height,
    )
    axis.add_collection(PolyCollection(whole, facecolor=IDLE, linewidth=0, zorder=1))
    row = np.broadcast_to(np.arange(devices)[:, None], order.kind.shape)
    crowded = np.nanmedian(simulation.end_s - simulation.start_s) < width_s / 500
    chunk = _chunks(simulation)
    is_cut = end_s < simulation.makespan_s
    ends_s = np.minimum(simulation.end_s, end_s)
    for kind, colour in COLOURS.items():
        for paleness in np.unique(chunk):
            work = (order.kind == kind) & (chunk == paleness) & (simulation.start_s < end_s)
            drawn = boxes(simulation.start_s[work] / unit, ends_s[work] / unit, row[work], height)
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
    _number(axis, simulation, unit, width_s, end_s, chunk)
    if devices <= LABELLED_DEVICES:
        axis.set_yticks(range(devices), [str(device) for device in range(devices)])
        for device, idle in enumerate([] if is_cut else simulation.idle_fraction):
            axis.annotate(
                f"{100 * idle:.0f} %",
                (1, device),
                xycoords=("axes fraction", "data"),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
    if is_cut:
        _tear(axis, end_s / unit, width_s / unit, devices)
    title = _title(simulation, end_s)
    axis.set(title=title, ylabel="device", ylim=(devices - 0.5, -0.5))
    axis.grid(visible=False)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def _tear(axis: Any, end: float, width: float, devices: int) -> None:
    """Draws a zigzag line at the time `end`, and hides the boxes to the right of the line.

    `end`, and `width`, the length of the time axis, are in units of the time axis.
    """
    from matplotlib.patches import Polygon

    heights = np.linspace(-0.6, devices - 0.4, 2 * TEETH + 1)
    depths = end - TOOTH * width * (1 + np.arange(2 * TEETH + 1) % 2)
    edge = np.column_stack((depths, heights))
    corners = [(end + width, heights[-1]), (end + width, heights[0])]
    axis.add_patch(Polygon([*edge, *corners], facecolor=GROUND, linewidth=0, zorder=3))
    axis.plot(*edge.T, color=GREY, linewidth=1, zorder=4)


def _title(simulation: Simulation, end_s: float) -> str:
    order = simulation.order
    stages = order.num_stages // order.num_devices
    layout = counted(order.num_devices, "device") + (f" x {stages} stages" if stages > 1 else "")
    batches = counted(order.num_microbatches, "micro-batch", "micro-batches")
    if end_s < simulation.makespan_s:
        return f"{TITLES.get(order.name, order.name)}: {layout}, the beginning of a step"
    return (
        f"{TITLES.get(order.name, order.name)}: {layout},"
        f" {batches}\n{100 * simulation.bubble_fraction:.1f} % idle; at most"
        f" {order.peak_in_flight.max():.3g} micro-batches saved"
    )


def _chunks(simulation: Simulation) -> Array:
    """Returns the position of each operation's stage among the stages of its device, from 0 for the
    first to 1 for the last stage, shape (devices, operations).
    """
    order = simulation.order
    device = order.device_of_stage
    nth = np.array([np.sum(device[:stage] == device[stage]) for stage in range(order.num_stages)])
    return np.where(order.kind == PADDING, 0, nth[order.stage] / max(1, nth.max()))


def boxes(start: Array, end: Array, middle: Array, height: Any) -> Any:
    """Returns the (x, y) corners of boxes, shape (boxes, 4, 2). They extend from `start` to `end`
    in x, and by half of `height` below and above `middle` in y.
    """
    top = middle - height / 2
    bottom = middle + height / 2
    corners = [(start, top), (end, top), (end, bottom), (start, bottom)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)


def _number(
    axis: Any, simulation: Simulation, unit: float, width_s: float, end_s: float, chunk: Array
) -> None:
    order = simulation.order
    digits = len(str(order.num_microbatches - 1)) + 0.4
    is_wide = simulation.end_s - simulation.start_s > digits * DIGIT_WIDTH * width_s
    fits = is_wide & (order.kind != PADDING) & (simulation.end_s <= end_s)
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
    handles = [*patches.values(), Patch(color=IDLE, label="waiting")]
    if any(
        simulation.order.num_stages > simulation.order.num_devices for simulation in simulations
    ):
        handles.append(Patch(facecolor=BLUE, alpha=0.5, label="paler: later stages"))
    figure.legend(handles=handles, loc="outside lower left", ncols=3)
