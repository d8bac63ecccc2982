"""Few-bit codes in plain PyTorch: the definition that the kernels are tested against.

A tile is 1,024 elements in row-major order, as 32 rows of 32 columns; of each column, bit ``b`` of
the codes makes word ``b``, row ``r`` its bit ``r``. A tile's words are ordered by bit, then column.
"""

import torch
from torch import Tensor

from fixedpoint_kernels.few_bit.table import Table

TILE, ROWS, COLUMNS = 1024, 32, 32


def encode(x: Tensor, planes: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.encode``; ``x`` is contiguous."""
    borders = torch.from_numpy(table.borders).to(x.device)
    codes = torch.from_numpy(table.codes).to(x.device, torch.int64)
    padded = x.new_full((_tiles(x) * TILE,), float("-inf"), dtype=torch.float32)
    padded[: x.numel()] = x.detach().view(-1)
    position = torch.where(padded.isnan(), 0, torch.bucketize(padded, borders))
    tiles = codes[position].view(-1, 1, ROWS, COLUMNS)
    bits = tiles >> _along(table.bits, 1, tiles) & 1
    words = (bits << _along(ROWS, 2, tiles)).sum(2)
    planes.copy_(torch.where(words >= 1 << 31, words - (1 << 32), words).view(-1))


def decode(grad: Tensor, planes: Tensor, out: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.decode``; all are contiguous."""
    words = planes.to(torch.int64).view(-1, table.bits, 1, COLUMNS)
    bits = words >> _along(ROWS, 2, words) & 1
    codes = (bits << _along(table.bits, 1, words)).sum(1).view(-1)[: grad.numel()]
    levels = torch.from_numpy(table.levels).to(grad.device)[codes]
    working = torch.promote_types(torch.float32, torch.promote_types(grad.dtype, out.dtype))
    product = grad.detach().view(-1).to(working) * levels
    out.view(-1).copy_(torch.where(levels == 0, 0, product))


def _tiles(x: Tensor) -> int:
    return (x.numel() + TILE - 1) // TILE


def _along(count: int, axis: int, like: Tensor) -> Tensor:
    """Return 0 to ``count - 1`` along one axis of ``(tile, bit, row, column)``."""
    shape = [1, 1, 1, 1]
    shape[axis] = count
    return torch.arange(count, device=like.device).view(shape)
