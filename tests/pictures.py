"""What every figure keeps to: text of a page's size, three lines of caption, nothing cut,
nothing on another.
"""

import re
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from kit.show.theme import DARK, TEXT, WIDTH

WATERMARK = "demo scale"
INKS = ("#ffffff", "#111111")
"""Grounds of a light and a dark page."""


def check_figure(figure: Any) -> None:
    """Asserts that a figure can be read on a light and on a dark page of 1,000 pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    assert figure.get_figwidth() == WIDTH
    assert figure.get_supxlabel().count("\n") <= 2, f"more than three lines: {figure.caption}"
    texts = _drawn(figure)
    small = [text.get_text() for text in texts if text.get_fontsize() < TEXT]
    assert not small, f"smaller than the page's text: {small}"
    inside = figure.bbox.padded(2)
    for text in texts:
        box = text.get_window_extent(renderer)
        assert inside.containsx(box.x0) and inside.containsx(box.x1), (
            f"cut at the side: {text.get_text()!r}"
        )
        assert inside.containsy(box.y0) and inside.containsy(box.y1), f"cut: {text.get_text()!r}"
    for one, other in combinations([text for text in texts if text.get_text() != WATERMARK], 2):
        boxes = [text.get_window_extent(renderer).padded(-1) for text in (one, other)]
        assert not boxes[0].overlaps(boxes[1]), (
            f"one on the other: {one.get_text()!r}, {other.get_text()!r}"
        )
    for colour in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", figure.to_svg())) - set(DARK):
        assert min(_contrast(colour, ground) for ground in INKS) >= 3, (
            f"{colour} has no twin for a dark page"
        )


def check_data(figure: Any) -> None:
    """Asserts that a figure can be read and that its data are seen: no legend covers a line or a
    point, and no limit of a panel cuts an interval. What lies behind all (zorder 0) may be cut.
    """
    check_figure(figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    for panel in figure.axes:
        legend = panel.get_legend()
        for line in panel.get_lines() if legend else ():
            box, path = legend.get_window_extent(renderer).padded(-2), line.get_path()
            place = line.get_transform().transform_path(path).cleaned(remove_nans=True)
            is_line = line.get_linestyle() != "None"
            assert not any(box.contains(*point) for point in place.vertices[:-1]) and not (
                is_line and place.intersects_bbox(box, filled=False)
            ), f"under the legend: {line.get_label()!r}"
        drawn = [each for each in panel.collections if each.get_zorder() and each.get_paths()]
        ends = [path.vertices for each in drawn for path in each.get_paths()]
        heights = np.concatenate(ends)[:, 1] if ends else np.zeros(0)
        low, high = sorted(panel.get_ylim())
        cut = heights[(heights < low) | (heights > high)]
        assert not len(cut), f"an interval that is cut: {cut}, {panel.get_title(loc='left')!r}"


def _drawn(figure: Any) -> list[Text]:
    """Returns the texts that are seen: of tick labels, those within their axis."""
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
    """Returns the contrast of two colours as WCAG defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
