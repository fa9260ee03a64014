"""Measurements of this machine: rates of matrix products, memory and collectives, and slow
nodes."""
