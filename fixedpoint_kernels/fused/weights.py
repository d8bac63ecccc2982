"""Weights: rounded and laid out before a pass, and their gradients written after it."""

from collections.abc import Callable

import numpy as np
from numba import prange

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.llvm import rows as passes
from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.arrays import doubles, empty, floats, view, zeros
from fixedpoint_kernels.llvm.calls import called, inner, keep
from fixedpoint_kernels.products.packing import (
    pack,
    pack_alone,
    pack_groups,
    sum_taps,
    write_columns,
)
from fixedpoint_kernels.threads import compile_both

__all__ = ["collect_share", "pack_share", "pack_weights", "packing_items", "spare_bytes"]


@inner
def _begin(d, channels, sums):
    """Make of the sums of weights what sums of products start from: in all, then place by place."""
    rows = view(d[f.BEGIN], (1 + d[f.W_SPOTS], len(sums)), np.int32)
    if d[f.W_SPOTS] and d[f.W_FLIPS]:
        meets = view(d[f.W_MEETS], (d[f.W_SPOTS], d[f.W_PART_TAPS]), np.uint8)
        sum_taps(d[f.W_PACKED], d[f.W_DEPTH], len(sums) // 16, channels, meets, rows[1:])
    for row in range(len(rows)):
        for i in range(len(sums)):
            rows[row, i] *= np.int32(-128) * np.int32(d[f.W_FLIPS])


@inner
def _code(value, scale, low, high):
    rounded = np.rint(value * scale)
    bounded = min(max(rounded, low), high)
    return np.int8(bounded) if rounded == rounded else np.int8(0)


@inner
def _scale_of(d, output, scale):
    """Return by what the weights of an output are multiplied to be codes."""
    return floats(d[f.W_SCALES], output + 1)[output] if d[f.W_SCALES] else scale


@inner
def _round_row(weight, size, codes, scale, low, high):
    """Round elements that follow each other; ``weight``, ``codes``: addresses."""
    whole = size // 16 * 16
    passes.encode(weight, whole, codes, 0, 0, scale, low, high)
    values, rest = floats(weight, size), view(codes, size, np.int8)
    for i in range(whole, size):
        rest[i] = _code(values[i], scale, low, high)


@inner
def _round_rows(d, weight, step_o, taps, inputs, codes, scale, low, high):
    """Round a weight whose taps follow each other; the codes of a row lie by tap, then by input."""
    size = taps * inputs
    row = empty(size, np.int8)
    for first in range(0, len(codes), size):
        source = weight.ctypes.data + 4 * (first // size * step_o)
        own_scale = _scale_of(d, first // size, scale)
        _round_row(source, size, row.ctypes.data, own_scale, low, high)
        out = codes[first : first + size]
        for t in range(taps):
            own, tap = out[t * inputs : (t + 1) * inputs], row[t:]
            for c in range(inputs):
                own[c] = tap[c * taps]
    keep(row)


@inner
def _round_places(d, weight, step_o, step_c, step_t, taps, inputs, codes, scale, low, high):
    """``_round_rows`` of any strides."""
    for at in range(len(codes)):
        o, t, c = at // (taps * inputs), at // inputs % taps, at % inputs
        value = weight[o * step_o + c * step_c + t * step_t]
        codes[at] = _code(value, _scale_of(d, o, scale), low, high)


def pack_task(d, scales, own):
    """Round a weight to nearest codes, and lay it out for tiles.

    Args:
        d: Address of a row of numbers, see ``fields``.
        scales: Address of float32: scale, lowest and highest code.
        own: Address of the thread's memory.
    """
    d, (scale, low, high) = view(d, f.COUNT, np.int64), floats(scales, 3)
    outputs, inputs, taps = d[f.W_OUTPUTS], d[f.W_INPUTS], d[f.W_TAPS]
    codes = view(own, outputs * taps * inputs, np.int8)
    step_o, step_c, step_t = d[f.W_STEP_O], d[f.W_STEP_C], d[f.W_STEP_T]
    size = (outputs - 1) * step_o + (inputs - 1) * step_c + (taps - 1) * step_t + 1
    weight = floats(d[f.WEIGHTS], size)
    is_dense = outputs == 1 or step_o == taps * inputs
    if is_dense and (taps == 1 or step_t == inputs) and (inputs == 1 or step_c == 1):
        size = taps * inputs if d[f.W_SCALES] else len(codes)
        for first in range(0, len(codes), size):
            own_scale = _scale_of(d, first // size, scale)
            _round_row(d[f.WEIGHTS] + 4 * first, size, own + first, own_scale, low, high)
    elif step_t == 1 and step_c == taps:
        _round_rows(d, weight, step_o, taps, inputs, codes, scale, low, high)
    else:
        _round_places(d, weight, step_o, step_c, step_t, taps, inputs, codes, scale, low, high)
    count = d[f.W_PART_TAPS]
    numbers = view(d[f.W_NUMBERS], count, np.int64)
    offsets = view(d[f.W_OFFSETS], count, np.int64)
    turned, groups = d[f.W_IS_TURNED] != 0, d[f.W_GROUPS]
    if d[f.W_IS_FLAT]:  # its places are inputs, as they lie
        inputs, taps = inputs * taps, 1
    columns, depth = (inputs * groups, outputs) if turned else (outputs, inputs)
    blocks = (columns + 15) // 16
    begin = view(d[f.BEGIN], blocks * 16, np.int32)
    begin[:] = 0
    if d[f.W_IS_ALONE]:
        pack_alone(own, numbers, columns, taps, d[f.W_PACKED])
        return 0
    if groups > 1:
        shape = groups, outputs // groups, inputs
        firsts = view(d[f.W_FIRSTS], blocks, np.int64)
        pack_groups(
            own, numbers, offsets, d[f.W_DEPTH], shape, taps * inputs, turned, firsts, begin,
            d[f.W_PACKED],
        )  # fmt: skip
        _begin(d, depth, begin)
        return 0
    pack(
        own, numbers, offsets, d[f.W_DEPTH], columns, depth, taps * inputs, turned, begin,
        d[f.W_PACKED],
    )  # fmt: skip
    _begin(d, depth, begin)
    return 0


@inner
def _round_outputs(d, block, scale, low, high, own):
    """Round 16 outputs, and lay them out: a column is an output's taps and inputs."""
    inputs, step_o, size = d[f.W_INPUTS], d[f.W_STEP_O], d[f.W_INPUTS] * d[f.W_TAPS]
    step_c, turned = d[f.W_STEP_C] * 16, own + 16 * size
    for i in range(16):
        output = block * 16 + i
        source, own_scale = d[f.WEIGHTS] + 4 * output * step_o, _scale_of(d, output, scale)
        passes.encode(source, size, own + i * size, 0, 0, own_scale, low, high)
    for j in range(0, size, 16):  # the codes of 16 outputs side by side
        tiles.transpose(own + j, size, turned + 16 * j, 16)
    out = d[f.W_PACKED] + block * d[f.W_DEPTH] * 16
    for i in range(d[f.W_TAPS] if d[f.W_IS_FLAT] else d[f.W_PART_TAPS]):
        tap, offset = _tap(d, i, inputs)
        source = turned + 16 * tap * d[f.W_STEP_T]
        for c in range(0, inputs, 4):
            tiles.interleave(source + c * step_c, step_c, out + (offset + c) * 16)


@inner
def _round_inputs(d, block, scale, low, high, own):
    """Round 16 inputs, and lay them out: a column is an input's taps and outputs."""
    outputs, taps, step_t = d[f.W_OUTPUTS], d[f.W_TAPS], d[f.W_STEP_T]
    is_flat, first = d[f.W_IS_FLAT] != 0, block * 16
    is_last = d[f.W_STEP_C] == 1  # channels last, or there is one tap
    count = taps if is_flat else d[f.W_PART_TAPS]
    step = count * 16 if is_last else (taps + 15) // 16 * 256
    codes = own + 16 * step
    for output in range(0, outputs, 16):
        for o in range(16):
            source, place = d[f.WEIGHTS] + 4 * (output + o) * d[f.W_STEP_O], own + o * step
            own_scale = _scale_of(d, output + o, scale)
            if is_last:
                for i in range(count):
                    start = source + 4 * (_tap(d, i, outputs)[0] * step_t + first)
                    passes.encode(start, 16, place + 16 * i, 0, 0, own_scale, low, high)
            else:
                start = source + 4 * first * taps
                passes.encode(start, 16 * taps, codes, 0, 0, own_scale, low, high)
                for j in range(0, taps, 16):
                    tiles.transpose(codes + j, taps, place + 16 * j, 16)
        for i in range(count):
            tap, offset = _tap(d, i, outputs)
            group = tap * (d[f.W_INPUTS] // 16) + block if is_flat else block
            out = d[f.W_PACKED] + (group * d[f.W_DEPTH] + (0 if is_flat else offset) + output) * 16
            source = own + 16 * (i if is_last else tap)
            for o in range(0, 16, 4):
                tiles.interleave(source + o * step, step, out + o * 16)


@inner
def _tap(d, i, channels):
    """Return the number of a tap, and where it begins in a column; those of a flat layer follow each other."""
    if d[f.W_IS_FLAT]:
        return np.int64(i), i * channels
    numbers = view(d[f.W_NUMBERS], i + 1, np.int64)
    return numbers[i], view(d[f.W_OFFSETS], i + 1, np.int64)[i]


@inner
def _begin_group(d, group, count, channels, columns, own):
    """Write what sums of products of 16 columns start from: in all, then place by place.

    count: taps, of ``channels`` each; columns: of all groups; own: address of room for int32.
    """
    spots, packed = d[f.W_SPOTS], d[f.W_PACKED] + group * d[f.W_DEPTH] * 16
    begin = view(d[f.BEGIN], (1 + spots, columns), np.int32)
    for row in range(1 + spots):
        for lane in range(16):
            begin[row, group * 16 + lane] = 0
    if not d[f.W_FLIPS]:
        return
    offsets = view(d[f.W_OFFSETS], count, np.int64)
    meets = view(d[f.W_MEETS], (spots, count), np.uint8)
    sums = view(own, 16, np.int32)
    for i in range(count):
        tiles.sum_columns(packed + offsets[i] * 16, channels // 4, own)
        for row in range(1 + spots):
            if row == 0 or meets[row - 1, i]:
                for lane in range(16):
                    begin[row, group * 16 + lane] -= np.int32(128) * sums[lane]


def pack_columns(d, scales, own, block):
    """Round 16 outputs of a weight (of a turned one: inputs), and lay them out for tiles.

    Args:
        d: Address of a row of numbers, see ``fields``.
        scales: Address of float32: scale, lowest and highest code.
        own: Address of the thread's memory.
        block: Which 16. A weight that lies otherwise is laid out as a whole, with the first.
    """
    at, d, (scale, low, high) = d, view(d, f.COUNT, np.int64), floats(scales, 3)
    outputs, inputs, taps = d[f.W_OUTPUTS], d[f.W_INPUTS], d[f.W_TAPS]
    step_c, step_t = d[f.W_STEP_C], d[f.W_STEP_T]
    is_known = step_c == taps and (step_t == 1 or taps == 1)
    is_known = is_known or (step_c == 1 and step_t == inputs)
    if outputs % 16 or inputs % 16 or not is_known or d[f.W_GROUPS] > 1:
        if block == 0:
            _pack_task(at, scales, own)
        return 0
    is_turned, is_flat, depth = d[f.W_IS_TURNED] != 0, d[f.W_IS_FLAT] != 0, d[f.W_DEPTH]
    channels, count = outputs if is_turned else inputs, d[f.W_PART_TAPS]
    groups = taps if is_turned and is_flat else 1
    if not is_flat and count * channels < depth:  # there is room between taps
        tiles.blank(d[f.W_PACKED] + block * depth * 16, depth * 16, 0)
    if is_turned:
        _round_inputs(d, block, scale, low, high, own)
    else:
        _round_outputs(d, block, scale, low, high, own)
    columns = (inputs * taps if is_flat else inputs) if is_turned else outputs
    for i in range(groups):
        group = i * (inputs // 16) + block
        _begin_group(d, group, count, depth if is_flat else channels, columns, own)
    return 0


_pack_task = called(pack_task)
_pack_columns = called(pack_columns)


@inner
def _pack_share(tasks, scales, items, count, own, thread, threads):
    """Lay out a thread's share of the weights; see ``_pack_weights``, but for addresses and ``count`` items."""
    pairs = view(items, (count, 2), np.int64)
    for k in range(thread, count, threads):
        task, block = pairs[k]
        _pack_columns(tasks + 8 * f.COUNT * task, scales + 16 * task, own, block)


def pack_share(context, thread):
    """Lay out a thread's share of a program's weights; ``context``: address of ``fields.CONTEXT`` int64."""
    c = view(context, f.CONTEXT, np.int64)
    own = c[f.C_SPARE] + thread * c[f.C_SPARE_BYTES]
    tasks, scales, items, count = c[f.C_TASKS], c[f.C_TASK_REALS], c[f.C_ITEMS], c[f.C_ITEM_COUNT]
    _pack_share(tasks, scales, items, count, own, thread, c[f.C_THREADS])
    return 0


def _pack_weights(tasks, scales, items, spare, spare_bytes, threads):
    """Lay out all weights.

    Args:
        tasks: (tasks, ...) int64, see ``fields``.
        scales: (tasks, 4) float32: scale, lowest and highest code.
        items: (items, 2) int64: a task, and which 16 of its columns.
        spare: Address of each thread's memory.
        spare_bytes: Of a thread, see ``spare_bytes``.
        threads: How many.
    """
    for thread in prange(threads):
        _pack_share(
            tasks.ctypes.data, scales.ctypes.data, items.ctypes.data, len(items),
            spare + thread * spare_bytes, thread, threads,
        )  # fmt: skip


def packing_items(tasks: np.ndarray) -> np.ndarray:
    """Return what ``pack_weights`` does one by one, the longest first; see there.

    Args:
        tasks: (tasks, ...) int64, see ``fields``.
    """
    turned = tasks[:, f.W_IS_TURNED] != 0
    blocks = -(np.where(turned, tasks[:, f.W_INPUTS], tasks[:, f.W_OUTPUTS]) // -16)
    task = np.repeat(np.arange(len(tasks)), blocks)
    block = np.arange(len(task)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    order = np.argsort(-tasks[task, f.W_DEPTH], kind="stable")
    return np.stack([task, block], axis=1).astype(np.int64)[order]


def spare_bytes(shape: tuple[int, int, int, int]) -> int:
    """Return how much memory a thread needs to lay out a weight.

    Args:
        shape: Outputs, inputs, height and width.
    """
    outputs, inputs, height, width = shape
    taps = height * width
    by_outputs, by_inputs = 32 * inputs * taps, (16 * -(taps // -16) + 1) * 256 + 16 * taps
    return max(outputs * inputs * taps, by_outputs, by_inputs) + 512


@inner
def _rows_of(d):
    """Return how many rows a thread's sums have, and how far taps are apart.

    The inputs of a tap go up to a multiple of 16; those of a linear layer are all of one tap.
    """
    taps, inputs = d[f.W_TAPS], d[f.W_INPUTS]
    if d[f.W_IS_FLAT]:
        return (taps * inputs + 15) // 16 * 16, inputs
    padded = (inputs + 15) // 16 * 16
    return taps * padded, padded


@inner
def _add_thread(d, thread, first, output, is_last, sums, rows):
    """Add what a thread has for 16 inputs and 16 outputs: int32, or the float64 that they were folded to.

    sums: address of (rows, 16) float64, by input and tap, or where ``is_last`` by tap and input; a
    thread's own lie by tap, input and output.
    """
    at = d[f.HELD] + 24 * thread
    is_folded = doubles(at, 3)[2] > 0
    taps, columns = d[f.W_TAPS], (d[f.W_OUTPUTS] + 15) // 16 * 16
    count = rows // taps
    every, step = _rows_of(d)
    totals = d[f.TOTALS] + 8 * (thread * every * columns + output)
    whole = d[f.SUMS] + thread * d[f.SUMS_STRIDE] + 4 * output
    last, flip = whole + 4 * every * columns, 128 * d[f.W_FLIPS]
    for tap in range(taps):
        for place in range(count):
            row = tap * count + place if is_last else place * taps + tap
            own, out = (tap * step + first + place) * columns, sums + 128 * row
            if is_folded:
                tiles.add_doubles(totals + 8 * own, out)
            else:
                tiles.add_scaled(whole + 4 * own, last, flip, at + 8, out)


def collect_inputs(d, first, threads):
    """Write the weight gradients of 16 inputs, as the weight lies.

    Args:
        d: Address of a row of numbers, see ``fields``.
        first: Of the inputs.
        threads: That added up.
    """
    d = view(d, f.COUNT, np.int64)
    outputs, inputs, taps = d[f.W_OUTPUTS], d[f.W_INPUTS], d[f.W_TAPS]
    rows, is_last = min(16, inputs - first) * taps, d[f.W_STEP_C] == 1 and taps > 1
    sums, values = empty((rows, 16), np.float64), empty((rows + 16, 16), np.float32)
    step, count = inputs * taps, rows // taps
    for output in range(0, outputs, 16):
        sums[:] = 0.0
        for thread in range(threads):
            _add_thread(d, thread, first, output, is_last, sums.ctypes.data, rows)
        for row in range(rows):
            out = values.ctypes.data + 64 * row
            tiles.scale_doubles(sums.ctypes.data + 128 * row, d[f.POWERS], out)
        if is_last:
            for tap in range(taps):
                place = d[f.OUT] + 4 * (output * step + tap * inputs + first)
                own_values = values[tap * count : tap * count + count + 16]
                write_columns(own_values, count, min(16, outputs - output), place, step)
        else:
            place = d[f.OUT] + 4 * (output * step + first * taps)
            write_columns(values, rows, min(16, outputs - output), place, step)
    keep(sums, values)
    return 0


def collect_groups(d, first, threads):
    """Write the weight gradients of 16 outputs in groups, as the weight lies; see ``collect_inputs``."""
    d = view(d, f.COUNT, np.int64)
    outputs, inputs, taps, rows = d[f.W_OUTPUTS], d[f.W_INPUTS], d[f.W_TAPS], d[f.W_ROWS]
    columns, is_last = (outputs + 15) // 16 * 16, d[f.W_STEP_C] == 1 and taps > 1
    count, places = min(16, outputs - first), inputs * taps
    starts = view(d[f.W_STARTS], outputs, np.int64)
    found, held = zeros((count, places), np.float64), doubles(d[f.HELD], 3 * threads)
    size = d[f.W_SUM_ROWS] * columns
    for thread in range(threads):
        sums = view(d[f.SUMS] + thread * d[f.SUMS_STRIDE], size + columns, np.int32)
        totals = doubles(d[f.TOTALS] + 8 * thread * size, size)
        scale, is_folded = held[3 * thread + 1], held[3 * thread + 2] > 0
        for o in range(count):
            output, flip = first + o, np.int32(0)
            if d[f.W_FLIPS]:
                flip = np.int32(128) * sums[size + output]
            for i in range(places):
                tap, c = (i // inputs, i % inputs) if is_last else (i % taps, i // taps)
                at = (tap * rows + starts[output] + c) * columns + output
                if is_folded:
                    found[o, i] += totals[at]
                else:
                    found[o, i] += np.float64(np.int32(sums[at] - flip)) * scale
    out, lsb = floats(d[f.OUT] + 4 * first * places, count * places), floats(d[f.POWERS], 1)[0]
    for o in range(count):
        for i in range(places):
            out[o * places + i] = np.float32(found[o, i]) * lsb
    return 0


_collect_inputs, _collect_groups = called(collect_inputs), called(collect_groups)


def collect_share(context, thread):
    """Add up the threads' gradients of a thread's share of the weights, and write them as the weights lie.

    Args:
        context: Address of ``fields.CONTEXT`` int64. Items are a layer, and the first of 16 inputs; of
            outputs, in groups.
        thread: One of those that added up.
    """
    c = view(context, f.CONTEXT, np.int64)
    count, threads = c[f.C_COLLECT_COUNT], c[f.C_THREADS]
    pairs = view(c[f.C_COLLECT_ITEMS], (count, 2), np.int64)
    for k in range(thread, count, threads):
        layer, first = pairs[k]
        at = c[f.C_COLLECT] + 8 * f.COUNT * layer
        if view(at, f.COUNT, np.int64)[f.W_GROUPS] > 1:
            _collect_groups(at, first, threads)
        else:
            _collect_inputs(at, first, threads)
    return 0


_PACK = compile_both(_pack_weights)


def pack_weights(parallel: bool) -> Callable[..., object]:
    """Return the kernel that lays out weights."""
    return _PACK[parallel]
