"""What can go wrong in an export, as the user is told."""

__all__ = ["ExportError"]


class ExportError(ValueError):
    """A network or a file that cannot be exported or read; says what, and why."""
