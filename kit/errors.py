"""The kit's typed errors.

Each message says what, the value, what is allowed, and what to do next.
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
"""Beside the packages of a checkout, and not beside installed ones."""


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raises ConfigError for a name that is none of those that are known, with the closest one."""
    if name not in known:
        raise ConfigError(f"{what}: {name!r} is unknown. {suggestion(name, known)}")


def install_command(extra: str = "") -> str:
    """Returns the command that installs what the kit needs, with an extra of it, in its checkout
    or from its wheel.
    """
    extras = f"[{extra}]" if extra else ""
    editable = f"-e {shlex.quote(f'.{extras}')}"
    whole = shlex.quote(f"pretraining-notebook-kit{extras}")
    return f"pip install {editable if CHECKOUT.exists() else whole}"


class RunError(RuntimeError):
    """A run directory cannot be used as asked: it is live, absent, or was made by another
    configuration.
    """


class CheckpointError(RunError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; an older one may be."""


class DataError(ValueError):
    """A text source, tokenizer or token file is missing, truncated, corrupt, or too short."""


class MissingPackageError(ImportError):
    """An optional package is not installed; the message gives the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed. Run: {install_command(extra)}"
        )

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows in place of a traceback, by a convention of IPython."""
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def needed(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Says how to install a package that an import inside does not find.

    Raises:
        MissingPackageError: in place of the ImportError.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(package, extra, purpose) from error
