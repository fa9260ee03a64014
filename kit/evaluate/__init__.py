"""Scores a checkpoint on lm-eval's own tasks: benchmarks, whose data is in a local folder (mirror),
and the validation text of the run's data set.
"""

from kit.evaluate.benchmarks import BENCHMARKS, SUITES, Options, eval_arguments
from kit.evaluate.report import EvalReport, Metric, TaskScore
from kit.evaluate.scoring import evaluate, evaluate_folder, evaluate_model, report_file
from kit.evaluate.task_data import build_mirror, default_mirror

__all__ = [
    "BENCHMARKS",
    "SUITES",
    "EvalReport",
    "Metric",
    "Options",
    "TaskScore",
    "build_mirror",
    "default_mirror",
    "eval_arguments",
    "evaluate",
    "evaluate_folder",
    "evaluate_model",
    "report_file",
]
