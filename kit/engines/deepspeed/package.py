"""Is there a DeepSpeed that the kit can drive? Looks at what is installed; it is not imported.

No torch.
"""

import importlib.metadata

from kit.errors import MissingPackageError, install_command

SUPPORTED = "0.19"
"""The engine reads and sets what DeepSpeed keeps to itself (fp32 weights, moments), which moves
between versions."""


class DeepSpeedError(MissingPackageError):
    """DeepSpeed is of another version, or is installed but cannot be imported; the message says
    which.
    """

    def __init__(self, reason: str) -> None:
        ImportError.__init__(
            self,
            f"plan.engine 'deepspeed' needs DeepSpeed {SUPPORTED}: {reason}. Run:"
            f" {install_command('deepspeed')} 'deepspeed=={SUPPORTED}.*', or use plan.engine"
            " 'native'.",
        )


def require_deepspeed() -> None:
    """Raises MissingPackageError unless DeepSpeed of a version that was tried is installed."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError("deepspeed", "deepspeed", "plan.engine 'deepspeed'") from None
    if not version.startswith(f"{SUPPORTED}."):
        raise DeepSpeedError(f"version {version} is installed")
