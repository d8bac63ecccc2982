"""Integer codes of 1 to 32 bits to bytes and back: the promise, the checks, the choice of device.

Code ``i`` takes bits ``i * bits`` to ``(i + 1) * bits - 1`` of a stream, least significant bit
first; bit ``j`` of the stream is bit ``j & 7`` of byte ``j >> 3``. Bits left over in the last byte
are zero.
"""

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.operators import kernels_for

__all__ = ["pack", "unpack"]

_INTEGERS = torch.int8, torch.int16, torch.int32, torch.int64
_INTEGERS += torch.uint8, torch.uint16, torch.uint32, torch.uint64
kernels_of = kernels_for("packing")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Write codes of ``bits`` bits one behind the other into bytes.

    Codes may be signed (two's complement) or unsigned. Only the low ``bits`` bits of each are
    kept: a code that does not fit is not refused, because on a GPU finding one would make the
    host wait for the device. ``encode`` never gives one where ``bits`` is ``fmt.wl``.

    Args:
        codes: Integers, any shape, dtype and strides; taken in row-major order.
        bits: Bits a code, 1 to 32.

    Returns:
        uint8, shape ``(ceil(codes.numel() * bits / 8),)``, on the device of ``codes``.

    Raises:
        TypeError: ``codes`` are not integers that lie in memory, or ``bits`` is not one.
        ValueError: ``bits`` is not 1 to 32, or the storage of ``codes`` was freed.
    """
    if not isinstance(codes, Tensor) or codes.dtype not in _INTEGERS:
        came = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"pack needs a tensor of integers, got {came}")
    bits = _checked_bits(bits)
    flat = _as_signed(in_memory(codes, "codes").contiguous().view(-1), bits)
    packed = torch.empty(_byte_count(codes.numel(), bits), dtype=torch.uint8, device=codes.device)
    if codes.numel():
        kernels_of(codes).pack(flat, packed, bits)
    return packed


def unpack(packed: Tensor, bits: int, shape: int | Sequence[int], *, signed: bool = True) -> Tensor:
    """Read the codes that ``pack`` wrote.

    Args:
        packed: uint8, shape ``(ceil(count * bits / 8),)``.
        bits: Bits a code, 1 to 32, as given to ``pack``.
        shape: Of the codes, or their count.
        signed: Whether the highest of the ``bits`` is a sign (two's complement).

    Returns:
        Codes of ``shape`` in the smallest dtype that holds ``bits`` bits: of int8, int16 and
        int32 where ``signed``, else of uint8, int16, int32 and int64.

    Raises:
        TypeError: ``packed`` is not uint8 in memory, or ``bits`` or ``shape`` are not integers.
        ValueError: ``bits`` is not 1 to 32, ``shape`` has a negative size, or ``packed`` is not
            of the shape above, or its storage was freed.
    """
    if not isinstance(packed, Tensor) or packed.dtype is not torch.uint8:
        came = packed.dtype if isinstance(packed, Tensor) else type(packed).__name__
        raise TypeError(f"unpack needs a uint8 tensor, got {came}")
    bits, shape = _checked_bits(bits), _checked_shape(shape)
    packed = in_memory(packed, "packed")
    expected = _byte_count(math.prod(shape), bits)
    if packed.shape != (expected,):
        raise ValueError(
            f"{math.prod(shape)} codes of {bits} bits take {expected} bytes, shape ({expected},), "
            f"got shape {tuple(packed.shape)}"
        )
    codes = torch.empty(shape, dtype=_code_dtype(bits, signed), device=packed.device)
    if codes.numel():
        kernels_of(packed).unpack(packed.contiguous(), codes.view(-1), bits, signed)
    return codes


def _byte_count(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def _as_signed(codes: Tensor, bits: int) -> Tensor:
    """Return the same low bits in a signed dtype: half as many kernels to compile."""
    if bits > 8 * codes.itemsize and not codes.dtype.is_signed:
        return codes.to(torch.int32)  # a sign bit would be repeated in the bits above
    return codes.view(_INTEGERS[_INTEGERS.index(codes.dtype) % 4])


def _code_dtype(bits: int, signed: bool) -> torch.dtype:
    if bits <= 8:
        return torch.int8 if signed else torch.uint8
    sign = not signed  # int16 and wider hold an unsigned code with one bit to spare
    if bits + sign <= 16:
        return torch.int16
    return torch.int32 if bits + sign <= 32 else torch.int64


def _checked_bits(bits: int) -> int:
    try:
        value = operator.index(bits)
    except TypeError:
        raise TypeError(f"bits must be an integer, got {bits!r}") from None
    if not 1 <= value <= 32:
        raise ValueError(f"bits must be 1 to 32, got bits={value}")
    return value


def _checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    try:
        checked = tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(f"shape must be a count or integer sizes, got {shape!r}") from None
    if min(checked, default=0) < 0:
        raise ValueError(f"shape must have no negative size, got {checked}")
    return checked
