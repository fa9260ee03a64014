"""The gloo collectives of these tests end a graph, which a device's collectives do not, and return
equal values.
"""

import pytest
import torch

from tests.engines.real_nxd.conftest import run_xla

pytestmark = pytest.mark.neuron


def gather_unfinished() -> list[float]:
    """Returns two gathered tensors whose pending graphs have one hash in Torch-XLA."""
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
