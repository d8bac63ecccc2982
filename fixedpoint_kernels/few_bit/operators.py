"""``encode`` and ``decode`` as operators of PyTorch, which ``torch.compile`` keeps in its graphs."""

from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels.few_bit import reference
from fixedpoint_kernels.few_bit.table import Table

_TILE = 1024
_WORDS = 32  # a tile and bit: one a column
_FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
_tables: dict[str, Table] = {}


def register(table: Table) -> str:
    """Make a table known to the operators, and return its key."""
    return _tables.setdefault(table.key, table).key


def registered(key: str) -> Table:
    """Return the table with a key."""
    return _tables[key]


@torch.library.custom_op("fixedpoint_kernels::few_bit_encode", mutates_args=())
def encode(x: Tensor, table: str) -> Tensor:
    """Write the few-bit code of each element into bit planes.

    Args:
        x: Values, any shape and strides, floating; read once, in row-major order, and compared
            with the table's borders as float32.
        table: Key of a registered table.

    Returns:
        int32, shape ``(ceil(x.numel() / 1024) * 32 * bits,)``. The elements that fill up the last
        tile have the code of minus infinity.

    Raises:
        TypeError: ``x`` is not floating.
    """
    if x.dtype not in _FLOATS:
        raise TypeError(f"few-bit activations need a floating tensor, got {x.dtype}")
    planes = _empty_planes(x, table)
    if x.numel():
        _implementation(x).encode(x.contiguous(), planes, _tables[table])
    return planes


@torch.library.custom_op("fixedpoint_kernels::few_bit_decode", mutates_args=())
def decode(grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype) -> Tensor:
    """Multiply each element by the level of its code, in one pass.

    Where the level is 0 the product is 0, of infinities and NaN too, as in torch's ReLU.

    Args:
        grad: Gradient, any shape and strides, floating; as many elements as were encoded.
        planes: What ``encode`` returned.
        table: Key of the same table.
        dtype: Of the result; products are float32, or float64 where either is.

    Returns:
        Shape of ``grad``, contiguous.
    """
    out = _empty_product(grad, dtype)
    if grad.numel():
        _implementation(grad).decode(grad.contiguous(), planes, out, _tables[table])
    return out


def _empty_planes(x: Tensor, table: str) -> Tensor:
    words = (x.numel() + _TILE - 1) // _TILE * (_WORDS * _tables[table].bits)
    return x.new_empty((words,), dtype=torch.int32)


def _empty_product(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)


@encode.register_fake
def _(x: Tensor, table: str) -> Tensor:
    return _empty_planes(x, table)


@decode.register_fake
def _(grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype) -> Tensor:
    return _empty_product(grad, dtype)


@encode.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, table: str) -> tuple[Tensor, int]:
    return torch.stack([encode(one, table) for one in x.unbind(in_dims[0])]), 0


@decode.register_vmap
def _(
    info: Any, in_dims: Any, grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype
) -> tuple[Tensor, int]:
    grads, codes = (
        [t] * info.batch_size if at is None else t.unbind(at)
        for t, at in zip((grad, planes), in_dims[:2], strict=True)
    )
    products = [decode(g, p, table, dtype) for g, p in zip(grads, codes, strict=True)]
    return torch.stack(products), 0


def _implementation(x: Tensor) -> Any:
    if x.is_cuda:
        from fixedpoint_kernels.few_bit import gpu  # triton is not on every system

        return gpu
    if x.is_cpu:
        from fixedpoint_kernels.few_bit import cpu  # numba takes half a second to import

        return cpu
    return reference
