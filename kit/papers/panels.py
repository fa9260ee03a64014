"""Draws the figures and tables of the papers.

Each figure is described by two objects. A function computes the `FigureContent` (numbers) from
runs. The `Appearance` (texts and settings) comes from `data/figures.toml`. For a table, a
`TableContent` replaces the `FigureContent`.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cluster.record import ConfigError
from kit.estimate.choose.figures import plain_ticks
from kit.papers.appearance import Appearance
from kit.papers.facts import Facts
from kit.papers.layers import Drawn, FigureLayer, scale_of, table
from kit.run import Run
from kit.show.style import Rows, new_figure, short
from kit.show.table import Table
from kit.show.theme import BLUE, GREEN, GREY, GROUND, OLIVE, PURPLE, SLATE, VERMILION

COLOURS = (BLUE, VERMILION, GREEN, SLATE)
"""Colours of modelled layers and of layers that were measured on clusters, in the order of their
use."""
DEMO_COLOURS = (PURPLE, OLIVE)
"""Colours of layers that were measured at demo scale (on this machine). No other layer has these
colours."""
MARKERS = "osD^vP"
HOLLOW: dict[str, Any] = {
    "color": GREY,
    "linestyle": "none",
    "markerfacecolor": "white",
    "markersize": 8,
    "markeredgewidth": 1.5,
}
"""Matplotlib style of the hollow grey markers that show published points."""
DASHED: Any = (0, (4, 3))
NAME_SPACING = 0.14
"""Horizontal distance between points of different layers in one category, in units of the x axis,
where categories are 1 apart."""
NAME_HEIGHT = 14.0
"""Smallest distance, in points, between two names at the ends of lines."""
BAR_SPACING = 7.0
"""Horizontal distance between the error bars of two modelled lines, in points of 1/72 inch, if the
points of the lines fill their panel."""
MAX_MARKED_POINTS = 20
"""Largest number of points up to which a modelled line has a marker at each point."""
CAPTION_WIDTH = 74
"""Largest number of characters per line of a caption."""
LEAD = {"published": "Published", "modelled": "Modelled", "measured": "Measured"}
"""First word of a sentence on a source, by the kind of the layer that has this source."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FigureContent:
    """Content of a figure: the layers (curves and points) of its panels, and the numbers in its
    texts.
    """

    panels: Mapping[str, Sequence[FigureLayer]]
    """Layers (curves and points) of each panel, by the panel's name in the table. If a figure has
    only one panel, its name may be ""."""
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Text for each placeholder in the captions, titles and notes, by the name of the
    placeholder."""
    notes: Sequence[str] = ()
    """Notes below the figure that depend on the data. They follow the notes from
    `data/figures.toml`."""
    ticks: Mapping[str, Mapping[Any, str]] = dataclasses.field(default_factory=dict)
    """For each panel name, a mapping from the coordinates of x ticks to their labels. Only panels
    whose ticks depend on computed numbers are contained."""
    rows: Rows | None = None
    """Rows of the table that belongs to the figure. None: one row per point of each layer."""
    axes: Sequence[str] | None = None
    """Names of the panels that are drawn, in order. None: all keys of `panels`."""
    layout: Mapping[str, Any] | None = None
    """Keyword arguments of `new_figure`: arrangement of the panels and height of the figure. None:
    the layout that `data/figures.toml` has for this number of panels."""
    draw_panel: Callable[[Any, str], None] | None = None
    """Function `draw_panel(axis, name)` that draws the panel with this name into a matplotlib axis.
    None: the layers of the panel are drawn as curves and points (`draw_layers`)."""
    annotate: Callable[[Any], None] | None = None
    """Function `annotate(figure)` that adds whatever is not a layer, such as texts and marks, after
    the panels are drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableContent:
    """Content of a table that a paper prints: its cells, its data, and the numbers in its texts."""

    cells: Rows
    """Rows of the table as the user sees them, with cells as texts by column. All rows have equal
    keys."""
    rows: Rows
    """Rows of the table as data. They are written to the CSV file."""
    layers: Sequence[FigureLayer]
    """Layers that are not drawn. They only name the sources of the cells, which are listed below
    the table."""
    runs: Iterable[str] = ()
    """Names of the user's runs that the table contains."""
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Text for each placeholder in the captions, titles and notes, by the name of the
    placeholder."""
    notes: Sequence[str] = ()
    """Notes below the table that depend on the data. They follow the notes from
    `data/figures.toml`."""


def draw_content(appearance: Appearance, content: FigureContent | TableContent) -> Drawn:
    """Returns (figure or table, rows of its data). The content is drawn with the texts and settings
    of `appearance`.
    """
    values = content.values
    caption = [line.format(**values).strip() for line in appearance.caption]
    notes = [note.format(**values) for note in appearance.notes]
    notes += content.notes
    if isinstance(content, TableContent):
        text = " ".join(line for line in caption if line)
        notes += sources(content.layers)
        return Table(content.cells, text, notes, content.runs), content.rows
    return _draw_figure(appearance, content, caption, notes)


def _draw_figure(
    appearance: Appearance, content: FigureContent, caption: Sequence[str], notes: Sequence[str]
) -> Drawn:
    """Returns (figure, rows of its data) for the content. The placeholders in the caption and the
    notes are already replaced.
    """
    names = content.axes if content.axes is not None else [*content.panels]
    layout = dict(content.layout or appearance.layout(len(names)))
    with new_figure(layout.pop("mosaic"), **layout) as (figure, axes):
        for axis, name in zip(axes, names, strict=True):
            layers = content.panels.get(name, ())
            settings = appearance.panel_settings(name, content.values)
            # The distance between intervals depends on the scale of the axis.
            axis.set_xscale(settings.get("xscale", "linear"))
            if content.draw_panel is not None:
                content.draw_panel(axis, name)
            else:
                draw_layers(axis, layers)
            if name in content.ticks:
                settings["ticks"] = content.ticks[name]
            set_panel(axis, layers, **settings)
        if appearance.legend_columns:
            _add_legend_above(figure, appearance.legend_columns)
        if content.annotate is not None:
            content.annotate(figure)
        _write_caption(figure, caption)
    layers = [layer for panel_layers in content.panels.values() for layer in panel_layers]
    figure.notes = (*notes, *sources(layers))
    figure.runs = frozenset(name for layer in layers for name in layer.runs)
    rows = content.rows
    if rows is None:
        rows = panel_rows(content.panels)
    return figure, rows


def panel_rows(panels: Mapping[str, Sequence[FigureLayer]]) -> Rows:
    """Returns the table rows of all layers, one row per point. The column `panel` has the name of
    the panel. Rows of a panel with the name "" lack this column.
    """
    rows = []
    for name, layers in panels.items():
        columns = {"panel": name} if name else {}
        rows += table(layers, **columns)
    return rows


def _write_caption(figure: Any, lines: Sequence[str]) -> None:
    """Writes the caption below the panels, with long lines wrapped. Matplotlib's constrained layout
    then leaves space for it.
    """
    wrapped = [textwrap.fill(line, CAPTION_WIDTH, break_on_hyphens=False) for line in lines if line]
    figure.supxlabel("\n".join(wrapped), x=0.005, ha="left", fontsize="medium", linespacing=1.3)


def draw_layers(axis: Any, layers: Sequence[FigureLayer]) -> None:
    """Draws the layers of one panel. Each modelled or measured layer has a different colour.

    A panel that has layers at demo scale is marked with the words `demo scale`.

    Raises:
        ConfigError: The panel has points at demo scale and points of a paper or a cluster.
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
        else:
            style = HOLLOW | {"marker": marker}
            axis.plot(layer.x, layer.y, zorder=5, label=layer.label, clip_on=False, **style)
    others = [layer for layer in layers if layer.kind != "published"]
    shifts = _interval_shifts(others)
    for number, layer in enumerate(others):
        _draw_modelled_or_measured(axis, layer, number, shifts.get(number))
    if "demo" in scales:
        mark_demo_scale(axis)


