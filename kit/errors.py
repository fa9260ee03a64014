"""The kit's typed errors.

Each message says what is wrong, the value, the allowed values, and what to do next.
"""

import contextlib
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster.record import ConfigError, did_you_mean, kit_command, suggestion

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DamagedCheckpointError",
    "DataError",
    "MissingPackageError",
    "RunError",
    "check_known",
    "did_you_mean",
    "install_command",
    "kit_command",
    "needed",
]
CHECKOUT = Path(__file__).parents[1] / "pyproject.toml"
"""File beside the packages `kit` and `cluster` in a checkout. It does not exist beside installed
packages."""


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raises ConfigError if `name` is not in `known`. The message suggests the closest known
    name. `what` describes the value in the message.
    """
    if name not in known:
        raise ConfigError(f"{what}: {name!r} is unknown. {suggestion(name, known)}")


def install_command(extra: str = "") -> str:
    """Returns the command that installs the kit with an extra, from its checkout if there is one,
    otherwise from its wheel.
    """
    extras = f"[{extra}]" if extra else ""
    if CHECKOUT.exists():
        return f"pip install -e {shlex.quote(f'.{extras}')}"
    return f"pip install {shlex.quote(f'pretraining-notebook-kit{extras}')}"


class RunError(RuntimeError):
    """A run directory cannot be used: its job is live, it is missing, or it was made with another
    configuration.
    """


class CheckpointError(RunError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint differs from what was written. An older checkpoint may be intact."""


class DataError(ValueError):
    """A text source, tokenizer or token file is missing, truncated, corrupt, or too short."""


class MissingPackageError(ImportError):
    """An optional package is not installed. The message gives the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed. Run: {install_command(extra)}"
        )

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows instead of a traceback, as IPython expects."""
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def needed(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Context in which a failing import of an optional package raises an error that says how to
    install the package.

    Raises:
        MissingPackageError: An import inside the context has raised ImportError.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(package, extra, purpose) from error
