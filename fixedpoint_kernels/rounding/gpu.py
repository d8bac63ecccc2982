"""Fixed-point rounding in Triton."""

# Rules that kernels break, for they are Triton's language; launchers keep all others.
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint, Minifloat
from fixedpoint_kernels.memory import Places
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.gpu import jit, uniform
from fixedpoint_kernels.rounding.reference import Rounding, float_bounds

_BLOCK = 1024


@jit
def noise_of(block, seed, stream, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    """Return the noise of ``BLOCK`` elements from ``4 * block`` on, or 0 where none is needed."""
    noise = 0.0
    if STOCHASTIC:
        blocks = block + tl.arange(0, BLOCK // 4)
        noise = uniform(blocks, seed.to(tl.int64), stream.to(tl.int64), BLOCK // 4)
    return noise


@jit
def codes_of(x, noise, scale, STOCHASTIC: tl.constexpr):
    """Round ``x * scale`` to whole numbers."""
    scaled = x * scale
    below = tl.floor(scaled)
    fraction = scaled - below
    if STOCHASTIC:
        up = noise < fraction
    else:
        is_odd = below != 2.0 * tl.floor(0.5 * below)
        up = (fraction > 0.5) | ((fraction == 0.5) & is_odd)
    return below + up.to(tl.float32)


@jit
def saturate(codes, low, high):
    """Clamp, keeping NaN."""
    codes = tl.where(codes < low, low, codes)  # comparisons, not minimum: NaN stays
    return tl.where(codes > high, high, codes)


@jit
def own_scale(x, MAN: tl.constexpr, LEAST: tl.constexpr):
    """Return ``2**fl`` and ``2**-fl`` of minifloats, each with an exponent of its own.

    LEAST: exponent bits of the smallest normal number, as a number.
    """
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where(exponent < LEAST, LEAST, exponent)
    exponent = tl.where(exponent > 254, 254, exponent)  # infinities and NaN have one more
    scale = ((MAN + 254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - MAN) << 23).to(tl.float32, bitcast=True)


@jit
def _to_float32(x):
    """Widen to float32; bfloat16 by hand, of which Triton's interpreter loses tiny numbers."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def _to_bfloat16(y):
    """Round float32 to bfloat16, ties to even; Triton's interpreter would truncate."""
    bits = y.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(y == y, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit(do_not_specialize=["seed", "stream", "block"])
def _quantize_kernel(
    x_ptr,  # (n,) float32, bfloat16 or float16
    y_ptr,  # (n,) the same, or int8, int16, int32 for codes
    inside_ptr,  # (n,) bool; y_ptr where WITH_MASK is false
    n,
    scale,  # 2**fl: a power of two, so both products below are exact; not of minifloats
    lsb,  # 2**-fl, or 1 for codes
    low,  # smallest and largest code; of minifloats, number
    high,
    seed: tl.int64,
    stream: tl.int64,
    block: tl.int64,  # of the noise in which element 0 is
    LEAD: tl.constexpr,  # its lane there
    STOCHASTIC: tl.constexpr,
    WITH_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    MAN: tl.constexpr,  # of minifloats, see ``own_scale``; 0 of fixed point
    LEAST: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK) - LEAD
    mask = offsets < n
    if LEAD > 0:
        mask = mask & (offsets >= 0)
    x = _to_float32(tl.load(x_ptr + offsets, mask=mask, other=0.0))
    noise = noise_of(block.to(tl.int64) + (first >> 2), seed, stream, STOCHASTIC, BLOCK)
    if MAN > 0:
        scale, lsb = own_scale(x, MAN, LEAST)
    codes = codes_of(x, noise, scale, STOCHASTIC)
    if MAN > 0:
        codes = codes * lsb
        lsb = 1.0
    if WITH_MASK:
        inside = (codes < low) | (codes > high)
        tl.store(inside_ptr + offsets, inside == 0, mask=mask)
    y = saturate(codes, low, high) * lsb
    if y_ptr.dtype.element_ty.is_int():
        y = tl.where(y == y, y, 0.0).to(y_ptr.dtype.element_ty)
    elif y_ptr.dtype.element_ty == tl.bfloat16:
        y = _to_bfloat16(y)
    tl.store(y_ptr + offsets, y, mask=mask)


@jit(do_not_specialize=["seed", "stream"])
def _quantize_many_kernel(
    pointers_ptr,  # (t, 2) int64: addresses of x and y, float32
    sizes_ptr,  # (t,) int64
    numbers_ptr,  # (t, 4) float32: scale, lsb, smallest and largest code
    tasks_ptr,  # (programs, 3) int64: tensor, first element and noise block of each program
    seed: tl.int64,
    stream: tl.int64,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.load(tasks_ptr + 3 * tl.program_id(0))
    first = tl.load(tasks_ptr + 3 * tl.program_id(0) + 1)
    block = tl.load(tasks_ptr + 3 * tl.program_id(0) + 2)
    x_ptr = tl.load(pointers_ptr + 2 * tensor).to(tl.pointer_type(tl.float32))
    y_ptr = tl.load(pointers_ptr + 2 * tensor + 1).to(tl.pointer_type(tl.float32))
    scale = tl.load(numbers_ptr + 4 * tensor)
    lsb = tl.load(numbers_ptr + 4 * tensor + 1)
    low = tl.load(numbers_ptr + 4 * tensor + 2)
    high = tl.load(numbers_ptr + 4 * tensor + 3)
    offsets = first + tl.arange(0, BLOCK)
    mask = (offsets >= 0) & (offsets < tl.load(sizes_ptr + tensor))
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    noise = noise_of(block, seed, stream + tensor, STOCHASTIC, BLOCK)
    codes = codes_of(x, noise, scale, STOCHASTIC)
    tl.store(y_ptr + offsets, saturate(codes, low, high) * lsb, mask=mask)


def quantize(
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
    fmt: FixedPoint | Minifloat,
    rounding: Rounding,
    key: Key,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize``; integer ``y`` takes codes."""
    if isinstance(fmt, Minifloat):
        scale, lsb, low, high = 1.0, 1.0, fmt.min, fmt.max
        man, least = fmt.man, fmt.min_exponent + 127
    else:
        scale, lsb = fmt.scale, fmt.lsb if y.dtype.is_floating_point else 1.0
        (low, high), (man, least) = float_bounds(fmt), (0, 0)
    _quantize_kernel[(triton.cdiv(x.numel() + key.lead, _BLOCK),)](
        x.detach(),
        y.detach(),
        y.detach() if inside is None else inside,
        x.numel(),
        scale,
        lsb,
        low,
        high,
        key.seed,
        key.stream,
        key.offset >> 2,
        LEAD=key.lead,
        STOCHASTIC=rounding == "stochastic",
        WITH_MASK=inside is not None,
        BLOCK=_BLOCK,
        MAN=man,
        LEAST=least,
        enable_fp_fusion=False,
    )


def quantize_many(
    places: Places,
    fmts: Sequence[FixedPoint],
    rounding: Rounding,
    first: Key,
    offsets: Sequence[int],
    device: torch.device,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize_many``; all tensors are float32.

    ``first`` has the seed of all, and the stream of the first.
    """
    pointers, sizes, tasks = _tables(places, tuple(offsets), device)
    _quantize_many_kernel[(len(tasks),)](
        pointers,
        sizes,
        _numbers(tuple(fmts), device),
        tasks,
        first.seed,
        first.stream,
        STOCHASTIC=rounding == "stochastic",
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )


@lru_cache(
    maxsize=16
)  # the same parameters and formats come step after step: no copy to the device
def _tables(
    places: Places, offsets: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    rows = [places.xs, places.ys, places.elements, offsets]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").T
    lead, block = table[:, 3] & 3, table[:, 3] >> 2
    programs = torch.where(table[:, 2] > 0, -((table[:, 2] + lead) // -_BLOCK), 0)
    tensor = torch.repeat_interleave(torch.arange(len(offsets), device="cpu"), programs)
    first = (
        torch.arange(len(tensor), device="cpu") - (programs.cumsum(0) - programs)[tensor]
    ) * _BLOCK
    tasks = torch.stack([tensor, first - lead[tensor], block[tensor] + first // 4], dim=1)
    pointers, sizes = table[:, :2].contiguous(), table[:, 2].contiguous()
    return pointers.to(device), sizes.to(device), tasks.to(device)


@lru_cache(maxsize=16)
def _numbers(fmts: tuple[FixedPoint, ...], device: torch.device) -> Tensor:
    rows = [(fmt.scale, fmt.lsb, *float_bounds(fmt)) for fmt in fmts]
    return torch.tensor(rows, dtype=torch.float32, device=device)
