"""The recorded names and signatures of torch 2.9 and Torch-XLA equal those of the installed
packages. The tests without NxD use this record.
"""

import pytest

from tests.engines.trainium_torch import inventory, record, signatures

pytestmark = pytest.mark.neuron


def test_torch_record_matches_installed_versions():
    import torch_xla.distributed.xla_backend  # noqa: F401  # pyright: ignore[reportMissingImports]  # makes groups

    has, recorded = inventory(list(record()["lacks"])), record()["torch"] | record()["torch_xla"]
    assert {
        module: set(names) & set(has[module]) for module, names in record()["lacks"].items()
    } == {module: set() for module in record()["lacks"]}
    assert signatures(set(recorded)) == recorded
