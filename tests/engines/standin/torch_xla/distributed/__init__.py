"""Process groups of the simulated torch_xla."""
