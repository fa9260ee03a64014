"""A stand-in for torch_xla whose device is the CPU. See `neuronx_distributed` beside it."""

from torch_xla.distributed import xla_backend as xla_backend
