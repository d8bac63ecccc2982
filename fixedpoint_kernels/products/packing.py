"""Weights as the tiles want them, and their gradients as the weights lie, in Numba."""

from typing import NamedTuple

import numpy as np
from numba import prange

from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.arrays import empty, view, zeros
from fixedpoint_kernels.llvm.calls import inner, keep
from fixedpoint_kernels.threads import compile_both

__all__ = [
    "Totals",
    "finish_weights",
    "pack",
    "pack_alone",
    "pack_groups",
    "sum_taps",
    "write_columns",
]


@inner
def _fill_columns(weight, taps, offsets, rows, depth, columns, inputs, step, is_turned, outputs):
    """Write 16 columns of bytes, ``(16, depth)``; the bytes between, and other columns, are 0.

    weight: address of (o, all taps, c) int8 at the first column, ``step`` bytes an ``o``; turned,
    columns are ``c``, of ``outputs`` in all.
    """
    tiles.blank(rows, 16 * depth, 0)
    for i in range(len(taps)):
        source, target = weight + taps[i] * (outputs if is_turned else inputs), rows + offsets[i]
        for column in range(columns):
            if is_turned:
                for row in range(inputs):
                    tiles.copy(source + row * step + column, target + column * depth + row, 1)
            else:
                tiles.copy(source + column * step, target + column * depth, inputs)


