"""Rows of memory written as columns; addresses are int64, steps from one row to the next are bytes."""

from numba import njit

from fixedpoint_kernels.llvm.tiles import transpose, transpose_floats
from fixedpoint_kernels.llvm.views import bytes_at, floats

__all__ = ["LANES", "turn", "turn_bytes"]

LANES = 16  # rows and columns that change places at once


def _turning(transposed, elements, size):
    """Return a function that writes rows of elements of ``size`` bytes as columns."""

    @njit
    def turned(source, step, rows, columns, out, out_step):
        whole_rows, whole_columns = rows // LANES * LANES, columns // LANES * LANES
        for row in range(0, whole_rows, LANES):
            for column in range(0, whole_columns, LANES):
                own = source + row * step + size * column
                transposed(own, step, out + column * out_step + size * row, out_step)
        for column in range(columns):
            target = elements(out + column * out_step, rows)
            for row in range(whole_rows if column < whole_columns else 0, rows):
                target[row] = elements(source + row * step, columns)[column]

    return turned


turn = _turning(transpose_floats, floats, 4)
turn_bytes = _turning(transpose, bytes_at, 1)
