"""Runs where `make test-nxd` puts NxD's source on the path; else nothing is collected."""

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
    """NxD and Torch-XLA, imported once, before ranks are forked; their devices are not touched."""
    import neuronx_distributed  # noqa: F401  # pyright: ignore[reportMissingImports]
    import torch_xla  # noqa: F401  # pyright: ignore[reportMissingImports]


@pytest.fixture(scope="session")
def mha(llama_spec: ModelSpec) -> ModelSpec:
    """As in HLAT's 7B, every query head has a key/value head."""
    return llama_spec.replace(name="tiny-mha", num_layers=2, num_kv_heads=4)


def start_xla() -> None:
    """Joins the ranks as `kit.train` does."""
    import logging

    from kit.engines.process_group import start_process_group

    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    start_process_group("neuron")


run_xla = functools.partial(run_ranks, timeout_s=800, start=start_xla)
"""`run_ranks` over Torch-XLA."""
