"""Block floating point: the tensor's range gives the power of two, the kernels round."""

import torch
from torch import Tensor

from fixedpoint_kernels.formats import BlockFloat, FixedPoint
from fixedpoint_kernels.memory import is_exported
from fixedpoint_kernels.rounding import Rounding, check_values, quantize
from fixedpoint_kernels.rounding.reference import power

__all__ = ["block_fl", "quantize_block"]

_MOST = 126  # 2**126 and its inverse are normal numbers of float32
_POWERS = torch.tensor(
    [2.0**n for n in range(-_MOST, _MOST + 1)], dtype=torch.float64, device="cpu"
)


def quantize_block(
    x: Tensor,
    fmt: BlockFloat,
    *,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
    per_sample: bool = False,
) -> Tensor:
    """Round ``x`` to codes of ``fmt`` times the power of two that its range asks for.

    Values are rounded as by ``fixedpoint_kernels.quantize`` with ``FixedPoint(fmt.wl, fl)``,
    ``fl = fmt.fl(x.min(), x.max())`` within -126 to 126; nothing waits for a device. A tensor of
    zeros stays. NaN stays NaN and takes the whole tensor's ``fl`` to 0.

    Args:
        x: Values, any shape and strides, float32, bfloat16 or float16.
        fmt: Word length.
        rounding: ``"stochastic"`` or ``"nearest"``.
        seed: Of the noise.
        stream: Of the noise.
        per_sample: One power of two for each index of the first dimension.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        TypeError: ``fmt`` is not a ``BlockFloat``, or ``per_sample`` neither True nor False.
        TypeError, ValueError, RuntimeError: As ``fixedpoint_kernels.quantize``.

    Source:
        MuPPET, section 3.1. Differs: codes saturate; the largest value may round up to one code
        more than there is.
    """
    check_values(x, "quantize_block")
    if not isinstance(fmt, BlockFloat):
        raise TypeError(f"the format must be a BlockFloat, got {type(fmt).__name__}")
    if not isinstance(per_sample, bool):
        raise TypeError(f"per_sample must be True or False, got {per_sample!r}")
    x = x.resolve_neg() if x.is_neg() else x
    if not x.numel():
        return x.clone()
    fl = block_fl(x, fmt, per_sample=per_sample)
    scaled = x.float() * power(fl)
    codes = quantize(
        scaled, FixedPoint(fmt.wl, 0), rounding=rounding, seed=seed, stream=stream, out=None
    )
    return (codes * power(-fl)).to(x.dtype)


def block_fl(x: Tensor, fmt: BlockFloat, *, per_sample: bool = False) -> Tensor:
    """Return ``fmt.fl`` of the range of ``x``, int32, on the device of ``x``.

    Returns:
        0-d; with ``per_sample``, shape ``(n, 1, ...)`` of as many dimensions as ``x``.
    """
    x = x.detach()
    dims = list(range(1, x.ndim)) if per_sample else list(range(x.ndim))
    # without dimensions to reduce, torch would reduce all: each number is its own range
    low = x.amin(dims, keepdim=per_sample).double() if dims else x.double()
    high = x.amax(dims, keepdim=per_sample).double() if dims else x.double()
    unbounded = torch.full_like(high, torch.inf)
    up = torch.where(high > 0, (fmt.max_code + 0.5) / high, unbounded)
    down = torch.where(low < 0, (fmt.min_code - 0.5) / low, unbounded)
    ratio = torch.minimum(up, down)
    if is_exported():  # ONNX has no frexp
        fl = (ratio.unsqueeze(-1) >= _POWERS.to(ratio.device)).sum(-1).int() - _MOST - 1
    else:
        fl = torch.frexp(ratio).exponent - 1  # of m * 2**e with 1/2 <= m < 1
    known = (ratio > 0) & ratio.isfinite()
    return torch.where(known, fl, 0).clamp(-_MOST, _MOST)
