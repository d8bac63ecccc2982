"""Compact states in Numba: a block is decoded, moved and encoded while it is in the cache."""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numba import prange, types
from torch import Tensor

from fixedpoint_kernels.compact.records import (
    BLOCK,
    DTYPES,
    FACTORS,
    Adam,
    Codes,
    Kind,
    Moves,
    Noise,
    Sgd,
    Sum,
    block_shape,
    blocks_of,
    flattened,
)
from fixedpoint_kernels.compact.targets import Tables
from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.llvm import states
from fixedpoint_kernels.llvm.arrays import floats, view
from fixedpoint_kernels.llvm.calls import inlined, inner, keep
from fixedpoint_kernels.llvm.vectors import F32, I32, I64, intrinsic
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.cpu import words
from fixedpoint_kernels.rounding.cpu import TASK, numbers_of, round_task
from fixedpoint_kernels.rounding.reference import Rounding
from fixedpoint_kernels.sgd import has_bits_of_torch as has_sums_of_torch
from fixedpoint_kernels.sgd.cpu import move
from fixedpoint_kernels.threads import compile_both, is_parallel

_WORDS = 128  # of noise, made at a time
_FREE = FixedPoint(2, 0)  # stands where there is no format
_PIECE = TASK - 2 * _WORDS  # elements of a task, at most: rounding then takes them at once
_NOISE = TASK + 2 * _WORDS + states.LANES  # parts of a task's noise, and of a vector more
_GROUP = 1024  # elements that are moved before they are encoded
_MEMORY = TASK + 2 * _GROUP + 64 + _NOISE // 2  # float32 that a task works in
_ADDED = _GROUP + 48 + _NOISE // 2  # the same, of what is only added to
_KINDS = {"fixed": 0, "signed": 1, "squares": 2}
_INFINITY = np.int32(0x7F800000)  # the bits of
_ONE = np.float32(1.0)
_SMALLEST = np.float32(2.0**-126)
_HALF = np.float32(2.0**-17)  # of a step of the noise
_FACTORS = tuple(map(np.int32, FACTORS))


