"""The trials of `benchmarks/endurance.py`, one module each; what they share is in bench.py, their tasks are in tasks.py."""
