"""Measurements, each beside what a user would otherwise call: ``python -m benchmarks.run``."""
