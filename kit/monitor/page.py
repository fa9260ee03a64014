"""Page: one HTML file with the dashboard of a run as it is now, for readers without a notebook.

The page contains the scripts of the dashboard and all numbers of its charts. It loads nothing from
a network. Its reader can zoom, choose the x axis, and add and hide charts.
"""

import base64
import hashlib
import html
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from cluster.files import write_atomic
from kit.monitor.curves import MAX_WIDTH, SERIES, PlotRange
from kit.monitor.dashboard import Dashboard, complete_dashboard
from kit.monitor.front_end import CHARTS, DASHBOARD_SCRIPT, DASHBOARD_STYLE, STATIC
from kit.run import Run
from kit.show.style import check_output_file
from kit.show.terminal import format_time

ENDINGS = (".html", ".htm")
"""Allowed extensions of the file of a page."""
NUMBERS_BYTES = 3_000_000
"""Largest size of the numbers of all charts in a page, before they are encoded as base64. With more
charts, each chart has fewer pixels."""
AXES = ("step", "tokens", "time")
SCRIPT = f"{DASHBOARD_SCRIPT};\n{(STATIC / 'page.js').read_text()}"
STYLE = """
:root { color-scheme: light dark; --jp-layout-color1: #fff; --jp-ui-font-color1: #1a1a1a; --jp-ui-font-color2: #595959; }
@media (prefers-color-scheme: dark) {
  :root { --jp-layout-color1: #1e1e1e; --jp-ui-font-color1: #eee; --jp-ui-font-color2: #b5b5b5; }
}
body { margin: 8px; background: var(--jp-layout-color1); }
"""  # noqa: E501
"""Style sheet of the page around the dashboard. The variables are the names with which JupyterLab
gives its colours to the dashboard."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
"""Content security policy: the browser runs only the script with this checksum, and loads
nothing."""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><div id="view"></div><noscript>This page needs JavaScript.</noscript>
<script type="application/json" id="kit-data">{data}</script>
<script type="module">{script}</script></body></html>
"""


def write_page(run: Run, file: Path) -> None:
    """Writes the page of a run to a file by atomic rename. If the file is a symbolic link, the link
    is replaced, and its target stays unchanged.

    Raises:
        ConfigError: The file does not end in one of ENDINGS, or cannot be written.
    """
    check_output_file(file, ENDINGS, "an ending of an HTML page")
    dashboard = complete_dashboard(run)
    dashboard.update_speed(wait=True)
    write_atomic(file, page_html(dashboard))


def page_html(dashboard: Dashboard) -> str:
    """Returns the HTML page of a run, as its dashboard has read it. The page does not contain the
    log of the run.
    """
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    data = json.dumps(_page_data(dashboard), allow_nan=False)
    return PAGE.format(
        policy=POLICY.format(digest=digest),
        title=html.escape(dashboard.run.name),
        style=STYLE + DASHBOARD_STYLE,
        # Without `<`, no text of the run can end the script element.
        data=data.replace("<", "\\u003c"),
        script=SCRIPT,
    )


def _page_data(dashboard: Dashboard) -> dict[str, Any]:
    """Returns the data that `static/page.js` reads: the attributes that a widget has for a browser,
    and the positions of the pixels on each x axis.

    The pixels of all axes contain the same steps, so that the page contains their numbers once.
    """
    metrics = dashboard.further_metrics()
    charts = [*SERIES, *(metric["key"] for metric in metrics)]
    dashboard.show_charts(charts)
    # A chart has at most twice as many pixels as its width, with 12 bytes per pixel.
    width = min(MAX_WIDTH, NUMBERS_BYTES // (24 * len(charts)))
    frame, window = dashboard.frame(PlotRange(width=width))
    steps = np.frombuffer(window, "<f8", frame["n"])
    curves = dashboard.curves
    indices = np.searchsorted(curves["step"], steps)
    written = format_time(time.time(), "%Y-%m-%d %H:%M %Z")
    return {
        "values": {
            "charts": CHARTS,
            "metrics": metrics,
            "facts": dashboard.facts(),
            "alerts": dashboard.alerts(),
            "settings": dashboard.settings,
            "notes": dashboard.notes(),
            "page": f"as of {written}",
        },
        "heat": _base64(dashboard.step_time_heat_map()),
        "frames": {
            axis: {**frame, "axis": axis, "attempts": dashboard.attempt_starts(axis)}
            for axis in AXES
        },
        "places": {axis: _base64(curves[axis][indices].astype("<f8").tobytes()) for axis in AXES},
        "rows": _base64(window[steps.nbytes :]),
    }


def _base64(data: bytes) -> str:
    """Returns bytes as text, since JSON has no bytes."""
    return base64.b64encode(data).decode()
