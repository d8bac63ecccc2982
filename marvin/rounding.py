"""Rounding to any format that a policy may choose."""

from collections.abc import Sequence

from torch import Tensor

from fixedpoint_kernels import (
    BlockFloat,
    FixedPoint,
    Minifloat,
    quantize,
    quantize_block,
    quantize_many,
)
from fixedpoint_kernels.rounding import Rounding
from marvin.channels import ChannelFormat, scale_of

__all__ = ["Format", "round_many", "round_one"]

Format = FixedPoint | BlockFloat | ChannelFormat


def round_one(
    x: Tensor,
    fmt: Format | Minifloat,
    *,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
    per_sample: bool = False,
) -> Tensor:
    """Round ``x`` to ``fmt``; see ``quantize`` and ``quantize_block``, which alone knows ``per_sample``."""
    if isinstance(fmt, ChannelFormat):
        scale = scale_of(fmt, x)
        return round_one(x * scale, fmt.fmt, rounding=rounding, seed=seed, stream=stream) / scale
    if isinstance(fmt, BlockFloat):
        noise = {"seed": seed, "stream": stream}
        return quantize_block(x, fmt, rounding=rounding, per_sample=per_sample, **noise)
    return quantize(x, fmt, rounding=rounding, seed=seed, stream=stream)


def round_many(  # noqa: PLR0913  noise has three coordinates
    xs: Sequence[Tensor],
    fmts: Sequence[Format],
    *,
    rounding: Rounding = "stochastic",
    seed: int,
    stream: int,
    offsets: Sequence[int] | None = None,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Round tensors, tensor ``j`` with noise of ``stream + j`` from ``offsets[j]`` on.

    One launch where all formats are fixed-point; see ``quantize_many``.

    Raises:
        ValueError: A format is block floating point, and a tensor a part of a whole.
    """
    if any(isinstance(fmt, ChannelFormat) for fmt in fmts):
        scales = _scales(xs, fmts, offsets or [0] * len(xs))
        scaled = [x if scale is None else x * scale for x, scale in zip(xs, scales, strict=True)]
        plain = [fmt.fmt if isinstance(fmt, ChannelFormat) else fmt for fmt in fmts]
        noise = {"seed": seed, "stream": stream, "offsets": offsets}
        rounded = round_many(scaled, plain, rounding=rounding, out=out, **noise)
        for y, scale in zip(rounded, scales, strict=True):
            if scale is not None:
                y.div_(scale)
        return rounded
    fixed = [fmt for fmt in fmts if isinstance(fmt, FixedPoint)]
    if len(fixed) == len(fmts):
        noise = {"seed": seed, "stream": stream, "offsets": offsets}
        return quantize_many(xs, fixed, rounding=rounding, out=out, **noise)
    if any(offsets or ()):
        raise ValueError("block floating point needs whole tensors, got parts of some")
    rounded = [
        round_one(x, fmt, rounding=rounding, seed=seed, stream=stream + j)
        for j, (x, fmt) in enumerate(zip(xs, fmts, strict=True))
    ]
    if out is None:
        return rounded
    for y, value in zip(out, rounded, strict=True):
        y.copy_(value)
    return list(out)


def _scales(
    xs: Sequence[Tensor], fmts: Sequence[Format], offsets: Sequence[int]
) -> list[Tensor | None]:
    return [
        scale_of(fmt, x, offset) if isinstance(fmt, ChannelFormat) else None
        for x, fmt, offset in zip(xs, fmts, offsets, strict=True)
    ]
