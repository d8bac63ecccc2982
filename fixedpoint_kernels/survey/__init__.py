"""Rounding that counts: what chooses a format, from the pass that rounds to the present one.

Values are rounded to nearest. Backward, one pass gives the straight-through gradient and its norm.
"""

import torch
from torch import Tensor

from fixedpoint_kernels.executions import execution
from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.survey.reference import MAGNITUDES

__all__ = ["MAGNITUDES", "mask_and_survey", "round_and_survey"]


def round_and_survey(x: Tensor, fmt: FixedPoint | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round to nearest and measure, in one pass; nothing waits for a device.

    Args:
        x: Values, any shape and strides, not empty; float32, bfloat16 or float16.
        fmt: The target format; None: not rounded.

    Returns:
        Values, as ``quantize`` gives them; without a format, ``x`` itself.
        Marks, uint8, shape of ``x``, for ``mask_and_survey``: odd where the rounded value was
        inside the range, above 1 where ``x`` is not 0, too.
        Counts, int64, shape ``(MAGNITUDES,)``: how many values have which magnitude.
        Sums, shape ``(3,)``, float64 (float32 on MPS): the smallest value, the sum of squares, and
        how many were clamped. The first two are undefined where values are NaN.
    """
    marks = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    y = None if fmt is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    counts, sums = execution("survey", x).survey(x.detach().contiguous(), y, marks, fmt)
    return (x if y is None else y), marks, counts, sums


def mask_and_survey(grad: Tensor, marks: Tensor, *, clip: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient to what was rounded, and the squared norm of a part of it.

    Args:
        grad: Gradient to the rounded values, any strides; float32, bfloat16 or float16.
        marks: Of the values.
        clip: Whether the gradient is 0 where the value was clamped; else ``grad`` is returned.

    Returns:
        The gradient; and, 0-d, float64 (float32 on MPS), the sum of its squares where the value
        was neither 0 nor clamped.
    """
    out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device) if clip else None
    squares = execution("survey", grad).survey_gradient(grad.contiguous(), marks, out)
    return (grad if out is None else out), squares