def _interval_shifts(layers: Sequence[FigureLayer]) -> dict[int, float]:
    """Returns, for each modelled line whose interval is drawn as error bars, its shift to the right
    in multiples of BAR_SPACING. The keys are positions in `layers`.

    Bands of several lines would cover each other. So the intervals are error bars, side by side, if
    a panel has several modelled lines with intervals. The result is empty for a single line, which
    has a band.
    """
    places = [
        i
        for i, layer in enumerate(layers)
        if layer.kind == "modelled" and not layer.names and np.isfinite(layer.low).any()
    ]
    if len(places) < 2 or any(len(layers[i].x) > MAX_MARKED_POINTS for i in places):
        return {}
    return {i: order - (len(places) - 1) / 2 for order, i in enumerate(places)}


def _shifted_x(axis: Any, x: Any, shift: float) -> Any:
    """Returns the x values of a line, moved to the right by `shift` times BAR_SPACING."""
    width = axis.get_window_extent().width * 72 / axis.figure.dpi
    share = shift * BAR_SPACING / width
    if axis.get_xscale() == "log":
        return x * (x.max() / x.min()) ** share
    return x + share * (x.max() - x.min())


def _draw_modelled_or_measured(
    axis: Any, layer: FigureLayer, number: int, shift: float | None
) -> None:
    """Draws a layer (data series) of a panel, modelled or measured. `number` selects its colour and
    marker.

    A modelled layer with numeric x values is drawn as a line, with a band for the interval. If
    `shift` is given, the interval is drawn as error bars instead, and the line is moved to the
    right by `shift` times BAR_SPACING. A measured layer whose points are joined and have no
    interval is drawn as a line too. Any other layer is drawn as points with error bars.
    """
    colours = COLOURS
    if layer.scale == "demo":
        colours = DEMO_COLOURS
    colour = colours[number % len(colours)]
    marker = MARKERS[number % len(MARKERS)]
    is_model = layer.kind == "modelled"
    has_interval = bool(np.isfinite(layer.low).any())
    style: dict[str, Any] = {"color": colour, "label": short(layer.label, 40)}
    interval = np.stack([layer.y - layer.low, layer.high - layer.y])
    if shift is not None:
        x = _shifted_x(axis, layer.x, shift)
        bars: dict[str, Any] = {"capsize": 2, "elinewidth": 1.2, "markersize": 5}
        axis.errorbar(x, layer.y, yerr=interval, fmt=f"{marker}-", **bars, **style)
        return
    if (is_model and not layer.names) or (layer.joined and not has_interval):
        if is_model and len(layer.x) <= MAX_MARKED_POINTS:
            style["marker"] = marker
        axis.plot(layer.x, layer.y, markersize=4, **style)
        if has_interval:
            axis.fill_between(layer.x, layer.low, layer.high, color=colour, alpha=0.18, linewidth=0)
        return
    x = layer.x
    if layer.names:
        x = x + NAME_SPACING * (number + 1)
    if layer.joined:
        marker += "-"
    axis.errorbar(x, layer.y, yerr=interval, fmt=marker, capsize=2, markersize=6, zorder=4, **style)


