import numpy as np
import pytest
from numba import njit
from numba.core.runtime import _nrt_python, rtsys

from fixedpoint_kernels.llvm.arrays import doubles, empty, floats, view, zeros

SHAPES = [(6,), (2, 3), (1, 3, 2), (0,), (0, 4)]
TYPES = [np.int8, np.uint8, np.uint16, np.int32, np.int64, np.float32, np.float64]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_memory_is_seen_as_numpy_sees_it(shape, dtype):
    @njit
    def seen(address):
        return view(address, shape, dtype).copy()

    x = np.arange(100, 100 + np.prod(shape)).astype(dtype).reshape(shape)
    y = seen(x.ctypes.data)
    assert y.dtype == x.dtype
    assert y.shape == shape
    assert (y == x).all()


def test_what_is_written_to_a_view_is_in_memory():
    @njit
    def write(address, rows, columns):
        out = view(address, (rows, 2, columns), np.int16)
        for i in range(rows):
            out[i, 1, columns - 1] = 7 + i

    x = np.zeros((3, 2, 4), np.int16)
    write(x.ctypes.data, 3, 4)
    expected = np.zeros_like(x)
    expected[:, 1, 3] = 7, 8, 9
    assert (x == expected).all()


def test_sizes_are_numbers_in_the_code_or_not():
    @njit
    def seen(single, double, n):
        return floats(single, n).sum() + floats(single, 2).sum() + doubles(double, n)[2]

    x, y = np.array([1, 2, 4], np.float32), np.array([0, 0, 8.0])
    assert seen(x.ctypes.data, y.ctypes.data, 3) == 7 + 3 + 8


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_new_arrays_are_those_of_numpy(shape, dtype):
    @njit
    def made():
        dirty = empty(shape, dtype)
        for i in range(dirty.size):
            dirty.ravel()[i] = 1
        return zeros(shape, dtype), dirty

    cleared, dirty = made()
    assert cleared.dtype == dirty.dtype == dtype
    assert cleared.shape == dirty.shape == shape
    assert cleared.flags.c_contiguous
    assert not cleared.any()
    assert dirty.all()


def test_zeros_are_written_where_memory_was_used_before():
    @njit
    def sums(n):
        total = 0
        for _ in range(100):
            x = zeros(n, np.int64)
            total += x.sum()
            x[:] = 5
        return total

    assert sums(1000) == 0


def test_new_arrays_are_freed():
    @njit
    def use(n):
        total = 0.0
        for _ in range(n):
            x, y = empty(100, np.float64), zeros((3, n), np.float32)
            x[0] = 1.0
            total += x[0] + y[2, 0]
        return total

    use(1)
    _nrt_python.memsys_enable_stats()
    try:
        before = rtsys.get_allocation_stats()
        assert use(50) == 50.0
        after = rtsys.get_allocation_stats()
    finally:
        _nrt_python.memsys_disable_stats()
    assert after.alloc - before.alloc == 100
    assert after.alloc - before.alloc == after.free - before.free
