"""Checks of every figure: size of its text, at most three caption lines, no text cut at the edge,
no text on other text.
"""

import re
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.path import Path
from matplotlib.text import Text

from kit.show.theme import DARK, TEXT, WIDTH

WATERMARK = "demo scale"
INKS = ("#ffffff", "#111111")
"""Background colours of a light and of a dark page."""


def check_figure(figure: Any) -> None:
    """Asserts that a figure can be read on a light and on a dark page that is 1,000 pixels wide."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    assert figure.get_figwidth() == WIDTH
    assert figure.get_supxlabel().count("\n") <= 2, f"more than three lines: {figure.caption}"
    texts = _drawn(figure)
    small = [text.get_text() for text in texts if text.get_fontsize() < TEXT]
    assert not small, f"smaller than the page's text: {small}"
    inside = figure.bbox.padded(2)
    boxes = {text: text.get_window_extent(renderer) for text in texts}
    for text, box in boxes.items():
        assert inside.containsx(box.x0) and inside.containsx(box.x1), (
            f"cut at the side: {text.get_text()!r}"
        )
        assert inside.containsy(box.y0) and inside.containsy(box.y1), f"cut: {text.get_text()!r}"
    cores = [(text, box.padded(-1)) for text, box in boxes.items() if text.get_text() != WATERMARK]
    for (one, here), (other, there) in combinations(cores, 2):
        assert not here.overlaps(there), (
            f"one on the other: {one.get_text()!r}, {other.get_text()!r}"
        )
    # The layout engine has already placed the axes. A change of colours needs no new layout.
    figure.set_layout_engine("none")
    for colour in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", figure.to_svg())) - set(DARK):
        assert min(_contrast(colour, ground) for ground in INKS) >= 3, (
            f"{colour} has no twin for a dark page"
        )


BESIDE = ("axes fraction", "data")


def check_panels(figure: Any) -> None:
    """Asserts that texts and interval ends lie inside their panel, and that no legend or text
    covers data.
    """
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    for axis in figure.axes:
        inside, title = axis.bbox.padded(2), axis.get_title(loc="left")
        # Labels of rows are placed beside the panel intentionally, so they may lie outside it.
        beside = [text for text in axis.texts if getattr(text, "xycoords", "") == BESIDE]
        inner = [text for text in axis.texts if text not in beside]
        for text in [text for text in inner if text.get_text() != WATERMARK]:
            box = text.get_window_extent(renderer)
            assert inside.x0 <= box.x0 and inside.y0 <= box.y0, f"{title}: {text.get_text()!r}"
            assert box.y1 <= inside.y1, f"{title}: {text.get_text()!r} leaves its panel"
            assert box.x1 <= inside.x1, f"{title}: {text.get_text()!r} leaves its panel"
        paths = _data_paths(axis)
        for path in paths:
            ends = [end for end in np.asarray(path.vertices) if np.isfinite(end).all()]
            # A panel may show only a part of the x range.
            shown = [end for end in ends if inside.containsx(end[0])]
            out = [end for end in shown if not inside.containsy(end[1])]
            assert not out, f"{title}: a limit of the axis cuts data at {out}"
        drawn = [*paths, *(bar.get_path().transformed(bar.get_transform()) for bar in axis.patches)]
        for legend in filter(None, (axis.get_legend(), *figure.legends)):
            box = legend.get_window_extent(renderer).padded(-2)
            hidden = [path for path in drawn if path.intersects_bbox(box, filled=False)]
            assert not hidden, f"{title}: the legend stands on data"


def check_data(figure: Any) -> None:
    """Asserts that a figure can be read, and that all its data are visible."""
    check_figure(figure)
    check_panels(figure)


def _data_paths(axis: Any) -> list[Path]:
    """Returns the paths of the data in a panel, in pixels: lines, points, error bars and bands.
    Reference lines, marks and background shapes are left out.
    """
    lines = [line for line in axis.get_lines() if line.get_transform() == axis.transData]
    paths = [axis.transData.transform_path(line.get_path()) for line in lines]
    for collection in axis.collections:
        if collection.get_zorder() and collection.get_transform() == axis.transData:
            paths += [axis.transData.transform_path(path) for path in collection.get_paths()]
    return paths


def _drawn(figure: Any) -> list[Text]:
    """Returns the visible texts of a figure. Tick labels outside their axis limits are left out."""
    sides = [(panel, side) for panel in figure.axes for side in (panel.xaxis, panel.yaxis)]
    labels = {
        text
        for _, side in sides
        for text in (*side.get_ticklabels(), *side.get_ticklabels(minor=True))
    }
    ticks = [tick for panel, side in sides if panel.axison for tick in side._update_ticks()]
    seen = {tick.label1 for tick in ticks}
    return [
        text
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and (text not in labels or text in seen)
    ]


def _contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of two colours as defined by WCAG."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
