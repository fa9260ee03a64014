"""Layers of the stand-in."""

from neuronx_distributed.parallel_layers import layers, loss_functions, mappings, parallel_state

__all__ = ["layers", "loss_functions", "mappings", "parallel_state"]
