"""Moved to ``fixedpoint_kernels._torch_private``."""

from fixedpoint_kernels._torch_private import hooks_of, remove_hooks

__all__ = ["hooks_of", "remove_hooks"]
