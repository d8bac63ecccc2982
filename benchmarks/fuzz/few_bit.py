"""Few-bit activations: codes in their bit planes, and gradients times levels."""

from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Array, Format
from fixedpoint_kernels import few_bit
from fixedpoint_kernels.few_bit import operators
from fixedpoint_kernels.few_bit.fused import WITH_EXPONENTIAL, fused_of
from fixedpoint_kernels.few_bit.named import resolve, table_of
from fixedpoint_kernels.few_bit.table import number

_TILE, _COLUMNS = 1024, 32
_DTYPES = {**draw.DTYPES, "float64": torch.float64}
_NEAR = Format(8, 4)
# names of torch.nn.functional, and torch's own parameters
_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "celu": (1.0,),
    "elu": (1.0,),
    "gelu": ("none",),
    "hardshrink": (0.5,),
    "hardsigmoid": (),
    "hardswish": (),
    "hardtanh": (-1.0, 1.0),
    "leaky_relu": (0.01,),
    "logsigmoid": (),
    "mish": (),
    "relu": (),
    "relu6": (),
    "selu": (),
    "sigmoid": (),
    "silu": (),
    "softplus": (1.0, 20.0),
    "softshrink": (0.5,),
    "softsign": (),
    "tanh": (),
    "tanhshrink": (),
}


def gradients(chance: Random) -> None:
    """An activation by name: its values, and the gradient times the level of its table.

    Values are torch's own; where one pass computes them by other means, near to torch's.
    """
    name, bits = chance.choice(list(_PARAMETERS)), _bits(chance)
    weight = chance.choice(("uniform", "normal"))
    table = table_of(name, _PARAMETERS[name], bits, weight)
    x, own, dtype = _input(chance, table.borders)
    x.requires_grad_()
    y = getattr(few_bit, name)(x, bits=bits, weight=weight)
    plain = getattr(torch if name in ("sigmoid", "tanh") else F, name)(x.detach())
    is_by_gpu = operators.kernels_of(x).__name__.endswith(".gpu")
    has_own_bits = is_by_gpu or name in (*WITH_EXPONENTIAL, "softshrink")  # the sign of 0, too
    if has_own_bits and operators.is_fused(x.data, fused_of(*resolve(name))):
        _near(draw.content(y), draw.content(plain), own.reshape(tuple(y.shape)), y.dtype, name)
    else:
        oracle.same(draw.content(y), draw.content(plain), name)
    grad = draw.values(chance, y.numel(), _NEAR, "float32" if dtype == "float64" else dtype)
    grad = grad.reshape(tuple(y.shape))
    y.backward(_tensor(grad, dtype))
    assert x.grad is not None
    levels = table.levels[table.codes[_pieces(own, table.borders)]].reshape(grad.shape)
    want = _product(grad, levels, dtype)
    oracle.same(draw.content(x.grad), want, f"gradient of {name}, {bits} bits, {weight}")


