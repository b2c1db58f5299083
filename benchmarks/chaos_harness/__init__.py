"""The parts of `benchmarks/chaos.py`: storm (real processes), engine (the storage engine driven by hand), the broken rules."""
