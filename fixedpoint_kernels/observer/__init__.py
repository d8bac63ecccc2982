"""Rounding that counts: what chooses a format, from the pass that rounds to the present one.

Values are rounded to nearest. Backward, one pass gives the straight-through gradient and its norm.
"""

import torch
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.observer.reference import MAGNITUDES
from fixedpoint_kernels.operators import kernels_for
from fixedpoint_kernels.strides import laid, memory_order

__all__ = ["MAGNITUDES", "mask_and_observe", "observe", "round_and_observe"]

_FLOATS = torch.float32, torch.bfloat16, torch.float16
kernels_of = kernels_for("observer")


def round_and_observe(x: Tensor, fmt: FixedPoint | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round to nearest and measure, in one pass; nothing waits for a device.

    Args:
        x: Values, any shape and strides, not empty; float32, bfloat16 or float16.
        fmt: The target format; None: not rounded.

    Returns:
        Values, as ``quantize`` gives them, in the strides of ``x`` where it has no gaps; without a
        format, ``x`` itself.
        ``ste_mask``, uint8, shape of ``x``, for ``mask_and_observe``: odd where the rounded value
        was inside the range, above 1 where ``x`` is not 0, too.
        Counts, int64, shape ``(MAGNITUDES,)``: how many values have which magnitude.
        Sums, shape ``(3,)``, float64 (float32 on MPS): the smallest value, the sum of squares, and
        how many were clamped. The first two are undefined where values are NaN.

    Raises:
        TypeError: ``x`` is not such a tensor, or does not lie in memory; ``fmt`` is no format.
        ValueError: ``x`` is empty, or its storage was freed.
    """
    y, ste_mask, counts, sums = _observe(x, fmt, writes=fmt is not None)
    return (x if y is None else y), ste_mask, counts, sums


def observe(x: Tensor, fmt: FixedPoint | None) -> tuple[Tensor, Tensor, Tensor]:
    """Measure values that are rounded elsewhere: ``round_and_observe`` without the rounded values.

    Args:
        x: As there.
        fmt: As there.

    Returns:
        ``ste_mask``, counts and sums, as there.

    Raises:
        TypeError: As there.
        ValueError: As there.
    """
    return _observe(x, fmt, writes=False)[1:]


def mask_and_observe(grad: Tensor, ste_mask: Tensor, *, clip: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient to what was rounded, and the squared norm of a part of it.

    Args:
        grad: Gradient to the rounded values, any strides; float32, bfloat16 or float16.
        ste_mask: What ``round_and_observe`` returned for the values.
        clip: Whether the gradient is 0 where the value was clamped; else ``grad`` is returned.

    Returns:
        The gradient, in its own strides where they are those of ``ste_mask``; and, 0-d,
        float64 (float32 on MPS), the sum of its squares where the value was neither 0 nor clamped.

    Raises:
        TypeError: ``grad`` is not such a tensor, ``ste_mask`` is not uint8; one does not
            lie in memory.
        ValueError: ``ste_mask`` has another shape or device than ``grad``; a storage was
            freed.
    """
    _check(grad, "grad")
    given, grad, ste_mask = grad, in_memory(grad, "grad"), in_memory(ste_mask, "ste_mask")
    if ste_mask.dtype is not torch.uint8:
        raise TypeError(f"ste_mask must be the uint8 of round_and_observe, got {ste_mask.dtype}")
    if ste_mask.shape != grad.shape or ste_mask.device != grad.device:
        raise ValueError(
            f"ste_mask must have the gradient's shape {tuple(grad.shape)} and be on {grad.device}, "
            f"got {tuple(ste_mask.shape)} on {ste_mask.device}"
        )
    order = memory_order(ste_mask) if grad.stride() == ste_mask.stride() else None
    if order is None:
        grad, ste_mask = grad.contiguous(), ste_mask.contiguous()
    out = torch.empty_like(grad) if clip else None
    squares = kernels_of(grad).observe_gradient(
        laid(grad, order), laid(ste_mask, order), None if out is None else laid(out, order)
    )
    return (given if out is None else out), squares


def _observe(
    x: Tensor, fmt: FixedPoint | None, *, writes: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Return what values are rounded to, where that is written; the mask, counts and sums."""
    _check(x, "x")
    if fmt is not None and not isinstance(fmt, FixedPoint):
        raise TypeError(f"the format must be a FixedPoint or None, got {type(fmt).__name__}")
    if not x.numel():
        raise ValueError(f"the observer needs values, got a tensor of shape {tuple(x.shape)}")
    x = in_memory(x)
    order = memory_order(x)
    values = x.detach() if order or x.is_contiguous() else x.detach().contiguous()
    y = torch.empty_like(values) if writes else None
    ste_mask = torch.empty_like(values, dtype=torch.uint8)
    counts, sums = kernels_of(x).observe(
        laid(values, order), None if y is None else laid(y, order), laid(ste_mask, order), fmt
    )
    return y, ste_mask, counts, sums


def _check(x: Tensor, name: str) -> None:
    if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a float32, bfloat16 or float16 tensor, got {came}")
