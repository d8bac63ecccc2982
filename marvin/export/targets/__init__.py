"""The files that a network can be written to."""
