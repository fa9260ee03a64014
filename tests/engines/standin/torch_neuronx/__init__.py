"""A stand-in for torch_neuronx: imported, never called. See `neuronx_distributed` beside it."""
