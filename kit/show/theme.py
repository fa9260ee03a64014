"""Sizes and colours of all figures, for light and dark pages, and a safe import of matplotlib."""

import contextlib
import sys
from pathlib import Path

WIDTH = 6.25
"""Width of every figure in inches, which is 600 pixels on a page.

In a browser window of 1,000 pixels, JupyterLab's side bar leaves 548 pixels for a figure. If a
figure of this width is scaled to 548 pixels, its smallest text is 14 pixels high, as high as the
text of the page."""
PIXELS_PER_INCH = 96
"""Number of pixels on a page for one inch of a figure."""
TEXT = 11.5
"""Size of all text in a figure in points, as in `kit.mplstyle`. In a figure that is 548 pixels
wide, the text is 14 pixels high."""

# These are the colours of Okabe and Ito, darkened until lines have a contrast of 4 on white.
# Drawing code uses these names and not matplotlib's C0, C1. Matplotlib looks up C0 when it saves a
# figure, and the kit's style may not be set then.
BLUE = "#0072B2"
VERMILION = "#B34D00"
GREEN = "#007A5A"
PURPLE = "#9A4A78"
OLIVE = "#8A7A00"

INK = "#222222"
GREY = "#666666"
SLATE = "#555555"
GRID = "#E6E6E6"
GROUND = "#FFFFFF"
MUTED = "color:var(--jp-ui-font-color2,gray)"
"""CSS of less important text on a page. The colour comes from the theme of the page."""
HUES = (BLUE, VERMILION, GREEN, PURPLE)
"""Colours of curves in one panel, in the order of their use."""
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
"""Maps each colour on a light page, in lower case, to its colour on a dark page. A colour with low
contrast on the light background has low contrast on the dark background too."""


def import_matplotlib() -> None:
    """Imports matplotlib without a settings file from the working directory.

    Matplotlib reads a file `matplotlibrc` in the working directory first, which may belong to
    another user. If the file were a pipe, the import would never end. So the import is made in
    another directory.
    """
    if "matplotlib" not in sys.modules:
        with contextlib.chdir(Path(__file__).parent):
            import matplotlib  # noqa: F401
