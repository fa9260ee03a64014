"""Estimates of memory and step time of a layout, the search for a fast layout, and the errors of
the estimates. The package needs NumPy and no torch.

theory/ the equations   fit/ their fit to runs   choose/ the search   validation/ its errors
                        tuning/ search by trials
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "choose.explain": ("answers",),
    "choose.panel": ("Panel",),
    "choose.search": ("search",),
    "choose.report": ("compare_sites", "plan_report"),
    "fit.calibrate": ("calibrate", "own_calibration", "published_calibration"),
    "fit.measured_rows": ("hardware_on",),
    "theory.layouts": ("Layouts",),
    "theory.memory": ("memory_by_stage",),
    "theory.schedule": ("simulate_plan",),
    "theory.timeline": ("step_memory_figure", "timeline_figure"),
    "tuning.figures": ("sensitivity_figure", "trials_figure"),
    "tuning.objectives": ("EstimatedRate",),
    "tuning.tune": ("sensitivity", "tune"),
    "validation.validate": ("predictions", "validate"),
}


def __getattr__(name: str) -> Any:
    """Returns the object `name` of the module that `_NAMES` states. The module is imported at first
    use, so that `import kit.estimate` stays fast. Few users need all modules.
    """
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
