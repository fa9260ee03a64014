"""Views of a run: text in the terminal or a notebook, and a figure of loss and MFU."""

from kit.monitor.figure import run_figure
from kit.monitor.text import status_row, status_table, watch

__all__ = ["run_figure", "status_row", "status_table", "watch"]
