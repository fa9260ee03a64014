"""Views of a run: the live dashboard of a notebook, text in the terminal, and a figure of loss and MFU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.monitor.figure import run_figure
    from kit.monitor.text import status_row, status_table, watch
    from kit.monitor.widget import Monitor

__all__ = ["Monitor", "run_figure", "status_row", "status_table", "watch"]
_PLACES = {"Monitor": "widget", "run_figure": "figure", "status_row": "text", "status_table": "text", "watch": "text"}


def __getattr__(name: str) -> Any:
    """Imports a view when it is first asked for: none of them needs what the others do."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
