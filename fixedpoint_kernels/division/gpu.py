"""DIVISION in Triton: a program takes some planes, and reads each from memory once.

It goes over its planes three times, for means, for ranges and for codes; what the first has read is
in the cache for the others, except of planes that are larger than the cache.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.division.layout import Layout
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.gpu import uniform
from fixedpoint_kernels.rounding.gpu import _to_bfloat16

_LANES = 1024
_MOST_PLANES = 256  # that a program takes; they have fewer than _LANES elements in all


@triton.jit
def _float32(x):
    """Widen to float32; bfloat16 by hand, of which Triton's interpreter loses tiny numbers."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _rounded_down(x):
    """Return the largest number of bfloat16 that is not above ``x``, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _row(x_ptr, z, y, x, depth, height, width, mask):
    inside = mask & (z < depth) & (y < height)
    return _float32(tl.load(x_ptr + (z * height + y) * width + x, mask=inside, other=0.0))


@triton.jit
def _block_sums(
    x_ptr,  # (blocks, slots) pointers to the block's plane
    z,  # (blocks, 1) where the block starts
    y,
    x,
    mask,  # (blocks, slots)
    depth,
    height,
    width,
    EDGE_Z: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EDGE_X: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
):
    """Return the sums of blocks, shape ``(blocks,)``, in the order of ``reference``."""
    slot = tl.arange(0, SLOTS)[None, :]
    total = tl.zeros([BLOCKS, SLOTS], tl.float32)
    for group in range(0, EDGE_X, SLOTS):
        column = x + group + slot
        inside = mask & (group + slot < EDGE_X) & (column < width)
        sums = tl.zeros([BLOCKS, SLOTS], tl.float32)
        if EDGE_Z * EDGE_Y <= 16:
            for r in tl.static_range(EDGE_Z * EDGE_Y):
                row = y + r % EDGE_Y
                sums += _row(x_ptr, z + r // EDGE_Y, row, column, depth, height, width, inside)
        else:
            for r in range(EDGE_Z * EDGE_Y):
                row = y + r % EDGE_Y
                sums += _row(x_ptr, z + r // EDGE_Y, row, column, depth, height, width, inside)
        total += sums
    for step in tl.static_range(LOG_SLOTS):
        even, odd = tl.split(tl.reshape(total, [BLOCKS, SLOTS >> (step + 1), 2]))
        total = even + odd
    return tl.reshape(total, [BLOCKS])


@triton.jit
def _block_of(
    element, height, width, ny, nx, EDGE_Z: tl.constexpr, EDGE_Y: tl.constexpr, EDGE_X: tl.constexpr
):
    """Return which of its plane's blocks an element is in."""
    z, y, x = element // (height * width), element // width % height, element % width
    return (z // EDGE_Z * ny + y // EDGE_Y) * nx + x // EDGE_X


@triton.jit
def _residual(
    x_ptr,
    means_ptr,
    plane,
    element,  # of the plane
    mask,
    depth,
    height,
    width,
    nz,
    ny,
    nx,
    HAS_MEANS: tl.constexpr,
    EDGE_Z: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EDGE_X: tl.constexpr,
):
    x = tl.load(x_ptr + plane * (depth * height * width) + element, mask=mask, other=0.0)
    residual = _float32(x)
    if HAS_MEANS:
        block = _block_of(element, height, width, ny, nx, EDGE_Z, EDGE_Y, EDGE_X)
        mean = tl.load(means_ptr + plane * (nz * ny * nx) + block, mask=mask, other=0.0)
        residual -= _float32(mean)
    return residual


@triton.jit
def _range_of(low, high, is_wrong, inverse_levels, BITS: tl.constexpr):
    """Return smallest residual and step, or two NaN; see ``reference``."""
    smallest = _rounded_down(low + 0.0)  # -0.0 becomes 0.0
    extent = high - smallest
    step = -_rounded_down(-(extent * inverse_levels))
    step = tl.where(extent == 0.0, 0.0, tl.maximum(step, 1.1754943508222875e-38))
    largest = step * (2**BITS - 1)
    is_wrong |= (smallest - smallest != 0.0) | (largest - largest != 0.0)
    nan = float("nan")
    return tl.where(is_wrong, nan, smallest), tl.where(is_wrong, nan, step)


@triton.jit
def _keep_means(
    x_ptr,
    means_ptr,
    count,
    depth,
    height,
    width,
    nz,
    ny,
    nx,
    inner_z,
    inner_y,
    inner_x,
    last_z,
    last_y,
    last_x,
    EDGE_Z: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EDGE_X: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
):
    elements, blocks = depth * height * width, nz * ny * nx
    start = 0
    while start < count * blocks:
        block = start + tl.arange(0, BLOCKS)
        z, y, x = block % blocks // (ny * nx), block // nx % ny, block % nx
        sums = _block_sums(
            x_ptr + (block // blocks * elements)[:, None],
            (z * EDGE_Z)[:, None],
            (y * EDGE_Y)[:, None],
            (x * EDGE_X)[:, None],
            (block < count * blocks)[:, None],
            depth,
            height,
            width,
            EDGE_Z,
            EDGE_Y,
            EDGE_X,
            BLOCKS,
            SLOTS,
            LOG_SLOTS,
        )
        inverse = tl.where(z < nz - 1, inner_z, last_z) * tl.where(y < ny - 1, inner_y, last_y)
        mean = sums * (inverse * tl.where(x < nx - 1, inner_x, last_x))
        tl.store(means_ptr + block, _to_bfloat16(mean), mask=block < count * blocks)
        start += BLOCKS


@triton.jit
def _keep_ranges(
    x_ptr,
    means_ptr,
    ranges_ptr,
    count,
    depth,
    height,
    width,
    nz,
    ny,
    nx,
    inverse_levels,
    HAS_MEANS: tl.constexpr,
    BITS: tl.constexpr,
    EDGE_Z: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EDGE_X: tl.constexpr,
    PLANES: tl.constexpr,
    LANES: tl.constexpr,  # of a plane
):
    elements = depth * height * width
    plane = tl.arange(0, PLANES)[:, None]
    low = tl.full([PLANES, LANES], float("inf"), tl.float32)
    high = tl.full([PLANES, LANES], float("-inf"), tl.float32)
    wrong = tl.zeros([PLANES, LANES], tl.float32)
    start = 0
    while start < elements:
        element = start + tl.arange(0, LANES)[None, :]
        mask = (plane < count) & (element < elements)
        residual = _residual(
            x_ptr,
            means_ptr,
            plane,
            element,
            mask,
            depth,
            height,
            width,
            nz,
            ny,
            nx,
            HAS_MEANS,
            EDGE_Z,
            EDGE_Y,
            EDGE_X,
        )
        low = tl.where(mask & (residual < low), residual, low)
        high = tl.where(mask & (residual > high), residual, high)
        wrong += residual - residual  # 0, or NaN
        start += LANES
    is_wrong = tl.max((wrong != 0.0).to(tl.int32), axis=1) > 0
    smallest, step = _range_of(
        tl.min(low, axis=1), tl.max(high, axis=1), is_wrong, inverse_levels, BITS
    )
    row = tl.arange(0, PLANES)
    tl.store(ranges_ptr + 2 * row, _to_bfloat16(smallest), mask=row < count)
    tl.store(ranges_ptr + 2 * row + 1, _to_bfloat16(step), mask=row < count)


@triton.jit
def _keep_codes(
    x_ptr,
    means_ptr,
    codes_ptr,
    ranges_ptr,
    first_element,
    count,
    depth,
    height,
    width,
    nz,
    ny,
    nx,
    seed,
    stream,
    HAS_MEANS: tl.constexpr,
    BITS: tl.constexpr,
    EDGE_Z: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EDGE_X: tl.constexpr,
    PLANES: tl.constexpr,
    LANES: tl.constexpr,
):
    LEVELS: tl.constexpr = 2**BITS - 1
    elements = depth * height * width
    end = count * elements
    # counted from the program's first element: noise is made for four, from a multiple of four
    start = -(first_element & 3).to(tl.int32)
    while start < end:
        element = start + tl.arange(0, LANES)
        mask = (element >= 0) & (element < end)
        plane = element // elements
        residual = _residual(
            x_ptr,
            means_ptr,
            plane,
            element % elements,
            mask,
            depth,
            height,
            width,
            nz,
            ny,
            nx,
            HAS_MEANS,
            EDGE_Z,
            EDGE_Y,
            EDGE_X,
        )
        if PLANES == 1:
            smallest = _float32(tl.load(ranges_ptr))
            step = _float32(tl.load(ranges_ptr + 1))
        else:
            smallest = _float32(tl.load(ranges_ptr + 2 * plane, mask=mask, other=0.0))
            step = _float32(tl.load(ranges_ptr + 2 * plane + 1, mask=mask, other=0.0))
        inverse = tl.where(step > 0.0, tl.div_rn(1.0, tl.where(step > 0.0, step, 1.0)), 0.0)
        position = (residual - smallest) * inverse
        below = tl.floor(position)
        quad = (first_element + start >> 2) + tl.arange(0, LANES // 4)
        noise = uniform(quad, seed.to(tl.int64), stream.to(tl.int64), LANES // 4)
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


@triton.jit(
    do_not_specialize=["planes", "depth", "height", "width", "nz", "ny", "nx", "seed", "stream"]
)
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
    EDGE_Z: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EDGE_X: tl.constexpr,
    PLANES: tl.constexpr,  # of a program
    BLOCKS: tl.constexpr,  # whose means are taken together
    SLOTS: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LANES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * PLANES
    count = tl.minimum(planes - first, PLANES).to(tl.int32)
    first_element = first * (depth * height * width)
    x_ptr += first_element
    means_ptr += first * (nz * ny * nx)
    ranges_ptr += 2 * first
    if HAS_MEANS:
        _keep_means(
            x_ptr,
            means_ptr,
            count,
            depth,
            height,
            width,
            nz,
            ny,
            nx,
            inner_z,
            inner_y,
            inner_x,
            last_z,
            last_y,
            last_x,
            EDGE_Z,
            EDGE_Y,
            EDGE_X,
            BLOCKS,
            SLOTS,
            LOG_SLOTS,
        )
        tl.debug_barrier()  # the means are read by other threads than wrote them
    if BITS > 0:
        _keep_ranges(
            x_ptr,
            means_ptr,
            ranges_ptr,
            count,
            depth,
            height,
            width,
            nz,
            ny,
            nx,
            inverse_levels,
            HAS_MEANS,
            BITS,
            EDGE_Z,
            EDGE_Y,
            EDGE_X,
            PLANES,
            LANES // PLANES,
        )
        tl.debug_barrier()
        _keep_codes(
            x_ptr,
            means_ptr,
            codes_ptr,
            ranges_ptr,
            first_element,
            count,
            depth,
            height,
            width,
            nz,
            ny,
            nx,
            seed,
            stream,
            HAS_MEANS,
            BITS,
            EDGE_Z,
            EDGE_Y,
            EDGE_X,
            PLANES,
            LANES,
        )


@triton.jit(
    do_not_specialize=["planes", "height", "width", "elements", "ny", "nx", "blocks", "tiles"]
)
def _decompress_kernel(
    means_ptr,  # (planes, blocks) bfloat16
    codes_ptr,  # (bytes,) uint8
    ranges_ptr,  # (planes, 2) bfloat16
    out_ptr,  # (planes * elements,) floating
    planes,
    height,
    width,
    elements,  # of a plane
    ny,
    nx,
    blocks,  # of a plane
    tiles,  # of the planes that are counted together
    HAS_MEANS: tl.constexpr,
    BITS: tl.constexpr,
    EDGE_Z: tl.constexpr,
    EDGE_Y: tl.constexpr,
    EDGE_X: tl.constexpr,
    PLANES: tl.constexpr,
    LANES: tl.constexpr,
):
    first = (tl.program_id(0) // tiles).to(tl.int64) * PLANES
    element = tl.program_id(0) % tiles * LANES + tl.arange(0, LANES)
    mask = element < tl.minimum(planes - first, PLANES) * elements
    plane, inside = element // elements, element % elements
    value = tl.zeros([LANES], tl.float32)
    if BITS > 0:
        bit = element * BITS  # the first plane's codes start at a whole byte
        byte = tl.load(codes_ptr + first * elements * BITS // 8 + (bit >> 3), mask=mask, other=0)
        code = (byte.to(tl.int32) >> (bit & 7)) & ((1 << BITS) - 1)
        low = _float32(tl.load(ranges_ptr + 2 * (first + plane), mask=mask, other=0.0))
        step = _float32(tl.load(ranges_ptr + 2 * (first + plane) + 1, mask=mask, other=0.0))
        value = low + code.to(tl.float32) * step
    if HAS_MEANS:
        at = _block_of(inside, height, width, ny, nx, EDGE_Z, EDGE_Y, EDGE_X)
        mean = tl.load(means_ptr + (first + plane) * blocks + at, mask=mask, other=0.0)
        value += _float32(mean)
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
    (inner_z, last_z), (inner_y, last_y), (inner_x, last_x) = layout.inverses
    together = triton.next_power_of_2(min(planes * math.prod(blocks), _LANES // slots))
    _compress_kernel[(triton.cdiv(layout.planes, planes),)](
        x.detach(),
        means,
        codes,
        ranges,
        layout.planes,
        *sides,
        *blocks,
        inner_z,
        inner_y,
        inner_x,
        last_z,
        last_y,
        last_x,
        layout.inverse_levels,
        key.seed,
        key.stream,
        HAS_MEANS=layout.block is not None,
        BITS=layout.bits if layout.has_codes else 0,
        EDGE_Z=edges[0],
        EDGE_Y=edges[1],
        EDGE_X=edges[2],
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
        sides[1],
        sides[2],
        layout.elements,
        blocks[1],
        blocks[2],
        math.prod(blocks),
        tiles,
        HAS_MEANS=layout.block is not None,
        BITS=layout.bits if layout.has_codes else 0,
        EDGE_Z=edges[0],
        EDGE_Y=edges[1],
        EDGE_X=edges[2],
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
