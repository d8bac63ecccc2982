"""Kernels that run the operations of a program on samples, a few at a time; see ``program``.

A thread takes the rows of a few samples through all operations while they are in its cache. Functions
without a decorator know the tiles of one path by name, see ``products.instructions.compiled``.
"""

from typing import Any

import numpy as np
from numba import prange

from fixedpoint_kernels.llvm import rows as passes
from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.arrays import floats, view
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.philox.cpu import DRAWN, draw
from fixedpoint_kernels.products import by_outputs, weight_jobs
from fixedpoint_kernels.products.instructions import ByName, compiled
from fixedpoint_kernels.products.samples.cpu import POWERS, exponent_of, round_block
from fixedpoint_kernels.tokens import fields as f

__all__ = ["add_weights", "run"]

_NOISE_BLOCK = 512
_CURVE_BLOCK = 1024  # elements that go through a curve while they are in the nearest cache
_NAN = np.int64(2**passes.NAN_BIT)

enter: Any = None
leave = wide = narrow = write_weights = enter
FLIPS, NARROW_ROWS, WIDE_ROWS = 0, 0, 0


@inner
def _count(address, n):
    """Add to a count; that there was NaN stays. In a parallel loop, Numba takes such lines for dead code."""
    own = view(address, 1, np.int64)
    flag = (own[0] | n) & _NAN
    own[0] = ((own[0] & ~_NAN) + (n & ~_NAN)) | flag


@inner
def _place(d, operand, own, first):
    """Return where the rows of a chunk lie."""
    row_bytes = d[operand + 1]
    return d[operand] + first * row_bytes if row_bytes else own + d[operand]


def multiply(
    d, a, step, groups, rows, sums, out, bias, columns, mask, adds, powers
):  # fmt: skip
    """Multiply rows of codes, and write outputs (``powers`` is 0) or gradients.

    Args:
        d: Row of numbers: weights and where sums start.
        a: Address of codes.
        step: Bytes of a row of them.
        groups: Of 16 columns.
        rows: How many.
        sums: Address of room for int32 of 32 columns, and for 64 rows more.
        out: Address of float32.
        bias: Address of float32.
        columns: Address of float32, powers of two, one a column; of outputs.
        mask: Address of bits of gradients, or 0.
        adds: Whether gradients are added.
        powers: Address of float32, one a row; of gradients.
    """
    group, out_step = 0, groups * 64
    while group < groups:
        pair = group + 1 < groups and WIDE_ROWS > 0
        at_once, count = (WIDE_ROWS, 2) if pair else (NARROW_ROWS, 1)
        weights, start = d[f.WEIGHTS] + group * d[f.GROUP_BYTES], d[f.BEGIN] + group * 64
        sums_step = count * 64
        for q in range(0, rows, at_once):
            if pair:
                wide(
                    d[f.BYTES], a + q * step, d[f.STARTS], step, d[f.RUNS], 1, weights,
                    d[f.GROUP_BYTES], start, 0, sums + q * sums_step, sums_step,
                )  # fmt: skip
            else:
                narrow(
                    d[f.BYTES], a + q * step, d[f.STARTS], step, d[f.RUNS], 1, weights,
                    d[f.GROUP_BYTES], start, 0, sums + q * sums_step, sums_step,
                )  # fmt: skip
        target = out + group * 64
        if powers:
            own_mask = mask + 2 * group if mask else np.int64(0)
            passes.finish_gradient(
                sums, sums_step, rows, target, out_step, own_mask, 2 * groups, count, adds, powers
            )
        else:
            passes.finish_product(
                sums,
                sums_step,
                rows,
                target,
                out_step,
                bias + 64 * group,
                count,
                columns + 64 * group,
            )
        group += count


@inner
def _scale_columns(x, rows, width, factors):
    """Multiply rows of float32 by a number a column."""
    values, own = floats(x, rows * width), floats(factors, width)
    for first in range(0, rows * width, width):
        row = values[first : first + width]
        for i in range(width):
            row[i] *= own[i]


