"""Norms in Numba: pieces of all tensors side by side. Torch adds up one element after the other."""

from functools import lru_cache

import numpy as np
from numba import njit, prange

from fixedpoint_kernels.llvm.arrays import view
from fixedpoint_kernels.memory import Places
from fixedpoint_kernels.threads import compile_both, is_parallel

PIECE = 16384  # elements
_ELEMENTS = 16  # that cost as much as one of another kernel; to wake a thread that sleeps takes a tenth of a millisecond


@njit(fastmath={"reassoc", "contract"})  # a sum of one order cannot be made of vectors
def _square_sum(x):
    total = 0.0
    for i in range(x.size):
        wide = np.float64(x[i])
        total += wide * wide
    return total


def _norms_many(pointers, pieces, sums):
    # pointers (t,) int64; pieces (k, 3) int64: tensor, first element and number of elements;
    # sums (k,) float64
    for piece in prange(pieces.shape[0]):
        tensor, first, size = pieces[piece]
        x = view(pointers[tensor] + 4 * first, size, np.float32)
        sums[piece] = _square_sum(x)


_norms_many_serial, _norms_many_parallel = compile_both(_norms_many)


def norms_many(places: Places) -> np.ndarray:
    """See ``fixedpoint_kernels.norms.norms_many``."""
    pieces, starts = _pieces(places.elements)
    sums = np.empty(len(pieces))
    elements = sum(places.elements) // _ELEMENTS
    kernel = _norms_many_parallel if is_parallel(elements) else _norms_many_serial
    kernel(np.array(places.xs, np.int64), pieces, sums)
    return np.sqrt(np.add.reduceat(sums, starts))


@lru_cache(maxsize=16)  # the same tensors come step after step
def _pieces(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return tensor, first element and size of each piece, and the first piece of each tensor."""
    rows = [
        (tensor, first, min(PIECE, size - first))
        for tensor, size in enumerate(sizes)
        for first in range(0, max(size, 1), PIECE)  # an empty tensor has one, of nothing
    ]
    pieces = np.array(rows, np.int64).reshape(-1, 3)
    return pieces, np.flatnonzero(pieces[:, 1] == 0)
