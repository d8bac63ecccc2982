"""Fixed-point rounding in plain PyTorch: the definition that the kernels are tested against."""

from typing import Literal

import torch
from torch import Tensor

from fixedpoint_kernels import philox
from fixedpoint_kernels.formats import FixedPoint, Minifloat
from fixedpoint_kernels.philox import Key

Rounding = Literal["stochastic", "nearest"]


def quantize(
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
    fmt: FixedPoint | Minifloat,
    rounding: Rounding,
    key: Key,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize``; integer ``y`` takes codes."""
    if isinstance(fmt, Minifloat):
        fl = fractional_length(x, fmt)
        values = whole(x.detach().float() * power(fl), rounding, key) * power(-fl)
        if inside is not None:
            inside.copy_((values.abs() > fmt.max).logical_not_())
        y.copy_(values.clamp(-fmt.max, fmt.max))
        return
    codes = unbounded_codes(x, fmt, rounding, key)
    low, high = float_bounds(fmt)
    if inside is not None:
        inside.copy_((codes < low).logical_or_(codes > high).logical_not_())
    codes = codes.clamp(low, high)
    y.copy_(codes * fmt.lsb if y.dtype.is_floating_point else codes.nan_to_num())


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
    return ((fl.to(torch.int32) + 127) << 23).view(torch.float32)


def float_bounds(fmt: FixedPoint) -> tuple[float, float]:
    """Return the smallest and largest code of ``fmt`` that float32 holds."""
    excess = max(0, fmt.wl - fmt.signed - 24)  # float32 holds every integer up to 2**24
    high = float(fmt.max_code >> excess << excess)
    return (-high if fmt.symmetric else float(fmt.min_code)), high
