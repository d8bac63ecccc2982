"""The gradient of a value where a product writes it, as a Numba intrinsic: what ``passes.finish`` does with whole images.

The product of a layer's gradient and its weight is then never in memory, and what an earlier region left there
arrives while the next places are multiplied.
"""

from collections.abc import Sequence
from typing import Any

from numba.core import cgutils

from fixedpoint_kernels.llvm.tiles import addressed, opaque
from fixedpoint_kernels.llvm.vectors import F32, I8, I16, I32, I64, Vector, prefetch
from fixedpoint_kernels.llvm.words import Words

__all__ = ["FIELDS", "finish_rows"]

# addresses of what all images have, at the first of them: bfloat16 but for masks; 0: there is none
OUT, CLIP_MASK, ADD, RELU_MASK, Z, Z2 = range(6)
# float32 sums of the first image, three times so many, one image's behind the other's
TOTALS = 6
# elements after which channels begin at a multiple of 64 again, and places
PATTERN, PLACES = 7, 8
FIELDS = 9

_LANES, _ROWS = 16, 4  # that are taken at once
_AHEAD = 4096  # bytes


def _finish_rows(  # noqa: PLR0913
    builder: Any, sums: Any, sums_step: Any, rows: Any, out: Any, step: Any, scale: Any, own: Any, totals: Any
) -> None:  # fmt: skip
    """Write 16 channels of the gradient of a value at some places of one row, and add them up.

    The sums are those of ``passes.finish``, in the same order: places of an image are given in order, a
    multiple of four at a time, from a multiple of four on.

    Args:
        builder: llvmlite's.
        sums: Address of int32 sums of the first place.
        sums_step: Bytes from one place's to the next one's.
        rows: How many places.
        out: Address of the first place's first channel.
        step: Bytes from one place to the next.
        scale: Address of a float32 that sums are multiplied by.
        own: Address of ``FIELDS`` int64, as named above.
        totals: Address of the image's sums, at these channels.
    """
    to = Words(builder, _LANES)
    base, clip, add, relu, z, z2, _, pattern, places = (
        to.one(builder.add(own, I64(8 * k)), I64) for k in range(FIELDS)
    )
    scales, begin = to.splat(to.one(scale)), builder.sub(out, base)
    with cgutils.for_range_slice(builder, I64(0), rows, I64(_ROWS), I64) as (first, _):
        at = [builder.add(first, I64(i)) for i in range(_ROWS)]
        moved = [opaque(builder, builder.add(begin, builder.mul(row, step))) for row in at]
        values = []
        for row in at:
            found = to.load(builder.add(sums, builder.mul(row, sums_step)), I32)
            values.append(to.variable(found.converted(F32) * scales))
        with to.there(clip):
            _keep(to, values, clip, moved)
        with to.there(add):
            for value, place in zip(values, moved, strict=True):
                to.put(to.get(value) + _far(to, builder.add(add, place)), value)
        with to.there(relu):
            _keep(to, values, relu, moved)
        for value, place in zip(values, moved, strict=True):
            to.put(to.store_bfloat16(to.get(value), builder.add(base, place)), value)
        found = [to.get(value) for value in values]
        _add_up(to, found, totals, places, step)
        for k, address in enumerate((z, z2), 1):
            with to.there(address):
                products = [
                    value * _far(to, builder.add(address, place))
                    for value, place in zip(found, moved, strict=True)
                ]
                part = builder.add(totals, builder.mul(pattern, I64(4 * k)))
                _add_up(to, products, part, places, step)


def _far(to: Words, address: Any) -> Vector:
    """Return the bfloat16 at an address; what is some way behind it comes near."""
    ahead = to.builder.add(address, I64(_AHEAD))
    prefetch(to.builder, to.builder.inttoptr(ahead, I8.as_pointer()))
    return to.load_bfloat16(address)


def _keep(to: Words, values: Sequence[Any], mask: Any, moved: Sequence[Any]) -> None:
    """Set to 0 what a mask has not; it has a bit for two bytes."""
    for value, place in zip(values, moved, strict=True):
        bits = to.one(to.builder.add(mask, to.builder.lshr(place, I64(4))), I16)
        to.put(to.flags(bits).where(to.get(value), to.zero), value)


def _add_up(to: Words, values: Sequence[Vector], totals: Any, places: Any, step: Any) -> None:
    """Add values to the sums of their places, in order."""
    builder = to.builder
    with builder.if_else(builder.icmp_signed("==", places, I64(1))) as (one, more):
        with one:
            total = to.load(totals)
            for value in values:
                total = total + value
            to.store(total, totals)
        with more:
            for i, value in enumerate(values):
                place = builder.and_(I64(i), builder.sub(places, I64(1)))
                address = builder.add(totals, builder.mul(place, builder.shl(step, I64(1))))
                to.store(to.load(address) + value, address)


finish_rows = addressed(8, _finish_rows)