@intrinsic
def _store_words(_context, out, first, seed, stream):
    """Write the ``_WORDS`` words of noise from word ``first`` on to an address."""
    signature = types.void(out, first, seed, stream)

    def codegen(context, builder, _signature, args):
        block = builder.lshr(args[1], args[1].type(2))
        found = words(builder, block, args[2], args[3], _WORDS // 4)
        found.store(builder.inttoptr(args[0], I32.as_pointer()))
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
def _float_of(_context, bits):
    """Return the float32 of an int32's bits."""

    def codegen(_context, builder, _signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(bits), codegen


@inlined
def _draw(noise, n, first, seed, stream):
    """Write 16 bits of noise for each of ``n`` elements from ``first`` on to an address.

    Returns:
        How many 16 bits before those of the first element there are.
    """
    lead = first % (2 * _WORDS)
    for at in range(0, lead + n, 2 * _WORDS):
        _store_words(noise + 2 * at, (first - lead + at) >> 1, seed, stream)
    return lead


@inner
def _shorts(address, n):
    return view(address, n, np.int16)


@inner
def _bytes(address, n):
    return view(address, n, np.int8)


@inlined
def _put_fixed(places, n, top, scales, block, noise):
    """Encode a block, and write what the codes mean.

    places: addresses of values, codes, noise, and where the meaning goes, which may be the values;
    top: of the magnitudes' bits; noise: factor and half of a step.
    """
    if top >= _INFINITY:
        scales[block], codes, meant = np.nan, _shorts(places[1], n), floats(places[3], n)
        for i in range(n):
            codes[i], meant[i] = 0, np.nan
        return
    # one code above the largest must fit, too
    exponent = max(((top + np.int32(511)) >> np.int32(23)) - np.int32(14), np.int32(1))
    lsb = _float_of(np.int32(exponent << np.int32(23)))
    scale = _float_of(np.int32((np.int32(254) - exponent) << np.int32(23)))  # 1 / lsb
    scales[block] = lsb
    states.encode_fixed(places, n, (lsb, scale), noise[0], noise[1])


@inlined
def _scaled(top, steps, scales, block, codes, n):
    """Write a block's scale, its largest value being so many steps; return 1 over it, or write codes of NaN and return 0."""
    if top >= _INFINITY:
        scales[block], own = np.nan, _bytes(codes, n)
        for i in range(n):
            own[i] = 0
        return np.float32(0.0)
    scale = max(_float_of(top) / np.float32(steps), _SMALLEST)
    scales[block] = scale
    return _ONE / scale


@inlined
def _put_signed(places, n, top, scales, block, noise):
    """Encode a block; places: addresses of values, codes and noise."""
    inverse = _scaled(top, 127.0**2, scales, block, places[1], n)
    if inverse > 0.0:
        states.encode_signed(places, n, inverse, noise[0], noise[1])


@inlined
def _put_squares(places, n, top, scales, block, noise):
    inverse = _scaled(top, 255.0**4, scales, block, places[1], n)
    if inverse > 0.0:
        states.encode_squares(places, n, inverse, noise[0], noise[1])


@inlined
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


def _encode(x, codes, itemsize, scales, shape, kind, seed, stream, offset, factor, half):
    # x, codes: addresses; itemsize: of a code; scales (blocks,); shape: blocks of a row, columns;
    # factor: 0 for nearest
    count, columns = shape
    blocks = scales.size
    for task in prange((blocks + 15) // 16):
        meant, noise, lead = np.empty(BLOCK, np.float32), np.empty(_NOISE, np.uint16), 0
        first, stop = task * 16, min(task * 16 + 16, blocks)
        begin, last = _span(first, count, columns)[0], _span(stop - 1, count, columns)
        if factor:
            n = last[0] + last[1] - begin
            lead = _draw(_data_of(noise), n, offset + begin, seed, stream)
        for block in range(first, stop):
            start, n = _span(block, count, columns)
            own, piece = x + 4 * start, codes + itemsize * start
            drawn = _data_of(noise) + 2 * (lead + start - begin if factor else 0)
            top, rule = states.top(own, n), (factor, half)
            if kind == 0:
                _put_fixed((own, piece, drawn, _data_of(meant), own), n, top, scales, block, rule)
            elif kind == 1:
                _put_signed((own, piece, drawn), n, top, scales, block, rule)
            else:
                _put_squares((own, piece, drawn), n, top, scales, block, rule)
        keep(meant, noise)


def _decode(codes, itemsize, scales, values, shape, kind):
    # codes, values: addresses; itemsize: of a code
    count, columns = shape
    blocks = scales.size
    for task in prange((blocks + 15) // 16):
        for block in range(task * 16, min(task * 16 + 16, blocks)):
            start, n = _span(block, count, columns)
            own, piece, scale = values + 4 * start, codes + itemsize * start, scales[block]
            if kind == 0:
                states.decode_fixed(piece, own, n, scale)
            elif kind == 1:
                states.decode_signed(piece, own, n, scale)
            else:
                states.decode_squares(piece, own, n, scale)


@inlined
def _add_codes(places, where, rule, work):
    """Add to some blocks of codes, and encode them; return the sum of the squares.

    places: addresses of codes and scales, new ones, and of what is added; where: blocks, of a row and
    columns, the first and the one behind the last; rule: factor of the noise, and half of a step;
    work: addresses of sums, float32, of the magnitudes' bits, and of the first block's noise.
    """
    blocks, (count, columns), first, stop = where
    old, fresh = floats(places[1], blocks), floats(places[3], blocks)
    sums, tops = work[0], view(work[1], 16, np.int32)
    begin, total = _span(first, count, columns)[0], 0.0
    many = min(max(_GROUP // max(min(columns, BLOCK), 1), 1), 16)
    for at in range(first, stop, many):
        origin, last = _span(at, count, columns)[0], min(at + many, stop)
        for block in range(at, last):
            start, n = _span(block, count, columns)
            own = places[0] + start, places[4] + 4 * start, sums + 4 * (start - origin)
            tops[block - at], squares = states.add_to_signed(own, n, old[block])
            total += squares
        for block in range(at, last):
            start, n = _span(block, count, columns)
            own = sums + 4 * (start - origin), places[2] + start, work[2] + 2 * (start - begin)
            _put_signed(own, n, tops[block - at], fresh, block, rule)
    return total


def _add_many(addresses, table, noise, tasks, squares):
    # addresses int64: see ``_Plan``; table (t, 5) int64: blocks, of a row, columns, place among the
    # addresses, whether there are codes; noise (t, 4) int64: seed, stream, offset, factor; tasks (k, 3)
    # int64: tensor, first block and one behind the last; squares (k,) float64
    parts = (addresses.size - table.shape[0]) // 2  # of all tensors
    for task in prange(tasks.shape[0]):
        tensor, first, stop = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        shape, place = (table[tensor, 1], table[tensor, 2]), table[tensor, 3]
        begin = _span(first, shape[0], shape[1])[0]
        last, n = _span(stop - 1, shape[0], shape[1])
        n += last - begin
        old, fresh = addresses[place], addresses[parts + place]
        x = addresses[2 * parts + tensor]
        if table[tensor, 4]:
            memory = np.empty(_ADDED, np.float32)
            sums = (_data_of(memory) + 63) & -64  # vectors within lines of the cache
            drawn, seed, stream = sums + 4 * _GROUP + 64, noise[tensor, 0], noise[tensor, 1]
            lead = _draw(drawn, n, noise[tensor, 2] + begin, seed, stream)
            work = sums, sums + 4 * _GROUP, drawn + 2 * lead
            places = old, addresses[place + 1], fresh, addresses[parts + place + 1], x
            where, factor = (table[tensor, 0], shape, first, stop), np.int32(noise[tensor, 3])
            rule = factor, _HALF if factor else np.float32(0.5)
            squares[task] = _add_codes(places, where, rule, work)
            keep(memory)
        else:
            at = 4 * begin
            squares[task] = states.add_to_floats((old + at, x + at, fresh + at), n, _ONE)[1]


@inlined
def _move_group(pointers, where, rate, kind, work, tops):
    """Move some blocks; see ``_move``."""
    blocks, (count, columns), first, stop, begin = where
    lsbs, scales = floats(pointers[1], blocks), floats(pointers[5], blocks)
    powers, plain = floats(pointers[7], blocks), (rate[0], rate[1], rate[2], rate[3])
    masters, fresh, second, _ = work
    origin = _span(first, count, columns)[0]
    for block in range(first, stop):
        start, n = _span(block, count, columns)
        own, master, lsb = pointers[0] + 2 * start, masters + 4 * (start - begin), lsbs[block]
        if kind < 0:
            states.decode_fixed(own, master, n, lsb)
            continue
        at, old, grad = 4 * (start - origin), pointers[4] + start, pointers[3] + 4 * start
        row = 3 * (block - first)
        if kind == 0:
            tops[row] = states.sgd((own, grad, master), n, lsb, plain)
        elif kind == 1:
            places = own, grad, master, old, fresh + at
            tops[row], tops[row + 1] = states.momentum(places, n, (lsb, scales[block]), plain)
        else:
            places = own, grad, master, old, fresh + at, pointers[6] + start, second + at
            rates = (*plain, rate[4], rate[5], rate[6], rate[7])
            numbers = lsb, scales[block], powers[block]
            tops[row], tops[row + 1], tops[row + 2] = states.adam(places, n, numbers, rates)


@inlined
def _encode_group(pointers, where, kind, work, tops):
    """Encode some blocks that have been moved; see ``_move``."""
    blocks, (count, columns), first, stop, begin = where
    lsbs, scales = floats(pointers[1], blocks), floats(pointers[5], blocks)
    powers = floats(pointers[7], blocks)
    masters, fresh, second, noise = work
    origin = _span(first, count, columns)[0]
    for block in range(first, stop):
        start, n = _span(block, count, columns)
        at, row, drawn = 4 * (start - origin), 3 * (block - first), noise + 2 * (start - begin)
        master, weight = masters + 4 * (start - begin), pointers[2] + 4 * start
        places = master, pointers[0] + 2 * start, drawn, master, weight
        _put_fixed(places, n, tops[row], lsbs, block, (_FACTORS[0], _HALF))
        if kind:
            places, rule = (fresh + at, pointers[4] + start, drawn), (_FACTORS[1], _HALF)
            _put_signed(places, n, tops[row + 1], scales, block, rule)
        if kind == 2:
            places, rule = (second + at, pointers[6] + start, drawn), (_FACTORS[2], _HALF)
            _put_squares(places, n, tops[row + 2], powers, block, rule)


@inlined
def _move(pointers, where, rate, kind, key, offset, memory):
    """Move some blocks of a parameter, and leave its masters in memory to work in.

    pointers (8,) int64; where: blocks, of a row and columns, the first and the one behind the last;
    kind: 0 SGD, 1 SGD with momentum, 2 Adam, -1: only decode; key: seed and stream of the states'
    noise; memory (_MEMORY,) float32. Some blocks are moved, then encoded: a processor finds the scale of one
    while it is busy with others.
    """
    blocks, shape, first, stop = where
    begin = _span(first, shape[0], shape[1])[0]
    last, n = _span(stop - 1, shape[0], shape[1])
    masters = _data_of(memory)
    fresh = masters + 4 * TASK
    second = fresh + 4 * _GROUP
    tops = view(second + 4 * _GROUP, 48, np.int32)
    noise = second + 4 * _GROUP + 256
    if kind >= 0:
        noise += 2 * _draw(noise, last + n - begin, offset + begin, key[0], key[1])
    work = masters, fresh, second, noise
    many = min(max(_GROUP // max(min(shape[1], BLOCK), 1), 1), 16)
    for at in range(first, stop, many):
        own = blocks, shape, at, min(at + many, stop), begin
        _move_group(pointers, own, rate, kind, work, tops)
        if kind >= 0:
            _encode_group(pointers, own, kind, work, tops)


@inlined
def _write(masters, weight, at, number, is_stochastic, seed, stream):
    """Round masters, elements ``at`` on of a tensor, into a weight; stream: -1 without a format."""
    if stream < 0:
        _copy(weight, masters)
    elif is_stochastic:
        round_task(masters, weight, None, -(at % _WORDS), at, number, (seed, stream))
    else:
        round_task(masters, weight, None, -(at % _WORDS), at, number, None)


def _step_many(pointers, sizes, streams, kinds, rates, numbers, tasks, key):
    # pointers (t, 8), sizes (t, 6), streams (t, 2) int64: see ``targets.Tables``; kinds (t,) int64: -1
    # for what stays; rates (t, 8), numbers (t, 4) float32; tasks (k, 3) int64: tensor, first
    # block and one behind the last; key: seed, streams of weights and states, whether there is noise
    for task in prange(tasks.shape[0]):
        tensor, first, stop = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        offset, blocks, kind = sizes[tensor, 1], sizes[tensor, 2], kinds[tensor]
        shape = sizes[tensor, 3], sizes[tensor, 4]
        begin = _span(first, shape[0], shape[1])[0]
        last, n = _span(stop - 1, shape[0], shape[1])
        size = last + n - begin
        weight = floats(pointers[tensor, 2] + 4 * begin, size)
        number = numbers[tensor, 0], numbers[tensor, 1], numbers[tensor, 2], numbers[tensor, 3]
        stream = streams[tensor, 0] + (key[1] if streams[tensor, 0] >= 0 else 0)
        if pointers[tensor, 1]:
            memory = np.empty(_MEMORY + 16, np.float32)
            memory = memory[(-_data_of(memory) & 63) >> 2 :]  # vectors within lines of the cache
            own_key, where = (key[0], key[2] + streams[tensor, 1]), (blocks, shape, first, stop)
            _move(pointers[tensor], where, rates[tensor], kind, own_key, offset, memory)
            _write(memory[:size], weight, offset + begin, number, key[3], key[0], stream)
        else:
            masters = floats(pointers[tensor, 0] + 4 * begin, size)
            if kind >= 0:
                grad = floats(pointers[tensor, 3] + 4 * begin, size)
                momentum = floats(pointers[tensor, 4] + 4 * begin, size if kind else 0)
                rate = rates[tensor]
                move(masters, grad, momentum, 0, rate, False, rate[3] != 0)
            _write(masters, weight, offset + begin, number, key[3], key[0], stream)


_encode_serial, _encode_parallel = compile_both(_encode)
_add_serial, _add_parallel = compile_both(_add_many)
_decode_serial, _decode_parallel = compile_both(_decode)
_step_serial, _step_parallel = compile_both(_step_many)


def encode(x: Tensor, kind: Kind, noise: Noise | None) -> Codes:
    """See ``fixedpoint_kernels.compact.encode``; ``x`` is float32 and contiguous."""
    rows, count = blocks_of(x.shape)
    scales = torch.empty(rows, count, dtype=torch.float32, device="cpu")
    codes = Codes(torch.empty(x.shape, dtype=DTYPES[kind], device="cpu"), scales)
    kernel = _encode_parallel if is_parallel(x.numel()) else _encode_serial
    key = noise.key if noise else Key(0, 0)
    kernel(
        x.data_ptr(),
        codes.codes.data_ptr(),
        codes.codes.itemsize,
        scales.view(-1).numpy(),
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
    x = torch.empty(codes.codes.shape, dtype=torch.float32, device="cpu")
    kernel = _decode_parallel if is_parallel(x.numel()) else _decode_serial
    shape = blocks_of(x.shape)[1], x.shape[1:].numel()
    own, scales = codes.codes, codes.scales.view(-1).numpy()
    kernel(own.data_ptr(), own.itemsize, scales, x.data_ptr(), shape, _KINDS[kind])
    return x


def add_many(
    before: Sequence[Codes | Tensor], xs: Sequence[Tensor], noises: Sequence[Noise | None]
) -> tuple[list[Sum | Tensor], Tensor]:
    """See ``fixedpoint_kernels.compact.add_many``; all is contiguous."""
    coded = tuple(isinstance(x, Codes) for x in before)
    plan, own = _plan(tuple(x.shape for x in xs), coded), flattened(before)
    made = [torch.empty_like(x) for x in own]
    addresses = np.array([x.data_ptr() for x in (*own, *made, *xs)])
    noise = [(*own.key, FACTORS[own.lane]) if own else (0, 0, 0, 0) for own in noises]
    squares = np.empty(len(plan.tasks))
    kernel = _add_parallel if is_parallel(plan.elements) else _add_serial
    kernel(addresses, plan.table, np.array(noise, np.int64), plan.tasks, squares)
    norms = np.sqrt(np.bincount(plan.owners, squares, len(xs)))
    parts = iter(made)
    sums = [
        Sum(Codes(next(parts), next(parts)), x, more) if isinstance(x, Codes) else next(parts)
        for x, more in zip(before, xs, strict=True)
    ]
    return sums, torch.from_numpy(norms)


class _Plan(NamedTuple):
    """What ``add_many`` does, whatever the addresses: of what there is, of what is made, of what is added.

    Args:
        table: Of the tensors; see ``_add_many``.
        tasks: Pieces of work.
        owners: The tensor of each.
        elements: Of all tensors.
    """

    table: np.ndarray
    tasks: np.ndarray
    owners: np.ndarray
    elements: int


@lru_cache(maxsize=16)  # the same parameters come step after step
def _plan(sizes: tuple[torch.Size, ...], coded: tuple[bool, ...]) -> _Plan:
    shapes = [block_shape(size, is_coded=own) for size, own in zip(sizes, coded, strict=True)]
    places = accumulate((1 + is_coded for is_coded in coded), initial=0)
    rows = [
        (*shape, place, is_coded)
        for shape, place, is_coded in zip(shapes, places, coded, strict=False)
    ]
    tasks = _tasks(tuple(shapes))
    elements = sum(map(torch.Size.numel, sizes))
    return _Plan(np.array(rows, np.int64), tasks, np.ascontiguousarray(tasks[:, 0]), elements)


def step_many(
    tables: Tables,
    moves: Moves,
    grads: Sequence[int],
    key: tuple[Rounding, int, int, int],
) -> None:
    """See ``fixedpoint_kernels.compact.step_many``.

    Args:
        tables: Of the targets.
        moves: Of the step.
        grads: Addresses of the gradients.
        key: Rounding, seed, and streams of weights and states.
    """
    rounding, *noise = key
    rows, kinds = np.array(moves.rows, np.int64), np.full(len(tables.sizes), -1, np.int64)
    kinds[rows] = tables.sizes[rows, 5]
    pointers = tables.pointers.copy()
    pointers[rows, 3] = grads
    rates = np.zeros((len(kinds), 8), np.float32)
    rates[rows] = _rates(tuple(moves.moves))
    numbers, tasks = _numbers(tables.fmts), _tasks(tables.shapes)
    kernel = _step_parallel if is_parallel(tables.elements) else _step_serial
    own = (*noise, rounding == "stochastic")
    kernel(pointers, tables.sizes, tables.streams, kinds, rates, numbers, tasks, own)


@lru_cache(maxsize=16)
def _numbers(fmts: tuple[FixedPoint | None, ...]) -> np.ndarray:
    return numbers_of(tuple(fmt or _FREE for fmt in fmts))


@lru_cache(maxsize=16)
def _rates(moves: tuple[Sgd | Adam, ...]) -> np.ndarray:
    return np.array([_rate_of(move) for move in moves], np.float32).reshape(-1, 8)


def _rate_of(move: Sgd | Adam) -> tuple[float, ...]:
    """Return the numbers of a move, as torch computes them in float64."""
    if isinstance(move, Sgd):
        own = -move.lr, move.momentum, move.weight_decay, float(move.nesterov)
        return (*own, 0.0, 0.0, 0.0, 0.0)
    beta1, beta2 = move.betas
    size = move.lr / (1 - beta1**move.step)
    correction = (1 - beta2**move.step) ** 0.5
    decay = 0.0 if move.decoupled else move.weight_decay
    kept = 1 - move.lr * move.weight_decay if move.decoupled else 1.0
    return -size, 1 - beta1, beta2, 1 - beta2, correction, move.eps, decay, kept


@lru_cache(maxsize=16)
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
        a, b, c = (
            torch.rand(n, generator=g, dtype=torch.float32, device="cpu") + 0.5 for _ in range(3)
        )
        wide, value = [x.double() for x in (a, b, c)], 1 - 0.999
        narrow = float(np.float32(value))
        lerp = (narrow * (b - a).double() + wide[0]).float()
        square = ((narrow * b).double() * wide[1] + wide[2]).float()
        quotient = a + (np.float32(-0.3).item() * b) / c
        found = a.lerp(b, value), c.addcmul(b, b, value=value), a.addcdiv(b, c, value=-0.3)
        if not all(map(torch.equal, found, (lerp, square, quotient))):
            return False
    return True
