"""Starts DeepSpeed without its surprises: nothing is compiled, nothing waits for a lock, nothing
is printed.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from kit.engines.deepspeed.package import DeepSpeedError

# Of DeepSpeed 0.19.8 under torch 2.13; neither is about what the kit or its user does.
# It calls torch's collectives by their old names.
HARMLESS = {
    r".*all_gather_into_tensor. is deprecated": FutureWarning,
    r".*reduce_scatter_tensor. is deprecated": FutureWarning,
}


def import_deepspeed(device: torch.device) -> Any:
    """Returns the deepspeed package, set up for ranks on `device`; the process group must exist.

    Raises:
        DeepSpeedError: it cannot be imported.

    On a CPU, DeepSpeed compiles a shared-memory collective when it starts: half a minute, a
    compiler, and for ever if a killed job left its lock in TORCH_EXTENSIONS_DIR. Told that the
    operation does not fit, it uses gloo. The table is set, not changed: reading it would try the
    compiler on every operation that DeepSpeed has, and the kit uses none.
    """
    # Nothing of it is compiled, and an optimizer that ZeRO imports would load torch's compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Else it warns that it found no accelerator.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # DeepSpeed takes the local rank for the device, which is wrong where a launcher shows each rank
    # one device only.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger
    except Exception as error:  # a library that does not fit torch raises what it likes
        reason = f"it is installed but cannot be imported: {type(error).__name__}: {error}"
        raise DeepSpeedError(reason) from error

    logger.setLevel(logging.WARNING)
    for message, category in HARMLESS.items():
        warnings.filterwarnings("ignore", message, category)
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    if device.type == "cpu":
        # It refuses fp16 where that is slow; but torch computes it on every CPU, so that a plan can
        # be tried.
        vars(deepspeed.get_accelerator())["is_fp16_supported"] = lambda: True
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps standard output clean while DeepSpeed builds: it prints layout and memory whatever
    its log level.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        yield
