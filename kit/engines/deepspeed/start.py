"""Imports DeepSpeed so that the import compiles nothing, waits for no lock and prints nothing."""

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
"""Maps a pattern of the messages of suppressed warnings to the category of these warnings.
DeepSpeed 0.19.8 calls collectives of torch 2.13 by deprecated names. Neither the kit nor its user
can avoid these warnings."""


def import_deepspeed(device: torch.device) -> Any:
    """Returns the imported package deepspeed, prepared for ranks on `device`. The process group
    must exist.

    Raises:
        DeepSpeedError: DeepSpeed cannot be imported.

    On a CPU, DeepSpeed normally compiles a shared-memory collective when it starts. The compilation
    takes half a minute and needs a compiler. It waits forever if a killed job has left a lock in
    TORCH_EXTENSIONS_DIR. The kit therefore marks this operation as incompatible with the machine,
    so DeepSpeed uses gloo instead. The kit replaces DeepSpeed's whole table of compatible
    operations. To fill this table, DeepSpeed would test the compiler for each of its operations,
    none of which the kit uses.
    """
    # The kit uses no compiled code of DeepSpeed. Without this variable, an optimizer module that
    # ZeRO imports would load torch's compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Without this variable DeepSpeed warns that it found no accelerator.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # DeepSpeed takes the local rank as the index of the GPU. This is wrong if a launcher makes only
    # one GPU visible to each rank, so LOCAL_RANK is set to the index of `device`.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger
    # A DeepSpeed that does not fit the installed torch may raise any exception.
    except Exception as error:
        reason = f"it is installed but cannot be imported: {type(error).__name__}: {error}"
        raise DeepSpeedError(reason) from error

    logger.setLevel(logging.WARNING)
    for message, category in HARMLESS.items():
        warnings.filterwarnings("ignore", message, category)
    deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    if device.type == "cpu":
        # DeepSpeed refuses fp16 on CPUs on which fp16 is slow. torch computes fp16 on every CPU, so
        # fp16 is allowed here in order that a plan can be tested without a GPU.
        vars(deepspeed.get_accelerator())["is_fp16_supported"] = lambda: True
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discards standard output within the context, since DeepSpeed prints layout and memory at
    every log level while it builds an engine.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        yield
