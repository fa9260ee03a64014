"""A simulated torch_xla whose device is the CPU. See `neuronx_distributed` in the folder above."""

from torch_xla.distributed import xla_backend as xla_backend
