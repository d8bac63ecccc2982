"""Rounding of samples to codes, on a CPU."""
