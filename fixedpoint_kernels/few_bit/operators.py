"""``encode`` and ``decode`` as operators of PyTorch, which ``torch.compile`` keeps in its graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.modes import is_batched, is_watched
from fixedpoint_kernels.few_bit.fused import NONE, ONE_PASS, Fused, Passes
from fixedpoint_kernels.few_bit.table import Table
from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.operators import LIBRARY, define, kernels_for
from fixedpoint_kernels.strides import laid

_TILE = 1024
_WORDS = 32  # a tile and bit: one a column
_FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
_tables: dict[str, Table] = {}
kernels_of = kernels_for("few_bit")


def register(table: Table) -> str:
    """Make a table known to the operators, and return its key.

    Raises:
        ValueError: Its arrays do not fit together.
    """
    table.check()
    return _tables.setdefault(table.key, table).key


def registered(key: str) -> Table:
    """Return the table with a key.

    Raises:
        ValueError: There is none.
    """
    table = _tables.get(key)
    if table is None:
        raise ValueError(f"the key must be one that register returned, got {key!r}")
    return table


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
        TypeError: ``x`` is not floating, or does not lie in memory.
        ValueError: ``table`` is not registered; the storage of ``x`` was freed.
    """
    if is_plain(x):
        return encode_plain(x, table)
    return torch.ops.fixedpoint_kernels.few_bit_encode.default(x, table)


