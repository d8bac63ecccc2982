"""Products of codes in Triton, on the integer tensor cores.

Convolutions are matrix products whose rows are gathered as they are read. The gradient of a weight
is a sum over positions, which tensor cores want side by side: codes are laid so first, samples of
one exponent together. Both operands of ``tl.dot`` are int8: unsigned codes go in less 128, the
border too, and 128 times the sum of the other operand is added.
"""

# Rules that kernels break, for they are Triton's language; launchers keep all others.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.gpu import jit, words
from fixedpoint_kernels.products import reference, shapes
from fixedpoint_kernels.products.shapes import Correlation, Window
from fixedpoint_kernels.rounding.gpu import _to_bfloat16, _to_float32

# tiles, of which none spills; loads of the next steps are under way
_NARROW = {"ROWS": 128, "COLUMNS": 64, "DEPTH": 64, "num_warps": 8}
_WIDE = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "num_warps": 8}
_RAGGED = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "num_warps": 8}  # codes are read byte by byte
_STAGES = {"num_stages": 2 if torch.version.hip else 4, "enable_fp_fusion": False}
_MANY = 512  # outputs, from which tiles are wide
_POSITIONS, _LAID = 128, 64  # positions of a block, channels of a program that lays one
_PROGRAMS = 264  # of a sum over positions, about: two for each of a large GPU's processors
_WORKSPACE = 2**28  # bytes of codes that are laid at once, about
_GROUPS = tl.constexpr(64)  # of samples with one exponent: as many as int64 has places
_FINISHED = 512  # sums of a program that rounds them
_BLOCK = 4096  # elements of a program that rounds


@jit
def _power_of_two(exponent):
    """Return float32 ``2**exponent`` as the reference does."""
    exponent = tl.minimum(tl.maximum(exponent, -126), 128)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit(do_not_specialize=["images"])
