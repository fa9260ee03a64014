"""Views of a run: the live dashboard, text in the terminal, a figure of loss and MFU, and the
scores of checkpoints.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.monitor.figure import run_figure
    from kit.monitor.score_figure import eval_figure
    from kit.monitor.scores import eval_curve
    from kit.monitor.text import status_row, status_table, watch
    from kit.monitor.widget import Monitor

_PLACES = {
    "Monitor": "widget",
    "eval_curve": "scores",
    "eval_figure": "score_figure",
    "run_figure": "figure",
    "status_row": "text",
    "status_table": "text",
    "watch": "text",
}
__all__ = [
    "Monitor",
    "eval_curve",
    "eval_figure",
    "run_figure",
    "status_row",
    "status_table",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Imports a view when it is first asked for: none of them needs what the others do."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
