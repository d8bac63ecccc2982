"""The earlier name of ``fixedpoint_kernels.observer``."""

import warnings
from typing import Any

_NOW = {"mask_and_survey": "mask_and_observe", "round_and_survey": "round_and_observe"}


def __getattr__(name: str) -> Any:
    from fixedpoint_kernels import observer  # torch, which this package does not load by itself

    now = _NOW.get(name, name)
    if not hasattr(observer, now):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = f"{__name__}.{name} is now fixedpoint_kernels.observer.{now}"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(observer, now)
