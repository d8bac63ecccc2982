"""Few-bit codes in Triton: a program takes some tiles; a lane owns a column, so none is exchanged.

Values are float32 arithmetic in torch's order, without fused multiply-adds. ``tl.exp`` is off by
``abs(x) / 2`` units in the last place on a GPU, so the exponential is our own.
"""

# Rules that kernels break, for they are Triton's language; launchers keep all others.
# pyright: reportGeneralTypeIssues=false

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.few_bit.fused import ONE_PASS as PASSES
from fixedpoint_kernels.few_bit.table import Table, steps_of
from fixedpoint_kernels.philox.gpu import jit
from fixedpoint_kernels.rounding.gpu import _to_bfloat16, _to_float32

ONE_PASS = PASSES["cuda"]
_TILE = 1024
_TILES = 4  # that a program takes


@jit
def _code(x, borders_ptr, codes_ptr, STEPS: tl.constexpr):
    """Search for each ``x`` among ``2**STEPS - 1`` borders; NaN is above none."""
    at = tl.zeros_like(x).to(tl.int32)
    for step in tl.static_range(STEPS):
        border = tl.load(borders_ptr + at + ((1 << (STEPS - 1 - step)) - 1))
        at += tl.where(x > border, 1 << (STEPS - 1 - step), 0)
    return tl.load(codes_ptr + at)


@jit
def _power(n):
    """Return 2**n, float32, of integers -126 to 127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _reduced(x):
    """Return n and ``exp(r) - 1`` where ``x = n log(2) + r``: Cody and Waite, Taylor's series."""
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.4286068203094172e-06  # the first product is exact
    tail = 0.0013888889 + r * 0.0001984127
    tail = 0.16666667 + r * (0.041666668 + r * (0.008333334 + r * tail))
    return n.to(tl.int32), r + r * r * (0.5 + r * tail)


@jit
def _logistic(x, top):
    """Return ``top / (1 + exp(-x))``; what rounding takes from the sum is put back afterwards."""
    n, rest = _reduced(tl.where(x < -89.0, 89.0, tl.where(x > 104.0, -104.0, -x)))
    whole = 1.0 + rest
    high, low = _power(n >> 1), _power(n - (n >> 1))
    power = whole * high * low
    total = 1.0 + power
    added = total - 1.0
    lost = (1.0 - (total - added)) + (power - added) + (rest - (whole - 1.0)) * high * low
    y = tl.div_rn(top, total)
    return tl.where(tl.abs(x) < 87.0, y - y * (lost / total), y)  # beyond: infinities


@jit
def _expm1(x):  # of x that are not positive
    n, rest = _reduced(tl.where(x < -30.0, -30.0, x))
    power = _power(n)
    return power * rest + (power - 1.0)


@jit
def _value(x, a, b, c, KIND: tl.constexpr):
    """Return the activation of each ``x``, float32; see ``fused_of`` for kinds and numbers."""
    if KIND == "elu":
        y = tl.where(x > 0.0, x * c, _expm1(tl.where(x > 0.0, 0.0, x * b)) * a)
    elif KIND == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "hardswish":
        y = x * _clamped(x + 3.0, 0.0, 6.0) * 0.16666667
    elif KIND == "sigmoid":
        y = _logistic(x, 1.0 + tl.zeros_like(x))
    elif KIND == "silu":
        y = _logistic(x, x)
    elif KIND == "softsign":
        y = tl.div_rn(x, 1.0 + tl.abs(x))
    else:
        y = _stepwise_value(x, a, b, KIND)
    return y


@jit
def _stepwise_value(x, a, b, KIND: tl.constexpr):
    if KIND == "hardshrink":
        y = tl.where((x >= -a) & (x <= a), 0.0, x)
    elif KIND == "hardsigmoid":
        y = _clamped(x + 3.0, 0.0, 6.0) * 0.16666667
    elif KIND == "hardtanh":
        y = _clamped(x, a, b)
    elif KIND == "leaky_relu":
        y = tl.where(x > 0.0, x, x * a)
    elif KIND == "softshrink":
        y = tl.where(x > a, x - a, tl.where(x < -a, x + a, x * 0.0))
    else:
        tl.static_assert(KIND == "threshold")
        y = tl.where(x <= a, b, x)
    return y


@jit
def _clamped(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))  # NaN stays


