"""Memory and time of a layout, the search for a good one, and how far all of it can be trusted. NumPy, no torch.

theory/ the equations   fit/ their fit to runs   choose/ the search   validation/ its errors   tuning/ search by trials
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.estimate.choose.explain import answers
    from kit.estimate.choose.search import search
    from kit.estimate.fit.calibrate import calibrate, published_calibration
    from kit.estimate.fit.measured_rows import hardware_on
    from kit.estimate.theory.layouts import Layouts
    from kit.estimate.theory.memory import memory_by_stage
    from kit.estimate.theory.schedule import simulate_plan
    from kit.estimate.theory.timeline import timeline_figure
    from kit.estimate.tuning.objectives import EstimatedRate
    from kit.estimate.tuning.sensitivity import sensitivity, sensitivity_figure
    from kit.estimate.tuning.tune import trials_figure, tune
    from kit.estimate.validation.validate import predictions, validate

_PLACES = {
    "EstimatedRate": "tuning.objectives",
    "Layouts": "theory.layouts",
    "answers": "choose.explain",
    "calibrate": "fit.calibrate",
    "hardware_on": "fit.measured_rows",
    "memory_by_stage": "theory.memory",
    "predictions": "validation.validate",
    "published_calibration": "fit.calibrate",
    "search": "choose.search",
    "sensitivity": "tuning.sensitivity",
    "sensitivity_figure": "tuning.sensitivity",
    "simulate_plan": "theory.schedule",
    "timeline_figure": "theory.timeline",
    "trials_figure": "tuning.tune",
    "tune": "tuning.tune",
    "validate": "validation.validate",
}
__all__ = [
    "EstimatedRate", "Layouts", "answers", "calibrate", "hardware_on", "memory_by_stage", "predictions",
    "published_calibration", "search", "sensitivity", "sensitivity_figure", "simulate_plan", "timeline_figure",
    "trials_figure", "tune", "validate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a name when it is first asked for: few readers need all of them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
