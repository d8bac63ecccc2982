"""What compiling and tracing make of models, and what they leave alone."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

__all__ = [
    "ASSERT",
    "COMPILED_CALL",
    "asserting",
    "compiled_as_constant",
    "compiled_graph",
    "constants",
    "function_of_call",
    "is_compiling_known",
    "left_uncompiled",
    "uncompiled",
]

_Run = TypeVar("_Run", bound=Callable[..., object])
_Value = TypeVar("_Value")


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module of which ``torch.compile`` made ``model``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


ASSERT = torch._assert
"""What models call that are to be traced: an ``assert`` would ask a proxy for its truth."""


def is_compiling_known() -> bool:
    """Say whether something may have been compiled: Dynamo, which is slow to import, is there."""
    return "torch._dynamo" in sys.modules


@contextmanager
def asserting(function: Callable[[object, str], object]) -> Iterator[None]:
    """Put a function in the place of ``torch._assert``, for the whole process meanwhile."""
    torch._assert = function
    try:
        yield
    finally:
        torch._assert = ASSERT


def left_uncompiled(function: _Run) -> _Run:
    """Return a function that ``torch.compile`` leaves as it is, with all that it calls: kernels take addresses.

    As ``torch.compiler.disable``, without loading Dynamo and Triton before something else does.
    """
    apart: Callable[..., object] | None = None
    whole: Callable[..., object] = function

    @wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        nonlocal apart
        if not is_compiling_known():
            return function(*args, **kwargs)
        if apart is None:
            from torch._dynamo.decorators import skip_code  # slow to import

            apart = cast("Callable[..., object]", torch.compiler.disable(whole))
            code = cast("FunctionType", run).__code__
            skip_code(code)  # of all: Dynamo would compile it for each kind of arguments
        return apart(*args, **kwargs)

    return cast("_Run", run)


def compiled_as_constant(function: _Run) -> _Run:
    """Return a function that ``torch.compile`` calls once for the same arguments, and keeps what it gave.

    As ``torch.compiler.assume_constant_result``, without loading Dynamo and Triton. Where Dynamo gave up on the
    caller it would compile what the function calls: it is kept from that. Numbers that users give go through
    ``constants`` first.
    """
    run = left_uncompiled(function)
    setattr(run, "_dynamo_marked_constant", True)  # noqa: B010  pyright knows functions
    return run


def constants(values: Iterable[_Value]) -> tuple[_Value, ...]:
    """Return numbers and texts as constants of the graph that is compiled, which then holds for them alone.

    ``torch.compile`` makes symbols of floats once it saw two values, or with ``dynamic=True``. A key of a dict must be
    a constant to it.
    """
    if not torch.compiler.is_compiling():
        return tuple(values)
    return tuple([dict.fromkeys([value]).popitem()[0] for value in values])


COMPILED_CALL = "_compiled_call_impl"
"""Where a module has what ``nn.Module.compile`` made; torch has no way to undo that."""


def function_of_call(module: nn.Module) -> Callable[..., object]:
    """Return a function that calls a module as if it was not compiled in place.

    Its code is its own, which ``nn.Module.compile`` has no way to ask for: Dynamo keeps what it
    compiled with the code, and lets at most 8 versions share it. And it begins outside of torch,
    where Dynamo would skip all of a model whose ``forward`` is torch's, such as ``nn.Sequential``.
    """

    def call(*args: object, **kwargs: object) -> object:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace()
    return FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)


def compiled_graph(
    backend: str, memory_budget: float, graph: torch.fx.GraphModule, inputs: list[Tensor]
) -> Callable[..., object]:
    """Return what a backend of ``torch.compile`` makes of a graph, with a budget of kept bytes.

    Neither the setting nor the backend has a public name.
    """
    from torch._dynamo import lookup_backend  # slow to import
    from torch._functorch import config

    with config.patch(activation_memory_budget=memory_budget):
        return lookup_backend(backend)(graph, inputs)
