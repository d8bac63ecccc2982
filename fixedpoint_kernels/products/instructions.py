"""The tiles of each path, and kernels made of them: one definition, compiled for each path."""

from functools import cache
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fixedpoint_kernels.llvm import alone, tiles
from fixedpoint_kernels.llvm.calls import called, inner, keep
from fixedpoint_kernels.llvm.pairs import pairs_tile
from fixedpoint_kernels.threads import compile_both

__all__ = ["FLIPS", "GRAINS", "ByName", "compiled", "ends_with_tiles"]

GRAINS = MappingProxyType({"amx": 64, "avx512_vnni": 4, "avx_vnni": 4, "avx2": 4})
"""Bytes of a row that a tile takes at a time, by path."""
FLIPS = MappingProxyType({"amx": 0, "avx512_vnni": 1, "avx_vnni": 1, "avx2": 1})
"""1 where rows must be unsigned: signed codes go in as ``code + 128``."""


_VNNI_16X1 = tiles.vnni_tile(16, 1, 16)
_VNNI_8X2 = tiles.vnni_tile(8, 2, 16)
_VNNI_4X1 = tiles.vnni_tile(4, 1, 8)
_VNNI_16X1_SHARED = tiles.vnni_tile(16, 1, 16, taps=3)
_PAIRS_16X1 = pairs_tile(4, 4)
_ALONE = {  # 32 vectors of 16 float32, or 16 of 8
    rows: {
        "alone": alone.outputs_tile(rows),
        "ALONE_ROWS": rows,
        "alone_rows": alone.weights_tile(taps),
        "ALONE_TAPS": taps,
    }
    for rows, taps in ((8, 9), (4, 3))
}
_AMX_4X1, _AMX_3X1, _AMX_1X1 = (tiles.amx_tile(rows, 1) for rows in (4, 3, 1))
_AMX_2X2, _AMX_1X2 = (tiles.amx_tile(rows, 2) for rows in (2, 1))


@inner
def _enter_nothing():
    pass


@inner
def _enter_amx():
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    for tile in range(8):
        configuration[16 + 2 * tile] = 64  # bytes of a row
        configuration[48 + tile] = 16  # rows
    tiles.configure(configuration.ctypes.data)
    keep(configuration)


@inner
def _leave_amx():
    tiles.release(0)


@inner
def _narrow_rows_amx(kind, left, a, starts, first, step, runs, count, b, group, place, row_bytes):
    """Add 16 rows, or up to four times as many; return how many times."""
    if left % 4 and left >= 3 and (left % 3 == 0 or left < 4):
        _AMX_3X1(kind, a, starts, step, runs, count, b, group, place, row_bytes, place, row_bytes)
        return 3
    if left < 4:
        _AMX_1X1(kind, a, starts, step, runs, count, b, group, place, row_bytes, place, row_bytes)
        return 1
    _AMX_4X1(kind, a, starts, step, runs, count, b, group, place, row_bytes, place, row_bytes)
    return 4


@inner
def _wide_rows_amx(kind, left, a, starts, first, step, runs, count, b, group, place, row_bytes):
    if left == 1:
        _AMX_1X2(kind, a, starts, step, runs, count, b, group, place, row_bytes, place, row_bytes)
        return 1
    _AMX_2X2(kind, a, starts, step, runs, count, b, group, place, row_bytes, place, row_bytes)
    return 2


@inner
def _narrow_rows_avx512(
    kind, left, a, starts, first, step, runs, count, b, group, place, row_bytes
):
    a += first
    _VNNI_16X1(kind, a, 0, step, runs, count, b, group, place, row_bytes, place, row_bytes)
    return 1


@inner
def _wide_rows_avx512(kind, left, a, starts, first, step, runs, count, b, group, place, row_bytes):
    for row in range(0, 16, 8):
        here, out = a + first + row * step, place + row * row_bytes
        _VNNI_8X2(kind, here, 0, step, runs, count, b, group, out, row_bytes, out, row_bytes)
    return 1


