"""Views of a run: text in the terminal or a notebook, a figure of loss and MFU, and the scores of its checkpoints."""

from kit.monitor.eval_figure import eval_figure
from kit.monitor.figure import run_figure
from kit.monitor.scores import eval_curve
from kit.monitor.text import status_row, status_table, watch

__all__ = ["eval_curve", "run_figure", "eval_figure", "status_row", "status_table", "watch"]
