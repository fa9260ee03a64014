"""The kit's typed errors. Each message says what, the value, what is allowed, and what to do next."""

from cluster.record import ConfigError, kit_command

__all__ = ["CheckpointError", "ConfigError", "DamagedCheckpointError", "DataError", "MissingPackageError", "RunError",
           "kit_command"]  # fmt: skip


class RunError(RuntimeError):
    """A run directory cannot be used as asked: it is live, absent, or was made by another configuration."""


class CheckpointError(RunError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; an older one may be."""


class DataError(ValueError):
    """A text source, tokenizer or token file is missing, truncated, corrupt, or too short."""


class MissingPackageError(ImportError):
    """An optional package is not installed; the message gives the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed. Run: pip install -e '.[{extra}]'")

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows in place of a traceback, by a convention of IPython."""
        return [f"{type(self).__name__}: {self}"]
