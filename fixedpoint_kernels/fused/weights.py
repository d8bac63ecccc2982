"""Weights: rounded and laid out before a pass, and their gradients written after it."""

from collections.abc import Callable

import numpy as np
from numba import carray, prange

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.views import doubles, floats
from fixedpoint_kernels.llvm.calls import called, inner
from fixedpoint_kernels.llvm.vectors import pointer_to
from fixedpoint_kernels.products.packing import pack, sum_taps, write_columns
from fixedpoint_kernels.threads import compile_both

__all__ = ["collect", "pack_weights"]


@inner
def _begin(d, channels, sums):
    """Make of the sums of weights what sums of products start from: in all, then place by place."""
    rows = carray(pointer_to(d[f.BEGIN]), (1 + d[f.W_SPOTS], len(sums)), np.int32)
    if d[f.W_SPOTS] and d[f.W_FLIPS]:
        meets = carray(pointer_to(d[f.W_MEETS]), (d[f.W_SPOTS], d[f.W_PART_TAPS]), np.uint8)
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
def _round_rows(weight, step_o, taps, inputs, codes, scale, low, high):
    """Round a contiguous weight; the codes of a row lie by tap, then by input."""
    size = taps * inputs
    row = np.empty(size, np.int8)
    for first in range(0, len(codes), size):
        start = first // size * step_o
        values, out = weight[start : start + size], codes[first : first + size]
        for i in range(size):
            row[i] = _code(values[i], scale, low, high)
        for t in range(taps):
            own, tap = out[t * inputs : (t + 1) * inputs], row[t:]
            for c in range(inputs):
                own[c] = tap[c * taps]


@inner
def _round_places(weight, step_o, step_c, step_t, taps, inputs, codes, scale, low, high):
    """``_round_rows`` of any strides."""
    for at in range(len(codes)):
        o, t, c = at // (taps * inputs), at // inputs % taps, at % inputs
        codes[at] = _code(weight[o * step_o + c * step_c + t * step_t], scale, low, high)


