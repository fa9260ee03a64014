"""Classes of the kit's errors.

Each error message says what is wrong, the value, the allowed values, and what to do next.
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
"""File pyproject.toml in the parent folder of the package `kit`. It exists only if the kit runs
from a checkout of its repository."""


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raises ConfigError if `name` is not in `known`. `what` is the name of the setting in the
    message. The message suggests the closest known name.
    """
    if name not in known:
        raise ConfigError(f"{what}: {name!r} is unknown. {suggestion(name, known)}")


def install_command(extra: str = "") -> str:
    """Returns the command that installs the kit with an extra (optional packages): from its
    checkout if there is one, otherwise from its wheel.
    """
    extras = f"[{extra}]" if extra else ""
    if CHECKOUT.exists():
        return f"pip install -e {shlex.quote(f'.{extras}')}"
    return f"pip install {shlex.quote(f'pretraining-notebook-kit{extras}')}"


class RunError(RuntimeError):
    """A run directory cannot be used: its job is live, or the directory is missing or belongs to
    another configuration.
    """


class CheckpointError(RunError):
    """A checkpoint is missing, incomplete or damaged, or it belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """The content of a checkpoint differs from what was written. An older checkpoint may be
    intact.
    """


class DataError(ValueError):
    """A text source, tokenizer or token file is missing, truncated, corrupt or too short."""


class MissingPackageError(ImportError):
    """An optional package is not installed. The message contains the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed. Run: {install_command(extra)}"
        )

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows instead of a traceback. IPython calls this
        method.
        """
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def needed(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Context manager for imports of an optional package. If an import fails, it raises an error
    with the command that installs the package.

    Raises:
        MissingPackageError: An import within the context has raised ImportError.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(package, extra, purpose) from error
