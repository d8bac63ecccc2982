"""The three executions of each kernel, and which of them is a device's."""

import importlib
from functools import cache
from typing import Any

from torch import Tensor

__all__ = ["execution"]


def execution(package: str, x: Tensor) -> Any:
    """Return the module that computes where ``x`` is: ``gpu``, ``cpu``, or else ``reference``.

    It is imported when it is first needed: Triton is not on every system, and Numba takes half a
    second.

    Args:
        package: Of ``fixedpoint_kernels``, whose three modules have the same functions.
        x: Any tensor.
    """
    return _module(package, "cpu" if x.is_cpu else "gpu" if x.is_cuda else "reference")


@cache
def _module(package: str, name: str) -> Any:
    return importlib.import_module(f"fixedpoint_kernels.{package}.{name}")
