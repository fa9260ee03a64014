"""Memory and time of a layout, the search for a good one, and how far all of it can be trusted.
NumPy, no torch.

theory/ the equations   fit/ their fit to runs   choose/ the search   validation/ its errors
                        tuning/ search by trials
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.estimate.choose.explain import answers as answers
    from kit.estimate.choose.panel import Panel as Panel
    from kit.estimate.choose.search import search as search
    from kit.estimate.fit.calibrate import calibrate as calibrate
    from kit.estimate.fit.calibrate import published_calibration as published_calibration
    from kit.estimate.fit.measured_rows import hardware_on as hardware_on
    from kit.estimate.theory.layouts import Layouts as Layouts
    from kit.estimate.theory.memory import memory_by_stage as memory_by_stage
    from kit.estimate.theory.schedule import simulate_plan as simulate_plan
    from kit.estimate.theory.timeline import timeline_figure as timeline_figure
    from kit.estimate.tuning.objectives import EstimatedRate as EstimatedRate
    from kit.estimate.tuning.sensitivity import sensitivity as sensitivity
    from kit.estimate.tuning.sensitivity import sensitivity_figure as sensitivity_figure
    from kit.estimate.tuning.tune import trials_figure as trials_figure
    from kit.estimate.tuning.tune import tune as tune
    from kit.estimate.validation.validate import predictions as predictions
    from kit.estimate.validation.validate import validate as validate

_NAMES = {
    "choose.explain": ("answers",),
    "choose.panel": ("Panel",),
    "choose.search": ("search",),
    "fit.calibrate": ("calibrate", "published_calibration"),
    "fit.measured_rows": ("hardware_on",),
    "theory.layouts": ("Layouts",),
    "theory.memory": ("memory_by_stage",),
    "theory.schedule": ("simulate_plan",),
    "theory.timeline": ("timeline_figure",),
    "tuning.objectives": ("EstimatedRate",),
    "tuning.sensitivity": ("sensitivity", "sensitivity_figure"),
    "tuning.tune": ("trials_figure", "tune"),
    "validation.validate": ("predictions", "validate"),
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first asked for: few readers need all of them."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
