"""The benchmarks behind docs/benchmarks.md, and what makes its tables; `python -m tests.bench` runs
them.

A benchmark is a function that measures and returns rows. It gets `workplace`, an empty folder, and
some get `dataset`, on whose tokens, text and tokenizer the demo model trains; other arguments make
it smaller, for tests. Where a process of its own fails, it raises RuntimeError with that one's last
words.
"""