def pack_task(d, scales, own):
    """Round a weight to nearest codes, and lay it out for tiles.

    Args:
        d: Address of a row of numbers, see ``fields``.
        scales: Address of float32: scale, lowest and highest code.
        own: Address of the thread's memory.
    """
    d, (scale, low, high) = carray(pointer_to(d), f.COUNT, np.int64), floats(scales, 3)
    outputs, inputs, taps = d[f.W_OUTPUTS], d[f.W_INPUTS], d[f.W_TAPS]
    codes = carray(pointer_to(own), outputs * taps * inputs, np.int8)
    step_o, step_c, step_t = d[f.W_STEP_O], d[f.W_STEP_C], d[f.W_STEP_T]
    size = (outputs - 1) * step_o + (inputs - 1) * step_c + (taps - 1) * step_t + 1
    weight = floats(d[f.WEIGHTS], size)
    if step_t == 1 and step_c == taps:
        _round_rows(weight, step_o, taps, inputs, codes, scale, low, high)
    else:
        _round_places(weight, step_o, step_c, step_t, taps, inputs, codes, scale, low, high)
    count = d[f.W_PART_TAPS]
    numbers = carray(pointer_to(d[f.W_NUMBERS]), count, np.int64)
    offsets = carray(pointer_to(d[f.W_OFFSETS]), count, np.int64)
    turned = d[f.W_IS_TURNED] != 0
    if d[f.W_IS_FLAT]:  # its places are inputs, as they lie
        inputs, taps = inputs * taps, 1
    columns, depth = (inputs, outputs) if turned else (outputs, inputs)
    begin = carray(pointer_to(d[f.BEGIN]), (columns + 15) // 16 * 16, np.int32)
    begin[:] = 0
    pack(
        own, numbers, offsets, d[f.W_DEPTH], columns, depth, taps * inputs, turned, begin,
        d[f.W_PACKED],
    )  # fmt: skip
    _begin(d, depth, begin)
    return 0


_pack_task = called(pack_task)


def _pack_weights(tasks, scales, spare, spare_bytes, threads):
    """Lay out all weights.

    Args:
        tasks: (tasks, ...) int64, see ``fields``.
        scales: (tasks, 3) float32: scale, lowest and highest code.
        spare: Address of each thread's memory.
        spare_bytes: Of a thread.
        threads: How many.
    """
    for thread in prange(threads):
        for k in range(thread, len(tasks), threads):
            own = spare + thread * spare_bytes
            _pack_task(tasks[k].ctypes.data, scales[k].ctypes.data, own)


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
def _add_thread(d, thread, first, sums):
    """Add what a thread has for 16 inputs: int32, or the float64 that they were folded to.

    sums: (inputs * taps, columns) float64; a thread's own lie by tap, input and output.
    """
    held = doubles(d[f.HELD], 3 * thread + 3)[3 * thread :]
    taps, (rows, columns) = d[f.W_TAPS], sums.shape
    every, step = _rows_of(d)
    size, scale, is_folded = every * columns, held[1], held[2] > 0
    totals = doubles(d[f.TOTALS], (thread + 1) * size)[thread * size :]
    whole = carray(pointer_to(d[f.SUMS] + thread * d[f.SUMS_STRIDE]), size + columns, np.int32)
    last = whole[size:]
    for row in range(rows):
        at, out = (row % taps * step + first + row // taps) * columns, sums[row]
        if is_folded:
            folded = totals[at : at + columns]
            for o in range(columns):
                out[o] += folded[o]
        elif d[f.W_FLIPS]:
            own = whole[at : at + columns]
            for o in range(columns):
                out[o] += np.float64(np.int32(own[o] - np.int32(128) * last[o])) * scale
        else:
            own = whole[at : at + columns]
            for o in range(columns):
                out[o] += np.float64(own[o]) * scale


def collect_inputs(d, first, threads):
    """Write the weight gradients of 16 inputs, as the weight lies.

    Args:
        d: Address of a row of numbers, see ``fields``.
        first: Of the inputs.
        threads: That added up.
    """
    d = carray(pointer_to(d), f.COUNT, np.int64)
    outputs, inputs, taps = d[f.W_OUTPUTS], d[f.W_INPUTS], d[f.W_TAPS]
    columns, lsb = (outputs + 15) // 16 * 16, floats(d[f.POWERS], 1)[0]
    rows = min(16, inputs - first) * taps
    sums, values = np.zeros((rows, columns), np.float64), np.empty((rows + 16, 16), np.float32)
    for thread in range(threads):
        _add_thread(d, thread, first, sums)
    step = inputs * taps
    for output in range(0, outputs, 16):
        for row in range(rows):
            own, out = sums[row, output : output + 16], values[row]
            for o in range(16):
                out[o] = np.float32(own[o]) * lsb
        place = d[f.OUT] + 4 * (output * step + first * taps)
        write_columns(values, rows, min(16, outputs - output), place, step)
    return 0


_collect_inputs = called(collect_inputs)


def _collect(tasks, items, threads):
    """Add up the threads' weight gradients, and write them as the weights lie.

    Args:
        tasks: (layers, ...) int64, see ``fields``.
        items: (items, 2) int64: a layer, and the first of 16 inputs.
        threads: That added up.
    """
    for k in prange(len(items)):
        layer, first = items[k]
        if tasks[layer, f.OUT]:
            _collect_inputs(tasks[layer].ctypes.data, first, threads)


_PACK, _COLLECT = compile_both(_pack_weights), compile_both(_collect)


def pack_weights(parallel: bool) -> Callable[..., object]:
    """Return the kernel that lays out weights."""
    return _PACK[parallel]


def collect(parallel: bool) -> Callable[..., object]:
    """Return the kernel that writes weight gradients."""
    return _COLLECT[parallel]