@inner
def _round_gradient(d, g, samples, first, tokens, own, places, stream, scales):
    """Round each sample to codes of its own power of two, which ``scales`` takes; write the power of each row."""
    width, padded = tokens * d[f.WIDTH], _NOISE_BLOCK
    codes, powers_at = own + places[f.ROUNDED], own + places[f.POWERS]
    powers = floats(powers_at, samples * tokens)
    key = d[f.SEED], stream
    blocks = (width + 15) // 16
    for i in range(samples):
        values = floats(g + 4 * i * width, width + padded)
        exponent = exponent_of(view(g + 4 * i * width, width, np.int32))
        scales[i] = np.inf if exponent == 128 else np.ldexp(1.0, exponent)
        moved = min(exponent - d[f.WEIGHT_FL], 127)
        power = np.float32(np.inf) if exponent == 128 else np.float32(np.ldexp(1.0, moved))
        powers[i * tokens : i * tokens + tokens] = power
        if exponent == 128:
            tiles.blank(codes + i * width, width, 0)
            continue
        out = view(codes + i * width, width + padded, np.int8)
        start = (first + i) * blocks
        for e in range(0, width, _NOISE_BLOCK):
            round_block(values, out, e, start + e // 16, key, POWERS[exponent + 126])


@inner
def _turned(source, line, valid, size, out):
    """Write 16 rows of ``size`` float32, ``line`` bytes apart, as columns; others than ``valid`` as 0."""
    for e in range(0, size, 16):
        passes.transpose(source + 4 * e, line, valid, out + 64 * e)


@inner
def _products(a, a_row, a_step, b, b_step, rows, columns, depth, out, out_step, adds, spare):
    """Write, or add, products of float32; ``spare``: memory for 8 rows."""
    for i in range(0, rows, 8):
        if i + 8 <= rows:
            for j in range(0, columns, 16):
                passes.float_tile(
                    a + i * a_row, a_row, a_step, b + 4 * j, b_step, depth,
                    out + i * out_step + 4 * j, out_step, adds,
                )  # fmt: skip
            continue
        for j in range(0, columns, 16):  # fewer rows than a tile has
            passes.float_tile(a + i * a_row, a_row, a_step, b + 4 * j, b_step, depth, spare, 64, 0)
            for k in range(rows - i):
                passes.pass_on(spare + 64 * k, 16, out + (i + k) * out_step + 4 * j, adds)


@inner
def _scores(a, line, turned, size, tokens, out):
    """Write products of rows with 16 turned ones, (tokens, 16); rows up to the next 8 are written."""
    for j in range(0, tokens, 8):
        passes.float_tile(a + j * line, line, 4, turned, 64, size, out + 64 * j, 64, 0)


@inner
def _draw(d, start, count, out, spare):
    """Write which of ``count`` numbers stay, a bit each, those from number ``start`` on; ``spare``: 32 bytes.

    Up to 30 bytes behind are written too: of the numbers that follow.
    """
    at, end, key = start, start + count, (d[f.SEED], d[f.STREAM])
    begin = at // DRAWN * DRAWN
    if at != begin:
        last = min(begin + DRAWN, end)
        draw(spare, begin // 8, key, d[f.THRESHOLD])
        tiles.copy(spare + (at - begin) // 8, out, (last - at) // 8)
        out, at = out + (last - at) // 8, last
    while at < end:
        draw(out, at // 8, key, d[f.THRESHOLD])
        out, at = out + DRAWN // 8, at + DRAWN


@inner
def _attend(d, scale, factor, own, places, first, samples, tokens):
    """Attend, 16 tokens at a time: their scores are columns."""
    size, heads, row0 = d[f.SIZE], d[f.HEADS], first * tokens
    groups = d[f.GROUPS]
    q0, k0, v0 = _place(d, f.Q, own, row0), _place(d, f.K, own, row0), _place(d, f.V, own, row0)
    y0 = _place(d, f.Y, own, row0)
    spare = own + places[f.HEAD]
    turned = spare + 512
    scores = turned + 64 * size
    kept = scores + 192 * (tokens + 8)
    tile, blocks = 16 * tokens, (tokens + 15) // 16
    y_line = 4 * heads * size
    for n in range(samples):
        row = n * tokens
        for head in range(heads):
            q = q0 + row * d[f.Q_LINE] + d[f.Q_START] + head * d[f.Q_STEP]
            k = k0 + row * d[f.K_LINE] + d[f.K_START] + head // groups * d[f.K_STEP]
            v = v0 + row * d[f.V_LINE] + d[f.V_START] + head // groups * d[f.V_STEP]
            y = y0 + row * y_line + 4 * head * size
            for i in range(0, tokens, 16):
                count = min(16, tokens - i)
                _turned(q + i * d[f.Q_LINE], d[f.Q_LINE], count, size, turned)
                _scores(k, d[f.K_LINE], turned, size, tokens, scores)
                passes.softmax(scores, tokens, i, d[f.CAUSAL], scale)
                if d[f.THRESHOLD]:
                    at = ((first + n) * heads + head) * blocks + i // 16
                    _draw(d, at * tile, tile, kept, spare)
                    passes.masked(scores, tile, kept, scores, 0, factor)
                _products(
                    scores, 4, 64, v, d[f.V_LINE], count, size, tokens, y + i * y_line, y_line, 0,
                    spare,
                )  # fmt: skip


@inner
def _attend_backward(d, scale, factor, own, places, first, samples, tokens):
    size, heads, row0 = d[f.SIZE], d[f.HEADS], first * tokens
    q0, k0, v0 = _place(d, f.Q, own, row0), _place(d, f.K, own, row0), _place(d, f.V, own, row0)
    dq0, dk0 = _place(d, f.DQ, own, row0), _place(d, f.DK, own, row0)
    dv0, g0 = _place(d, f.DV, own, row0), _place(d, f.X, own, row0)
    spare = own + places[f.HEAD]
    turned = spare + 512
    scores = turned + 64 * size
    grads = scores + 64 * (tokens + 8)
    weights = grads + 64 * (tokens + 8) if d[f.THRESHOLD] else scores
    kept = scores + 192 * (tokens + 8)
    tile, blocks = 16 * tokens, (tokens + 15) // 16
    g_line = 4 * heads * size
    q_line, k_line, v_line, groups = d[f.Q_LINE], d[f.K_LINE], d[f.V_LINE], d[f.GROUPS]
    for n in range(samples):
        for head in range(heads):
            row = n * tokens
            of_q = row * q_line + d[f.Q_START] + head * d[f.Q_STEP]
            of_k = row * k_line + d[f.K_START] + head // groups * d[f.K_STEP]
            of_v = row * v_line + d[f.V_START] + head // groups * d[f.V_STEP]
            k, v = k0 + of_k, v0 + of_v
            for i in range(0, tokens, 16):
                count = min(16, tokens - i)
                q, g = q0 + of_q + i * q_line, g0 + row * g_line + 4 * head * size + i * g_line
                _turned(q, q_line, count, size, turned)
                _scores(k, k_line, turned, size, tokens, scores)
                passes.softmax(scores, tokens, i, d[f.CAUSAL], scale)
                if d[f.THRESHOLD]:
                    at = ((first + n) * heads + head) * blocks + i // 16
                    _draw(d, at * tile, tile, kept, spare)
                    passes.masked(scores, tile, kept, weights, 0, factor)
                more = 1 if i or head % groups else d[f.DV_ADDS]
                _products(
                    weights, 64, 4, g, g_line, tokens, size, count, dv0 + of_v, v_line, more, spare
                )
                _turned(g, g_line, count, size, turned)
                _scores(v, v_line, turned, size, tokens, grads)
                if d[f.THRESHOLD]:
                    passes.masked(grads, tile, kept, grads, 0, factor)
                passes.softmax_backward(scores, grads, tokens, scale)
                place = dq0 + of_q + i * q_line
                _products(
                    grads, 4, 64, k, k_line, count, size, tokens, place, q_line, d[f.ADDS], spare
                )
                more = 1 if i or head % groups else d[f.DK_ADDS]
                _products(
                    grads, 64, 4, q, q_line, tokens, size, count, dk0 + of_k, k_line, more, spare
                )


@inner
def _rotary(d, own, first, samples, tokens):
    """Turn heads by their position."""
    row, heads, size, turned = first * tokens, d[f.HEADS], d[f.SIZE], d[f.TURNED]
    x0, y0, half = _place(d, f.Q, own, row) + d[f.Q_START], _place(d, f.Y, own, row), turned // 2
    for i in range(samples * tokens):
        at = 4 * turned * (row + i if d[f.BY_SAMPLE] else i % tokens)
        cos, sin = floats(d[f.COS] + at, turned), floats(d[f.SIN] + at, turned)
        for head in range(heads):
            x = floats(x0 + i * d[f.Q_LINE] + head * d[f.Q_STEP], size)
            y = floats(y0 + 4 * (i * heads + head) * size, size)
            if d[f.IN_PAIRS]:
                for e in range(0, turned, 2):
                    y[e] = x[e] * cos[e] - x[e + 1] * sin[e]
                    y[e + 1] = x[e + 1] * cos[e + 1] + x[e] * sin[e + 1]
            else:
                for e in range(half):
                    y[e] = x[e] * cos[e] - x[half + e] * sin[e]
                    y[half + e] = x[half + e] * cos[half + e] + x[e] * sin[half + e]
            for e in range(turned, size):
                y[e] = x[e]


@inner
def _rotary_backward(d, own, first, samples, tokens):
    row, heads, size, turned = first * tokens, d[f.HEADS], d[f.SIZE], d[f.TURNED]
    g0, dx0, half = _place(d, f.X, own, row), _place(d, f.DQ, own, row) + d[f.Q_START], turned // 2
    for i in range(samples * tokens):
        at = 4 * turned * (row + i if d[f.BY_SAMPLE] else i % tokens)
        cos, sin = floats(d[f.COS] + at, turned), floats(d[f.SIN] + at, turned)
        for head in range(heads):
            g = floats(g0 + 4 * (i * heads + head) * size, size)
            dx = floats(dx0 + i * d[f.Q_LINE] + head * d[f.Q_STEP], size)
            if not d[f.ADDS]:
                dx[:] = 0
            if d[f.IN_PAIRS]:
                for e in range(0, turned, 2):
                    dx[e] += g[e] * cos[e] + g[e + 1] * sin[e + 1]
                    dx[e + 1] += g[e + 1] * cos[e + 1] - g[e] * sin[e]
            else:
                for e in range(half):
                    dx[e] += g[e] * cos[e] + g[half + e] * sin[half + e]
                    dx[half + e] += g[half + e] * cos[half + e] - g[e] * sin[e]
            for e in range(turned, size):
                dx[e] += g[e]


def operate(d, r, thread, own, places, first, samples, tokens, partial):
    """Do one operation on the rows of a few samples.

    Args:
        d: Row of numbers, see ``fields``.
        r: Row of float32.
        thread: Number of the thread.
        own: Address of its memory.
        places: (5,) int64: where its parts begin.
        first: Sample.
        samples: How many.
        tokens: Rows of a sample.
        partial: Address of sums over the rows of this chunk, float32.
    """
    kind, width, rows, row = d[f.KIND], d[f.WIDTH], samples * tokens, first * tokens
    count = rows * width
    if kind == f.ATTENTION:
        _attend(d, r[0], r[1], own, places, first, samples, tokens)
        return
    if kind == f.ATTENTION_BACKWARD:
        _attend_backward(d, r[0], r[1], own, places, first, samples, tokens)
        return
    if kind == f.ROTARY:
        _rotary(d, own, first, samples, tokens)
        return
    if kind == f.ROTARY_BACKWARD:
        _rotary_backward(d, own, first, samples, tokens)
        return
    x, y = _place(d, f.X, own, row), _place(d, f.Y, own, row)
    sums = own + places[f.WORK]
    if kind == f.LINEAR:
        depth = d[f.DEPTH]
        codes = d[f.CODES] + row * depth
        mask = d[f.MASK] + row * depth // 8 if d[f.MASK] else np.int64(0)
        clamped = passes.encode(x, rows * depth, codes, mask, d[f.FLIP], r[0], r[1], r[2])
        _count(d[f.CLAMPED] + 8 * thread, clamped)
        bias, powers = d[f.BIAS], d[f.SUM_POWERS]
        multiply(d, codes, depth, width // 16, rows, sums, y, bias, powers, 0, 0, 0)
    elif kind == f.LINEAR_BACKWARD:
        scales = view(d[f.SCALES], first + samples, np.float64)[first:]
        _round_gradient(d, x, samples, first, tokens, own, places, d[f.STREAM], scales)
        codes = own + places[f.ROUNDED]
        grad_codes = d[f.GRAD_CODES] + row * width
        tiles.copy(codes, grad_codes, count)
        if d[f.SUMS] >= 0:
            passes.add_rows(x, rows, width, partial + 4 * d[f.SUMS])
        if d[f.WEIGHTS]:
            if d[f.FACTORS]:
                _scale_columns(x, rows, width, d[f.FACTORS])
                scales = np.empty(samples, np.float64)  # those of weights stay
                stream = d[f.SECOND_STREAM]
                _round_gradient(d, x, samples, first, tokens, own, places, stream, scales)
                if FLIPS:
                    tiles.copy_flipped(codes, codes, (count + 63) // 64 * 64)  # pieces do not meet
            elif FLIPS:
                tiles.copy_flipped(grad_codes, codes, count)
            depth = d[f.DEPTH]
            mask = d[f.MASK] + row * depth // 8 if d[f.MASK] else np.int64(0)
            multiply(
                d, codes, width, depth // 16, rows, sums, y, 0, 0, mask, d[f.ADDS],
                own + places[f.POWERS],
            )  # fmt: skip
    elif kind == f.NORM:
        before = row * d[f.HEADS]
        for i in range(rows * d[f.HEADS]):
            kept = d[f.KEPT] + 2 * (before + i) * width if d[f.KEPT] else np.int64(0)
            passes.normalize(
                x + 4 * i * width, width, y + 4 * i * width, kept,
                d[f.INVERSE] + 4 * (before + i), d[f.SCALE], d[f.SHIFT], d[f.CENTRED], r[0], r[1],
            )  # fmt: skip
    elif kind == f.NORM_BACKWARD:
        before = row * d[f.HEADS]
        for i in range(rows * d[f.HEADS]):
            dx = y + 4 * i * width if d[f.Y] >= 0 else np.int64(0)
            passes.normalize_backward(
                x + 4 * i * width, width, d[f.KEPT] + 2 * (before + i) * width,
                d[f.INVERSE] + 4 * (before + i), d[f.SCALE], dx, d[f.ADDS],
                partial + 4 * d[f.SUMS], partial + 4 * d[f.SUMS2], d[f.CENTRED], r[0],
            )  # fmt: skip
    elif kind == f.CURVE:
        for e in range(0, count, _CURVE_BLOCK):
            n = min(_CURVE_BLOCK, count - e)
            kept = d[f.KEPT] + 2 * (row * width + e) if d[f.KEPT] else np.int64(0)
            passes.curve(x + 4 * e, n, y + 4 * e, kept, d[f.CURVE_NUMBER], r[0])
    elif kind == f.CURVE_BACKWARD:
        kept = d[f.KEPT] + 2 * row * width
        for e in range(0, count, _CURVE_BLOCK):
            n = min(_CURVE_BLOCK, count - e)
            passes.curve_backward(
                x + 4 * e, n, kept + 2 * e, y + 4 * e, d[f.ADDS], sums, d[f.CURVE_NUMBER], r[0]
            )
    elif kind == f.MULTIPLY:
        kept = d[f.KEPT] + 2 * row * width if d[f.KEPT] else np.int64(0)
        other = d[f.OTHER_KEPT] + 2 * row * width
        passes.multiply(x, _place(d, f.OTHER, own, row), count, y, kept, other)
    elif kind == f.MULTIPLY_BACKWARD:
        passes.multiply_backward(x, count, d[f.OTHER_KEPT] + 2 * row * width, y, d[f.ADDS])
    elif kind == f.RELU:
        passes.relu(x, count, y, d[f.KEPT] + row * width // 8)
    elif kind == f.RELU_BACKWARD:
        passes.masked(x, count, d[f.KEPT] + row * width // 8, y, d[f.ADDS], np.float32(1))
    elif kind == f.DROPOUT:
        mask = d[f.KEPT] + row * width // 8
        _draw(d, row * width, count, mask, own + places[f.HEAD])
        passes.masked(x, count, mask, y, 0, r[0])
    elif kind == f.DROPOUT_BACKWARD:
        passes.masked(x, count, d[f.KEPT] + row * width // 8, y, d[f.ADDS], r[0])
    elif kind == f.ADD:
        passes.add(x, _place(d, f.OTHER, own, row), count, y)
    elif kind == f.PASS_ON:
        passes.pass_on(x, count, y, d[f.ADDS])
    elif kind == f.BLANK:
        tiles.blank(y, 4 * count, 0)
    elif kind == f.CUT:
        for i in range(rows):
            tiles.copy(x + i * d[f.Q_LINE] + d[f.Q_START], y + 4 * i * width, 4 * width)
    elif kind == f.CUT_BACKWARD:
        for i in range(rows):
            dx = y + i * d[f.Q_LINE] + d[f.Q_START]
            passes.pass_on(x + 4 * i * width, width, dx, d[f.ADDS])


def _run(
    table, reals, samples, tokens, chunk, scratch, scratch_bytes, places, partial, partial_bytes,
    threads,
):  # fmt: skip
    """Run operations on all samples.

    Args:
        table: (operations, ...) int64, see ``fields``.
        reals: (operations, 4) float32.
        samples: How many.
        tokens: Rows of a sample.
        chunk: Samples that a thread takes at a time.
        scratch: Address of each thread's memory, one after the other.
        scratch_bytes: Of a thread.
        places: (5,) int64: where in it which part begins.
        partial: Address of a row of sums for each chunk.
        partial_bytes: Of a row.
        threads: How many.
    """
    chunks = (samples + chunk - 1) // chunk
    for thread in prange(threads):
        own = scratch + thread * scratch_bytes
        enter()
        for c in range(chunks * thread // threads, chunks * (thread + 1) // threads):
            first = c * chunk
            count = min(chunk, samples - first)
            row = partial + c * partial_bytes
            tiles.blank(row, partial_bytes, 0)
            for k in range(len(table)):
                operate(table[k], reals[k], thread, own, places, first, count, tokens, row)
        leave()


def run(path: str, parallel: bool) -> Any:
    """Return the kernel of operations with the tiles of a path."""
    return compiled(_run, path, multiply, operate)[parallel]


# ------------------------------------------------------------------ weights


def _add_weights(table, details, tasks, begins, samples, scratch, scratch_bytes, threads):
    """Write gradients of weights.

    Args:
        table: (layers, ...) int64, see ``fields``.
        details: (layers, ...) int64, see ``products.jobs``.
        tasks: (tasks, 3) int64: a layer, the first of its outputs in sixteens, and behind the last.
        begins: (threads + 1,) int64: which tasks a thread has.
        samples: How many.
        scratch: Address of each thread's memory, one after the other.
        scratch_bytes: Of a thread.
        threads: How many.
    """
    for thread in prange(threads):
        enter()
        for k in range(begins[thread], begins[thread + 1]):
            layer, begin, end = tasks[k]
            d = table[layer]
            write_weights(
                details[layer].ctypes.data, d[f.CODES], d[f.GRAD_CODES], d[f.SCALES], samples,
                d[f.OUT], d[f.LIES], d[f.LSB], begin, end, scratch + thread * scratch_bytes,
            )  # fmt: skip
        leave()


def add_weights(path: str, parallel: bool) -> Any:
    """Return the kernel of gradients of weights with the tiles of a path."""
    parts = *weight_jobs.PARTS, *map(ByName, by_outputs.PARTS)
    return compiled(_add_weights, path, *parts)[parallel]
