"""Drawing of layers: one panel, its caption with the sources, and tables as pictures."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.record import ConfigError
from kit.papers.layers import Layer
from kit.style import BLUE, GREEN, GREY, PURPLE, VERMILION, Rows

COLOURS = (BLUE, VERMILION, GREEN, "#555555")
DEMO_COLOURS = (PURPLE, "#8A7A00")
"""Of what was measured at demo scale, and of nothing else."""
MARKERS = "osD^vP"
BESIDE = 0.14
"""Distance between layers at a place that is only a name."""
MARKED = 20
"""Points of a line that have a marker each; more of them are a curve."""
CHARACTERS_PER_INCH = 19.5
"""Of a caption: 7.2 pt sans."""


def draw(axis: Any, layers: Sequence[Layer]) -> None:
    """Draws the layers of one panel, a colour per modelled or measured layer, and marks demo scale.

    Raises:
        ConfigError: demo-scale points and a paper's in one panel.
    """
    kinds = {layer.scale for layer in layers if layer.kind != "modelled"}
    if "demo" in kinds and len(kinds) > 1:
        raise ConfigError("draw: demo scale and a paper's or a cluster's numbers do not belong in one panel. Use two.")
    solid = [layer for layer in layers if layer.kind != "published"]
    hollow = [layer for layer in layers if layer.kind == "published"]
    for layer in layers:
        if layer.kind == "published":
            axis.plot(layer.x, layer.y, MARKERS[hollow.index(layer)], color=GREY, markerfacecolor="white",
                      markersize=7, markeredgewidth=1.4, zorder=5, label=layer.label, clip_on=False)  # fmt: skip
            continue
        number = solid.index(layer)
        colours = DEMO_COLOURS if layer.scale == "demo" else COLOURS
        colour, marker = colours[number % len(colours)], MARKERS[number % len(MARKERS)]
        joined = layer.joined if layer.kind == "measured" else not layer.names
        if layer.kind == "modelled" and joined:
            few = len(layer.x) <= MARKED
            axis.plot(layer.x, layer.y, color=colour, label=layer.label, marker=marker if few else None, markersize=3)
            if np.isfinite(layer.low).any():
                axis.fill_between(layer.x, layer.low, layer.high, color=colour, alpha=0.15, linewidth=0)
            continue
        beside = BESIDE * (number + 1) if layer.names else 0.0
        spread = np.stack([layer.y - layer.low, layer.high - layer.y])
        axis.errorbar(layer.x + beside, layer.y, yerr=spread, fmt=f"{marker}-" if joined else marker, color=colour,
                      capsize=2, markersize=5, label=layer.label, zorder=4)  # fmt: skip
    if "demo" in kinds:
        mark_demo_scale(axis)


def mark_demo_scale(axis: Any) -> None:
    """Writes `demo scale` across a panel whose numbers were measured on this machine."""
    axis.text(0.5, 0.5, "demo scale", transform=axis.transAxes, ha="center", va="center", rotation=18, fontsize=26,
              color=DEMO_COLOURS[0], alpha=0.15, zorder=0, weight="bold")  # fmt: skip


def finish(figure: Any, text: str, layers: Sequence[Layer]) -> None:
    """Writes the caption below a figure: what is seen, then each layer with its source.

    Args:
        figure: with constrained layout, which makes room for it.
        text: what the figure shows, and where the model misses a published value.
        layers: all of its panels.
    """
    said: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        said.setdefault((layer.kind, layer.source), []).append(layer.label)
    lead = {"published": "Published", "modelled": "Modelled", "measured": "Measured"}
    sentences = [f"{lead[kind]}: {source}." for kind, source in said]
    width = int(CHARACTERS_PER_INCH * figure.get_figwidth())
    whole = " ".join([text, *sentences]).replace("..", ".")
    caption = textwrap.fill(whole, width, break_on_hyphens=False)
    figure.supxlabel(caption, x=0.005, ha="left", fontsize=7.2, color="#444444")


def caption(figure: Any) -> str:
    """Returns the caption of a figure, on one line."""
    return figure.get_supxlabel().replace("\n", " ")


def table_figure(plt: Any, rows: Rows, *, size: float = 8) -> tuple[Any, Any]:
    """Returns (figure, axis) of a table drawn as a picture, for what a paper prints as one.

    Args:
        plt: from `figure_style`.
        rows: all with the same keys; values are shown as they are.
        size: of the text in points.
    """
    columns = list(rows[0])
    cells = [["" if row[name] is None else str(row[name]) for name in columns] for row in rows]
    longest = [max(1.4 * len(name), *(len(line[i]) for line in cells)) + 2 for i, name in enumerate(columns)]  # bold
    is_text = [not all(line[i][:1].isdigit() or line[i] in ("", "-") for line in cells) for i in range(len(columns))]
    figure, axis = plt.subplots(figsize=(0.0077 * size * sum(longest), 0.032 * size * (len(rows) + 1)))
    axis.set_axis_off()
    drawn = axis.table(cellText=cells, colLabels=columns, colWidths=[n / sum(longest) for n in longest],
                       bbox=(0, 0, 1, 1))  # fmt: skip
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(size)
    for (line, column), cell in drawn.get_celld().items():
        cell.visible_edges = "B" if line == 0 else ""
        cell.set_edgecolor(GREY)
        cell.set_text_props(ha="left" if is_text[column] else "right")
        cell._loc = "left" if is_text[column] else "right"  # matplotlib has no public name for one column's side
        cell.PAD = 0.6 / longest[column]
        if line == 0:
            cell.set_text_props(weight="bold", color="#333333")
        elif line % 2 == 0:
            cell.set_facecolor("#F4F4F4")
    return figure, axis
