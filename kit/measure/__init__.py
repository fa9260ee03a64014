"""Measurements of a machine: rates of matrix products, memory and collectives, and a check for slow
nodes."""
