"""Device and graph functions of the simulated torch_xla."""

import torch

from tests.engines.signatures import CALLS


def xla_device() -> torch.device:
    return torch.device("cpu")


def mark_step() -> None:
    CALLS.append(("mark_step", {}))
