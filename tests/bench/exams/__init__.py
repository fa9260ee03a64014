"""Validation of the planner: `make validate` prints the errors of its estimates against published
measurements.
"""
