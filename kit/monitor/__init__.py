"""Views of a run: the live dashboard, text in the terminal, a figure of loss and MFU, and the
scores of checkpoints.

After each training step, the trainer appends a row of numbers to `metrics.jsonl`
(`kit.run.metrics.MetricsWriter`). In the kernel of the notebook, `Monitor` (`widget.py`) reads new
rows through `Dashboard` (`dashboard.py`). `Dashboard` adds derived quantities (`curves.py`) and
reduces them to a few numbers per pixel of the charts. `Monitor` sends the result to the browser,
where `static/dashboard.js` draws it. The same script draws the page that `kit watch --html` writes
(`page.py`).
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "Monitor": "widget",
    "compare_figure": "runs",
    "compare_speed": "speed",
    "copy_metrics": "export",
    "eval_curve": "scores",
    "eval_figure": "scores",
    "ledger": "goodput",
    "recorded_alerts": "text",
    "run_figure": "figure",
    "runs_table": "runs",
    "status_row": "text",
    "status_table": "text",
    "watch": "text",
    "write_page": "page",
}


def __getattr__(name: str) -> Any:
    """Returns a view of this package. Its module is imported at the first access to the view.

    The views need different third-party packages. Some machines, such as Trainium nodes, have
    neither anywidget nor matplotlib, since nobody opens notebooks on them.
    """
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
