"""Few-bit codes in Triton: a program takes some tiles; a lane owns a column, so none is exchanged."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.few_bit.table import Table, steps_of
from fixedpoint_kernels.rounding.gpu import _to_bfloat16

_TILE = 1024
_TILES = 4  # that a program takes


@triton.jit
def _code(x, borders_ptr, codes_ptr, STEPS: tl.constexpr):
    """Search for each ``x`` among ``2**STEPS - 1`` borders; NaN is above none."""
    at = tl.zeros_like(x).to(tl.int32)
    for step in tl.static_range(STEPS):
        border = tl.load(borders_ptr + at + ((1 << (STEPS - 1 - step)) - 1))
        at += tl.where(x > border, 1 << (STEPS - 1 - step), 0)
    return tl.load(codes_ptr + at)


@triton.jit
def _column(TILES: tl.constexpr):
    """Return each lane's tile and column."""
    lane = tl.arange(0, TILES * 32)
    return tl.program_id(0).to(tl.int64) * TILES + lane // 32, lane % 32


@triton.jit
def _encode_kernel(
    x_ptr,  # (n,) float32, bfloat16, float16 or float64
    planes_ptr,  # (tiles * BITS * 32,) int32
    borders_ptr,  # (2**STEPS - 1,) float32
    codes_ptr,  # (2**STEPS,) int32
    n,
    tiles,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
):
    tile, column = _column(TILES)
    w0 = tl.zeros([TILES * 32], tl.int32)
    w1, w2, w3, w4, w5, w6, w7 = w0, w0, w0, w0, w0, w0, w0
    for row in range(32):
        i = tile * 1024 + row * 32 + column
        x = tl.load(x_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        code = _code(x, borders_ptr, codes_ptr, STEPS)
        w0 |= (code & 1) << row  # words that BITS does not reach are never stored
        w1 |= (code >> 1 & 1) << row
        w2 |= (code >> 2 & 1) << row
        w3 |= (code >> 3 & 1) << row
        w4 |= (code >> 4 & 1) << row
        w5 |= (code >> 5 & 1) << row
        w6 |= (code >> 6 & 1) << row
        w7 |= (code >> 7 & 1) << row
    words = (w0, w1, w2, w3, w4, w5, w6, w7)
    for bit in tl.static_range(BITS):
        tl.store(planes_ptr + (tile * BITS + bit) * 32 + column, words[bit], mask=tile < tiles)


@triton.jit
def _word(planes_ptr, tile, column, tiles, BIT: tl.constexpr, BITS: tl.constexpr):
    word = tl.zeros_like(column)
    if BIT < BITS:
        word = tl.load(planes_ptr + (tile * BITS + BIT) * 32 + column, mask=tile < tiles, other=0)
    return word


@triton.jit
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
        code = (w0 >> row & 1) | (w1 >> row & 1) << 1 | (w2 >> row & 1) << 2
        code |= (w3 >> row & 1) << 3 | (w4 >> row & 1) << 4 | (w5 >> row & 1) << 5
        code |= (w6 >> row & 1) << 6 | (w7 >> row & 1) << 7
        level = tl.load(levels_ptr + code)
        grad = tl.load(grad_ptr + i, mask=i < n, other=0.0)
        if grad_ptr.dtype.element_ty == tl.float64 or out_ptr.dtype.element_ty == tl.float64:
            grad = grad.to(tl.float64)
        else:
            grad = grad.to(tl.float32)
        product = tl.where(level == 0.0, 0.0, grad * level)  # of an infinite gradient too
        if out_ptr.dtype.element_ty == tl.bfloat16:
            product = _to_bfloat16(product.to(tl.float32))
        tl.store(out_ptr + i, product.to(out_ptr.dtype.element_ty), mask=i < n)


@lru_cache(maxsize=256)
def _tensors(table: Table, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return borders, with infinite ones up to a power of two, codes and levels."""
    steps = steps_of(table)
    borders = torch.full(((1 << steps) - 1,), float("inf"))
    borders[: len(table.borders)] = torch.from_numpy(table.borders)
    codes = torch.zeros(1 << steps, dtype=torch.int32)
    codes[: len(table.codes)] = torch.from_numpy(table.codes)
    return borders.to(device), codes.to(device), torch.from_numpy(table.levels).to(device)


def encode(x: Tensor, planes: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.encode``; ``x`` is contiguous."""
    borders, codes, _ = _tensors(table, x.device)
    tiles = triton.cdiv(x.numel(), _TILE)
    _encode_kernel[(triton.cdiv(tiles, _TILES),)](
        x.detach(),
        planes,
        borders,
        codes,
        x.numel(),
        tiles,
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
