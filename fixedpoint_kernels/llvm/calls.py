"""Functions that kernels call, and that are compiled for nobody else.

Numba compiles a function again with each kernel that calls it, and with all that call those. A
large one is compiled here alone (``called``); kernels hold its name, which LLVM looks up when it loads
them. Small ones become part of their callers (``inner``).
"""

from types import FunctionType
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import CPUDispatcher

from fixedpoint_kernels.llvm.compiler import Compiler
from fixedpoint_kernels.llvm.vectors import I64, intrinsic
from fixedpoint_kernels.threads import compiled, kept

__all__ = ["called", "inlined", "inner", "keep", "outer"]

_OPTIONS = {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_compiled: dict[str, CFunc] = {}  # by name; what LLVM knows the address of must live on


def called(function: FunctionType) -> Any:
    """Compile a function, and return what kernels call in its place.

    Args:
        function: Takes int64, in the order of its arguments, and returns int64. Its qualified name
            must be its own.
    """
    name, count = f"{__package__}.{function.__qualname__}", function.__code__.co_argcount
    signature = types.int64(*[types.int64] * count)
    if name not in _compiled:
        own = kept(
            CFunc(function, (signature.args, signature.return_type), {}, {}, Compiler),
            function,
        )
        own.compile()
        binding.add_symbol(name, own.address)
        _compiled[name] = own

    def codegen(_context, builder, _signature, arguments):
        kind = ir.FunctionType(I64, [I64] * count)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    scope: dict[str, Any] = {"made": (signature, codegen)}
    names = ", ".join(f"x{i}" for i in range(count))
    exec(f"def typing(_context, {names}): return made", scope)
    return intrinsic(scope["typing"])


def inner(function: FunctionType) -> Any:
    """Let kernels call a function; what Python would need to call it is not compiled.

    Raises:
        TypeError: Python calls it.
    """
    return _Inner(function, targetoptions=dict(_OPTIONS), pipeline_class=_Compiler)


def inlined(function: FunctionType) -> Any:
    """Do as ``inner``; LLVM puts the function into its callers, whatever its size.

    Raises:
        TypeError: Python calls it.
    """
    options = {**_OPTIONS, "forceinline": True}
    return _Inner(function, targetoptions=options, pipeline_class=_Compiler)


def outer(function: Any) -> Any:
    """Return a kernel that Python calls, of what ``inner`` made."""
    return compiled()(function.py_func)


class _Inner(CPUDispatcher):
    """What Numba makes of such a function."""

    def add_overload(self, cres: Any) -> None:
        key = object()  # by which callers look it up: others have an address
        self.targetctx.insert_user_function(key, cres.fndesc, [cres.library])
        self.overloads[tuple(cres.signature.args)] = cres._replace(entry_point=key)

    def _compile_for_args(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(
            f"{self.py_func.__qualname__} must be called by a kernel, got Python's call"
        )


class _Compiler(Compiler):
    """Compiles such a function as far as its callers take it in."""

    def __init__(self, typing: Any, target: Any, _library: None, *arguments: Any) -> None:
        super().__init__(typing, target, _Library(target.codegen(), "inner"), *arguments)
        self.state.flags.no_compile = True


class _Library(JITCodeLibrary):
    """Code that is optimised, and made machine code, where others have taken it in."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@inner
def keep(*_arrays):
    """Keep arrays alive until here: Numba frees them after their last use, not that of addresses."""
