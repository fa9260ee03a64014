"""Registers the process group backend `xla` of the simulated torch_xla. The backend uses gloo.

Groups are created with the function and arguments that Torch-XLA 2.9 uses.
"""

import torch.distributed as dist


def _group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def new_xla_process_group(
    ranks=None, timeout=dist.default_pg_timeout, backend=None, pg_options=None
):
    """Replaces torch's `dist.new_group`, and accepts fewer arguments, as in Torch-XLA 2.9."""
    return _new_group(ranks=ranks, timeout=timeout, backend=backend, pg_options=pg_options)


if not hasattr(dist.Backend, "XLA") or "xla" not in dist.Backend.backend_list:
    dist.Backend.register_backend("xla", _group, devices=["cpu"])

_new_group, dist.new_group = dist.new_group, new_xla_process_group