@jit
def _rounded(y, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        y = _to_bfloat16(y.to(tl.float32))
    return y.to(dtype)


@jit
def _column(TILES: tl.constexpr):
    """Return each lane's tile and column."""
    lane = tl.arange(0, TILES * 32)
    return tl.program_id(0).to(tl.int64) * TILES + lane // 32, lane % 32


@jit
def _encode_kernel(
    x_ptr,  # (n,) float32, bfloat16, float16 or float64
    y_ptr,  # (n,) dtype of x, or with KIND None anything
    planes_ptr,  # (tiles * BITS * 32,) int32
    borders_ptr,  # (2**STEPS - 1,) float32
    codes_ptr,  # (2**STEPS,) int32
    n,
    tiles,
    a,
    b,
    c,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
):
    tile, column = _column(TILES)
    w0 = tl.zeros([TILES * 32], tl.int32)
    w1, w2, w3, w4, w5, w6, w7 = w0, w0, w0, w0, w0, w0, w0
    for row in range(32):
        i = tile * 1024 + row * 32 + column
        x = _to_float32(tl.load(x_ptr + i, mask=i < n, other=float("-inf")))
        if KIND is not None:
            y = _rounded(_value(x, a, b, c, KIND), y_ptr.dtype.element_ty)
            tl.store(y_ptr + i, y, mask=i < n)
        code = _code(x, borders_ptr, codes_ptr, STEPS)
        w0 |= (code & 1) << row
        if BITS > 1:
            w1 |= (code >> 1 & 1) << row
        if BITS > 2:
            w2 |= (code >> 2 & 1) << row
        if BITS > 3:
            w3 |= (code >> 3 & 1) << row
        if BITS > 4:
            w4 |= (code >> 4 & 1) << row
            w5 |= (code >> 5 & 1) << row  # words that BITS does not reach are never stored
            w6 |= (code >> 6 & 1) << row
            w7 |= (code >> 7 & 1) << row
    words = (w0, w1, w2, w3, w4, w5, w6, w7)
    for bit in tl.static_range(BITS):
        tl.store(planes_ptr + (tile * BITS + bit) * 32 + column, words[bit], mask=tile < tiles)


@jit
def _word(planes_ptr, tile, column, tiles, BIT: tl.constexpr, BITS: tl.constexpr):
    word = tl.zeros_like(column)
    if BIT < BITS:
        word = tl.load(planes_ptr + (tile * BITS + BIT) * 32 + column, mask=tile < tiles, other=0)
    return word


@jit
def _decode_kernel(
    grad_ptr,  # (n,) floating
    planes_ptr,  # (tiles * BITS * 32,) int32
    levels_ptr,  # (2**BITS,) float32
    out_ptr,  # (n,) floating
    n,
    tiles,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
):
    tile, column = _column(TILES)
    w0 = _word(planes_ptr, tile, column, tiles, 0, BITS)
    w1 = _word(planes_ptr, tile, column, tiles, 1, BITS)
    w2 = _word(planes_ptr, tile, column, tiles, 2, BITS)
    w3 = _word(planes_ptr, tile, column, tiles, 3, BITS)
    w4 = _word(planes_ptr, tile, column, tiles, 4, BITS)
    w5 = _word(planes_ptr, tile, column, tiles, 5, BITS)
    w6 = _word(planes_ptr, tile, column, tiles, 6, BITS)
    w7 = _word(planes_ptr, tile, column, tiles, 7, BITS)
    for row in range(32):
        i = tile * 1024 + row * 32 + column
        code = w0 >> row & 1
        if BITS > 1:
            code |= (w1 >> row & 1) << 1
        if BITS > 2:
            code |= (w2 >> row & 1) << 2
        if BITS > 3:
            code |= (w3 >> row & 1) << 3
        if BITS > 4:
            code |= (w4 >> row & 1) << 4 | (w5 >> row & 1) << 5
            code |= (w6 >> row & 1) << 6 | (w7 >> row & 1) << 7
        level = tl.load(levels_ptr + code)
        grad = tl.load(grad_ptr + i, mask=i < n, other=0.0)
        if grad_ptr.dtype.element_ty != tl.float64:
            grad = _to_float32(grad)
        if out_ptr.dtype.element_ty == tl.float64:
            grad = grad.to(tl.float64)
        product = tl.where(level == 0.0, 0.0, grad * level)  # of an infinite gradient too
        tl.store(out_ptr + i, _rounded(product, out_ptr.dtype.element_ty), mask=i < n)


@lru_cache(maxsize=256)
def _tensors(table: Table, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return borders, with infinite ones up to a power of two, codes and levels."""
    steps = steps_of(table)
    borders = torch.full(((1 << steps) - 1,), float("inf"), dtype=torch.float32, device="cpu")
    borders[: len(table.borders)] = torch.from_numpy(table.borders)
    codes = torch.zeros(1 << steps, dtype=torch.int32, device="cpu")
    codes[: len(table.codes)] = torch.from_numpy(table.codes)
    return borders.to(device), codes.to(device), torch.from_numpy(table.levels).to(device)


def encode(x: Tensor, planes: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.encode``; ``x`` is contiguous."""
    value_and_encode(x, planes, planes, table, (None, 0.0, 0.0, 0.0))


def value_and_encode(x: Tensor, y: Tensor, planes: Tensor, table: Table, fused: object) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.value_and_encode``; ``x`` is contiguous."""
    borders, codes, _ = _tensors(table, x.device)
    tiles = triton.cdiv(x.numel(), _TILE)
    kind, *numbers = fused
    _encode_kernel[(triton.cdiv(tiles, _TILES),)](
        x.detach(),
        y,
        planes,
        borders,
        codes,
        x.numel(),
        tiles,
        *numbers,
        KIND=kind,
        BITS=table.bits,
        STEPS=steps_of(table),
        TILES=_TILES,
        enable_fp_fusion=False,
    )


def decode(grad: Tensor, planes: Tensor, out: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.decode``; all are contiguous."""
    tiles = triton.cdiv(grad.numel(), _TILE)
    _decode_kernel[(triton.cdiv(tiles, _TILES),)](
        grad.detach(),
        planes,
        _tensors(table, grad.device)[2],
        out,
        grad.numel(),
        tiles,
        BITS=table.bits,
        TILES=_TILES,
        enable_fp_fusion=False,
    )
