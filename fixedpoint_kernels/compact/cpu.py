"""Compact states in Numba: a block is decoded, moved and encoded while it is in the cache."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numba import carray, njit, prange, types
from torch import Tensor

from fixedpoint_kernels.compact.records import (
    BLOCK,
    FACTORS,
    Adam,
    Codes,
    Kind,
    Noise,
    Row,
    Sgd,
    blocks_of,
)
from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.llvm.vectors import F32, I16, I32, I64, intrinsic, multiply_add, pointer_to
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.cpu import words
from fixedpoint_kernels.rounding.cpu import TASK, numbers_of, round_task
from fixedpoint_kernels.rounding.reference import Rounding
from fixedpoint_kernels.sgd import has_bits_of_torch as has_sums_of_torch
from fixedpoint_kernels.threads import compile_both, is_parallel

_WORDS = 128  # of noise, made at a time
_FREE = FixedPoint(2, 0)  # stands where there is no format
_PIECE = TASK - 2 * _WORDS  # elements of a task, at most: rounding then takes them at once
_NOISE = TASK + 2 * _WORDS  # parts of a task's noise
_KINDS = {"fixed": 0, "signed": 1, "squares": 2}
_INFINITY = np.int32(0x7F800000)  # the bits of
_SIGN = np.int32(-(2**31))
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_SMALLEST = np.float32(2.0**-126)
_HALF = np.float32(2.0**-17)  # of a step of the noise
_FACTORS = tuple(map(np.int32, FACTORS))
_DTYPES = {"fixed": torch.int16, "signed": torch.int8, "squares": torch.uint8}


@intrinsic
def _store_words(_context, out, at, first, seed, stream):
    """Write the ``_WORDS`` words of noise from word ``first`` on to ``out[at:]``, uint16 halves."""
    signature = types.void(out, at, first, seed, stream)

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        block = builder.lshr(args[2], args[2].type(2))
        found = words(builder, block, args[3], args[4], _WORDS // 4).viewed(I16)
        found.store(builder.gep(array.data, [args[1]]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _data_of(_context, array):
    """Return where an array's elements lie, as an integer."""

    def codegen(context, builder, signature, args):
        own = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(own.data, I64)

    return types.int64(array), codegen


@intrinsic
def _bits_of(_context, value):
    """Return the bits of a float32 as an int32."""

    def codegen(_context, builder, _signature, args):
        return builder.bitcast(args[0], I32)

    return types.int32(value), codegen


