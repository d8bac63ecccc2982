"""The observer in Triton: each program rounds, masks and counts one block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.observer.reference import MAGNITUDES
from fixedpoint_kernels.philox.gpu import jit
from fixedpoint_kernels.rounding.gpu import _to_bfloat16, _to_float32, codes_of, saturate
from fixedpoint_kernels.rounding.reference import float_bounds

_BLOCK = 4096
_BINS = 512  # above MAGNITUDES; the last one takes what is no element


@jit
def _observe_kernel(
    x_ptr,  # (n,) float32, bfloat16 or float16
    y_ptr,  # (n,) the same; x_ptr where WRITES is false
    ste_mask_ptr,  # (n,) uint8
    n,
    scale,
    lsb,
    low,
    high,
    counts_ptr,  # (MAGNITUDES,) int64
    sums_ptr,  # (programs, 3) float32: smallest value, squares, values clamped
    ROUNDS: tl.constexpr,
    WRITES: tl.constexpr,
    MAGNITUDES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = _to_float32(tl.load(x_ptr + offsets, mask=mask, other=0.0))
    outside = tl.zeros((BLOCK,), tl.int1)
    if ROUNDS:
        codes = codes_of(x, 0.0, scale, False)
        outside = (codes < low) | (codes > high)
        if WRITES:
            y = saturate(codes, low, high) * lsb
            if y_ptr.dtype.element_ty == tl.bfloat16:
                y = _to_bfloat16(y)
            tl.store(y_ptr + offsets, y, mask=mask)
    inside = (outside == 0).to(tl.uint8)
    counted = inside * (x != 0.0).to(tl.uint8)
    tl.store(ste_mask_ptr + offsets, inside + 2 * counted, mask=mask)
    sums = sums_ptr + 3 * tl.program_id(0)
    tl.store(sums, tl.min(tl.where(mask, x, float("inf"))))
    tl.store(sums + 1, tl.sum(x * x))  # 0 where there is no element
    tl.store(sums + 2, tl.sum((outside & mask).to(tl.float32)))
    # the biased exponent, one more where the mantissa is not 0; NaN gives 256
    indices = ((x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) + 0x7FFFFF) >> 23
    indices = tl.where(mask, indices, BINS - 1).to(tl.int32)
    found = tl.histogram(indices, BINS).to(tl.int64)
    columns = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + columns, found, mask=(columns < MAGNITUDES) & (found > 0))


@jit
def _observe_gradient_kernel(
    grad_ptr,  # (n,) float32, bfloat16 or float16
    ste_mask_ptr,  # (n,) uint8
    out_ptr,  # (n,) as grad; grad_ptr where WRITES is false
    n,
    sums_ptr,  # (programs,) float32
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
    ste_mask = tl.load(ste_mask_ptr + offsets, mask=mask, other=0)
    if WRITES:
        masked = tl.where((ste_mask & 1) == 1, grad, tl.zeros_like(grad))
        tl.store(out_ptr + offsets, masked, mask=mask)
    counted = tl.where(ste_mask > 1, _to_float32(grad), 0.0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(counted * counted))


def observe(
    x: Tensor, y: Tensor | None, ste_mask: Tensor, fmt: FixedPoint | None
) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.observer.reference.observe``."""
    numbers = (1.0,) * 4 if fmt is None else (fmt.scale, fmt.lsb, *float_bounds(fmt))
    programs = triton.cdiv(x.numel(), _BLOCK)
    counts = torch.zeros(MAGNITUDES, dtype=torch.int64, device=x.device)
    sums = torch.empty(programs, 3, dtype=torch.float32, device=x.device)
    _observe_kernel[(programs,)](
        x.detach(),
        x.detach() if y is None else y,
        ste_mask,
        x.numel(),
        *numbers,
        counts,
        sums,
        ROUNDS=fmt is not None,
        WRITES=y is not None,
        MAGNITUDES=MAGNITUDES,
        BINS=_BINS,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    wide = sums.double()
    return counts, torch.cat([wide[:, :1].amin(0), wide[:, 1:].sum(0)])


def observe_gradient(grad: Tensor, ste_mask: Tensor, out: Tensor | None) -> Tensor:
    """See ``fixedpoint_kernels.observer.reference.observe_gradient``."""
    programs = triton.cdiv(grad.numel(), _BLOCK)
    sums = torch.empty(programs, dtype=torch.float32, device=grad.device)
    _observe_gradient_kernel[(programs,)](
        grad.detach(),
        ste_mask,
        grad.detach() if out is None else out,
        grad.numel(),
        sums,
        WRITES=out is not None,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return sums.double().sum()
