"""A stand-in for torch_xla whose device is the CPU. See `neuronx_distributed` beside it."""
