"""Collectives over gloo, which replace XLA's collectives in these tests, return correct values.
Unlike a device's collectives, they end the current graph of Torch-XLA.
"""

import pytest
import torch

from tests.engines.real_nxd.conftest import run_xla

pytestmark = pytest.mark.neuron


def gather_unfinished() -> list[float]:
    """Gathers two tensors that are not computed yet, whose graphs have the same hash in Torch-XLA.
    Returns the values of both gathered tensors.
    """
    import torch_xla  # pyright: ignore[reportMissingImports]
    import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]

    a, b = (torch.full((1,), value).to(torch_xla.device()) for value in (2.0, 3.0))
    torch_xla.sync()
    gathered = xm.all_gather_bucketized([a * (a - b), b * (a - b)])
    return torch.cat(gathered).tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_bucketized_gather_returns_each_input(ranks):
    expected = [-2.0] * ranks + [-3.0] * ranks
    assert run_xla(ranks, gather_unfinished) == [expected] * ranks
