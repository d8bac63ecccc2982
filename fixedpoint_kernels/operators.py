"""Operators of PyTorch, and the kernels for where a tensor is."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["LIBRARY", "define", "kernels_for"]

LIBRARY = torch.library.Library("fixedpoint_kernels", "FRAGMENT")


def define(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> str:
    """Register an operator without the checks of ``custom_op``, which take 10 us a call; return its name.

    Raises:
        ImportError: The process has it already.
    """
    own = schema.partition("(")[0]
    name = "fixedpoint_kernels::" + own
    if hasattr(torch.ops.fixedpoint_kernels, own):
        raise ImportError(
            "fixedpoint_kernels must be imported once in a process, got a second import, after its modules left "
            "sys.modules or an import was interrupted: restart Python, or the kernel of the notebook"
        )
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=LIBRARY)
    return name


def kernels_for(package: str) -> Callable[[Tensor], ModuleType]:
    """Return a function that gives a package's kernels for where a tensor is.

    No compiler is loaded before one is needed.
    """

    @cache  # an import statement takes as long as a kernel over 1,000 elements
    def kernels(name: str) -> ModuleType:
        return import_module(f"fixedpoint_kernels.{package}.{name}")

    def kernels_of(x: Tensor) -> ModuleType:
        return kernels("cpu" if x.is_cpu else "gpu" if x.is_cuda else "reference")

    return kernels_of
