"""Functions that kernels call by name, each compiled once.

Numba compiles a function again with each kernel that calls it, and with all that call those. A
large one is compiled here alone; kernels hold its name, which LLVM looks up when it loads them.
"""

from types import FunctionType
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.ccallback import CFunc

from fixedpoint_kernels.llvm.vectors import I64, intrinsic
from fixedpoint_kernels.threads import kept

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
        own = kept(CFunc(function, (signature.args, signature.return_type), {}, {}), function)
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
