"""DIVISION in Triton: a program takes some planes, and reads each from memory once.

It goes over its planes three times, for means, for ranges and for codes; what the first has read is
in the cache for the others, except of planes that are larger than the cache.
"""

# Rules that kernels break, for they are Triton's language; launchers keep all others.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import math

import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.division.layout import Layout
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.gpu import jit, uniform
from fixedpoint_kernels.rounding.gpu import _to_bfloat16, _to_float32

_LANES = 1024
_MOST_PLANES = 64  # that a program takes; they have fewer than _LANES elements in all


@jit
def _rounded_down(x):
    """Return the largest number of bfloat16 that is not above ``x``, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).to(tl.float32, bitcast=True)


@jit
def _row(x_ptr, z, y, x, sides, mask):
    inside = mask & (z < sides[0]) & (y < sides[1])
    return _to_float32(tl.load(x_ptr + (z * sides[1] + y) * sides[2] + x, mask=inside, other=0.0))


@jit
def _block_sums(
    x_ptr,  # (blocks, 1) pointers to the block's plane
    corner,  # z, y, x of the block's first element, (blocks, 1) each
    mask,  # (blocks, 1)
    sides,
    EDGES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
):
    """Return the sums of blocks, shape ``(blocks,)``, in the order of ``reference``."""
    ROWS: tl.constexpr = EDGES[0] * EDGES[1]
    z, y, x = corner
    slot = tl.arange(0, SLOTS)[None, :]
    total = tl.zeros([BLOCKS, SLOTS], tl.float32)
    for group in range(0, EDGES[2], SLOTS):
        column = x + group + slot
        inside = mask & (group + slot < EDGES[2]) & (column < sides[2])
        sums = tl.zeros([BLOCKS, SLOTS], tl.float32)
        if ROWS <= 16:
            for row in tl.static_range(ROWS):
                sums += _row(x_ptr, z + row // EDGES[1], y + row % EDGES[1], column, sides, inside)
        else:
            for row in range(ROWS):
                sums += _row(x_ptr, z + row // EDGES[1], y + row % EDGES[1], column, sides, inside)
        total += sums
    for step in tl.static_range(LOG_SLOTS):
        even, odd = tl.split(tl.reshape(total, [BLOCKS, SLOTS >> (step + 1), 2]))
        total = even + odd
    return tl.reshape(total, [BLOCKS])


@jit
def _mean_of(means_ptr, plane, element, mask, sides, blocks, EDGES: tl.constexpr):
    """Read the mean of the block that an element of a plane is in."""
    z = element // (sides[1] * sides[2]) // EDGES[0]
    y = element // sides[2] % sides[1] // EDGES[1]
    block = (z * blocks[1] + y) * blocks[2] + element % sides[2] // EDGES[2]
    count = blocks[0] * blocks[1] * blocks[2]
    return _to_float32(tl.load(means_ptr + plane * count + block, mask=mask, other=0.0))


@jit
def _range_of(low, high, is_wrong, inverse_levels, LEVELS: tl.constexpr):
    """Return smallest residual and step, or two NaN; see ``reference``."""
    smallest = _rounded_down(low + 0.0)  # -0.0 becomes 0.0
    extent = high - smallest
    step = -_rounded_down(-(extent * inverse_levels))
    step = tl.where(extent == 0.0, 0.0, tl.maximum(step, 1.1754943508222875e-38))
    largest = step * LEVELS
    is_wrong |= (smallest - smallest != 0.0) | (largest - largest != 0.0)
    nan = float("nan")
    return tl.where(is_wrong, nan, smallest), tl.where(is_wrong, nan, step)


@jit
def _keep_means(
    x_ptr,
    means_ptr,
    count,
    sides,
    blocks,
    inverses,  # 1 over a whole block's edges, then over the last one's
    EDGES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
):
    elements, in_plane = sides[0] * sides[1] * sides[2], blocks[0] * blocks[1] * blocks[2]
    start = 0
    while start < count * in_plane:
        block = start + tl.arange(0, BLOCKS)
        mask = block < count * in_plane
        z, y, x = block % in_plane // (blocks[1] * blocks[2]), block // blocks[2], block % blocks[2]
        y = y % blocks[1]
        corner = (z * EDGES[0])[:, None], (y * EDGES[1])[:, None], (x * EDGES[2])[:, None]
        planes = x_ptr + (block // in_plane * elements)[:, None]
        sums = _block_sums(planes, corner, mask[:, None], sides, EDGES, BLOCKS, SLOTS, LOG_SLOTS)
        inverse = tl.where(z < blocks[0] - 1, inverses[0], inverses[3])
        inverse *= tl.where(y < blocks[1] - 1, inverses[1], inverses[4])
        mean = sums * (inverse * tl.where(x < blocks[2] - 1, inverses[2], inverses[5]))
        tl.store(means_ptr + block, _to_bfloat16(mean), mask=mask)
        start += BLOCKS


@jit
def _keep_ranges(
    x_ptr,
    means_ptr,
    ranges_ptr,
    count,
    sides,
    blocks,
    inverse_levels,
    HAS_MEANS: tl.constexpr,
    LEVELS: tl.constexpr,
    EDGES: tl.constexpr,
    PLANES: tl.constexpr,
    LANES: tl.constexpr,  # of a plane
):
    elements = sides[0] * sides[1] * sides[2]
    plane = tl.arange(0, PLANES)[:, None]
    low = tl.full([PLANES, LANES], float("inf"), tl.float32)
    high = tl.full([PLANES, LANES], float("-inf"), tl.float32)
    wrong = tl.zeros([PLANES, LANES], tl.float32)
    start = 0
    while start < elements:
        element = start + tl.arange(0, LANES)[None, :]
        mask = (plane < count) & (element < elements)
        residual = _to_float32(tl.load(x_ptr + plane * elements + element, mask=mask, other=0.0))
        if HAS_MEANS:
            residual -= _mean_of(means_ptr, plane, element, mask, sides, blocks, EDGES)
        low = tl.where(mask & (residual < low), residual, low)
        high = tl.where(mask & (residual > high), residual, high)
        wrong += residual - residual  # 0, or NaN
        start += LANES
    low, high = tl.min(low, axis=1), tl.max(high, axis=1)
    is_wrong = tl.max((wrong != 0.0).to(tl.int32), axis=1) > 0
    smallest, step = _range_of(low, high, is_wrong, inverse_levels, LEVELS)
    row = tl.arange(0, PLANES)
    tl.store(ranges_ptr + 2 * row, _to_bfloat16(smallest), mask=row < count)
    tl.store(ranges_ptr + 2 * row + 1, _to_bfloat16(step), mask=row < count)


@jit
def _keep_codes(
    x_ptr,
    means_ptr,
    codes_ptr,
    ranges_ptr,
    first_element,
    count,
    sides,
    blocks,
    key,
    HAS_MEANS: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    EDGES: tl.constexpr,
    LANES: tl.constexpr,
):
    elements = sides[0] * sides[1] * sides[2]
    end = count * elements
    # counted from the program's first element: noise is made for four, from a multiple of four
    start = -(first_element & 3).to(tl.int32)
    while start < end:
        element = start + tl.arange(0, LANES)
        mask = (element >= 0) & (element < end)
        plane, inside = element // elements, element % elements
        residual = _to_float32(tl.load(x_ptr + element, mask=mask, other=0.0))
        if HAS_MEANS:
            residual -= _mean_of(means_ptr, plane, inside, mask, sides, blocks, EDGES)
        smallest = _to_float32(tl.load(ranges_ptr + 2 * plane, mask=mask, other=0.0))
        step = _to_float32(tl.load(ranges_ptr + 2 * plane + 1, mask=mask, other=0.0))
        inverse = tl.where(step > 0.0, tl.div_rn(1.0, tl.where(step > 0.0, step, 1.0)), 0.0)
        position = (residual - smallest) * inverse
        below = tl.floor(position)
        quad = (first_element + start >> 2) + tl.arange(0, LANES // 4)
        noise = uniform(quad, key[0].to(tl.int64), key[1].to(tl.int64), LANES // 4)
        code = below + (noise < position - below).to(tl.float32)
        code = tl.where(code > LEVELS, LEVELS, code)
        code = tl.where(mask & (code == code), code, 0.0).to(tl.int32)
        pieces = tl.reshape(code, [LANES * BITS // 8, 8 // BITS])
        packed = tl.sum(pieces << (BITS * tl.arange(0, 8 // BITS))[None, :], axis=1)
        byte = (start * BITS >> 3) + tl.arange(0, LANES * BITS // 8)
        is_ours = (byte >= 0) & (byte < (end * BITS + 7) // 8)
        target = codes_ptr + first_element * BITS // 8 + byte
        tl.store(target, packed.to(tl.uint8), mask=is_ours)
        start += LANES


@jit(do_not_specialize=["planes", "depth", "height", "width", "nz", "ny", "nx", "seed", "stream"])
def _compress_kernel(
    x_ptr,  # (planes * elements,) float32, bfloat16, float16 or float64
    means_ptr,  # (planes, nz * ny * nx) bfloat16
    codes_ptr,  # (bytes,) uint8
    ranges_ptr,  # (planes, 2) bfloat16
    planes,
    depth,
    height,
    width,
    nz,  # blocks along the depth
    ny,
    nx,
    inner_z,  # 1 over a whole block's edge
    inner_y,
    inner_x,
    last_z,  # 1 over the last block's
    last_y,
    last_x,
    inverse_levels,
    seed: tl.int64,
    stream: tl.int64,
    HAS_MEANS: tl.constexpr,
    BITS: tl.constexpr,
    EDGES: tl.constexpr,
    PLANES: tl.constexpr,  # of a program
    BLOCKS: tl.constexpr,  # whose means are taken together
    SLOTS: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LANES: tl.constexpr,
):
    LEVELS: tl.constexpr = 2**BITS - 1
    sides, blocks = (depth, height, width), (nz, ny, nx)
    first = tl.program_id(0).to(tl.int64) * PLANES
    count = tl.minimum(planes - first, PLANES).to(tl.int32)
    at = first * (depth * height * width)
    x_ptr += at
    means_ptr += first * (nz * ny * nx)
    ranges_ptr += 2 * first
    if HAS_MEANS:
        inverses = (inner_z, inner_y, inner_x, last_z, last_y, last_x)
        _keep_means(
            x_ptr, means_ptr, count, sides, blocks, inverses, EDGES, BLOCKS, SLOTS, LOG_SLOTS
        )
        tl.debug_barrier()  # the means are read by other threads than wrote them
    if BITS > 0:
        _keep_ranges(
            x_ptr,
            means_ptr,
            ranges_ptr,
            count,
            sides,
            blocks,
            inverse_levels,
            HAS_MEANS,
            LEVELS,
            EDGES,
            PLANES,
            LANES // PLANES,
        )
        tl.debug_barrier()
        _keep_codes(
            x_ptr,
            means_ptr,
            codes_ptr,
            ranges_ptr,
            at,
            count,
            sides,
            blocks,
            (seed, stream),
            HAS_MEANS,
            BITS,
            LEVELS,
            EDGES,
            LANES,
        )


@jit(do_not_specialize=["planes", "depth", "height", "width", "nz", "ny", "nx", "tiles"])
def _decompress_kernel(
    means_ptr,  # (planes, nz * ny * nx) bfloat16
    codes_ptr,  # (bytes,) uint8
    ranges_ptr,  # (planes, 2) bfloat16
    out_ptr,  # (planes * elements,) floating
    planes,
    depth,
    height,
    width,
    nz,
    ny,
    nx,
    tiles,  # of the planes that are counted together
    HAS_MEANS: tl.constexpr,
    BITS: tl.constexpr,
    EDGES: tl.constexpr,
    PLANES: tl.constexpr,
    LANES: tl.constexpr,
):
    elements = depth * height * width
    first = (tl.program_id(0) // tiles).to(tl.int64) * PLANES
    element = tl.program_id(0) % tiles * LANES + tl.arange(0, LANES)
    mask = element < tl.minimum(planes - first, PLANES) * elements
    plane, inside = element // elements, element % elements
    means_ptr += first * (nz * ny * nx)
    ranges_ptr += 2 * first
    value = tl.zeros([LANES], tl.float32)
    if BITS > 0:
        bit = element * BITS  # the first plane's codes start at a whole byte
        byte = tl.load(codes_ptr + first * elements * BITS // 8 + (bit >> 3), mask=mask, other=0)
        code = (byte.to(tl.int32) >> (bit & 7)) & ((1 << BITS) - 1)
        low = _to_float32(tl.load(ranges_ptr + 2 * plane, mask=mask, other=0.0))
        step = _to_float32(tl.load(ranges_ptr + 2 * plane + 1, mask=mask, other=0.0))
        value = low + code.to(tl.float32) * step
    if HAS_MEANS:
        sides, blocks = (depth, height, width), (nz, ny, nx)
        mean = _mean_of(means_ptr, plane, inside, mask, sides, blocks, EDGES)
        if BITS > 0:
            value += mean
        else:
            value = mean  # nothing is added: a mean of -0 stays
    if out_ptr.dtype.element_ty == tl.bfloat16:
        value = _to_bfloat16(value)
    target = out_ptr + first * elements + element
    tl.store(target, value.to(out_ptr.dtype.element_ty), mask=mask)


def compress(
    x: Tensor, means: Tensor, codes: Tensor, ranges: Tensor, layout: Layout, key: Key
) -> None:
    """See ``fixedpoint_kernels.division.compress``; ``x`` is contiguous and has elements."""
    sides, edges, blocks, slots = layout.geometry
    planes = _planes_of_program(layout)
    inner, last = zip(*layout.inverses, strict=True)
    together = triton.next_power_of_2(min(planes * math.prod(blocks), _LANES // slots))
    _compress_kernel[(triton.cdiv(layout.planes, planes),)](
        x.detach(),
        means,
        codes,
        ranges,
        layout.planes,
        *sides,
        *blocks,
        *inner,
        *last,
        layout.inverse_levels,
        key.seed,
        key.stream,
        HAS_MEANS=layout.block is not None,
        BITS=layout.bits if layout.has_codes else 0,
        EDGES=edges,
        PLANES=planes,
        BLOCKS=together,
        SLOTS=slots,
        LOG_SLOTS=slots.bit_length() - 1,
        LANES=_LANES,
        enable_fp_fusion=False,
    )


def decompress(means: Tensor, codes: Tensor, ranges: Tensor, out: Tensor, layout: Layout) -> None:
    """See ``fixedpoint_kernels.division.decompress``; ``out`` is contiguous and has elements."""
    sides, edges, blocks, _ = layout.geometry
    planes = _planes_of_program(layout)
    tiles = triton.cdiv(planes * layout.elements, _LANES)
    _decompress_kernel[(triton.cdiv(layout.planes, planes) * tiles,)](
        means,
        codes,
        ranges,
        out,
        layout.planes,
        *sides,
        *blocks,
        tiles,
        HAS_MEANS=layout.block is not None,
        BITS=layout.bits if layout.has_codes else 0,
        EDGES=edges,
        PLANES=planes,
        LANES=_LANES,
        enable_fp_fusion=False,
    )


def _planes_of_program(layout: Layout) -> int:
    """Return how many planes are counted together, a power of two: they end at a whole byte."""
    planes = layout.planes_of_whole_bytes
    if planes * layout.elements * max(1, layout.bits) >= 2**31:
        raise ValueError(
            "on a GPU, planes whose codes end at a byte together must have fewer than 2**31 bits, "
            f"got {planes} of {layout.elements} elements of {layout.bits} bits"
        )
    while planes < _MOST_PLANES and 2 * planes * layout.elements <= _LANES:
        planes *= 2
    return planes
