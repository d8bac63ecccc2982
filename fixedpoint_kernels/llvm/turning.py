"""Rows of memory written as columns, in compiled code."""

from fixedpoint_kernels.llvm.arrays import floats
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.llvm.tiles import transpose_floats

__all__ = ["LANES", "turn"]

LANES = 16  # rows and columns that change places at once


@inner
def turn(source, step, rows, columns, out, out_step):
    """Write rows of float32 as columns; addresses, and bytes from one row to the next, and one column."""
    whole_rows, whole_columns = rows // LANES * LANES, columns // LANES * LANES
    for row in range(0, whole_rows, LANES):
        for column in range(0, whole_columns, LANES):
            own = source + row * step + 4 * column
            transpose_floats(own, step, out + column * out_step + 4 * row, out_step)
    for column in range(columns):
        target = floats(out + column * out_step, rows)
        for row in range(whole_rows if column < whole_columns else 0, rows):
            target[row] = floats(source + row * step, columns)[column]