def value_and_encode(
    x: Tensor, table: str, fused: Fused, order: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Return an activation and ``encode``, from one pass over ``x``.

    Args:
        x: As for ``encode``, without float64; on a CPU float32.
        table: As for ``encode``.
        fused: What ``fused_of`` returns.
        order: Of the dimensions, in which elements are encoded and values lie; None: as they come.

    Returns:
        Values, with the shape of ``x``, without gaps, a view of nothing: autograd lets nobody change
        a view in place; and what ``encode`` returns of ``x.permute(order)``. On a CPU values
        are torch's own bits; of Sigmoid and SiLU those of torch's vectors, while for the last
        elements of each thread torch may round to the neighbour; of Tanh at most one unit in the last
        place from exact; and Softshrink's 0 has no sign. On a GPU they are at most 2 units in the last place from torch's;
        GELU's at most 2 units of ``x / 2`` from exact, since ``1 + erf`` loses digits, in torch's
        too.

    Raises:
        TypeError: There is no such pass for the device and dtype of ``x`` (``fused.ONE_PASS``), or
            it does not lie in memory.
        ValueError: ``fused`` has no formula that is there, or as for ``encode``.
    """
    if is_plain(x):
        return value_and_encode_plain(x, table, fused, order)
    return torch.ops.fixedpoint_kernels.few_bit_value_and_encode.default(x, table, *fused, order)


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

    Raises:
        TypeError: ``grad`` or ``dtype`` is not floating, ``planes`` are not int32; one does not lie
            in memory.
        ValueError: ``planes`` are not those of as many elements on the same device; ``table`` is
            not registered; a storage was freed.
    """
    if is_plain(grad):
        return _decode(grad, planes, table, dtype)
    return torch.ops.fixedpoint_kernels.few_bit_decode.default(grad, planes, table, dtype)


def is_plain(x: Tensor) -> bool:
    """Say whether ``x`` can do without the dispatcher, a twentieth of GELU's time at 1e6 elements.

    It cannot where somebody watches or changes what operators do: the compiler, a mode, a subclass,
    torch.func, a gradient of many at once.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    return not (x.is_meta or is_watched() or is_batched(x))


def is_fused(x: Tensor, fused: Fused | None) -> bool:
    """Say whether the one pass is there for ``x``."""
    if fused is None:
        return False
    # where x is not what will run, as in the compiler, no kernels are loaded to be asked
    dtypes, kinds = _passes_of(x) if is_plain(x) else ONE_PASS.get(x.device.type, NONE)
    return x.dtype in dtypes and fused[0] in kinds


def is_fused_plain(x: Tensor, fused: Fused | None) -> bool:
    """Do as ``is_fused``, of an ``x`` that ``is_plain``."""
    if fused is None:
        return False
    dtypes, kinds = _passes_of(x)
    return x.dtype in dtypes and fused[0] in kinds


def _passes_of(x: Tensor) -> Passes:
    """Return what the kernels for where ``x`` is do in one pass."""
    return getattr(kernels_of(x), "ONE_PASS", NONE)


def encode_plain(x: Tensor, table: str) -> Tensor:
    """As ``encode``, of an ``x`` that ``is_plain``."""
    _check_floating(x.dtype)
    x, planes = in_memory(x), _empty_planes(x, table)
    if x.numel():
        kernels_of(x).encode(x.contiguous(), planes, _tables[table])
    return planes


def value_and_encode_plain(
    x: Tensor, table: str, fused: Fused, order: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """As ``value_and_encode``, of an ``x`` that ``is_plain``."""
    kernels = kernels_of(x)
    dtypes, kinds = getattr(kernels, "ONE_PASS", NONE)
    if x.dtype not in dtypes:
        raise TypeError(f"one pass on {x.device} needs one of {dtypes}, got {x.dtype}")
    one_pass = getattr(kernels, "value_and_encode", None)
    if one_pass is None or fused[0] not in kinds:
        raise ValueError(f"one pass on {x.device} needs one of {kinds}, got {fused[0]!r}")
    x, (y, planes) = in_memory(x), _empty_pair(x, table, order)
    if x.numel():
        one_pass(laid(x, order).contiguous(), laid(y, order), planes, _tables[table], fused)
    return y, planes


def _decode(grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype) -> Tensor:
    grad, planes = in_memory(grad, "grad"), in_memory(planes, "planes")
    own, n = registered(table), grad.numel()
    out, words = _fake_decode(grad, planes, table, dtype), _words(n, own)
    if planes.shape != (words,):
        raise ValueError(
            f"planes of {n} elements must have shape ({words},), got {tuple(planes.shape)}"
        )
    if n:
        kernels_of(grad).decode(grad.contiguous(), planes.contiguous(), out, own)
    return out


def _check_floating(dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise TypeError(f"few-bit activations need a floating tensor, got {dtype}")


def _words(n: int, table: Table) -> int:
    return (n + _TILE - 1) // _TILE * (_WORDS * table.bits)


def _empty_planes(x: Tensor, table: str) -> Tensor:
    return x.new_empty(_words(x.numel(), registered(table)), dtype=torch.int32)


def _empty_product(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)


def _empty_pair(
    x: Tensor, table: str, order: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    planes = _empty_planes(x, table)
    if order is None:
        return _empty_product(x, x.dtype), planes
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device), planes


def _fake_decode(grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype) -> Tensor:
    _check_floating(grad.dtype)
    _check_floating(dtype)
    if planes.dtype is not torch.int32:
        raise TypeError(f"planes must be the int32 of encode, got {planes.dtype}")
    if planes.device != grad.device:
        raise ValueError(f"planes must be on {grad.device}, as grad is, got {planes.device}")
    return _empty_product(grad, dtype)


def _each(operator: Any, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """Run an operator on one example of a batch after the other; tiles do not cross examples."""
    columns = [
        argument.unbind(at) if isinstance(at, int) else [argument] * info.batch_size
        for argument, at in zip(arguments, in_dims, strict=True)
    ]
    results = [operator(*row) for row in zip(*columns, strict=True)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def _define(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> None:
    """Register an operator, and what ``torch.vmap`` makes of it."""
    name = define("few_bit_" + schema, run, fake)
    operator = getattr(torch.ops.fixedpoint_kernels, name.partition("::")[2]).default
    torch.library.register_vmap(name, partial(_each, operator), lib=LIBRARY)


_define("encode(Tensor x, str table) -> Tensor", encode_plain, _empty_planes)
_define(
    "value_and_encode(Tensor x, str table, str kind, float a, float b, float c, int[]? order=None)"
    " -> (Tensor, Tensor)",
    lambda x, table, *how: value_and_encode_plain(x, table, how[:4], *how[4:]),
    lambda x, table, *how: _empty_pair(x, table, *how[4:]),
)
_define(
    "decode(Tensor grad, Tensor planes, str table, ScalarType dtype) -> Tensor",
    _decode,
    _fake_decode,
)
