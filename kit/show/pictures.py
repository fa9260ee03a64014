"""Drawings and figures for notebooks that explain an idea, such as tensor parallelism.

Each function returns a matplotlib figure. Functions that show data return (figure, table of the
data).
"""

from collections.abc import Sequence
from typing import Any

from kit.config.spec import FlopBasis, ModelSpec
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE, GREY, VERMILION


def tensor_split_picture() -> Any:
    """Returns a drawing of tensor parallelism over two devices: a matrix that is split by columns,
    followed by a matrix that is split by rows.
    """
    subscripts = "₁₂"
    with new_figure(height=1.7) as (figure, axis):
        for device, colour in enumerate((BLUE, VERMILION)):
            down = 1 - device
            _box(axis, 3.1 + 1.1 * device, 0, 1.1, 2, colour, f"A{subscripts[device]}")
            _box(axis, 6.6 + 1.1 * device, 0.3, 1.1, 1.4, colour, f"Y{subscripts[device]}")
            _box(axis, 10.1, down, 2, 1, colour, f"B{subscripts[device]}")
            _box(axis, 13.3 + 3 * device, 0.3, 2, 1.4, colour, f"Z{subscripts[device]}")
        _box(axis, 0, 0.3, 2, 1.4, GREY, "X")
        for x, text in ((2.55, "·"), (6.0, "="), (9.45, "·"), (12.7, "="), (15.8, "+")):
            axis.text(x, 1, text, ha="center", va="center", fontsize=13)
        notes = (
            (1, "input,\non both"),
            (4.2, "by columns:\nnothing sent"),
            (7.7, "activation,\nelementwise"),
            (11.1, "by rows"),
            (15.8, "partial sums:\none all-reduce"),
        )
        for x, text in notes:
            axis.text(x, -0.25, text, ha="center", va="top", color=GREY)
        axis.set(xlim=(-0.2, 18.5), ylim=(-1.6, 2.9), aspect="equal")
        axis.set_axis_off()
        axis.text(0, 2.3, "device 1", color=BLUE, weight="bold")
        axis.text(3.1, 2.3, "device 2", color=VERMILION, weight="bold")
    return figure


def flop_basis_figure(specs: Sequence[ModelSpec]) -> tuple[Any, Rows]:
    """Returns (figure, table) of the FLOPs per token of each model, as counted by every `FlopBasis`
    and divided by the kit's own count (`FlopBasis.MODEL`).
    """
    others = [basis for basis in FlopBasis if basis is not FlopBasis.MODEL]
    rows = [
        {"spec": spec.name, "model": float(spec.flops_per_token())}
        | {basis.value: spec.flops_per_token(basis) / spec.flops_per_token() for basis in others}
        for spec in specs
    ]
    with new_figure(height=0.28 * len(rows) + 1.4) as (figure, axis):
        for basis, marker in zip(others, "osD^", strict=True):
            ratios = [row[basis.value] for row in rows]
            axis.plot(
                ratios, range(len(rows)), marker, label=basis.value.replace("_", " "), markersize=6
            )
        axis.axvline(1, color=GREY, linewidth=1, zorder=1)
        axis.set_yticks(range(len(rows)), [row["spec"] for row in rows])
        axis.set(
            title="FLOPs per token relative to the kit's own count (line at 1)",
            ylim=(len(rows) - 0.5, -0.5),
        )
        figure.legend(ncols=4, loc="outside lower left")
    return figure, rows


def stage_weights_figure(weights: dict[int, tuple[int, int]]) -> tuple[Any, Rows]:
    """Returns (figure, table) of the number of weights on one rank of each pipeline stage.

    `weights` maps the number of each stage to (weights in transformer blocks, all weights). The
    difference is the embedding, the final norm and the output layer.
    """
    rows = [
        {"stage": stage, "blocks": blocks, "embedding and output": whole - blocks}
        for stage, (blocks, whole) in weights.items()
    ]
    with new_figure(height=2.8) as (figure, axis):
        stages = [row["stage"] for row in rows]
        blocks = [row["blocks"] / 1e9 for row in rows]
        axis.bar(stages, blocks, color=BLUE, width=0.8, label="blocks")
        extra = [row["embedding and output"] / 1e9 for row in rows]
        axis.bar(
            stages,
            extra,
            bottom=blocks,
            color=VERMILION,
            width=0.8,
            label="embedding, final norm, output",
        )
        axis.set(
            title="Weights held by one rank of each pipeline stage, billions",
            xlabel="pipeline stage",
            ylim=(None, 1.3 * max(whole for _, whole in weights.values()) / 1e9),
        )
        axis.legend(ncols=2, loc="upper center")
    return figure, rows


def _box(
    axis: Any, x: float, y: float, width: float, height: float, colour: str, text: str
) -> None:
    """Draws a rectangle with a text in its middle. `x` and `y` are the coordinates of its lower
    left corner.
    """
    from matplotlib.patches import Rectangle

    face = (colour, 0.22)
    axis.add_patch(
        Rectangle((x, y), width, height, facecolor=face, edgecolor=colour, linewidth=1.2)
    )
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=13)
