"""Measurements: matrix-product rates of this machine, and the benchmarks behind the README's
tables.
"""
