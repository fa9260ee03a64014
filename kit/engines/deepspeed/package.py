"""Checks whether a supported version of DeepSpeed is installed, without importing DeepSpeed.

Imports no torch.
"""

import importlib.metadata

from kit.errors import MissingPackageError, install_command

SUPPORTED = "0.19"
"""Supported version of DeepSpeed. The engine reads and sets private attributes of DeepSpeed for
fp32 weights and moments, and these attributes change between versions."""


class DeepSpeedError(MissingPackageError):
    """DeepSpeed has an unsupported version, or it is installed but cannot be imported. The message
    names the cause.
    """

    def __init__(self, reason: str) -> None:
        ImportError.__init__(
            self,
            f"plan.engine 'deepspeed' needs DeepSpeed {SUPPORTED}: {reason}. Run:"
            f" {install_command('deepspeed')} 'deepspeed=={SUPPORTED}.*', or use plan.engine"
            " 'native'.",
        )


def require_deepspeed() -> None:
    """Raises MissingPackageError unless a supported version of DeepSpeed is installed."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError("deepspeed", "deepspeed", "plan.engine 'deepspeed'") from None
    if not version.startswith(f"{SUPPORTED}."):
        raise DeepSpeedError(f"version {version} is installed")
