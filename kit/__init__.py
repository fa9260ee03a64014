"""The names of the kit that most notebooks use. Importing the package loads none of their modules,
so that the command line starts fast.
"""

import os
import sys

# `python -m MODULE` puts the working directory first on sys.path. Python would then import another
# user's token.py in place of its own. It would also import a file with the name of a module that
# exists on Windows only, such as msvcrt.py. The working directory is therefore removed. The folder
# of a checkout stays, at the end, because the packages may be installed nowhere else. While Python
# imports the packages of MODULE, sys.argv[0] is "-m". `cluster/__init__.py` repeats this code for
# its own modules: an import of `cluster` from here could find a package of another user.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and "cluster" not in sys.modules:
    _first = sys.path.pop(0)
    if _first == os.path.dirname(os.path.dirname(__file__)):
        sys.path.append(_first)

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.site import Site
    from kit.config.plan import Plan
    from kit.config.recipe import Recipe
    from kit.config.spec import FlopBasis, ModelSpec
    from kit.launcher import launch, resume
    from kit.run import Run

__all__ = ["FlopBasis", "ModelSpec", "Plan", "Recipe", "Run", "Site", "launch", "resume"]

_MODULES = {
    "FlopBasis": "kit.config.spec",
    "ModelSpec": "kit.config.spec",
    "Plan": "kit.config.plan",
    "Recipe": "kit.config.recipe",
    "Run": "kit.run",
    "Site": "cluster.site",
    "launch": "kit.launcher",
    "resume": "kit.launcher",
}
"""Maps each name in `__all__` to the module that defines it. Neither torch nor NumPy is loaded by
these modules."""


def __getattr__(name: str) -> Any:
    """Returns the object `name` of the module that `_MODULES` states, at the first use of the name.
    If an import fails, shadowed modules are named as a possible reason.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULES[name]), name)
    except Exception as error:
        from cluster.shadows import explain

        explain(error)
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
