"""Products of codes in Triton: convolutions as matrix products whose rows are gathered.

Both operands of ``tl.dot`` are int8: unsigned codes go in less 128, the border too, and 128 times
the sum of the other operand is added.
"""

# Rules that kernels break, for they are Triton's language; launchers keep all others.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false

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

_ROWS, _COLUMNS, _DEPTH = 64, 64, 64  # of a program's tile, and of one step
_STEPS = 8  # of positions that a program of the weight gradient takes
_LAUNCH = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}  # nothing spills
_BLOCK = 4096  # elements of a program that rounds


@jit
def _correlate_kernel(
    x_ptr,  # (images, height, width, inputs) int8 or uint8
    weight_ptr,  # (outputs, all taps, inputs) int8, or its outputs and inputs swapped
    taps_ptr,  # (taps, 3) int32: which, row, column
    begin_ptr,  # (outputs,) int32
    scales_ptr,  # (outputs,) or (images,) float32; begin_ptr for int32
    out_ptr,  # int32, float32 or bfloat16
    rows,  # images * count_height * count_width
    height,
    width,
    inputs,
    outputs,
    weight_output,  # elements from one output to the next
    weight_tap,
    weight_input,
    count_height,
    count_width,
    stride_height,
    stride_width,
    out_image,  # elements, of the places that are written
    out_row,
    out_column,
    BY_IMAGE: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of inputs
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    image = row // (count_height * count_width)
    place = (row % (count_height * count_width)).to(tl.int32)
    i, j = place // count_width, place % count_width
    total = tl.load(begin_ptr + column, mask=column < outputs, other=0)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.int32) + total
    for step in range(STEPS * TAPS):
        tap = step // STEPS
        k = (step % STEPS) * DEPTH + tl.arange(0, DEPTH)
        which = tl.load(taps_ptr + 3 * tap)
        y = i * stride_height + tl.load(taps_ptr + 3 * tap + 1)
        x = j * stride_width + tl.load(taps_ptr + 3 * tap + 2)
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (row < rows)
        source = ((image * height + y) * width + x) * inputs
        mask = inside[:, None] & (k < inputs)[None, :]
        a = tl.load(x_ptr + source[:, None] + k[None, :], mask=mask, other=0)
        if x_ptr.dtype.element_ty == tl.uint8:
            a = (a ^ 128).to(tl.int8, bitcast=True)
        source = which * weight_tap + k[:, None] * weight_input + column[None, :] * weight_output
        mask = (k < inputs)[:, None] & (column < outputs)[None, :]
        b = tl.load(weight_ptr + source, mask=mask, other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    mask = (row < rows)[:, None] & (column < outputs)[None, :]
    out = image * out_image + i.to(tl.int64) * out_row + j.to(tl.int64) * out_column
    out = out_ptr + out[:, None] + column[None, :]
    if out_ptr.dtype.element_ty == tl.int32:
        tl.store(out, total, mask=mask)
    else:
        if BY_IMAGE:
            scale = tl.load(scales_ptr + image, mask=row < rows, other=1.0)[:, None]
        else:
            scale = tl.load(scales_ptr + column, mask=column < outputs, other=1.0)[None, :]
        result = total.to(tl.float32) * scale
        if out_ptr.dtype.element_ty == tl.bfloat16:
            result = _to_bfloat16(result)
        tl.store(out, result, mask=mask)


@jit
def _weight_gradient_kernel(
    x_ptr,  # (images, height, width, inputs) int8 or uint8
    grad_ptr,  # (images, count_height, count_width, outputs) int8
    order_ptr,  # (images,) int64
    shifts_ptr,  # (images,) int64 of the images in their order; below 0: left out
    taps_ptr,  # (taps, 3) int32
    total_ptr,  # (outputs, taps, inputs) int64, zeros
    positions,  # images * count_height * count_width
    height,
    width,
    inputs,
    outputs,
    count_height,
    count_width,
    stride_height,
    stride_width,
    taps,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tap = tl.program_id(1) % taps
    k = tl.program_id(1) // taps * COLUMNS + tl.arange(0, COLUMNS)
    tap_row, tap_column = tl.load(taps_ptr + 3 * tap + 1), tl.load(taps_ptr + 3 * tap + 2)
    total = tl.zeros((ROWS, COLUMNS), tl.int64)
    for step in range(STEPS):
        first = (tl.program_id(2).to(tl.int64) * STEPS + step) * DEPTH
        position = first + tl.arange(0, DEPTH)
        known = position < positions
        slot = position // (count_height * count_width)
        image = tl.load(order_ptr + slot, mask=known, other=0)
        shift = tl.load(shifts_ptr + slot, mask=known, other=-1)
        place = (position % (count_height * count_width)).to(tl.int32)
        i, j = place // count_width, place % count_width
        source = (image * (count_height * count_width) + place) * outputs
        mask = known[None, :] & (output < outputs)[:, None]
        g = tl.load(grad_ptr + source[None, :] + output[:, None], mask=mask, other=0)
        y, x = i * stride_height + tap_row, j * stride_width + tap_column
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & known
        source = ((image * height + y) * width + x) * inputs
        mask = inside[:, None] & (k < inputs)[None, :]
        b = tl.load(x_ptr + source[:, None] + k[None, :], mask=mask, other=0)
        if x_ptr.dtype.element_ty == tl.uint8:
            b = (b ^ 128).to(tl.int8, bitcast=True)
        largest = tl.max(shift, 0)
        while largest >= 0:  # once, where all samples of the block have one exponent
            own = tl.where((shift == largest)[None, :], g, tl.zeros_like(g))
            part = tl.dot(own, b, out_dtype=tl.int32)
            if x_ptr.dtype.element_ty == tl.uint8:
                part += 128 * tl.sum(own.to(tl.int32), 1)[:, None]  # pyright: ignore
            total += part.to(tl.int64) << largest
            shift = tl.where(shift == largest, -1, shift)
            largest = tl.max(shift, 0)
    out = total_ptr + (output.to(tl.int64)[:, None] * taps + tap) * inputs + k[None, :]
    mask = (output < outputs)[:, None] & (k < inputs)[None, :]
    tl.atomic_add(out, total, mask=mask, sem="relaxed")  # integers: no order matters


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
    exponent = tl.load(exponents_ptr + sample)
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
    _run(x, weight, part, False, exponents, False, out)
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
    by_image = exponents is not None and exponents.numel() > 1
    parts = shapes.input_gradient(window, size, _size(weight))
    if not shapes.covers(parts, size):
        reference.finish_empty(out, exponents)
    for part in parts:
        _run(grad, weight, part, True, exponents, by_image, out)
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
    (images, inputs, height, width), outputs = x.shape, grad.shape[1]
    part = shapes.forward(window, (height, width), kernel)
    positions, taps = images * part.counts[0] * part.counts[1], len(part.taps)
    room, top = shapes.shift_room(positions), None
    if exponents is None:
        order = torch.arange(images, device=x.device)
        shifts = torch.zeros_like(order)
    else:
        bounded = exponents.clamp(shapes.LOWEST_EXPONENT, shapes.NOT_FINITE).long().expand(images)
        top = bounded.amax() if images else bounded.new_zeros(())
        order = torch.argsort(bounded, stable=True)
        shifts = room - top + bounded[order]
    total = torch.zeros(outputs, taps, inputs, dtype=torch.int64, device=x.device)
    if total.numel() and positions:
        grid = (
            triton.cdiv(outputs, _ROWS),
            triton.cdiv(inputs, _COLUMNS) * taps,
            triton.cdiv(positions, _DEPTH * _STEPS),
        )
        _weight_gradient_kernel[grid](
            _laid(x),
            _laid(grad),
            order,
            shifts,
            _taps(part, x.device),
            total,
            positions,
            *(height, width, inputs, outputs),
            *part.counts,
            *part.stride,
            taps,
            STEPS=_STEPS,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            **_LAUNCH,
        )
    total = total.view(outputs, *kernel, inputs).permute(0, 3, 1, 2)
    return total if top is None else reference.folded(total, top, room)


def round_per_sample(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.products.round_per_sample``; x (n, elements), contiguous."""
    n, elements = x.shape
    codes, largest = torch.empty_like(x, dtype=torch.int8), x.new_zeros(n, dtype=torch.int32)
    grid = n, triton.cdiv(elements, _BLOCK)
    if x.numel():
        _largest_kernel[grid](x, largest, elements, BLOCK=_BLOCK, enable_fp_fusion=False)
    exponents = reference.exponents_of(largest)
    if x.numel():
        _round_kernel[grid](
            x,
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


def _run(
    x: Tensor,
    weight: Tensor,
    part: Correlation,
    is_turned: bool,
    exponents: Tensor | None,
    by_image: bool,
    out: Tensor,
) -> None:
    images, _, height, width = x.shape
    rows = images * part.counts[0] * part.counts[1]
    if not rows or not out.numel():
        return
    laid = _laid(weight)  # (o, r, s, c)
    across, channels = laid.shape[1] * laid.shape[2], laid.shape[3]
    outputs, inputs = (channels, len(laid)) if is_turned else (len(laid), channels)
    steps = (1, across * channels) if is_turned else (across * channels, 1)
    begin = torch.zeros(outputs, dtype=torch.int32, device=x.device)
    if x.dtype is torch.uint8:
        begin += 128 * weight.sum((1, 2, 3), dtype=torch.int32)
    scales = begin
    if exponents is not None:
        count = images if by_image else outputs
        scales = reference.powers_of_two(exponents).expand(count).contiguous()
    places = out.permute(0, 2, 3, 1)[:, part.first[0] :, part.first[1] :]
    _correlate_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(outputs, _COLUMNS))](
        _laid(x),
        laid,
        _taps(part, x.device),
        begin,
        scales,
        places,
        rows,
        *(height, width, inputs, outputs),
        *(steps[0], channels, steps[1]),
        *part.counts,
        *part.stride,
        *(places.stride(0), places.stride(1) * part.step[0], places.stride(2) * part.step[1]),
        BY_IMAGE=by_image,
        STEPS=triton.cdiv(inputs, _DEPTH),
        TAPS=len(part.taps),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        **_LAUNCH,
    )


@lru_cache(maxsize=256)  # the same layers come step after step: no copy to the device
def _taps(part: Correlation, device: torch.device) -> Tensor:
    table = list(zip(part.taps, part.rows, part.columns, strict=True))
    return torch.tensor(table, dtype=torch.int32, device=device)


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
