"""A matplotlib figure that shows itself in the theme of the page around it, with its sources
below.
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
"""Of the picture for pages that show no HTML."""
THEMES = """<style>
.kit-figure > img { max-width: 100%; height: auto; }
:is([data-jp-theme-light=false], .vscode-dark) .kit-figure > img.kit-light { display: none; }
:is([data-jp-theme-light=false], .vscode-dark) .kit-figure > img.kit-dark {
  display: inline !important;
}
</style>"""
"""Style sheet by which JupyterLab and VS Code show the drawing of their theme. It holds for the
whole page, so each of its selectors names the figure. A page that strips style sheets shows the
light drawing, on its own ground. JupyterLab strips style sheets and the attribute `hidden` from the
outputs of a notebook that it does not trust, and keeps `display:none`."""


_settings_lock = threading.RLock()


@contextlib.contextmanager
def drawing_settings(settings: str | dict[str, Any]) -> Iterator[None]:
    """Applies matplotlib's settings, from a style file or a table, in a block of one thread.

    The settings belong to the process. A dashboard draws its saved picture in a thread of its own,
    and without the lock the end of its block would reset the settings of a block in another thread.
    """
    with _settings_lock, style.context(settings):
        yield


class ThemedFigure(Figure):
    """A figure in the kit's style, whose colours all have a twin for dark pages
    (`kit.show.theme.DARK`).
    """

    notes: tuple[str, ...] = ()
    """Where what is drawn comes from, and how well it is known: for the page below the figure."""
    runs: frozenset[str] = frozenset()
    """Names of the run directories of the reader's own whose points are in it."""
    left_out: tuple[str, ...] = ()
    """What was given to be drawn and is not, with the reason."""

    @property
    def caption(self) -> str:
        """What is written below the panels, on one line."""
        return self.get_supxlabel().replace("\n", " ")

    def to_svg(self, *, dark: bool = False) -> str:
        """Returns the drawing as SVG, for a light page or a dark one; text is drawn, not set, so
        no font is needed.
        """
        stream = io.StringIO()
        with drawing_settings({"svg.hashsalt": "kit"}):  # Equal drawings get equal names of parts.
            self.savefig(stream, format="svg", metadata={"Date": None})
        # A hundredth of a point is enough of a path; what scales glyphs keeps all its digits.
        light = re.sub(
            r'(?<= d=")[^"]*',
            lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]),
            stream.getvalue(),
        )
        if not dark:
            return light
        return re.sub(r"#[0-9a-f]{6}\b", lambda found: DARK.get(found[0], found[0]), light)

    def to_html(self, *, alt: str = "") -> str:
        """Returns both drawings, of which the page shows the one of its theme, and the notes.

        `alt` is read instead of the picture; by default its caption, or the titles of its panels.
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
        """Returns what a notebook keeps of it: HTML, and a picture for pages that show none."""
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
    """Returns a drawing as the address of an image: JupyterLab strips drawings from pages that
    it does not trust.
    """
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
