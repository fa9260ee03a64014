"""Modules of the simulated NxD."""
