"""Fixed-point rounding in plain PyTorch: the definition that the kernels are tested against."""

from typing import Literal

import torch
from torch import Tensor

from fixedpoint_kernels import philox
from fixedpoint_kernels.formats import FixedPoint, Minifloat
from fixedpoint_kernels.memory import is_exported
from fixedpoint_kernels.philox import Key

Rounding = Literal["stochastic", "nearest"]
_POWERS = torch.tensor([2.0**fl for fl in range(-126, 128)], dtype=torch.float32, device="cpu")


def quantize(
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
    fmt: FixedPoint | Minifloat,
    rounding: Rounding,
    key: Key,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize``; integer ``y`` takes codes."""
    values, is_inside = rounded(x, fmt, rounding, key, y.dtype)
    y.copy_(values)
    if inside is not None:
        inside.copy_(is_inside)


def rounded(
    x: Tensor, fmt: FixedPoint | Minifloat, rounding: Rounding, key: Key, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what is rounded, in ``dtype``, codes where that is an integer, and where nothing was clamped."""
    if isinstance(fmt, Minifloat):
        fl = fractional_length(x, fmt)
        values = whole(x.detach().float() * power(fl), rounding, key) * power(-fl)
        is_inside = (values.abs() > fmt.max).logical_not()
        return values.clamp(-fmt.max, fmt.max).to(dtype), is_inside
    codes = unbounded_codes(x, fmt, rounding, key)
    low, high = float_bounds(fmt)
    is_inside = (codes < low).logical_or(codes > high).logical_not()
    codes = codes.clamp(low, high)
    values = codes * fmt.lsb if dtype.is_floating_point else codes.nan_to_num()
    return values.to(dtype), is_inside


def unbounded_codes(x: Tensor, fmt: FixedPoint, rounding: Rounding, key: Key) -> Tensor:
    """Round ``x * fmt.scale`` to whole numbers, before saturation; shape of ``x``, float32."""
    return whole(x.detach().float() * fmt.scale, rounding, key)


def whole(scaled: Tensor, rounding: Rounding, key: Key) -> Tensor:
    """Round float32 numbers to whole ones; element ``i`` with noise of ``key.offset + i``."""
    if rounding == "nearest":
        return torch.round(scaled) + 0.0  # -0.0 becomes 0.0
    below = torch.floor(scaled)
    noise = philox.uniform(scaled.numel(), key, scaled.device).view(scaled.shape)
    return below + (noise < scaled - below)


def fractional_length(x: Tensor, fmt: Minifloat) -> Tensor:
    """Return how many binary places each element keeps, int32: as many as its exponent leaves."""
    exponent = torch.frexp(x.detach().float()).exponent - 1  # of m * 2**e with 1/2 <= m < 1
    return fmt.man - exponent.clamp(fmt.min_exponent, 127)


def power(fl: Tensor) -> Tensor:
    """Return ``2**fl`` exactly, float32, of integers from -126 to 127: its exponent bits."""
    if is_exported():  # traces, and files of ONNX, have no view in another dtype
        # not ``take``, which has no decomposition, and no index of no dimension, whose value torch 2.9 asks for
        places = (fl.long() + 126).reshape(-1)
        return _POWERS.to(fl.device).index_select(0, places).reshape(fl.shape)
    return ((fl.to(torch.int32) + 127) << 23).view(torch.float32)


def float_bounds(fmt: FixedPoint) -> tuple[float, float]:
    """Return the smallest and largest code of ``fmt`` that float32 holds."""
    excess = max(0, fmt.wl - fmt.signed - 24)  # float32 holds every integer up to 2**24
    high = float(fmt.max_code >> excess << excess)
    return (-high if fmt.symmetric else float(fmt.min_code)), high
