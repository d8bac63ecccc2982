"""SGD and rounding in Numba: a thread takes a piece of a tensor through both while it is in its cache."""

from functools import lru_cache

import numpy as np
from numba import prange

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.llvm.arrays import view
from fixedpoint_kernels.llvm.calls import called, inner
from fixedpoint_kernels.llvm.vectors import multiply_add
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding.cpu import TASK, numbers_of, pieces_of, round_task
from fixedpoint_kernels.sgd.targets import Moves, Rates, Tables, Targets
from fixedpoint_kernels.threads import compile_both, is_parallel

_RATES = 3  # place in a table
_FREE = FixedPoint(2, 0)  # stands where there is no format


@inner
def move(master, grad, momentum, start, rate, is_first, is_nesterov):
    """Move a piece, from element ``start`` on: see ``reference.py``.

    master, grad (n,) float32; momentum (n,) float32, or (0,) without; rate (3,) float32: -lr,
    momentum, weight decay.
    """
    begin, stop = max(start, 0), min(start + TASK, master.size)
    step, kept, decay = rate[0], rate[1], rate[2]
    # slices, for LLVM makes vectors only where no index can be negative
    own, grads = master[begin:stop], grad[begin:stop]
    if momentum.size == 0:
        for i in range(own.size):
            g = multiply_add(own[i], decay, grads[i]) if decay != 0 else grads[i]
            own[i] = multiply_add(g, step, own[i])
        return
    momenta = momentum[begin:stop]
    for i in range(own.size):
        g = multiply_add(own[i], decay, grads[i]) if decay != 0 else grads[i]
        moved = g if is_first else kept * momenta[i] + g
        momenta[i] = moved
        g = multiply_add(moved, kept, g) if is_nesterov else moved
        own[i] = multiply_add(g, step, own[i])


@inner
def _copy(master, weight, start):
    begin, stop = max(start, 0), min(start + TASK, master.size)
    own, out = master[begin:stop], weight[begin:stop]
    for i in range(own.size):
        out[i] = own[i]


def step_task(table, seed, stream, is_stochastic, task):
    """Move and round a piece of a tensor.

    Args:
        table: Addresses, int64: of pointers (t, 4) int64, of master, weight, gradient and momentum, or 0;
            sizes (t, 2) int64, elements and those before them; moved (t,) int64, row of ``rates``, or -1;
            rates (r, 3) float32; kinds (r, 2) uint8, whether momentum begins, nesterov; numbers (t, 4)
            float32; streams (t,) int64, -1 without a format; tasks (k, 2) int64, tensor and first element.
        seed: Of the noise.
        stream: The first tensor's.
        is_stochastic: Whether there is noise.
        task: Which piece.
    """
    at = view(table, 8, np.int64)
    own_task = view(at[7] + 16 * task, 2, np.int64)
    tensor, start = own_task[0], own_task[1]
    pointers = view(at[0] + 32 * tensor, 4, np.int64)
    sizes = view(at[1] + 16 * tensor, 2, np.int64)
    size, row = sizes[0], view(at[2] + 8 * tensor, 1, np.int64)[0]
    master = view(pointers[0], size, np.float32)
    weight = view(pointers[1], size, np.float32)
    if row >= 0:
        grad = view(pointers[2], size, np.float32)
        momentum = view(pointers[3], size if pointers[3] else 0, np.float32)
        rate = view(at[3] + 12 * row, 3, np.float32)
        kind = view(at[4] + 2 * row, 2, np.uint8)
        move(master, grad, momentum, start, rate, kind[0] != 0, kind[1] != 0)
    own_stream = view(at[6] + 8 * tensor, 1, np.int64)[0]
    if own_stream < 0:
        _copy(master, weight, start)
        return 0
    own = view(at[5] + 16 * tensor, 4, np.float32)
    number = (own[0], own[1], own[2], own[3])
    if is_stochastic:
        round_task(master, weight, None, start, sizes[1], number, (seed, stream + own_stream))
    else:
        round_task(master, weight, None, start, sizes[1], number, None)
    return 0


_step_task = called(step_task)


def _step_many(table, seed, stream, is_stochastic, tasks):
    for task in prange(tasks):
        _step_task(table, seed, stream, is_stochastic, task)


_STEP_MANY = compile_both(_step_many)


def step_many(
    targets: Targets, written: np.ndarray, read: np.ndarray, moves: Moves, key: Key | None
) -> None:
    """See ``fixedpoint_kernels.sgd.step_many``; addresses: ``Targets.find``, and of gradients."""
    own = targets.tables
    if own is None or own.rows != moves.rows:
        own = targets.tables = _tables(targets, written, moves)
    own.pointers[own.moving, 2] = read
    rates, nesterov = _rates(tuple(moves.rates))
    own.kinds[:, 0], own.kinds[:, 1] = moves.is_first, nesterov
    own.table[_RATES] = rates.ctypes.data
    noise = (0, 0, 0) if key is None else (key.seed, key.stream, 1)
    _STEP_MANY[is_parallel(own.elements)](own.table.ctypes.data, *noise, own.tasks)


def _tables(targets: Targets, written: np.ndarray, moves: Moves) -> Tables:
    """Return what ``step_task`` reads, without what each step brings."""
    count, rows = len(targets.fmts), np.array(moves.rows, np.int64)
    pointers = np.zeros((count, 4), np.int64)
    pointers[:, 0], pointers[:, 1] = written[:count], written[count : 2 * count]
    has_momentum = np.array([x is not None for x in moves.momenta], bool)
    pointers[rows[has_momentum], 3] = written[2 * count :]
    moved = np.full(count, -1, np.int64)
    moved[rows] = np.arange(len(rows))
    kinds = np.zeros((len(rows), 2), np.uint8)
    bounds, tasks = pieces_of(targets.sizes, targets.offsets)
    numbers, streams = _roundings(targets.fmts)
    held = pointers, bounds, moved, None, kinds, numbers, streams, tasks
    table = np.array([0 if own is None else own.ctypes.data for own in held], np.int64)
    elements = sum(targets.sizes)
    return Tables(moves.rows, rows, pointers, kinds, table, elements, len(tasks), held)


@lru_cache(maxsize=16)  # the same parameters come step after step
def _rates(rates: tuple[Rates, ...]) -> tuple[np.ndarray, np.ndarray]:
    numbers = [(-own.lr, own.momentum, own.weight_decay) for own in rates]
    shape = len(rates), 3
    nesterov = np.array([own.nesterov for own in rates], np.uint8)
    return np.array(numbers, np.float32).reshape(shape), nesterov


def _roundings(fmts: tuple[FixedPoint | None, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of each format, and which stream each has; -1 without a format."""
    has_format = np.array([fmt is not None for fmt in fmts], bool)
    streams = np.where(has_format, np.cumsum(has_format) - 1, -1)
    return numbers_of(tuple(fmt or _FREE for fmt in fmts)), streams
