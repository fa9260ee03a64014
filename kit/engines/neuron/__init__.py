"""The engine that uses NeuronX Distributed."""
