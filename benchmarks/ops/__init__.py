"""One module an operation: ``TESTS``, which must be green, and ``cases()``."""