@intrinsic
def _float_of(_context, bits):
    """Return the float32 of an int32's bits."""

    def codegen(_context, builder, _signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(bits), codegen


@inner
def _draw(noise, n, first, seed, stream):
    """Write 16 bits of noise for each of ``n`` elements from ``first`` on; say where they begin."""
    lead = first % (2 * _WORDS)
    for at in range(0, lead + n, 2 * _WORDS):
        _store_words(noise, at, (first - lead + at) >> 1, seed, stream)
    return lead


@inner
def _chance(part, factor, half):
    """Return what a distance is compared with; see ``reference._chances``."""
    own = np.int32((np.int32(part) * factor) & np.int32(0xFFFF))
    return multiply_add(np.float32(own), np.float32(2.0**-16), half)


@inner
def _size(value):
    """Return the bits of a magnitude; those of infinity and NaN are above all others."""
    return np.int32(_bits_of(value) & np.int32(0x7FFFFFFF))


@inner
def _with_sign(size, of):
    """Return a value that is not below 0 with another's sign."""
    return _float_of(np.int32(_bits_of(size) | (_bits_of(of) & _SIGN)))


@inner
def _top(values):
    top = np.int32(0)
    for i in range(values.size):
        top = max(top, _size(values[i]))
    return top


@njit(error_model="numpy")
def _encode_fixed(values, top, codes, scales, block, noise, factor, half):
    """Encode a block, and leave in ``values`` what the codes mean; top: of the magnitudes' bits."""
    if top >= _INFINITY:
        scales[block], codes[:], values[:] = np.nan, 0, np.nan
        return
    # one code above the largest must fit, too
    exponent = max(((top + np.int32(511)) >> np.int32(23)) - np.int32(14), np.int32(1))
    lsb = _float_of(np.int32(exponent << np.int32(23)))
    scales[block], scale = lsb, _ONE / lsb
    for i in range(values.size):
        scaled = values[i] * scale
        below = np.floor(scaled)
        is_up = scaled - below > _chance(noise[i], factor, half)
        code = below + _ONE if is_up else below  # the scale leaves none to clamp
        codes[i] = np.int16(np.int32(code))
        values[i] = code * lsb


@njit(error_model="numpy")
def _encode_signed(values, top, codes, scales, block, noise, factor, half):
    if top >= _INFINITY:
        scales[block], codes[:] = np.nan, 0
        return
    own = max(_float_of(top) / np.float32(127.0**2), _SMALLEST)
    scales[block], inverse = own, _ONE / own
    most = np.float32(127.0)
    for i in range(values.size):
        scaled = values[i] * inverse
        size = abs(scaled)
        below = np.floor(np.sqrt(size))  # never above 127
        gap = multiply_add(below, _TWO, _ONE)  # to the next square
        is_up = gap * _chance(noise[i], factor, half) < size - below * below
        code = min(below + _ONE if is_up else below, most)
        codes[i] = np.int8(np.int32(_with_sign(code, scaled)))


@njit(error_model="numpy")
def _encode_squares(values, top, codes, scales, block, noise, factor, half):
    if top >= _INFINITY:
        scales[block], codes[:] = np.nan, 0
        return
    own = max(_float_of(top) / np.float32(255.0**4), _SMALLEST)
    scales[block], inverse = own, _ONE / own
    most = np.float32(255.0)
    for i in range(values.size):
        size = max(values[i] * inverse, _ZERO)
        below = min(np.floor(np.sqrt(np.sqrt(size))), most)
        above = below + _ONE
        low, high = below * below, above * above
        low, high = low * low, high * high
        step = (high - low) * _chance(noise[i], factor, half)
        code = min(below + (_ONE if step < size - low else _ZERO), most)
        code = max(code, _ONE if values[i] > _ZERO else _ZERO)
        codes[i] = np.uint8(np.int32(code))


@inner
def _fixed(code, scale):
    return np.float32(np.int32(code)) * scale


@inner
def _signed(code, scale):
    own = np.float32(np.int32(code))
    return own * abs(own) * scale


@inner
def _square(code, scale):
    own = np.float32(np.int32(code))
    own = own * own
    return own * own * scale


@inner
def _decoded(codes, lsb, master):
    for i in range(master.size):
        master[i] = _fixed(codes[i], lsb)


@inner
def _sgd(codes, lsb, grad, rate, master):
    """Move a block without momentum into ``master``; rate: see ``_rate_of``.

    Each of these returns the largest magnitudes' bits of what it writes.
    """
    step, decay, top = rate[0], rate[2], np.int32(0)
    for i in range(master.size):
        own = _fixed(codes[i], lsb)
        g = multiply_add(own, decay, grad[i]) if decay != 0 else grad[i]
        master[i] = multiply_add(g, step, own)
        top = max(top, _size(master[i]))
    return top


@inner
def _momentum(codes, lsb, momenta, scale, grad, rate, master, momentum):
    step, kept, decay = rate[0], rate[1], rate[2]
    is_nesterov, top, high = rate[3] != 0, np.int32(0), np.int32(0)
    for i in range(master.size):
        own = _fixed(codes[i], lsb)
        g = multiply_add(own, decay, grad[i]) if decay != 0 else grad[i]
        moved = kept * _signed(momenta[i], scale) + g
        g = multiply_add(moved, kept, g) if is_nesterov else moved
        new = multiply_add(g, step, own)
        momentum[i], master[i] = moved, new
        top, high = max(top, _size(new)), max(high, _size(moved))
    return top, high


@njit(error_model="numpy")
def _adam(codes, lsb, momenta, scale, squares, power, grad, rate, master, first, second):
    step, weight1, beta2, weight2 = rate[0], rate[1], rate[2], rate[3]
    correction, eps, decay, kept = rate[4], rate[5], rate[6], rate[7]
    top, high, peak = np.int32(0), np.int32(0), np.int32(0)
    for i in range(master.size):
        own = _fixed(codes[i], lsb) * kept
        g = multiply_add(own, decay, grad[i]) if decay != 0 else grad[i]
        m = _signed(momenta[i], scale)
        m = multiply_add(weight1, g - m, m)
        v = multiply_add(weight2 * g, g, _square(squares[i], power) * beta2)
        new = own + step * m / (np.sqrt(v) / correction + eps)
        master[i], first[i], second[i] = new, m, v
        top, high, peak = max(top, _size(new)), max(high, _size(m)), max(peak, _size(v))
    return top, high, peak


@inner
def _span(block, count, columns):
    """Return the first element of a block, and how many it has."""
    row, place = block // count, block % count
    return row * columns + place * BLOCK, min(BLOCK, columns - place * BLOCK)


@inner
def _copy(target, source):
    # a function of its own: a slice that is assigned in a parallel loop was not written; a loop,
    # for an assigned slice is copied element by element
    for i in range(target.size):
        target[i] = source[i]


def _encode(x, codes, scales, shape, kind, seed, stream, offset, factor, half):
    # x, codes (n,); scales (blocks,); shape: blocks of a row, columns; factor: 0 for nearest
    count, columns = shape
    blocks = scales.size
    for task in prange((blocks + 15) // 16):
        values, noise, lead = np.empty(BLOCK, np.float32), np.empty(_NOISE, np.uint16), 0
        first, stop = task * 16, min(task * 16 + 16, blocks)
        begin, last = _span(first, count, columns)[0], _span(stop - 1, count, columns)
        if factor:
            lead = _draw(noise, last[0] + last[1] - begin, offset + begin, seed, stream)
        for block in range(first, stop):
            start, n = _span(block, count, columns)
            own, at = values[:n], lead + start - begin if factor else 0
            _copy(own, x[start : start + n])
            piece, drawn, top = codes[start : start + n], noise[at : at + n], _top(own)
            if kind == 0:
                _encode_fixed(own, top, piece, scales, block, drawn, factor, half)
            elif kind == 1:
                _encode_signed(own, top, piece, scales, block, drawn, factor, half)
            else:
                _encode_squares(own, top, piece, scales, block, drawn, factor, half)


def _decode(codes, scales, values, shape, kind):
    count, columns = shape
    blocks = scales.size
    for task in prange((blocks + 15) // 16):
        for block in range(task * 16, min(task * 16 + 16, blocks)):
            start, n = _span(block, count, columns)
            own, piece, scale = values[start : start + n], codes[start : start + n], scales[block]
            for i in range(own.size):
                if kind == 0:
                    own[i] = _fixed(piece[i], scale)
                elif kind == 1:
                    own[i] = _signed(piece[i], scale)
                else:
                    own[i] = _square(piece[i], scale)


@inner
def _move(pointers, size, where, rate, kind, key, offset, work):
    """Move some blocks of a parameter, and leave its masters in memory to work in.

    pointers (8,) int64; where: blocks, of a row and columns, the first and the one behind the last;
    kind: 0 SGD, 1 SGD with momentum, 2 Adam, -1: only decode; key: seed and stream of the states'
    noise; work: for the masters, two moments of a block, and noise. Arrays made of addresses have no
    counts of references, which would take as long as a block.
    """
    blocks, (count, columns), first, stop = where
    begin, last = _span(first, count, columns)[0], _span(stop - 1, count, columns)
    masters = carray(pointer_to(_data_of(work[0])), TASK, np.float32)
    one = carray(pointer_to(_data_of(work[1])), BLOCK, np.float32)
    two = carray(pointer_to(_data_of(work[1]) + 4 * BLOCK), BLOCK, np.float32)
    noise = carray(pointer_to(_data_of(work[2])), _NOISE, np.uint16)
    half = _HALF
    codes = carray(pointer_to(pointers[0]), size, np.int16)
    lsbs = carray(pointer_to(pointers[1]), blocks, np.float32)
    grads = carray(pointer_to(pointers[3]), size, np.float32)
    momenta = carray(pointer_to(pointers[4]), size, np.int8)
    scales = carray(pointer_to(pointers[5]), blocks, np.float32)
    squares = carray(pointer_to(pointers[6]), size, np.uint8)
    powers = carray(pointer_to(pointers[7]), blocks, np.float32)
    lead = 0
    if kind >= 0:
        lead = _draw(noise, last[0] + last[1] - begin, offset + begin, key[0], key[1])
    for block in range(first, stop):
        start, n = _span(block, count, columns)
        end = start + n
        master, own, lsb = masters[start - begin : end - begin], codes[start:end], lsbs[block]
        if kind < 0:
            _decoded(own, lsb, master)
            continue
        grad, fresh, second = grads[start:end], one[:n], two[:n]
        at = lead + start - begin
        drawn, high, peak = noise[at : at + n], np.int32(0), np.int32(0)
        if kind == 0:
            top = _sgd(own, lsb, grad, rate, master)
        elif kind == 1:
            top, high = _momentum(
                own, lsb, momenta[start:end], scales[block], grad, rate, master, fresh
            )
        else:
            mean, scale = momenta[start:end], scales[block]
            square, power = squares[start:end], powers[block]
            top, high, peak = _adam(
                own, lsb, mean, scale, square, power, grad, rate, master, fresh, second
            )
        _encode_fixed(master, top, own, lsbs, block, drawn, _FACTORS[0], half)
        if kind:
            piece = momenta[start:end]
            _encode_signed(fresh, high, piece, scales, block, drawn, _FACTORS[1], half)
        if kind == 2:
            piece = squares[start:end]
            _encode_squares(second, peak, piece, powers, block, drawn, _FACTORS[2], half)


def _step_many(pointers, sizes, rates, numbers, streams, tasks, key, rounds):
    # pointers (t, 8) int64: of codes and scales of the master (or float32, and 0), of weight,
    # gradient, and codes and scales of two moments; sizes (t, 6) int64: elements, those before
    # them, blocks, blocks of a row, columns, kind of move; rates (t, 8) float32;
    # numbers (t, 4) float32; streams (t, 2) int64: of weights (-1: no format) and of states;
    # tasks (k, 3) int64: tensor, first block and one behind the last; key: seed of the noise
    for task in prange(tasks.shape[0]):
        tensor, first, stop = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        size, offset, blocks = sizes[tensor, 0], sizes[tensor, 1], sizes[tensor, 2]
        shape = sizes[tensor, 3], sizes[tensor, 4]
        kind = sizes[tensor, 5]
        begin = _span(first, shape[0], shape[1])[0]
        last, n = _span(stop - 1, shape[0], shape[1])
        end = last + n
        memory, buffers = np.empty(TASK, np.float32), np.empty((2, BLOCK), np.float32)
        noise = np.empty(_NOISE, np.uint16)
        masters = memory[: end - begin]
        weight = carray(pointer_to(pointers[tensor, 2]), size, np.float32)[begin:end]
        if pointers[tensor, 1]:
            own_key = key, streams[tensor, 1]
            work = memory, buffers, noise
            where = blocks, shape, first, stop
            _move(pointers[tensor], size, where, rates[tensor], kind, own_key, offset, work)
        else:
            _copy(masters, carray(pointer_to(pointers[tensor, 0]), size, np.float32)[begin:end])
        if streams[tensor, 0] < 0:
            _copy(weight, masters)
            continue
        row = numbers[tensor]
        number = (row[0], row[1], row[2], row[3])
        at = offset + begin
        if rounds:
            round_task(masters, weight, None, -(at % _WORDS), at, number, (key, streams[tensor, 0]))
        else:
            round_task(masters, weight, None, -(at % _WORDS), at, number, None)


_encode_serial, _encode_parallel = compile_both(_encode)
_decode_serial, _decode_parallel = compile_both(_decode)
_step_serial, _step_parallel = compile_both(_step_many)


def encode(x: Tensor, kind: Kind, noise: Noise | None) -> Codes:
    """See ``fixedpoint_kernels.compact.encode``; ``x`` is float32 and contiguous."""
    rows, count = blocks_of(x.shape)
    codes = Codes(torch.empty(x.shape, dtype=_DTYPES[kind]), torch.empty(rows, count))
    kernel = _encode_parallel if is_parallel(x.numel()) else _encode_serial
    key = noise.key if noise else Key(0, 0)
    kernel(
        x.view(-1).numpy(),
        codes.codes.view(-1).numpy(),
        codes.scales.view(-1).numpy(),
        (count, x.shape[1:].numel()),
        _KINDS[kind],
        key.seed,
        key.stream,
        key.offset,
        np.int32(FACTORS[noise.lane] if noise else 0),
        _HALF if noise else np.float32(0.5),
    )
    return codes


def decode(codes: Codes, kind: Kind) -> Tensor:
    """See ``fixedpoint_kernels.compact.decode``."""
    x = torch.empty(codes.codes.shape)
    kernel = _decode_parallel if is_parallel(x.numel()) else _decode_serial
    shape = blocks_of(x.shape)[1], x.shape[1:].numel()
    own = codes.codes.view(-1).numpy(), codes.scales.view(-1).numpy()
    kernel(*own, x.view(-1).numpy(), shape, _KINDS[kind])
    return x


def step_many(rows: Sequence[Row], *, rounding: Rounding, seed: int) -> None:
    """See ``fixedpoint_kernels.compact.step_many``."""
    pointers = np.array([_pointers(row) for row in rows], np.int64)
    sizes = np.array([_sizes(row) for row in rows], np.int64)
    rates = np.array([_rate_of(row.move) for row in rows], np.float32)
    numbers = numbers_of(tuple(row.fmt or _FREE for row in rows))
    streams = np.array([(row.stream if row.fmt else -1, row.noise) for row in rows], np.int64)
    tasks = _tasks(tuple(tuple(own[2:5]) for own in sizes.tolist()))
    kernel = _step_parallel if is_parallel(int(sizes[:, 0].sum())) else _step_serial
    kernel(pointers, sizes, rates, numbers, streams, tasks, seed, rounding == "stochastic")


def _pointers(row: Row) -> list[int]:
    master = row.master
    own = [*master] if isinstance(master, Codes) else [master]
    found = [x.data_ptr() for x in own] + [0] * (2 - len(own))
    found += [row.weight.data_ptr(), row.grad.data_ptr()]
    return (found + [x.data_ptr() for pair in row.moments for x in pair] + [0] * 4)[:8]


def _sizes(row: Row) -> tuple[int, ...]:
    shape, size = row.weight.shape, row.weight.numel()
    kind = -1
    if row.move is not None:
        kind = len(row.moments)
    if isinstance(row.master, Codes):
        count = blocks_of(shape)[1]
        return size, row.offset, shape[0] * count, count, shape[1:].numel(), kind
    count = -(-size // BLOCK)
    return size, row.offset, count, count, size, -1


def _rate_of(move: Sgd | Adam | None) -> tuple[float, ...]:
    """Return the numbers of a move, as torch computes them in float64."""
    if isinstance(move, Sgd):
        own = -move.lr, move.momentum, move.weight_decay, float(move.nesterov)
        return (*own, 0.0, 0.0, 0.0, 0.0)
    if move is None:
        return (0.0,) * 8
    beta1, beta2 = move.betas
    size = move.lr / (1 - beta1**move.step)
    correction = (1 - beta2**move.step) ** 0.5
    decay = 0.0 if move.decoupled else move.weight_decay
    kept = 1 - move.lr * move.weight_decay if move.decoupled else 1.0
    return -size, 1 - beta1, beta2, 1 - beta2, correction, move.eps, decay, kept


@cache
def _tasks(shapes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Return tensor, first block and the one behind the last of each piece of work."""
    tasks = []
    for tensor, (blocks, _, columns) in enumerate(shapes):
        many = max(_PIECE // min(max(columns, 1), BLOCK), 1)
        tasks += [(tensor, at, min(at + many, blocks)) for at in range(0, blocks, many)]
    return np.array(tasks, np.int64).reshape(-1, 3)


@cache
def has_bits_of_torch() -> bool:
    """Say whether torch's operations of SGD and Adam round as the kernels do, at all lengths."""
    if not has_sums_of_torch():
        return False
    g = torch.Generator().manual_seed(0)
    for n in range(1, 68):
        a, b, c = (torch.rand(n, generator=g) + 0.5 for _ in range(3))
        wide, value = [x.double() for x in (a, b, c)], 1 - 0.999
        narrow = float(np.float32(value))
        lerp = (narrow * (b - a).double() + wide[0]).float()
        square = ((narrow * b).double() * wide[1] + wide[2]).float()
        quotient = a + (np.float32(-0.3).item() * b) / c
        found = a.lerp(b, value), c.addcmul(b, b, value=value), a.addcdiv(b, c, value=-0.3)
        if not all(map(torch.equal, found, (lerp, square, quotient))):
            return False
    return True