def set_panel(
    axis: Any,
    layers: Sequence[FigureLayer],
    *,
    ticks: Mapping[Any, str] | Sequence[float] | str = (),
    legend: Mapping[str, Any] | None = None,
    broken: bool = False,
    headroom: float = 0.0,
    margin: float = 0.0,
    **settings: Any,
) -> None:
    """Applies the settings of one panel to its axis. On a logarithmic y axis, the ticks are
    labelled with plain numbers.

    Args:
        axis: matplotlib axis in which the layers are drawn.
        layers: layers of this panel.
        ticks: coordinates of the x ticks, or a mapping from coordinates to labels. "points" places
            a tick at the x of each point.
        legend: keyword arguments of `axis.legend`. None: the panel has no legend.
        broken: whether to draw a slash on the y axis, which shows that the axis does not start at
            0.
        headroom: upper end of the y axis, as a multiple of the highest number in the panel. The
            lower end is then 0. The default 0 leaves the y axis as it is.
        margin: factor, above 1, by which the ends of the x axis lie beyond the first and last
            point. The default 0 leaves the x axis as it is.
        settings: further keyword arguments, which are passed to `axis.set`.
    """
    axis.set(**settings)
    if headroom:
        highest = max(float(np.nanmax([layer.y, layer.high])) for layer in layers)
        axis.set_ylim(0, headroom * highest)
    if margin:
        places = np.concatenate([layer.x for layer in layers])
        axis.set_xlim(places.min() / margin, places.max() * margin)
    if broken:
        slash: Any = [(-1, -0.5), (1, 0.5)]
        place = {"transform": axis.transAxes, "clip_on": False, "linestyle": "none"}
        axis.plot([0, 0], [0.03, 0.07], marker=slash, markersize=10, color=SLATE, **place)
    if axis.get_yscale() == "log":
        plain_ticks(axis)
    if ticks == "points":
        ticks = sorted({int(x) for layer in layers for x in layer.x})
    texts = ticks
    if not isinstance(texts, Mapping):
        texts = {tick: f"{tick:,}" for tick in ticks}
    if texts:
        axis.set_xticks([*texts], [*texts.values()])
        axis.minorticks_off()
    if legend is not None:
        axis.legend(**legend)