@inner
def _narrow_rows_avx(kind, left, a, starts, first, step, runs, count, b, group, place, row_bytes):
    for row in range(0, 16, 4):
        here, out = a + first + row * step, place + row * row_bytes
        _VNNI_4X1(kind, here, 0, step, runs, count, b, group, out, row_bytes, out, row_bytes)
    return 1


@inner
def _narrow_rows_avx2(kind, left, a, starts, first, step, runs, count, b, group, place, row_bytes):
    a += first
    _PAIRS_16X1(kind, a, 0, step, runs, count, b, group, place, row_bytes, place, row_bytes)
    return 1


# by the names that the kernels know them by: what has 16 columns is narrow, what has 32 wide
_TILES: dict[str, dict[str, Any]] = {
    "amx": {
        "enter": _enter_amx,
        "leave": _leave_amx,
        "narrow": _AMX_4X1,
        "shared": _AMX_4X1,
        "NARROW_ROWS": 64,
        "narrow_rows": _narrow_rows_amx,
        "wide": _AMX_2X2,
        "WIDE_ROWS": 32,
        "wide_rows": _wide_rows_amx,
        **_ALONE[8],
    },
    "avx512_vnni": {
        "enter": _enter_nothing,
        "leave": _enter_nothing,
        "narrow": _VNNI_16X1,
        "shared": _VNNI_16X1_SHARED,
        "NARROW_ROWS": 16,
        "narrow_rows": _narrow_rows_avx512,
        "wide": _VNNI_8X2,
        "WIDE_ROWS": 8,
        "wide_rows": _wide_rows_avx512,
        **_ALONE[8],
    },
    "avx_vnni": {
        "enter": _enter_nothing,
        "leave": _enter_nothing,
        "narrow": _VNNI_4X1,
        "shared": _VNNI_4X1,
        "NARROW_ROWS": 4,
        "narrow_rows": _narrow_rows_avx,
        "wide": _VNNI_4X1,
        "WIDE_ROWS": 0,
        "wide_rows": _narrow_rows_avx,
        **_ALONE[4],
    },
    "avx2": {
        "enter": _enter_nothing,
        "leave": _enter_nothing,
        "narrow": _PAIRS_16X1,
        "shared": _PAIRS_16X1,
        "NARROW_ROWS": 16,
        "narrow_rows": _narrow_rows_avx2,
        "wide": _PAIRS_16X1,
        "WIDE_ROWS": 0,
        "wide_rows": _narrow_rows_avx2,
        **_ALONE[4],
    },
}


def ends_with_tiles(path: str, channels: int, places: int) -> bool:
    """Say whether tiles of so many channels take a row of places from end to end, by fours.

    Args:
        path: One of ``GRAINS``.
        channels: Of outputs that all read the same.
        places: Of a row.
    """
    groups, wide = -(channels // -16), _TILES[path]["WIDE_ROWS"]
    narrow = _TILES[path]["NARROW_ROWS"] if groups % 2 or not wide else 1
    pairs = wide if groups > 1 and wide else 1
    return places % 4 == places % narrow == places % pairs == 0


class ByName(NamedTuple):
    """A part of a kernel that is compiled once, alone; see ``llvm.calls``."""

    function: FunctionType


@cache
def compiled(kernel: Any, path: str, *parts: FunctionType | ByName) -> tuple[Any, Any]:
    """Return a kernel with the tiles of a path, serial and parallel.

    Args:
        kernel: A plain function of ``prange`` loops, which knows tiles by the names of ``_TILES``.
        path: One of ``GRAINS``.
        parts: Plain functions that it calls, and that know tiles too, those called first.
    """
    scope: dict[str, Any] = {"FLIPS": FLIPS[path], "GRAIN": GRAINS[path], **_TILES[path]}
    for part in parts:
        if isinstance(part, ByName):
            own = part.function
            scope[own.__name__] = called(_with(own, scope, f"{own.__name__}_{path}"))
        else:
            scope[part.__name__] = inner(_with(part, scope, part.__name__))
    return compile_both(_with(kernel, scope, f"{kernel.__name__}_{path}"))


def _with(function: Any, scope: dict[str, Any], name: str) -> FunctionType:
    copy = FunctionType(function.__code__, {**function.__globals__, **scope}, name)
    copy.__qualname__ = name
    return copy
