"""Numba's compiler, for all kernels."""

import gc
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from numba.core import compiler
from numba.core.types import functions

__all__ = ["Compiler"]

_OPERATORS = {bool, *(f for f in vars(operator).values() if callable(f))}
_types: dict[Any, Any] = {}


class Compiler(compiler.Compiler):
    """Collects no garbage meanwhile, and types an operator once: each took a tenth of the time."""

    def compile_extra(self, func: FunctionType) -> Any:
        """Compile a function; see Numba."""
        collects = gc.isenabled()
        gc.disable()
        try:
            with _remembers_types():
                return super().compile_extra(func)
        finally:
            if collects:
                gc.enable()


@contextmanager
def _remembers_types() -> Iterator[None]:
    """Remember what operators give, by the types of their arguments: each time, Numba tries all implementations that it has.

    Kernels that are compiled meanwhile, as others call them, remember the same. Numba's lock for
    compilers is held.
    """
    own = functions.BaseFunction.get_call_type
    if getattr(own, "remembers", False):
        yield
        return

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws or self.typing_key not in _OPERATORS:
            return own(self, context, args, kws)
        key = self, context, tuple(args)  # the function, which knows what is lowered, lives on here
        if key not in _types:
            _types[key] = own(self, context, args, kws)
        return _types[key]

    get_call_type.remembers = True  # pyright: ignore[reportFunctionMemberAccess]
    functions.BaseFunction.get_call_type = get_call_type
    try:
        yield
    finally:
        functions.BaseFunction.get_call_type = own
