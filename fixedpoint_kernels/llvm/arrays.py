"""Arrays in compiled code: memory at addresses, which are int64, and new ones.

In place of Numba's ``carray``, ``np.empty`` and ``np.zeros``, which are functions that it compiles
again for each type, each number of dimensions, and each size that stands in the code.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_new_ref
from numba.np import arrayobj

from fixedpoint_kernels.llvm.vectors import I8, intrinsic

__all__ = ["doubles", "empty", "floats", "view", "zeros"]


@intrinsic
def view(_context, address, shape, dtype):
    """Return memory as an array of some shape (int64, or a tuple of them) and type, contiguous."""
    return _viewed(address, shape, dtype.dtype, dtype)


@intrinsic
def floats(_context, address, n):
    """Return ``n`` float32 in memory."""
    return _viewed(address, n, types.float32)


@intrinsic
def doubles(_context, address, n):
    """Return ``n`` float64 in memory."""
    return _viewed(address, n, types.float64)


@intrinsic
def empty(_context, shape, dtype):
    """Return a new array, as ``np.empty`` does."""
    return _new(shape, dtype, lambda _builder, _array: None)


@intrinsic
def zeros(_context, shape, dtype):
    """Return a new array, as ``np.zeros`` does."""

    def clear(builder, array):
        cgutils.memset(builder, array.data, builder.mul(array.itemsize, array.nitems), 0)

    return _new(shape, dtype, clear)


def _viewed(address: Any, shape: Any, element: Any, *others: Any) -> Any:
    """Return what Numba asks of an intrinsic; ``others``: types of its other arguments."""
    array = _array(element, shape)

    def codegen(context, builder, _signature, args):
        pointer = builder.inttoptr(args[0], I8.as_pointer())
        own = array(types.voidptr, shape)
        return arrayobj.np_cfarray(context, builder, own, [pointer, args[1]])

    return array(address, shape, *others), codegen


def _new(shape: Any, dtype: Any, begin: Callable[[Any, Any], None]) -> Any:
    """Return what Numba asks of an intrinsic; ``begin`` appends what writes to the array first."""
    array = _array(dtype.dtype, shape)

    def codegen(context, builder, _signature, args):
        sizes = arrayobj._parse_shape(context, builder, shape, args[0])
        made = arrayobj._empty_nd_impl(context, builder, array, sizes)
        begin(builder, made)
        return impl_ret_new_ref(context, builder, array, made._getvalue())

    return array(shape, dtype), codegen


def _array(element: Any, shape: Any) -> Any:
    return types.Array(element, len(shape) if isinstance(shape, types.BaseTuple) else 1, "C")
