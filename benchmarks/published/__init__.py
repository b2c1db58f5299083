"""The published experiments that aioqueue answers: one module for each row, the naive form and aioqueue side by side.

`python -m benchmarks.published` runs all of them at a reduced size and prints one table; docs/published.md tells of them.
"""
