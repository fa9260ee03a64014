"""Collectives of the test end a graph where a device's do not, and carry the same."""

import pytest
import torch

from tests.engines.real_nxd.conftest import run_xla

pytestmark = pytest.mark.neuron


def gather_unfinished() -> list[float]:
    """Returns what is gathered of two tensors whose graphs are one to Torch-XLA."""
    import torch_xla  # pyright: ignore[reportMissingImports]
    import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]

    a, b = (torch.full((1,), value).to(torch_xla.device()) for value in (2.0, 3.0))
    torch_xla.sync()
    gathered = xm.all_gather_bucketized([a * (a - b), b * (a - b)])
    return torch.cat(gathered).tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_of_one_list_come_from_their_own_inputs(ranks):
    expected = [-2.0] * ranks + [-3.0] * ranks
    assert run_xla(ranks, gather_unfinished) == [expected] * ranks
