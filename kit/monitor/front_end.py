"""Front end of the dashboard: its JavaScript and its style sheet as texts, for the widget of a
notebook and for a page that `kit watch --html` writes.
"""

import re
from pathlib import Path

from kit.monitor.curves import SERIES
from kit.monitor.quantities import QUANTITIES

STATIC = Path(__file__).parent / "static"
ROOT = ".kit-monitor"
"""CSS selector of the dashboard's root element. The dashboard's style sheet applies only inside
this element."""
CHARTS = [{"key": name, "title": QUANTITIES[name].title} for name in SERIES]
"""Key and title of each default chart of the dashboard, in order, as they are sent to the front
end."""


def scoped(css: str, root: str) -> str:
    """Returns a style sheet whose rules apply only to elements inside the element with the selector
    `root`. The given style sheet must have no nested rules.
    """

    def in_root(rule: re.Match[str]) -> str:
        selectors = rule["selectors"].split(",")
        return ", ".join(f"{root} {selector.strip()}" for selector in selectors) + rule["body"]

    return re.sub(r"(?P<selectors>[^{}]+)(?P<body>\{[^{}]*\})", in_root, css)


# The chart library uPlot (MIT licence) comes first, since the other scripts use it.
SCRIPTS = ("vendor/uPlot.iife.min.js", "numbers.js", "svg.js", "dashboard.js")
DASHBOARD_SCRIPT = ";\n".join((STATIC / name).read_text() for name in SCRIPTS)
"""JavaScript module that draws the dashboard. Its default export has the function `render`."""
DASHBOARD_STYLE = (
    scoped((STATIC / "vendor/uPlot.min.css").read_text(), ROOT)
    + (STATIC / "dashboard.css").read_text()
)
"""Style sheet of the dashboard."""
