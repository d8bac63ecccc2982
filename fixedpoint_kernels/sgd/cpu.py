"""SGD and rounding in Numba: a thread takes a piece of a tensor through both while it is in its cache."""

from functools import lru_cache

import numpy as np
from numba import carray, njit, prange

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.llvm.vectors import multiply_add, pointer_to
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding.cpu import TASK, numbers_of, pieces_of, round_task
from fixedpoint_kernels.sgd.targets import Moves, Rates, Targets
from fixedpoint_kernels.threads import compile_both, is_parallel

_FREE = FixedPoint(2, 0)  # stands where there is no format


@njit
def _move(master, grad, momentum, start, rate, is_first, is_nesterov):
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


@njit
def _copy(master, weight, start):
    # a function of its own: a slice that is assigned in a parallel loop was not written
    begin, stop = max(start, 0), min(start + TASK, master.size)
    weight[begin:stop] = master[begin:stop]


def _step_many(pointers, sizes, moved, rates, kinds, numbers, streams, tasks, key):
    # pointers (t, 4) int64: of master, weight, gradient and momentum, or 0; sizes (t, 2) int64:
    # elements, and those before them; moved (t,) int64: row of ``rates``, or -1; rates (r, 3)
    # float32; kinds (r, 3) bool: whether momentum begins, nesterov; numbers (t, 4) float32;
    # streams (t,) int64: -1 without a format; tasks (k, 2) int64: tensor and first element;
    # key: seed and stream of the first, or None
    for task in prange(tasks.shape[0]):
        tensor, start = tasks[task, 0], tasks[task, 1]
        size, row = sizes[tensor, 0], moved[tensor]
        master = carray(pointer_to(pointers[tensor, 0]), size, np.float32)
        weight = carray(pointer_to(pointers[tensor, 1]), size, np.float32)
        if row >= 0:
            grad = carray(pointer_to(pointers[tensor, 2]), size, np.float32)
            kept = size if pointers[tensor, 3] else 0
            momentum = carray(pointer_to(pointers[tensor, 3]), kept, np.float32)
            _move(master, grad, momentum, start, rates[row], kinds[row, 0], kinds[row, 1])
        if streams[tensor] < 0:
            _copy(master, weight, start)
            continue
        own = numbers[tensor]
        number = (own[0], own[1], own[2], own[3])
        if key is None:
            round_task(master, weight, None, start, sizes[tensor, 1], number, None)
        else:
            noise = key[0], key[1] + streams[tensor]
            round_task(master, weight, None, start, sizes[tensor, 1], number, noise)


_step_many_serial, _step_many_parallel = compile_both(_step_many)


def step_many(
    targets: Targets, written: np.ndarray, read: np.ndarray, moves: Moves, key: Key | None
) -> None:
    """See ``fixedpoint_kernels.sgd.step_many``; addresses: ``Targets.find``, and of gradients."""
    sizes, count, rows = targets.sizes, len(targets.fmts), np.array(moves.rows, np.int64)
    pointers = np.zeros((count, 4), np.int64)
    pointers[:, 0], pointers[:, 1] = written[:count], written[count : 2 * count]
    has_momentum = np.array([x is not None for x in moves.momenta], bool)
    pointers[rows, 2], pointers[rows[has_momentum], 3] = read, written[2 * count :]
    moved = np.full(count, -1, np.int64)
    moved[rows] = np.arange(len(rows))
    rates, nesterov = _rates(tuple(moves.rates))
    kinds = np.stack([np.array(moves.is_first, bool), nesterov], axis=1)
    bounds, tasks = pieces_of(sizes, targets.offsets)
    kernel = _step_many_parallel if is_parallel(sum(sizes)) else _step_many_serial
    own_key = None if key is None else (key.seed, key.stream)
    numbers, streams = _roundings(targets.fmts)
    kernel(pointers, bounds, moved, rates, kinds, numbers, streams, tasks, own_key)


@lru_cache(maxsize=16)  # the same parameters come step after step
def _rates(rates: tuple[Rates, ...]) -> tuple[np.ndarray, np.ndarray]:
    numbers = [(-own.lr, own.momentum, own.weight_decay) for own in rates]
    shape = len(rates), 3
    nesterov = np.array([own.nesterov for own in rates], bool)
    return np.array(numbers, np.float32).reshape(shape), nesterov


@lru_cache(maxsize=16)
def _roundings(fmts: tuple[FixedPoint | None, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of each format, and which stream each has; -1 without a format."""
    has_format = np.array([fmt is not None for fmt in fmts], bool)
    streams = np.where(has_format, np.cumsum(has_format) - 1, -1)
    return numbers_of(tuple(fmt or _FREE for fmt in fmts)), streams
