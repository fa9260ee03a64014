"""A matplotlib figure that notebooks show in the theme of the page, light or dark, with notes below
the figure that say where its data come from.
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
"""Resolution in dots per inch of the PNG for notebook viewers that do not render HTML."""
THEMES = """<style>
.kit-figure > img { max-width: 100%; height: auto; }
:is([data-jp-theme-light=false], .vscode-dark) .kit-figure > img.kit-light { display: none; }
:is([data-jp-theme-light=false], .vscode-dark) .kit-figure > img.kit-dark {
  display: inline !important;
}
</style>"""
"""Style sheet that makes JupyterLab and VS Code show only the drawing for their present theme,
light or dark.

It applies to the whole page, so each selector contains the class of the figure. A page that removes
style sheets shows the light drawing, which has a background colour. In a notebook that it does not
trust, JupyterLab removes style sheets and the attribute `hidden`, but keeps `display:none`."""


_settings_lock = threading.RLock()


@contextlib.contextmanager
def drawing_settings(settings: str | dict[str, Any]) -> Iterator[None]:
    """Applies matplotlib settings, from a style file or a dictionary, within the `with` block. A
    block in another thread waits until this block has ended.

    Matplotlib's settings are global to the process, and a dashboard draws its saved picture in a
    separate thread. Without this wait, the end of a block would reset the settings of a block in
    another thread.
    """
    with _settings_lock, style.context(settings):
        yield


class ThemedFigure(Figure):
    """A matplotlib figure in the kit's style. It can also be drawn for a dark page. Each of its
    colours is then replaced by its dark counterpart in `kit.show.theme.DARK`.
    """

    notes: tuple[str, ...] = ()
    """Sentences on the sources and uncertainty of the data. They are shown below the figure."""
    runs: frozenset[str] = frozenset()
    """Names of the user's run directories whose points are drawn in the figure."""
    left_out: tuple[str, ...] = ()
    """Sentences that name runs or data of the user that the figure does not show, with the
    reason."""

    @property
    def caption(self) -> str:
        """Caption below the panels, as one line of text."""
        return self.get_supxlabel().replace("\n", " ")

    def to_svg(self, *, dark: bool = False) -> str:
        """Returns the figure as SVG for a light page, or for a dark page if `dark` is true. Letters
        are drawn as paths, so the viewer needs no font.
        """
        stream = io.StringIO()
        # Matplotlib derives the names of SVG elements from this salt. With a fixed salt, equal
        # drawings have equal names.
        with drawing_settings({"svg.hashsalt": "kit"}):
            self.savefig(stream, format="svg", metadata={"Date": None})
        # Coordinates in paths are truncated to hundredths of a point, which makes the SVG smaller.
        # Scale factors of glyphs keep all digits.
        light = re.sub(
            r'(?<= d=")[^"]*',
            lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]),
            stream.getvalue(),
        )
        if not dark:
            return light
        return re.sub(r"#[0-9a-f]{6}\b", lambda found: DARK.get(found[0], found[0]), light)

    def to_html(self, *, alt: str = "") -> str:
        """Returns HTML that contains the light drawing, the dark drawing and the notes. The page
        shows only the drawing for its theme.

        `alt` describes the figure for readers who cannot see it. The default is the caption.
        Without a caption, it is the titles of the panels.
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
        """Returns the figure as the output of a notebook cell, by MIME type: HTML, and a PNG in
        base64 for viewers that do not render HTML.
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
    """Returns an SVG as a data URL for an image element. Inline SVG is not used, since JupyterLab
    removes it from the outputs of a notebook that it does not trust.
    """
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