def codes(chance: Random) -> None:
    """Tables of any borders, near together and far apart: planes, then products."""
    bits = _bits(chance)
    levels = draw.normal(chance, chance.randint(2 ** (bits - 1) + 1, 2**bits)).astype(np.float32)
    levels[chance.randrange(len(levels))] = 0
    borders = _borders(chance, chance.choice((1, 2, 3, len(levels), 2 * len(levels))))
    ranks = np.array([chance.randrange(len(levels)) for _ in range(len(borders) + 1)])
    key = operators.register(number(borders, ranks, levels))
    x, own, _ = _input(chance, borders)
    planes = operators.encode(x, key)
    gray = ranks ^ ranks >> 1
    filled = -(-own.size // _TILE) * _TILE - own.size
    pieces = np.concatenate([_pieces(own, borders), np.zeros(filled, np.int64)])
    oracle.same(_codes(draw.content(planes), bits), gray[pieces], "codes")
    dtypes = [chance.choice(list(_DTYPES)) for _ in range(2)]
    grad = draw.values(chance, own.size, _NEAR, "float32" if dtypes[0] == "float64" else dtypes[0])
    got = operators.decode(_tensor(grad, dtypes[0]), planes, key, _DTYPES[dtypes[1]])
    found = levels[ranks[pieces[: own.size]]]
    oracle.same(draw.content(got), _product(grad, found, dtypes[1], dtypes[0]), "products")


def _near(got: Array, want: Array, x: Array, dtype: torch.dtype, what: str) -> None:
    """Fail unless values are within two units of torch's, or of ``x / 2``, as GELU's are."""
    limits = torch.finfo(dtype)
    with np.errstate(invalid="ignore"):
        size = np.maximum(np.maximum(np.abs(want), np.abs(x) / 2), limits.tiny)
        is_near = np.abs(got - want) <= 2 * limits.eps * size.astype(np.float64)
    is_near |= (got == want) | np.isnan(got) & np.isnan(want)
    if not is_near.all():
        i = np.flatnonzero(~is_near)[0]
        raise oracle.Failure(f"{what} of {x.flat[i]}: {got.flat[i]}, torch's is {want.flat[i]}")


def _bits(chance: Random) -> int:
    """Draw a width; each has kernels of its own to compile, so the rare ones are rare."""
    return chance.choice((1, 2, 3, 4)) if chance.random() < 0.95 else chance.randint(5, 8)


def _input(chance: Random, borders: Array) -> tuple[Tensor, Array, str]:
    """Return a tensor with values at borders and beside them, and what is compared with these."""
    n, dtype = draw.size(chance), chance.choices(list(_DTYPES), (6, 2, 2, 1))[0]
    near = borders[draw.words(chance, n) % len(borders)]
    beside = np.nextafter(
        near, np.array([-np.inf, 0, np.inf], np.float32)[draw.words(chance, n) % 3]
    )
    x = np.where(draw.words(chance, n) % 2, beside, draw.values(chance, n, _NEAR))
    x = oracle.stored(x.astype(np.float32), dtype).reshape(draw.shape_of(chance, n))
    return draw.odd(chance, _tensor(x, dtype)), x.ravel(), dtype


def _tensor(x: Array, dtype: str) -> Tensor:
    if dtype != "float64":
        return draw.tensor(x, dtype)
    with np.errstate(invalid="ignore"):  # NaN that signals
        return torch.from_numpy(x.astype(np.float64))


def _borders(chance: Random, count: int) -> Array:
    """Draw ascending borders: even, random, of huge range, or neighbours in float32."""
    kind = chance.randrange(5)
    if kind == 0:
        x = np.arange(count) - count / 2
    elif kind == 1:
        x = draw.normal(chance, count) * 2.0 ** chance.randint(-140, 120)
    elif kind == 2:
        x = draw.finite(draw.words(chance, count).view(np.float32))
    elif kind == 3:
        first = np.float32(chance.uniform(-3, 3)).view(np.uint32)
        x = (first + np.arange(count, dtype=np.uint32)).view(np.float32)
    else:
        x = draw.normal(chance, count)
    return np.unique(x.astype(np.float32) + np.float32(0))


def _pieces(x: Array, borders: Array) -> Array:
    """Return how many borders lie below each value; NaN is above none."""
    if len(x) > 1000:  # the same by bisection
        return np.where(np.isnan(x), 0, np.searchsorted(borders, x, side="left"))
    return (x[:, None] > borders[None]).sum(1)


def _codes(planes: Array, bits: int) -> Array:
    """Return the codes of all tiles: row ``r`` of column ``c`` is bit ``r`` of words ``c``."""
    words = planes.view(np.uint32).reshape(-1, bits, 1, _COLUMNS).astype(np.int64)
    set_bits = words >> np.arange(32)[None, None, :, None] & 1
    return (set_bits << np.arange(bits)[None, :, None, None]).sum(1).ravel()


def _product(grad: Array, levels: Array, to: str, of: str = "") -> Array:
    """Return products in float32, or float64 where either is; 0 where the level is."""
    working = np.float64 if "float64" in (to, of) else np.float32
    with np.errstate(all="ignore"):
        product = grad.astype(working) * levels.astype(working)
        product = np.where(levels == 0, working(0), product)
        if to == "float64":
            return product
        # torch takes float64 to float16 by way of float32, and rounds twice
        return oracle.stored(product.astype(np.float32), to)
