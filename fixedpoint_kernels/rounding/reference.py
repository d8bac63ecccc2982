"""Fixed-point rounding in plain PyTorch: the definition that the kernels are tested against."""

from typing import Literal

import torch
from torch import Tensor

from fixedpoint_kernels import philox
from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.philox import Key

Rounding = Literal["stochastic", "nearest"]


def quantize(
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
    fmt: FixedPoint,
    rounding: Rounding,
    key: Key,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize``; integer ``y`` takes codes."""
    codes = unbounded_codes(x, fmt, rounding, key)
    low, high = float_bounds(fmt)
    if inside is not None:
        inside.copy_((codes < low).logical_or_(codes > high).logical_not_())
    codes = codes.clamp(low, high)
    y.copy_(codes * fmt.lsb if y.dtype.is_floating_point else codes.nan_to_num())


def unbounded_codes(x: Tensor, fmt: FixedPoint, rounding: Rounding, key: Key) -> Tensor:
    """Round ``x * fmt.scale`` to whole numbers, before saturation; shape of ``x``, float32."""
    scaled = x.detach().float() * fmt.scale
    if rounding == "nearest":
        return torch.round(scaled) + 0.0  # -0.0 becomes 0.0
    below = torch.floor(scaled)
    noise = philox.uniform(x.numel(), key, x.device).view(x.shape)
    return below + (noise < scaled - below)


def float_bounds(fmt: FixedPoint) -> tuple[float, float]:
    """Return the smallest and largest code of ``fmt`` that float32 holds."""
    excess = max(0, fmt.wl - fmt.signed - 24)  # float32 holds every integer up to 2**24
    high = float(fmt.max_code >> excess << excess)
    return (-high if fmt.symmetric else float(fmt.min_code)), high