def _correlate_kernel(
    x_ptr,  # (images, height, width, inputs) int8 or uint8
    weight_ptr,  # (outputs, taps, inputs) int8
    sums_ptr,  # (outputs,) int32: of the weights; not read of signed codes
    exponents_ptr,  # (1,), (outputs,) or (images,) int32; not read for int32
    out_ptr,  # (images, height, width, outputs) int32, float32 or bfloat16
    parts_ptr,  # (parts, 22) int64: see ``_geometry``
    images,
    inputs,
    outputs,
    BY: tl.constexpr,  # whose exponents: of "none", "all", "outputs" or "images"
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    part = parts_ptr + 22 * tl.program_id(2)
    height, width = tl.load(part).to(tl.int32), tl.load(part + 1).to(tl.int32)
    count_height, count_width = tl.load(part + 2).to(tl.int32), tl.load(part + 3).to(tl.int32)
    stride_height, stride_width = tl.load(part + 4).to(tl.int32), tl.load(part + 5).to(tl.int32)
    row_first, column_first = tl.load(part + 6).to(tl.int32), tl.load(part + 7).to(tl.int32)
    row_step, column_step = tl.load(part + 8).to(tl.int32), tl.load(part + 9).to(tl.int32)
    tap_columns, count_taps = tl.load(part + 10).to(tl.int32), tl.load(part + 11).to(tl.int32)
    tap_first, taps = tl.load(part + 12).to(tl.int32), tl.load(part + 13)
    tap_down, tap_right = tl.load(part + 14).to(tl.int32), tl.load(part + 15).to(tl.int32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    image = row // (count_height * count_width)
    is_row, is_column = (image < images)[:, None], (column < outputs)[None, :]
    place = (row % (count_height * count_width)).to(tl.int32)
    i, j = place // count_width, place % count_width
    y0, x0 = i * stride_height + row_first, j * stride_width + column_first
    base = x_ptr + (((image * height + y0) * width + x0) * inputs)[:, None]
    weights = weight_ptr + (column * (taps * inputs))[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    if x_ptr.dtype.element_ty == tl.uint8:
        total += 128 * tl.load(sums_ptr + column, mask=column < outputs, other=0)[None, :]
    for start in range(0, count_taps * inputs, DEPTH):
        k = start + tl.arange(0, DEPTH)
        tap, channel = k // inputs, k % inputs
        down, right = tap // tap_columns, tap % tap_columns
        r, s = down * row_step, right * column_step
        y, x = y0[:, None] + r[None, :], x0[:, None] + s[None, :]
        is_tap = tap < count_taps
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & is_row & is_tap[None, :]
        a = tl.load(base + ((r * width + s) * inputs + channel)[None, :], mask=inside, other=0)
        if x_ptr.dtype.element_ty == tl.uint8:
            a = (a ^ 128).to(tl.int8, bitcast=True)
        tap = tap_first + down * tap_down + right * tap_right
        mask = is_tap[:, None] & is_column
        b = tl.load(weights + (tap * inputs + channel)[:, None], mask=mask, other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    out_height, out_width = tl.load(part + 16), tl.load(part + 17)
    y = tl.load(part + 18) + i * tl.load(part + 19)
    x = tl.load(part + 20) + j * tl.load(part + 21)
    out = out_ptr + (((image * out_height + y) * out_width + x) * outputs)[:, None]
    out += column[None, :]
    if BY == "none":
        tl.store(out, total, mask=is_row & is_column)
    else:
        if BY == "images":
            exponents = tl.load(exponents_ptr + image, mask=image < images, other=0)[:, None]
        elif BY == "outputs":
            exponents = tl.load(exponents_ptr + column, mask=column < outputs, other=0)[None, :]
        else:
            exponents = tl.load(exponents_ptr)
        result = total.to(tl.float32) * _power_of_two(exponents)
        if out_ptr.dtype.element_ty == tl.bfloat16:
            result = _to_bfloat16(result)
        tl.store(out, result, mask=is_row & is_column)


@jit
def _group_kernel(
    sorted_ptr,  # (samples,) int32: exponents, the least first; not read unless ARE_MANY
    groups_ptr,  # (3, _GROUPS) int64: first sample, positions, blocks up to the group's last
    samples,
    places,  # positions of a sample
    room,
    ARE_MANY: tl.constexpr,  # exponents; else all samples are in the first group
    POSITIONS: tl.constexpr,
):
    group = tl.arange(0, _GROUPS)
    first = tl.zeros((_GROUPS,), tl.int32)
    last = tl.where(group == 0, samples, 0)
    if ARE_MANY:  # the group of exponent e has the number room - (largest exponent - e)
        top = tl.maximum(tl.minimum(tl.load(sorted_ptr + samples - 1), 128), -126)
        first = _sorted_below(sorted_ptr, samples, top - room + group)
        last = _sorted_below(sorted_ptr, samples, top - room + group + 1)
    positions = (last - first).to(tl.int64) * places
    blocks = (positions + POSITIONS - 1) // POSITIONS
    tl.store(groups_ptr + group, first.to(tl.int64))
    tl.store(groups_ptr + _GROUPS + group, positions)
    tl.store(groups_ptr + 2 * _GROUPS + group, tl.cumsum(blocks, 0))


@jit
def _sorted_below(sorted_ptr, samples, bound):
    """Return how many exponents are below each bound."""
    low, high = tl.zeros_like(bound), tl.zeros_like(bound) + samples
    for _ in tl.static_range(31):
        middle = (low + high) // 2
        exponent = tl.load(sorted_ptr + middle, mask=low < high, other=0)
        exponent = tl.maximum(tl.minimum(exponent, 128), -126)
        is_below = (low < high) & (exponent < bound)
        high = tl.where(is_below, high, middle)
        low = tl.where(is_below, middle + 1, low)
    return low


@jit
def _lay_kernel(
    x_ptr,  # (images, height, width, channels) int8 or uint8
    laid_ptr,  # (taps, channels, blocks * POSITIONS) int8
    sums_ptr,  # (channels,) int64, zeros; not written unless HAS_SUMS
    order_ptr,  # (images,) int64; not read unless ARE_MANY
    groups_ptr,
    part_ptr,  # (22,) int64: see ``_geometry``
    channels,
    first_block,
    blocks,
    ARE_MANY: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    height, width = tl.load(part_ptr).to(tl.int32), tl.load(part_ptr + 1).to(tl.int32)
    count_height, count_width = (
        tl.load(part_ptr + 2).to(tl.int32),
        tl.load(part_ptr + 3).to(tl.int32),
    )
    stride_height, stride_width = (
        tl.load(part_ptr + 4).to(tl.int32),
        tl.load(part_ptr + 5).to(tl.int32),
    )
    row_first, column_first = tl.load(part_ptr + 6).to(tl.int32), tl.load(part_ptr + 7).to(tl.int32)
    row_step, column_step = tl.load(part_ptr + 8).to(tl.int32), tl.load(part_ptr + 9).to(tl.int32)
    tap_columns = tl.load(part_ptr + 10).to(tl.int32)
    block = first_block + tl.program_id(0)
    ends = tl.load(groups_ptr + 2 * _GROUPS + tl.arange(0, _GROUPS))
    group = tl.sum((ends <= block).to(tl.int32), 0)
    if group < _GROUPS:
        positions = tl.load(groups_ptr + _GROUPS + group)
        own = (
            block
            - tl.load(groups_ptr + 2 * _GROUPS + group)
            + (positions + POSITIONS - 1) // POSITIONS
        )
        places = count_height * count_width
        start = own * POSITIONS
        slot = start + tl.arange(0, POSITIONS)
        place = (start % places).to(tl.int32) + tl.arange(0, POSITIONS)
        image = tl.load(groups_ptr + group) + start // places + place // places
        if ARE_MANY:
            image = tl.load(order_ptr + image, mask=slot < positions, other=0)
        place = place % places
        down, right = tl.program_id(1) // tap_columns, tl.program_id(1) % tap_columns
        y = place // count_width * stride_height + row_first + down * row_step
        x = place % count_width * stride_width + column_first + right * column_step
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (slot < positions)
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
        source = x_ptr + (((image * height + y) * width + x) * channels)[:, None] + channel[None, :]
        codes = tl.load(source, mask=inside[:, None] & (channel < channels)[None, :], other=0)
        if HAS_SUMS:
            sums = tl.sum(codes.to(tl.int32), 0).to(tl.int64) << group
            tl.atomic_add(sums_ptr + channel, sums, mask=channel < channels, sem="relaxed")
        if x_ptr.dtype.element_ty == tl.uint8:
            codes = (codes ^ 128).to(tl.int8, bitcast=True)
        row = (tl.program_id(1) * channels + channel).to(tl.int64) * (blocks * POSITIONS)
        at = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
        laid = laid_ptr + row[:, None] + at[None, :]
        tl.store(laid, tl.trans(codes), mask=(channel < channels)[:, None])


@jit
def _weight_gradient_kernel(
    grad_ptr,  # (outputs, blocks * POSITIONS) int8
    x_ptr,  # (columns, blocks * POSITIONS) int8
    total_ptr,  # (outputs, columns) int64, zeros at first
    groups_ptr,
    outputs,
    columns,
    first_block,
    blocks,
    MOST: tl.constexpr,  # blocks whose sum int32 holds
    POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    grads = grad_ptr + output.to(tl.int64)[:, None] * (blocks * POSITIONS) + k[None, :]
    xs = x_ptr + column.to(tl.int64)[None, :] * (blocks * POSITIONS) + k[:, None]
    is_output, is_column = (output < outputs)[:, None], (column < columns)[None, :]
    ends = tl.load(groups_ptr + 2 * _GROUPS + tl.arange(0, _GROUPS))
    laid = tl.minimum(tl.max(ends, 0) - first_block, blocks).to(tl.int32)
    share = tl.maximum(tl.cdiv(laid, tl.num_programs(2)), 0)
    block = tl.program_id(2) * share
    last = tl.minimum(block + share, laid)
    out = total_ptr + output.to(tl.int64)[:, None] * columns + column[None, :]
    while block < last:
        group = tl.sum((ends <= first_block + block).to(tl.int32), 0)
        stop = tl.load(groups_ptr + 2 * _GROUPS + group).to(tl.int32) - first_block
        stop = tl.minimum(tl.minimum(stop, last), block + MOST)
        total = tl.zeros((ROWS, COLUMNS), tl.int32)
        for step in range(block * (POSITIONS // DEPTH), stop * (POSITIONS // DEPTH)):
            g = tl.load(grads + step * DEPTH, mask=is_output, other=0)
            b = tl.load(xs + step * DEPTH, mask=is_column, other=0)
            total = tl.dot(g, b, total, out_dtype=tl.int32)
        # integers: no order matters
        moved = total.to(tl.int64) << group
        tl.atomic_add(out, moved, mask=is_output & is_column, sem="relaxed")
        block = stop


@jit
def _finish_kernel(
    total_ptr,  # (outputs, taps, inputs) int64
    sums_ptr,  # (outputs,) int64; not read of signed codes
    top_ptr,  # () int32: largest exponent; not read for int64
    out_ptr,  # (outputs, inputs, taps) float32 or int64
    taps,
    inputs,
    part_of_room,  # 2**-room
    IS_UNSIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    output, columns = tl.program_id(0).to(tl.int64), taps * inputs
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(total_ptr + output * columns + column, mask=column < columns, other=0)
    if IS_UNSIGNED:
        total += 128 * tl.load(sums_ptr + output)
    if out_ptr.dtype.element_ty == tl.float32:
        total = total.to(tl.float32) * part_of_room * _power_of_two(tl.load(top_ptr))
    out = out_ptr + output * columns + column % inputs * taps + column // inputs
    tl.store(out, total, mask=column < columns)


@jit
def _largest_kernel(
    x_ptr,  # (n, elements) float32, bfloat16 or float16
    largest_ptr,  # (n,) int32, zeros: bits of float32
    elements,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(0).to(tl.int64)
    x = _to_float32(tl.load(x_ptr + sample * elements + at, mask=at < elements, other=0.0))
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(largest_ptr + sample, tl.max(bits, 0), sem="relaxed")


@jit(do_not_specialize=["seed", "stream", "first"])
def _round_kernel(
    x_ptr,  # (n, elements) float32, bfloat16 or float16
    largest_ptr,  # (n,) int32
    exponents_ptr,  # (n,) int32
    codes_ptr,  # (n, elements) int8
    elements,
    blocks,  # of noise, a sample
    seed: tl.int64,
    stream: tl.int64,
    first: tl.int64,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    largest = tl.load(largest_ptr + sample)  # the exponent is the reference's, see there
    exponent = (largest >> 23) - 133 + ((largest & 0x7FFFFF) > 0x7E0000).to(tl.int32)
    exponent = tl.where(largest >= 0x7F800000, 128, tl.maximum(exponent, -126))
    if start == 0:
        tl.store(exponents_ptr + sample, exponent)
    x = _to_float32(tl.load(x_ptr + sample * elements + at, mask=at < elements, other=0.0))
    x = tl.where(exponent == 128, 0.0, x)
    power = ((127 - tl.minimum(exponent, 127)) << 23).to(tl.float32, bitcast=True)
    place = (first.to(tl.int64) + sample) * blocks + (start >> 4) + tl.arange(0, BLOCK // 16)
    noise = words(place, seed.to(tl.int64), stream.to(tl.int64), BLOCK // 16)
    low, high = tl.join(noise & 255, noise >> 16 & 255), tl.join(noise >> 8 & 255, noise >> 24)
    noise = tl.join(low, high).reshape(BLOCK).to(tl.int32)
    # added, whole numbers stand in the lowest bits
    whole = (x * power * 256.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    codes = tl.where(exponent == 128, 0, (whole + noise) >> 8)
    tl.store(codes_ptr + sample * elements + at, codes.to(tl.int8), mask=at < elements)


def convolve(
    x: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    window: Window,
    dtype: torch.dtype,
    statistics: bool,
) -> tuple[Tensor, Tensor | None]:
    """See ``fixedpoint_kernels.products.convolve``."""
    if statistics:
        sums, _ = convolve(x, weight, None, window, torch.int32, False)
        return reference.finish(sums, exponents, 1, dtype), reference.sum_up(sums)
    if window.groups > 1:
        own, parts = window._replace(groups=1), []
        chosen = _chunks(exponents, window.groups)
        for some in zip(
            x.chunk(window.groups, 1), weight.chunk(window.groups), chosen, strict=True
        ):
            parts.append(convolve(*some, own, dtype, False)[0])
        return torch.cat(parts, 1), None
    part = shapes.forward(window, _size(x), _size(weight))
    out = _results(x, len(weight), part.counts, dtype)
    _correlate(x, _laid(weight), (part,), exponents, "outputs", out)
    return out, None


def input_gradient(
    grad: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    size: tuple[int, int],
    window: Window,
    dtype: torch.dtype,
) -> Tensor:
    """See ``fixedpoint_kernels.products.convolve_input_gradient``."""
    if window.groups > 1:
        own = window._replace(groups=1)
        pairs = zip(grad.chunk(window.groups, 1), weight.chunk(window.groups), strict=True)
        return torch.cat([input_gradient(*p, exponents, size, own, dtype) for p in pairs], 1)
    out = _results(grad, weight.shape[1], size, dtype)
    parts = shapes.input_gradient(window, size, _size(weight))
    if not shapes.covers(parts, size):
        reference.finish_empty(out, exponents)
    _correlate(grad, _laid(weight.transpose(0, 1)), parts, exponents, "images", out)
    return out


def weight_gradient(
    x: Tensor,
    grad: Tensor,
    exponents: Tensor | None,
    kernel: tuple[int, int],
    window: Window,
) -> Tensor:
    """See ``fixedpoint_kernels.products.convolve_weight_gradient``."""
    groups, own = window.groups, window._replace(groups=1)
    if groups > 1:
        pairs = zip(x.chunk(groups, 1), grad.chunk(groups, 1), strict=True)
        return torch.cat([weight_gradient(*p, exponents, kernel, own) for p in pairs])
    (images, inputs), outputs, taps = x.shape[:2], grad.shape[1], kernel[0] * kernel[1]
    dtype = torch.int64 if exponents is None else torch.float32
    out = torch.empty(outputs, inputs, *kernel, dtype=dtype, device=x.device)
    if not (images and out.numel()):
        return out.zero_()
    part = shapes.forward(window, _size(x), kernel)
    places = part.counts[0] * part.counts[1]
    room, order, ranked, are_many = 0, exponents, exponents, False
    if exponents is not None and exponents.numel() > 1:
        room, are_many = shapes.shift_room(images * places), True
        ranked, order = torch.sort(exponents)
    groups_ = torch.empty(3, _GROUPS.value, dtype=torch.int64, device=x.device)
    unused = groups_  # in place of what a kernel does not read
    ranked, order = (unused if t is None else t for t in (ranked, order))
    _group_kernel[(1,)](
        ranked,
        groups_,
        images,
        places,
        room,
        ARE_MANY=are_many,
        POSITIONS=_POSITIONS,
        enable_fp_fusion=False,
    )
    # sums of the gradient at the end
    total = torch.zeros(outputs * (taps * inputs + 1), dtype=torch.int64, device=x.device)
    sums = total[outputs * taps * inputs :]
    _sum_positions(x, grad, part, (groups_, order, are_many, room), total, sums)
    _finish_kernel[(outputs, triton.cdiv(taps * inputs, _FINISHED))](
        total,
        sums,
        ranked[-1:],
        out,
        *(taps, inputs),
        2.0**-room,
        IS_UNSIGNED=x.dtype is torch.uint8,
        BLOCK=_FINISHED,
        enable_fp_fusion=False,
    )
    return out


def _sum_positions(
    x: Tensor,
    grad: Tensor,
    part: Correlation,
    grouping: tuple[Tensor, Tensor, bool, int],
    total: Tensor,
    sums: Tensor,
) -> None:
    """Add the products of all positions to ``total``, and gradients alone to ``sums``."""
    groups, order, are_many, room = grouping
    images, outputs, inputs, taps = len(x), grad.shape[1], x.shape[1], len(part.taps)
    positions, columns = images * part.counts[0] * part.counts[1], taps * inputs
    # the last block of a group is not full
    most = triton.cdiv(positions, _POSITIONS) + min(images, room + 1)
    blocks = min(most, max(1, _WORKSPACE // (_POSITIONS * (columns + outputs))))
    laid_x, laid_grad = (
        torch.empty(rows, blocks * _POSITIONS, dtype=torch.int8, device=x.device)
        for rows in (columns, outputs)
    )
    each = shapes.forward(Window(), part.counts, (1, 1))  # reads each position as it is
    jobs = (
        (_laid(x), laid_x, part, False),
        (_laid(grad), laid_grad, each, x.dtype is torch.uint8),
    )
    tiles = triton.cdiv(outputs, _NARROW["ROWS"]), triton.cdiv(columns, _NARROW["COLUMNS"])
    programs = min(blocks, triton.cdiv(_PROGRAMS, tiles[0] * tiles[1]))
    for first in range(0, most, blocks):
        for codes, laid, own, has_sums in jobs:
            height, width, channels = codes.shape[1:]
            together = _LAID if channels % 16 == 0 else _LAID // 4
            _lay_kernel[(blocks, len(own.taps), triton.cdiv(channels, together))](
                codes,
                laid,
                sums,
                order,
                groups,
                _geometry((own,), (height, width), (1, 1), len(own.taps), x.device),
                *(channels, first, blocks),
                ARE_MANY=are_many,
                HAS_SUMS=has_sums,
                CHANNELS=together,
                POSITIONS=_POSITIONS,
                enable_fp_fusion=False,
            )
        _weight_gradient_kernel[(*tiles, programs)](
            laid_grad,
            laid_x,
            total,
            groups,
            *(outputs, columns, first, blocks),
            MOST=shapes.LONGEST_SUM // _POSITIONS,
            POSITIONS=_POSITIONS,
            **_NARROW,
            **_STAGES,
        )


def round_per_sample(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.products.round_per_sample``; x (n, elements), contiguous."""
    n, elements = x.shape
    codes, largest = torch.empty_like(x, dtype=torch.int8), x.new_zeros(n, dtype=torch.int32)
    grid = n, triton.cdiv(elements, _BLOCK)
    if not x.numel():
        return codes, reference.exponents_of(largest)
    _largest_kernel[grid](x, largest, elements, BLOCK=_BLOCK, enable_fp_fusion=False)
    exponents = torch.empty_like(largest)
    _round_kernel[grid](
        x,
        largest,
        exponents,
        codes,
        elements,
        triton.cdiv(elements, 16),
        key.seed,
        key.stream,
        key.offset,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return codes, exponents


def _correlate(
    x: Tensor,
    weight: Tensor,
    parts: Sequence[Correlation],
    exponents: Tensor | None,
    several: str,
    out: Tensor,
) -> None:
    """Write correlations with weights (outputs, kernel height, kernel width, inputs).

    ``several``: what has an exponent each, where they are not one.
    """
    if not (out.numel() and parts):
        return
    outputs, inputs, unused = len(weight), weight.shape[3], out
    sums = weight.sum((1, 2, 3), dtype=torch.int32) if x.dtype is torch.uint8 else unused
    by = "none" if exponents is None else "all" if exponents.numel() == 1 else several
    codes, tile = _laid(x), _tile(outputs) if inputs % 16 == 0 else _RAGGED
    rows = len(x) * max(part.counts[0] * part.counts[1] for part in parts)
    grid = triton.cdiv(rows, tile["ROWS"]), triton.cdiv(outputs, tile["COLUMNS"]), len(parts)
    taps = weight.shape[1] * weight.shape[2]
    _correlate_kernel[grid](
        codes,
        weight,
        sums,
        unused if exponents is None else exponents.contiguous(),
        out,
        _geometry(tuple(parts), _size(x), _size(out), taps, x.device),
        *(len(x), inputs, outputs),
        BY=by,
        **tile,
        **_STAGES,
    )


def _tile(columns: int) -> dict[str, int]:
    return _NARROW if columns < _MANY else _WIDE


@lru_cache(maxsize=256)  # the same layers come step after step: no copy to the device
def _geometry(
    parts: tuple[Correlation, ...],
    size: tuple[int, int],
    out: tuple[int, int],
    taps: int,
    device: torch.device,
) -> Tensor:
    """Return what kernels must know of correlations, int64 (parts, 22).

    Args:
        parts: Of one result. Taps, their rows and their columns are evenly spaced.
        size: Height and width of what they read.
        out: Of what they write.
        taps: Of the whole kernel.
        device: Where the kernels are.
    """
    table = []
    for part in parts:
        columns = len(set(part.columns))
        row, column = part.rows[::columns], part.columns[:columns]
        down, right = part.taps[::columns], part.taps[:columns]
        steps = [_step(line) for line in (row, column, down, right)]
        line = [*size, *part.counts, *part.stride, row[0], column[0], *steps[:2]]
        line += [columns, len(part.taps), part.taps[0], taps, *steps[2:], *out]
        line += [part.first[0], part.step[0], part.first[1], part.step[1]]
        table.append(line)
    return torch.tensor(table, dtype=torch.int64, device=device)


def _step(line: Sequence[int]) -> int:
    return line[1] - line[0] if len(line) > 1 else 0


def _chunks(exponents: Tensor | None, groups: int) -> list[Tensor | None]:
    if exponents is None or exponents.numel() == 1:
        return [exponents] * groups
    return list(exponents.chunk(groups))


def _results(x: Tensor, channels: int, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    shape = len(x), channels, *size
    form = torch.channels_last
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=form)


def _laid(x: Tensor) -> Tensor:
    return x.detach().permute(0, 2, 3, 1).contiguous()


def _size(x: Tensor) -> tuple[int, int]:
    return x.shape[2], x.shape[3]
