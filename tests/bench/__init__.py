"""Benchmarks behind docs/benchmarks.md and the program that makes its tables: `python -m
tests.bench`.

A benchmark is a function that measures and returns rows. Its `workplace` is an empty folder. Some
benchmarks also get `dataset`, a dataset with text and tokenizer on which the demo model trains.
Tests pass other arguments that reduce the size. If a process of a benchmark fails, the benchmark
raises RuntimeError with the last line of the process's output.
"""
