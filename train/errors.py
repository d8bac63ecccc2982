"""Errors a user can put right."""

__all__ = ["UserError"]


class UserError(ValueError):
    """Something the user can put right; the scripts show it without a traceback."""