def _add_legend_above(figure: Any, columns: int) -> None:
    """Adds a legend above all panels, which names the lines of the first panel."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def label_line_ends(axis: Any) -> None:
    """Writes the name of each line right of its end in the line's colour, instead of a legend. All
    names begin right of the panel's last point, where no error bar is.

    The name of points without a line is written above their highest point. The name of points with
    error bars is written at the last point. Horizontal reference lines are not named.
    """
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground=GROUND)]
    named = []
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
        line = getattr(handle, "lines", [handle])[0]
        if list(line.get_xdata()) != [0, 1]:
            named.append((handle, line, label))
    last = max(max(line.get_xdata()) for _, line, _ in named)
    shifts = _label_shifts(axis, [line for _, line, _ in named if line.get_linestyle() == "-"])
    for handle, line, label in named:
        x, y = line.get_data()
        style = {"textcoords": "offset points", "color": line.get_color(), "path_effects": halo}
        if line.get_linestyle() == "-":
            place = (7, shifts[line])
            axis.annotate(label, (last, y[-1]), xytext=place, va="center", **style)
        elif handle is line:
            highest = int(np.argmax(y))
            place = (x[highest], y[highest])
            axis.annotate(label, place, xytext=(0, 7), ha="center", va="bottom", **style)
        else:
            axis.annotate(label, (x[-1], y[-1]), xytext=(7, 0), va="center", **style)


def _label_shifts(axis: Any, lines: Sequence[Any]) -> dict[Any, float]:
    """Returns, for each line, the number of points by which its name is moved up, so that names do
    not overlap. Names keep the order of the ends of the lines.
    """
    axis.figure.draw_without_rendering()  # This computes the size and the limits of the panel.
    points_per_pixel = 72 / axis.figure.dpi
    ends = {
        line: axis.transData.transform((0, line.get_ydata()[-1]))[1] * points_per_pixel
        for line in lines
    }
    order = sorted(ends, key=lambda line: ends[line])
    raised: dict[Any, float] = {}
    for number, line in enumerate(order):
        lowest = raised[order[number - 1]] + NAME_HEIGHT if number else ends[line]
        raised[line] = max(ends[line], lowest)
    half = max((raised[line] - ends[line] for line in order), default=0.0) / 2
    return {line: raised[line] - ends[line] - half for line in order}


def mark_demo_scale(axis: Any) -> None:
    """Writes `demo scale` across a panel whose numbers were measured on this machine and not on a
    cluster.
    """
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


def sources(layers: Sequence[FigureLayer]) -> list[str]:
    """Returns one sentence per source, which names the source and the labels of all layers that
    have it.
    """
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for layer in layers:
        labels.setdefault((layer.kind, layer.source), {})[layer.label] = None
    return [
        f"{LEAD[kind]} ({', '.join(names)}): {source}.".replace("..", ".")
        for (kind, source), names in labels.items()
    ]


def paper_facts_table(
    facts: Facts,
    derived: Mapping[str, dict[str, str]],
    own_cells: Sequence[tuple[Run, dict[str, str]]],
    layers: Sequence[FigureLayer],
    *,
    labels: Mapping[str, str],
    kind: str = "computed",
) -> TableContent:
    """Returns a table with a column for each model of the paper and for each of the user's runs.

    Each row for the CSV file has a column `layer`, which says how the numbers are known. Its value
    is `published` for the rows in `labels`, and `kind` for all other rows.

    Args:
        facts: published numbers of the paper.
        derived: cells that are derived from published numbers. Maps a model to a dict from row
            label to cell.
        own_cells: (run, cells) for each of the user's runs. `cells` maps row labels to cells that
            are derived from the run. A cell stays empty if the run has no value for it.
        layers: layers whose sources are listed below the table.
        labels: maps the series of published numbers that the table shows to the label of their row.
        kind: text that says how the numbers outside `labels` are known, such as `computed` or
            `modelled`.
    """
    columns = {}
    for model, cells in derived.items():
        stated = {label: facts.text(series, model) for series, label in labels.items()}
        columns[model] = stated | cells
    row_names = [*next(iter(columns.values()))]
    for run, cells in own_cells:
        title = run.name
        if scale_of(run) == "demo":
            title += " (demo scale)"
        columns[title] = _stated_cells(run, labels) | cells
    shown = []
    rows = []
    for name in row_names:
        cells = {"": name} | {title: column.get(name, "") for title, column in columns.items()}
        known = "published" if name in labels.values() else kind
        shown.append(cells)
        rows.append({"layer": known} | cells)
    names = [run.name for run, _ in own_cells]
    return TableContent(cells=shown, rows=rows, layers=layers, runs=names)


def _stated_cells(run: Run, labels: Mapping[str, str]) -> dict[str, str]:
    """Returns a dict from row label to text, with the fields of a run's model, plan and recipe that
    the paper publishes too.
    """
    shape = {f"model_{name}": value for name, value in run.spec.to_dict().items()}
    training = run.plan.to_dict() | run.recipe.to_dict()
    fields = shape | {f"recipe_{name}": value for name, value in training.items()}
    cells = {}
    for series, label in labels.items():
        value = fields.get(series)
        if value is None:
            continue
        cells[label] = f"{value:g}" if series in shape else str(value)
    return cells
