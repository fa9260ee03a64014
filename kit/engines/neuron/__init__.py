"""The engine on NeuronX Distributed."""
