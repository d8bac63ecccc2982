"""Errors a user can put right; those of run folders, ``RunError``, are among them."""

from perfmodel.files import UserError

__all__ = ["UserError"]
