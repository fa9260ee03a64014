"""Layers of the simulated NxD that work in parallel on several ranks."""

from neuronx_distributed.parallel_layers import layers, loss_functions, mappings, parallel_state

__all__ = ["layers", "loss_functions", "mappings", "parallel_state"]
