"""Checks calls of the simulated NxD against function signatures that were recorded from the real
NxD.
"""

import functools
import inspect
import json
from pathlib import Path

SIGNATURES = Path(__file__).parent / "data" / "nxd_signatures.json"
CALLS: list[tuple[str, dict]] = []


@functools.cache
def versions() -> dict[str, dict[str, inspect.Signature]]:
    """Returns the recorded signatures as a dict: NxD version, then function name."""
    return {
        version: {
            name: signature(parameters) for name, parameters in recorded["signatures"].items()
        }
        for version, recorded in json.loads(SIGNATURES.read_text()).items()
    }


def signature(parameters: list[list[str]]) -> inspect.Signature:
    """Returns a signature object built from rows of (parameter name, kind[, default value])."""
    kinds = {
        "var_positional": inspect.Parameter.VAR_POSITIONAL,
        "var_keyword": inspect.Parameter.VAR_KEYWORD,
        "keyword_only": inspect.Parameter.KEYWORD_ONLY,
    }
    made = []
    for name, kind, *default in parameters:
        value = default[0] if default else inspect.Parameter.empty
        how = kinds.get(kind, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        made.append(inspect.Parameter(name, how, default=value))
    return inspect.Signature(made)


def check(name: str, arguments: dict) -> None:
    """Records a call of the simulated NxD. Raises TypeError if a recorded version of the real NxD
    does not accept the arguments.
    """
    for version, signatures in versions().items():
        try:
            signatures[name].bind(**arguments)
        except TypeError as error:
            raise TypeError(f"{name} of version {version}: {error}") from error
    CALLS.append((name.rsplit(".", 1)[1], arguments))


def recorded(module: str):
    """Returns a decorator for functions of the simulated NxD. Decorated functions accept only
    keyword arguments, which are checked and recorded.
    """

    def decorate(function):
        @functools.wraps(function)
        def call(**arguments):
            check(f"{module}.{function.__name__}", arguments)
            return function(**arguments)

        return call

    return decorate
