"""Correctness and speed on one GPU: ``python -m benchmarks.gpu``."""
