"""Views of a run: the live dashboard, text in the terminal, a figure of loss and MFU, and the
scores of checkpoints.

The way of a metrics row to the dashboard: the trainer appends it to `metrics.jsonl`
(`kit.run.metrics.MetricsWriter`). In the kernel of the notebook `Monitor` (`widget.py`) reads new
rows by `Dashboard` (`dashboard.py`), which adds derived quantities (`curves.py`) and reduces them
to the pixels of the charts. `static/dashboard.js` draws what `Monitor` sends.
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
}


def __getattr__(name: str) -> Any:
    """Imports a view when it is first asked for: none of them needs what the others do, and where
    nobody opens notebooks, as on a node of Trainium, anywidget and matplotlib are not installed.
    """
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
