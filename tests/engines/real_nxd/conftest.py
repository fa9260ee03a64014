"""Set-up of the tests with the real NxD. The tests are collected only if NxD's source is on
sys.path, as with `make test-nxd`.
"""

import functools
import os
import sys
import warnings

import pytest

from kit.config.spec import ModelSpec
from tests.support.workers import run_ranks

collect_ignore_glob = [] if "tests.engines.real_nxd.closed" in sys.modules else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Imports NxD and Torch-XLA once, before ranks are forked. The import does not start their
    devices.
    """
    import neuronx_distributed  # noqa: F401  # pyright: ignore[reportMissingImports]
    import torch_xla  # noqa: F401  # pyright: ignore[reportMissingImports]


@pytest.fixture(scope="session")
def mha(llama_spec: ModelSpec) -> ModelSpec:
    """A tiny Llama model with one key/value head for each query head, as in HLAT's 7B model."""
    return llama_spec.replace(name="tiny-mha", num_layers=2, num_kv_heads=4)


def start_xla() -> None:
    """Starts the process group of a rank with Torch-XLA, as `kit.train` does."""
    import logging

    from kit.engines.process_group import start_process_group

    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    start_process_group("neuron")


run_xla = functools.partial(run_ranks, timeout_s=800, start=start_xla)
"""`run_ranks` with process groups of Torch-XLA instead of gloo."""
