"""Operators called by hand with parts of the wrong size: refused, and never read out of bounds."""

from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fuzz.oracle import Failure
from fixedpoint_kernels.few_bit import operators
from fixedpoint_kernels.few_bit.table import number

_DTYPES = torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.float64, torch.bool
_REFUSALS = RuntimeError, ValueError, TypeError, KeyError, OverflowError, NotImplementedError


def call(chance: Random) -> None:
    """One operator, its arguments wrong in one place or in none."""
    _few_bit(chance) if chance.random() < 0.5 else _division(chance)


def _few_bit(chance: Random) -> None:
    table = number(np.array([-1.0, 0.0, 1.0]), np.array([0, 1, 2, 3]), np.arange(4.0))
    n, key = chance.choice((0, 1, 1023, 1024, 1025, 3000)), operators.register(table)
    ops: Any = torch.ops.fixedpoint_kernels
    planes = ops.few_bit_encode(torch.randn(n), key)
    grad, kind = torch.ones(n), chance.randrange(5)
    if kind == 0:
        planes = _other_size(chance, planes)
    elif kind == 1:
        planes = planes.to(chance.choice(_DTYPES))
    elif kind == 2:
        grad = torch.ones(n + chance.choice((1024, 5000, 200_000)))
    elif kind == 3:
        key = "no such table"
    must_fail = kind == 3 or grad.numel() > 1024 * (planes.numel() // 64)
    must_fail |= planes.dtype is not torch.int32
    direct = chance.random() < 0.5
    decode = operators.decode if direct else ops.few_bit_decode
    _check(lambda: decode(grad, planes, key, torch.float32), must_fail, "few_bit_decode")


def _division(chance: Random) -> None:
    ops: Any = torch.ops.fixedpoint_kernels
    shape = [chance.choice((1, 2, 5, 8)) for _ in range(chance.randint(1, 4))]
    block, bits = chance.choice((None, 1, 3, 8)), chance.choice((1, 2, 4, 8))
    spatial = chance.randint(0, min(3, len(shape)))
    parts = list(ops.division_compress(torch.randn(shape), block, bits, 0, 0, spatial))
    kind, must_fail, rest = chance.randrange(6), False, [block, bits, spatial]
    if kind < 2:
        at = chance.randrange(3)
        old = parts[at]
        parts[at] = _other_size(chance, old) if kind == 0 else old.to(chance.choice(_DTYPES))
        must_fail = parts[at].shape != old.shape or parts[at].dtype is not old.dtype
    elif kind == 2:
        rest[chance.randrange(3)] = chance.choice((-1, 0, 3, 5, 7, 2**31, 2**62))
    elif kind == 3:
        shape[chance.randrange(len(shape))] += chance.choice((1, 1000, 2**40))
        must_fail = spatial < len(shape) and block is not None
        must_fail = False  # a larger block may take the same parts; it must not crash
    elif kind == 4:
        shape[chance.randrange(len(shape))] = -1
        must_fail = True
    _check(
        lambda: ops.division_decompress(*parts, shape, torch.float32, *rest, False),
        must_fail,
        "division_decompress",
    )


def _other_size(chance: Random, x: Tensor) -> Tensor:
    kind = chance.randrange(3)
    if kind == 0:
        return x[: x.shape[0] // 2]
    return x.new_zeros(0) if kind == 1 else torch.cat([x, x])


def _check(function: Any, must_fail: bool, what: str) -> None:
    try:
        function()
    except _REFUSALS:
        return
    if must_fail:
        raise Failure(f"{what} took parts of the wrong size or type")