@inner
def pack(weight, taps, offsets, depth, outputs, inputs, step, is_turned, sums, out):
    """Lay out weights for tiles: ``[groups][depth / 4][16][4]``; and add up each column.

    weight: address of (o, all taps, c) int8, ``step`` bytes an ``o``; turned, outputs are ``c``.
    sums (16 * groups,) int32, or empty: nobody asks; out: address.
    """
    memory, quads = empty(16 * depth + 128, np.uint8), depth // 4
    rows = memory.ctypes.data
    for first in range(0, outputs, 16):
        place = out + first * depth
        if is_turned and inputs % 4 == 0 and first + 16 <= outputs:
            tiles.blank(place, 16 * depth, 0)
            for i in range(len(taps)):
                source, target = weight + taps[i] * outputs + first, place + offsets[i] * 16
                for row in range(0, inputs, 4):
                    tiles.interleave(source + row * step, step, target + row * 16)
        else:
            start = weight + first * (1 if is_turned else step)
            columns = min(16, outputs - first)
            _fill_columns(
                start, taps, offsets, rows, depth, columns, inputs, step, is_turned, outputs
            )
            for k in range(0, quads - 15, 16):
                tiles.transpose_floats(rows + k * 4, depth, place + k * 64, 64)
            source, target = view(rows, 16 * quads, np.int32), view(place, 16 * quads, np.int32)
            for k in range(quads // 16 * 16, quads):
                for column in range(16):
                    target[k * 16 + column] = source[column * quads + k]
        if sums.size:
            tiles.sum_columns(place, quads, sums.ctypes.data + 4 * first)
    keep(memory)


@inner
def pack_groups(weight, taps, offsets, depth, shape, step, is_turned, firsts, sums, out):
    """``pack``, in groups: weights between channels and outputs of different groups are 0.

    shape: groups, outputs and inputs of a group; firsts (blocks of 16 columns,) int64: see ``spans``.
    """
    groups, outputs, inputs = shape
    each, deep = (inputs, outputs) if is_turned else (outputs, inputs)
    codes = view(weight, groups * outputs * step, np.int8)
    tiles.blank(out, (groups * each + 15) // 16 * 16 * depth, 0)
    packed = view(out, (len(firsts), depth // 4, 16, 4), np.int8)
    for column in range(groups * each):
        group, block, total = column // each, column // 16, np.int32(0)
        for i in range(len(taps)):
            first, row = offsets[i] + group * deep - firsts[block], taps[i] * inputs
            for k in range(deep):
                if is_turned:
                    code = codes[(group * deep + k) * step + row + column % each]
                else:
                    code = codes[column * step + row + k]
                packed[block, (first + k) // 4, column % 16, (first + k) % 4] = code
                total += np.int32(code)
        if sums.size:
            sums[column] = total


@inner
def pack_alone(weight, taps, channels, step, out):
    """Lay out weights of outputs with a channel each: ``[blocks of 16][taps][16]`` float32.

    weight: address of (channels, all taps) int8, ``step`` bytes a channel; out: address.
    """
    codes, blocks = view(weight, channels * step, np.int8), (channels + 15) // 16
    packed = view(out, (blocks, len(taps), 16), np.float32)
    packed[blocks - 1] = 0.0
    for channel in range(channels):
        for i in range(len(taps)):
            packed[channel // 16, i, channel % 16] = codes[channel * step + taps[i]]


@inner
def sum_taps(packed, depth, groups, channels, meets, sums):
    """Add up packed weights over the taps that each place meets.

    packed: address of ``[groups][depth / 4][16][4]`` int8; meets (places, taps) uint8; sums
    (places, 16 * groups) int32.
    """
    sums[:] = 0
    quads = channels // 4
    codes = view(packed, (groups, depth // 4, 16, 4), np.int8)
    own = empty(16, np.int32)
    for group in range(groups):
        for tap in range(meets.shape[1]):
            own[:] = 0
            for k in range(tap * quads, (tap + 1) * quads):
                for lane in range(16):
                    for i in range(4):
                        own[lane] += np.int32(codes[group, k, lane, i])
            for place in range(meets.shape[0]):
                if meets[place, tap]:
                    for lane in range(16):
                        sums[place, group * 16 + lane] += own[lane]


@inner
def write_columns(values, rows, columns, out, step):
    """Write columns as rows.

    values: (rows + 16, 16) float32; columns: at most 16; out: address of float32, ``step`` of them
    from one column to the next.
    """
    whole = rows // 16 * 16 if columns == 16 else 0
    for row in range(0, whole, 16):
        tiles.transpose_floats(values.ctypes.data + 64 * row, 64, out + 4 * row, 4 * step)
    own = view(out, (columns - 1) * step + rows, np.float32)
    for column in range(columns):
        for row in range(whole, rows):
            own[column * step + row] = values[row, column]
    keep(values)


class Totals(NamedTuple):
    """What threads added up for weights, by tap, input and output.

    Args:
        totals: (threads, taps * inputs up to a multiple of 16, 16 * groups) int64.
        sums: (threads, ...) int32, the same, and a row more: see ``weight_jobs.sums_size``.
        ends: (threads, 2) int64: whether the int32 count, and by how many bits more; else the int64.
        flips: Whether codes were unsigned only there: the int32 count less 128 times that row.
    """

    totals: np.ndarray
    sums: np.ndarray
    ends: np.ndarray
    flips: bool


def _finish_weights(totals, sums, ends, flips, shape, scale, power, out):
    # shape: outputs, inputs, taps; scale, power: float32; out: address of (outputs, inputs, taps)
    # float32; the others: see ``Totals``
    outputs, inputs, taps = shape
    padded, columns = (inputs + 15) // 16 * 16, totals.shape[2]
    for item in prange(padded // 16):
        first = item * 16
        rows = min(16, inputs - first) * taps
        found, values = zeros((rows, columns), np.int64), empty((rows + 16, 16), np.float32)
        for thread in range(len(totals)):
            if ends[thread, 0]:
                shift = ends[thread, 1]
                _add_sums(sums[thread], shift, flips, taps, padded, first, found)
            else:
                _add_totals(totals[thread], taps, padded, first, found)
        for output in range(0, outputs, 16):
            _round_totals(found[:, output : output + 16], scale, power, values)
            place = out + 4 * (output * inputs + first) * taps
            write_columns(values, rows, min(16, outputs - output), place, inputs * taps)


@inner
def _add_sums(sums, shift, flips, taps, padded, first, found):
    rows, columns = found.shape
    last = sums[taps * padded * columns :]
    for row in range(rows):
        at, out = (row % taps * padded + first + row // taps) * columns, found[row]
        own = sums[at : at + columns]
        if flips:
            for o in range(columns):
                out[o] += np.int64(np.int32(own[o] - np.int32(128) * last[o])) << shift
        else:
            for o in range(columns):
                out[o] += np.int64(own[o]) << shift


@inner
def _add_totals(totals, taps, padded, first, found):
    rows, columns = found.shape
    for row in range(rows):
        own, out = totals[row % taps * padded + first + row // taps], found[row]
        for o in range(columns):
            out[o] += own[o]


@inner
def _round_totals(found, scale, power, values):
    for row in range(len(found)):
        own, out = found[row], values[row]
        for o in range(16):
            out[o] = np.float32(own[o]) * scale * power


_FINISH = compile_both(_finish_weights)


def finish_weights(
    held: Totals, shape: tuple[int, int, int], scale: float, power: float, out: int
) -> None:
    """Add up what the threads have, round it to float32, and write it as weights lie.

    Args:
        held: Of the threads.
        shape: Outputs, inputs, taps.
        scale: A power of two that totals are multiplied by.
        power: Another one, after that.
        out: Address of (outputs, inputs, taps) float32.
    """
    _FINISH[len(held.totals) > 1](*held, shape, np.float32(scale), np.float32(power), out)
