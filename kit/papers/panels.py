"""Drawing of layers: one panel, the caption and notes of a figure, and what a paper prints as a
table.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cluster.record import ConfigError
from kit.estimate.choose.figures import plain_ticks
from kit.papers.layers import Layer, table
from kit.show.style import Rows, short
from kit.show.table import Table
from kit.show.theme import BLUE, GREEN, GREY, OLIVE, PURPLE, SLATE, VERMILION

COLOURS = (BLUE, VERMILION, GREEN, SLATE)
DEMO_COLOURS = (PURPLE, OLIVE)
"""Of what was measured at demo scale, and of nothing else."""
MARKERS = "osD^vP"
BESIDE = 0.14
"""Distance between layers at a place that is only a name."""
MARKED = 20
"""Points of a line that have a marker each; more of them are a curve."""
LINE = 74
"""Characters of a line of a caption."""
LEAD = {"published": "Published", "modelled": "Modelled", "measured": "Measured"}
Panels = Mapping[str, Sequence[Layer]] | Sequence[Layer]


def draw(axis: Any, layers: Sequence[Layer]) -> None:
    """Draws the layers of one panel, a colour per modelled or measured layer, and marks demo scale.

    Raises:
        ConfigError: demo-scale points and a paper's in one panel.
    """
    kinds = {layer.scale for layer in layers if layer.kind != "modelled"}
    if "demo" in kinds and len(kinds) > 1:
        raise ConfigError(
            "draw: demo scale and a paper's or a cluster's numbers do not belong in one panel. Use"
            " two."
        )
    solid = [layer for layer in layers if layer.kind != "published"]
    hollow = [layer for layer in layers if layer.kind == "published"]
    for layer in layers:
        if layer.kind == "published":
            axis.plot(
                layer.x,
                layer.y,
                MARKERS[hollow.index(layer)],
                color=GREY,
                markerfacecolor="white",
                markersize=8,
                markeredgewidth=1.5,
                zorder=5,
                label=layer.label,
                clip_on=False,
            )
            continue
        number = solid.index(layer)
        colours = DEMO_COLOURS if layer.scale == "demo" else COLOURS
        style: dict[str, Any] = {
            "color": colours[number % len(colours)],
            "label": short(layer.label, 40),
        }
        marker = MARKERS[number % len(MARKERS)]
        if layer.kind == "modelled" and not layer.names:
            few = len(layer.x) <= MARKED
            axis.plot(layer.x, layer.y, marker=marker if few else None, markersize=4, **style)
            if np.isfinite(layer.low).any():
                ends = (layer.low, layer.high)
                axis.fill_between(layer.x, *ends, color=style["color"], alpha=0.18, linewidth=0)
            continue
        axis.errorbar(
            layer.x + (BESIDE * (number + 1) if layer.names else 0.0),
            layer.y,
            yerr=np.stack([layer.y - layer.low, layer.high - layer.y]),
            fmt=f"{marker}-" if layer.joined else marker,
            capsize=2,
            markersize=6,
            zorder=4,
            **style,
        )
    if "demo" in kinds:
        mark_demo_scale(axis)


def panel(
    axis: Any,
    layers: Sequence[Layer],
    *,
    ticks: Mapping[Any, str] | Iterable[float] = (),
    legend: Mapping[str, Any] | None = None,
    **shown: Any,
) -> None:
    """Draws the layers of one panel (`draw`) and dresses it.

    `ticks` of x are numbers, or texts by their places; `legend` is given to `axis.legend`, and
    the rest to `axis.set`. A logarithmic y has plain numbers.
    """
    draw(axis, layers)
    axis.set(**shown)
    if axis.get_yscale() == "log":
        plain_ticks(axis)
    texts = ticks if isinstance(ticks, Mapping) else {tick: f"{tick:,}" for tick in ticks}
    if texts:
        axis.set_xticks([*texts], [*texts.values()])
        axis.minorticks_off()
    if legend is not None:
        axis.legend(**legend)


def draw_curves(axis: Any, layers: Sequence[Layer], **style: Any) -> None:
    """Draws measured curves of many points, a colour each, and marks demo scale."""
    for number, layer in enumerate(layers):
        colours = DEMO_COLOURS if layer.scale == "demo" else COLOURS
        axis.plot(
            layer.x,
            layer.y,
            color=colours[number % len(colours)],
            label=short(layer.label),
            **style,
        )
    if any(layer.scale == "demo" for layer in layers):
        mark_demo_scale(axis)


def mark_demo_scale(axis: Any) -> None:
    """Writes `demo scale` across a panel whose numbers were measured on this machine."""
    axis.text(
        0.5,
        0.5,
        "demo scale",
        transform=axis.transAxes,
        ha="center",
        va="center",
        rotation=18,
        fontsize=22,
        color=DEMO_COLOURS[0],
        alpha=0.15,
        zorder=0,
        weight="bold",
    )


def pairs(count: int, *, under_one: bool = False) -> str:
    """Returns a mosaic of panels, two a row, for `new_figure`; an odd one at the end is wide, as
    is one above all.
    """
    names = "abcdefghijklmnopqrstuvwxyz"[: count + under_one]
    rows = [names[0] * 2] if under_one else []
    rows += [
        names[i : i + 2] if i + 1 < len(names) else names[i] * 2
        for i in range(len(rows), len(names), 2)
    ]
    return ";".join(rows)


def finish(
    figure: Any,
    panels: Panels,
    shows: str,
    holds: str = "",
    misses: str = "",
    *,
    notes: Sequence[str] = (),
) -> tuple[Any, Rows]:
    """Returns a figure with its caption of three lines at most and the notes of where each layer
    comes from; its table.

    Args:
        figure: of `kit.show.style.new_figure`, whose constrained layout makes room for the caption.
        panels: layers of each panel, by its name in the table, or of the only one.
        shows: what is drawn.
        holds: what is seen, or which published values the model meets.
        misses: where it misses them, or what could not be read.
        notes: fits, assumptions and numbers that are not in the picture.
    """
    named = panels if isinstance(panels, Mapping) else {"": panels}
    layers = [layer for each in named.values() for layer in each]
    rows = [
        row
        for name, each in named.items()
        for row in table(each, **({"panel": name} if name else {}))
    ]
    parts = [
        textwrap.fill(part, LINE, break_on_hyphens=False) for part in (shows, holds, misses) if part
    ]
    figure.supxlabel("\n".join(parts), x=0.005, ha="left", fontsize="medium", linespacing=1.3)
    figure.notes = (*notes, *sources(layers))
    figure.runs = frozenset(name for layer in layers for name in layer.runs)
    return figure, rows


def sources(layers: Sequence[Layer]) -> list[str]:
    """Returns a sentence for each source of some layers, which says what comes from it."""
    said: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        said.setdefault((layer.kind, layer.source), []).append(layer.label)
    return [
        f"{LEAD[kind]} ({', '.join(dict.fromkeys(labels))}): {source}.".replace("..", ".")
        for (kind, source), labels in said.items()
    ]


def paper_table(
    rows: Rows,
    layers: Sequence[Layer],
    *caption: str,
    notes: Sequence[str] = (),
    runs: Iterable[str] = (),
) -> Table:
    """Returns what a paper prints as a table: rows with the same keys, caption and notes as in
    `finish`.

    `layers` tell its sources, `runs` are names of the reader's own runs in it.
    """
    drawn = Table(rows, " ".join(caption), (*notes, *sources(layers)))
    drawn.runs = frozenset(runs)
    return drawn
