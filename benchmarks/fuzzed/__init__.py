"""Targets and mutations of the fuzz campaign, `benchmarks/fuzz.py`."""
