"""Core modules of the simulated torch_xla."""
