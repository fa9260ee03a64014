"""Drawing of layers: a picture of panels with its caption and notes, and what a paper prints as a
table.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cluster.record import ConfigError
from kit.estimate.choose.figures import plain_ticks
from kit.papers.facts import Facts
from kit.papers.layers import Drawn, Layer, scale_of, table
from kit.run import Run
from kit.show.style import Rows, new_figure, short
from kit.show.table import Table
from kit.show.theme import BLUE, GREEN, GREY, GROUND, OLIVE, PURPLE, SLATE, VERMILION

COLOURS = (BLUE, VERMILION, GREEN, SLATE)
DEMO_COLOURS = (PURPLE, OLIVE)
"""Of what was measured at demo scale, and of nothing else."""
MARKERS = "osD^vP"
HOLLOW: dict[str, Any] = {
    "color": GREY,
    "linestyle": "none",
    "markerfacecolor": "white",
    "markersize": 8,
    "markeredgewidth": 1.5,
}
"""Of what a paper published."""
DASHED: Any = (0, (4, 3))
BESIDE = 0.14
"""Distance between layers at a place that is only a name."""
MARKED = 20
"""Points of a line that have a marker each; more of them are a curve."""
LINE = 74
"""Characters of a line of a caption."""
LEAD = {"published": "Published", "modelled": "Modelled", "measured": "Measured"}


def picture(
    panels: Mapping[str, Sequence[Layer]] | Sequence[Layer],
    dress: Sequence[Mapping[str, Any]],
    *caption: str,
    notes: Sequence[str] = (),
    fill: Callable[..., None] | None = None,
    also: Callable[[Any], Any] = lambda figure: None,
    mosaic: str = "",
    **layout: Any,
) -> Drawn:
    """Returns a figure of panels with its caption, and its table; both as `finish` makes them.

    Args:
        panels: layers of each panel, by its name in the table, or of the only one.
        dress: of each panel, as `panel` or `fill` takes it.
        caption: what is drawn, what holds, what is missed.
        notes: fits, assumptions and numbers that are not in the picture.
        fill: draws the layers of one panel, in place of `panel`.
        also: draws into the figure what is no layer.
        mosaic: where the panels stand, if not two a row.
        layout: of `new_figure`, such as `height`.
    """
    named = panels if isinstance(panels, Mapping) else {"": panels}
    with new_figure(mosaic or pairs(len(named)), **layout) as (figure, axes):
        for axis, layers, style in zip(axes, named.values(), dress, strict=True):
            (fill or panel)(axis, layers, **style)
        also(figure)
        return finish(figure, named, *caption, notes=notes)


def draw(axis: Any, layers: Sequence[Layer]) -> None:
    """Draws the layers of one panel, a colour per modelled or measured layer, and marks demo scale.

    Raises:
        ConfigError: demo-scale points and a paper's in one panel.
    """
    scales = {layer.scale for layer in layers if layer.kind != "modelled"}
    if "demo" in scales and len(scales) > 1:
        raise ConfigError(
            "draw: demo scale and a paper's or a cluster's numbers do not belong in one panel. Use"
            " two."
        )
    published = [layer for layer in layers if layer.kind == "published"]
    for layer, marker in zip(published, MARKERS, strict=False):
        if layer.level:
            axis.axhline(layer.y[0], color=GREY, linewidth=1, linestyle=DASHED, label=layer.label)
            continue
        axis.plot(
            layer.x, layer.y, marker=marker, zorder=5, label=layer.label, clip_on=False, **HOLLOW
        )
    for number, layer in enumerate(layer for layer in layers if layer.kind != "published"):
        _draw_own(axis, layer, number)
    if "demo" in scales:
        mark_demo_scale(axis)


def _draw_own(axis: Any, layer: Layer, number: int) -> None:
    """Draws a modelled or measured layer: lines with a band, measured curves, or points with bars
    where there is an interval or a place is only a name.
    """
    colours = DEMO_COLOURS if layer.scale == "demo" else COLOURS
    colour = colours[number % len(colours)]
    marker = MARKERS[number % len(MARKERS)]
    is_model = layer.kind == "modelled"
    has_ends = bool(np.isfinite(layer.low).any())
    label = short(layer.label, 40)
    if (is_model and not layer.names) or (layer.joined and not has_ends):
        marked = is_model and len(layer.x) <= MARKED
        axis.plot(
            layer.x,
            layer.y,
            marker=marker if marked else None,
            markersize=4,
            color=colour,
            label=label,
        )
        if has_ends:
            axis.fill_between(layer.x, layer.low, layer.high, color=colour, alpha=0.18, linewidth=0)
        return
    axis.errorbar(
        layer.x + (BESIDE * (number + 1) if layer.names else 0.0),
        layer.y,
        yerr=np.stack([layer.y - layer.low, layer.high - layer.y]),
        fmt=f"{marker}-" if layer.joined else marker,
        capsize=2,
        markersize=6,
        zorder=4,
        color=colour,
        label=label,
    )


def panel(
    axis: Any,
    layers: Sequence[Layer],
    *,
    ticks: Mapping[Any, str] | Iterable[float] = (),
    legend: Mapping[str, Any] | None = None,
    broken: bool = False,
    **shown: Any,
) -> None:
    """Draws the layers of one panel (`draw`) and dresses it.

    `ticks` of x are numbers, or texts by their places; `legend` is given to `axis.legend`, and
    the rest to `axis.set`. A logarithmic y has plain numbers; one that is `broken` has a mark
    where it leaves out what is below.
    """
    draw(axis, layers)
    axis.set(**shown)
    if broken:
        slash: Any = [(-1, -0.5), (1, 0.5)]
        place = {"transform": axis.transAxes, "clip_on": False, "linestyle": "none"}
        axis.plot([0, 0], [0.03, 0.07], marker=slash, markersize=10, color=SLATE, **place)
    if axis.get_yscale() == "log":
        plain_ticks(axis)
    texts = ticks if isinstance(ticks, Mapping) else {tick: f"{tick:,}" for tick in ticks}
    if texts:
        axis.set_xticks([*texts], [*texts.values()])
        axis.minorticks_off()
    if legend is not None:
        axis.legend(**legend)


def legend_above(figure: Any, ncols: int) -> None:
    """Names above all panels what the first one shows."""
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=ncols
    )


def name_lines(axis: Any) -> None:
    """Writes the name of each line, or of points above each other, at its right end in its colour,
    in place of a legend; a level has none.
    """
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground=GROUND)]
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
        line = getattr(handle, "lines", [handle])[0]
        style = {"textcoords": "offset points", "va": "center", "color": line.get_color()}
        x, y = line.get_data()
        if list(x) != [0, 1]:
            axis.annotate(label, (x[-1], y[-1]), xytext=(7, 0), path_effects=halo, **style)


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
        fontsize=18,
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
    if len(names) == 1:
        return names
    first = [names[0] * 2] if under_one else []
    rest = [names[i : i + 2] for i in range(len(first), len(names), 2)]
    return ";".join(row if len(row) == 2 else row * 2 for row in [*first, *rest])


def finish(
    figure: Any,
    panels: Mapping[str, Sequence[Layer]],
    shows: str,
    holds: str = "",
    misses: str = "",
    *,
    notes: Sequence[str] = (),
) -> Drawn:
    """Returns a figure with its caption of three lines at most and the notes of where each layer
    comes from; its table.

    Args:
        figure: of `kit.show.style.new_figure`, whose constrained layout makes room for the caption.
        panels: layers of each panel, by its name in the table; the only one may have none.
        shows: what is drawn.
        holds: what is seen, or which published values the model meets.
        misses: where it misses them, or what could not be read.
        notes: fits, assumptions and numbers that are not in the picture.
    """
    layers = [layer for each in panels.values() for layer in each]
    parts = [
        textwrap.fill(part, LINE, break_on_hyphens=False) for part in (shows, holds, misses) if part
    ]
    figure.supxlabel("\n".join(parts), x=0.005, ha="left", fontsize="medium", linespacing=1.3)
    figure.notes = (*notes, *sources(layers))
    figure.runs = frozenset(name for layer in layers for name in layer.runs)
    return figure, [
        row
        for name, each in panels.items()
        for row in table(each, **({"panel": name} if name else {}))
    ]


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
    return Table(rows, " ".join(caption), (*notes, *sources(layers)), runs)


def facts_table(
    facts: Facts,
    follows: Mapping[str, dict[str, str]],
    own: Sequence[tuple[Run, dict[str, str]]],
    layers: Sequence[Layer],
    *,
    labels: Mapping[str, str],
    caption: Sequence[str],
    note: str,
    kind: str = "computed",
) -> Drawn:
    """Returns a table with a column for each model and each run of the reader's, and its rows with
    their kind: `published`, or `kind`.

    Args:
        facts: of the paper.
        follows: what follows from what the paper states, by model and label.
        own: the same of runs; what only a paper has stays empty.
        layers: where it comes from.
        labels: of what the paper states, by their series.
        caption: of the table.
        note: what to know about it.
        kind: of what follows.
    """
    columns = {
        model: {label: facts.text(series, model) for series, label in labels.items()} | more
        for model, more in follows.items()
    }
    for run, more in own:
        title = run.name + (" (demo scale)" if scale_of(run) == "demo" else "")
        columns[title] = _stated(run, labels) | more
    rows = [
        {"": name} | {title: column.get(name, "") for title, column in columns.items()}
        for name in next(iter(columns.values()))
    ]
    drawn = paper_table(rows, layers, *caption, notes=[note], runs=[run.name for run, _ in own])
    return drawn, [
        {"layer": "published" if row[""] in labels.values() else kind} | row for row in rows
    ]


def _stated(run: Run, labels: Mapping[str, str]) -> dict[str, str]:
    """Returns what a run's model, plan and recipe state, by the labels of the same fields in a
    paper.
    """
    shape = {f"model_{name}": value for name, value in run.spec.to_dict().items()}
    training = run.plan.to_dict() | run.recipe.to_dict()
    fields = shape | {f"recipe_{name}": value for name, value in training.items()}
    return {
        label: f"{fields[series]:g}" if series in shape else str(fields[series])
        for series, label in labels.items()
        if fields.get(series) is not None
    }
