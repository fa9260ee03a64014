"""Imports DeepSpeed so that it compiles nothing, waits for no lock and prints nothing."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from kit.engines.deepspeed.package import DeepSpeedError

HARMLESS = {
    r".*all_gather_into_tensor. is deprecated": FutureWarning,
    r".*reduce_scatter_tensor. is deprecated": FutureWarning,
}
"""Categories of warnings that are suppressed, by pattern of the message. DeepSpeed 0.19.8 under
torch 2.13 calls torch's collectives by deprecated names. Neither the kit nor its user causes the
warnings."""


def import_deepspeed(device: torch.device) -> Any:
    """Returns the deepspeed package, set up for ranks on `device`. The process group must exist.

    Raises:
        DeepSpeedError: DeepSpeed cannot be imported.

    On a CPU, DeepSpeed compiles a shared-memory collective when it starts. This takes half a minute
    and needs a compiler. The start never ends if a killed job left its lock in
    TORCH_EXTENSIONS_DIR. If the operation is marked as incompatible, DeepSpeed uses gloo instead.
    The whole table of compatible operations is replaced. Reading the table would test the compiler
    for every operation of DeepSpeed, and the kit uses none of these operations.
    """
    # The kit compiles nothing of DeepSpeed. Without this variable, an optimizer that ZeRO imports
    # would load torch's compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Without this variable DeepSpeed warns that it found no accelerator.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # DeepSpeed uses the local rank as the device's index. This is wrong if a launcher shows each
    # rank only one device.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger
    except Exception as error:  # A library that does not fit torch may raise any error.
        reason = f"it is installed but cannot be imported: {type(error).__name__}: {error}"
        raise DeepSpeedError(reason) from error

    logger.setLevel(logging.WARNING)
    for message, category in HARMLESS.items():
        warnings.filterwarnings("ignore", message, category)
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    if device.type == "cpu":
        # DeepSpeed refuses fp16 on CPUs on which it is slow. torch supports fp16 on every CPU, so
        # that a plan can be tried.
        vars(deepspeed.get_accelerator())["is_fp16_supported"] = lambda: True
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discards standard output while DeepSpeed builds an engine, since it prints layout and memory
    at every log level.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        yield
