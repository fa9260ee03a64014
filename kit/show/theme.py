"""The sizes of every figure, its colours on a light and on a dark page, and the import of
matplotlib.
"""

import contextlib
import sys
from pathlib import Path

WIDTH, PIXELS_PER_INCH = 6.25, 96
"""Inches, of every figure: 600 pixels of a page. Shown in 548 pixels, which is what JupyterLab's
side bar leaves of a window of 1,000, its smallest text is still as high as the page's own, 14
pixels."""
TEXT = 11.5
"""Points, of all text (as in `kit.mplstyle`): 14 pixels at 548."""
BLUE, VERMILION, GREEN, PURPLE, OLIVE = "#0072B2", "#B34D00", "#007A5A", "#9A4A78", "#8A7A00"
"""The Okabe-Ito hues, darkened until lines have a contrast of 4 on white. Written out where they
are used, since a cycle's C0, C1 are looked up when the figure is saved, outside its style."""
INK, GREY, SLATE, GRID, GROUND = "#222222", "#666666", "#555555", "#E6E6E6", "#FFFFFF"
MUTED = "color:var(--jp-ui-font-color2,gray)"
"""Of less important words on a page: its theme's own."""
HUES = (BLUE, VERMILION, GREEN, PURPLE)
DARK = {
    light.lower(): dark
    for light, dark in {
        BLUE: "#56B4E9",
        VERMILION: "#FF9A52",
        GREEN: "#2BCB9A",
        PURPLE: "#E08FC0",
        OLIVE: "#D9C64A",
        INK: "#E4E4E4",
        "#444444": "#C8C8C8",
        SLATE: "#B4B4B4",
        GREY: "#A6A6A6",
        GRID: "#333333",
        GROUND: "#111111",
        "#56A0D3": "#3C7FAE",
        "#A9CBE6": "#27506E",
        "#5E7F99": "#7F9DB5",
        "#B8C4CC": "#47525A",
        "#D27A3C": "#D67F3E",
        "#E39A63": "#A66230",
        "#F0C39C": "#754722",
        "#CC97B6": "#9A5F85",
        "#6DBFA4": "#1F8A69",
        "#BFBFBF": "#5C5C5C",
        "#ECECEC": "#2A2A2A",
    }.items()
}
"""Each colour of a figure on a dark page; what is paler on white is nearer to the dark ground."""


def import_matplotlib() -> None:
    """Imports matplotlib without the settings of the working directory.

    A file `matplotlibrc` there, which another user may have made, would be read first. If it were a
    pipe, the import would never end.
    """
    if "matplotlib" not in sys.modules:
        with contextlib.chdir(Path(__file__).parent):
            import matplotlib  # noqa: F401
