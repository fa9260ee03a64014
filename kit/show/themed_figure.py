"""A matplotlib figure that a notebook shows in the theme of the page, light or dark, with notes on
sources below.
"""

import base64
import contextlib
import html
import io
import re
import threading
from collections.abc import Iterator
from typing import Any

from kit.show.table import notes_html
from kit.show.theme import DARK, PIXELS_PER_INCH, import_matplotlib

import_matplotlib()
from matplotlib import style  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

DPI = 120
"""Resolution of the PNG for pages that show no HTML, in dots per inch."""
THEMES = """<style>
.kit-figure > img { max-width: 100%; height: auto; }
:is([data-jp-theme-light=false], .vscode-dark) .kit-figure > img.kit-light { display: none; }
:is([data-jp-theme-light=false], .vscode-dark) .kit-figure > img.kit-dark {
  display: inline !important;
}
</style>"""
"""Style sheet with which JupyterLab and VS Code show the drawing for their theme.

The style sheet applies to the whole page, so each selector names the class of the figure. A page
that removes style sheets shows the light drawing, which has its own background. JupyterLab removes
style sheets and the attribute `hidden` from the outputs of a notebook that it does not trust, and
keeps `display:none`."""


_settings_lock = threading.RLock()


@contextlib.contextmanager
def drawing_settings(settings: str | dict[str, Any]) -> Iterator[None]:
    """Applies matplotlib's settings, from a style file or a dictionary, within the block. Blocks of
    other threads wait until it has ended.

    Matplotlib's settings are shared by the process. A dashboard draws its saved picture in a
    separate thread. Without the lock, the end of its block would reset the settings of a block in
    another thread.
    """
    with _settings_lock, style.context(settings):
        yield


class ThemedFigure(Figure):
    """A figure in the kit's style. It can also be drawn for a dark page, since each of its colours
    has a dark counterpart in `kit.show.theme.DARK`.
    """

    notes: tuple[str, ...] = ()
    """Sentences on sources and uncertainty of the data, shown below the figure."""
    runs: frozenset[str] = frozenset()
    """Names of the user's own run directories whose points are in the figure."""
    left_out: tuple[str, ...] = ()
    """Sentences that say which given data are not drawn, with the reason."""

    @property
    def caption(self) -> str:
        """Text below the panels, as one line."""
        return self.get_supxlabel().replace("\n", " ")

    def to_svg(self, *, dark: bool = False) -> str:
        """Returns the drawing as SVG, for a light page or, with `dark`, for a dark page. Letters
        are drawn as paths, so the reader needs no font.
        """
        stream = io.StringIO()
        # With a fixed salt, equal drawings have equal names of their elements.
        with drawing_settings({"svg.hashsalt": "kit"}):
            self.savefig(stream, format="svg", metadata={"Date": None})
        # Coordinates of paths are cut to hundredths of a point, which makes the SVG smaller. Scale
        # factors of glyphs keep all digits.
        light = re.sub(
            r'(?<= d=")[^"]*',
            lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]),
            stream.getvalue(),
        )
        if not dark:
            return light
        return re.sub(r"#[0-9a-f]{6}\b", lambda found: DARK.get(found[0], found[0]), light)

    def to_html(self, *, alt: str = "") -> str:
        """Returns HTML with the light and the dark drawing and the notes. The page shows the
        drawing for its theme.

        `alt` is the alternative text for readers who cannot see the picture. The default is the
        caption, or else the titles of the panels.
        """
        words = alt or self.caption or "; ".join(axis.get_title(loc="left") for axis in self.axes)
        size = (
            f"width='{self.get_figwidth() * PIXELS_PER_INCH:.0f}'"
            f" alt='{html.escape(words, quote=True)}'"
        )
        light = f"<img class='kit-light' {size} src='{_as_address(self.to_svg())}'>"
        dark = (
            f"<img class='kit-dark' hidden style='display:none' {size}"
            f" src='{_as_address(self.to_svg(dark=True))}'>"
        )
        return (
            f"{THEMES}<div"
            f" class='kit-figure'>{light}{dark}{notes_html(self.notes, self.left_out)}</div>"
        )

    def to_bundle(self, *, alt: str = "") -> dict[str, str]:
        """Returns the output of a notebook cell by MIME type: HTML, and a PNG in base64 for pages
        that show no HTML.
        """
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=DPI)
        return {
            "text/html": self.to_html(alt=alt),
            "image/png": base64.b64encode(picture.getvalue()).decode(),
        }

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        return self.to_bundle(), {
            "image/png": {"width": round(self.get_figwidth() * PIXELS_PER_INCH)}
        }


def _as_address(svg: str) -> str:
    """Returns an SVG as a data URL for an image element. JupyterLab removes inline SVG from the
    outputs of a notebook that it does not trust.
    """
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
