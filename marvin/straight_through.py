"""Rounding with a straight-through gradient."""

import math
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fixedpoint_kernels import BlockFloat, FixedPoint, Minifloat, quantize, quantize_with_mask
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels._torch_private.modes import is_checkpointed
from fixedpoint_kernels.memory import check_untransformed, is_exported
from fixedpoint_kernels.once import once_differentiable
from fixedpoint_kernels.rounding import Rounding, check_floating, keep_inside
from marvin.rounding import Format, round_one

__all__ = [
    "StraightThrough",
    "Tally",
    "fake_quantize",
    "is_differentiated",
    "round_with_gradient",
]

StraightThrough = Literal["clip", "identity"]
_Back = (
    tuple[Format | Minifloat, dict[str, Any]] | None
)  # how to round the gradient that comes back


class Tally:
    """Counts saturated values; a device adds to its own number, so that nothing waits for it."""

    _looked: tuple[float, int] = (0.0, 0)  # what the last ``fresh`` counted
    _on_host = 0  # of the clipped: to add a number to a tensor takes as long as ten to a number

    def __init__(self) -> None:
        self.clipped: Tensor | int = 0  # what devices counted
        self.total = 0

    def add(self, clipped: Tensor | int, total: int) -> None:
        """Count ``clipped`` of ``total`` values."""
        if isinstance(clipped, int):
            self._on_host += clipped
        else:
            self.clipped = self.clipped + clipped
        self.total += total

    def share(self) -> float:
        """Return the share of clipped values; 0 where there are none at all."""
        return self.count / self.total if self.total else 0.0

    def fresh(self) -> float:
        """Return the share of those that came since the last call."""
        (clipped, total), self._looked = self._looked, (self.count, self.total)
        return (self._looked[0] - clipped) / (self.total - total) if self.total > total else 0.0

    @property
    def count(self) -> float:
        """How many values were clipped; waits for a device."""
        return float(self.clipped) + self._on_host


def _count(inside: Tensor) -> Tensor | int:
    """Return how many are true; nobody waits for a device."""
    if inside.is_cpu:
        return int(np.count_nonzero(inside.numpy()))  # a sixth of torch's time
    return inside.count_nonzero()


class _FakeQuantize(torch.autograd.Function):
    """Rounds forward; backward passes the gradient where the value was not clamped."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fmt: FixedPoint | Minifloat,
        options: dict[str, Any],
        tally: Tally | None,
        back: _Back,
    ) -> Tensor:
        y, inside = quantize_with_mask(x, fmt, **options)
        clipped = x.numel() - _count(inside)
        # other noise of a second pass may clamp
        if inside.is_cpu and not clipped and not is_checkpointed():
            inside = None
        ctx.save_for_backward(inside)
        ctx.save_for_forward(inside)
        ctx.back = back
        if tally is not None:
            tally.add(clipped, x.numel())
        return y

    @staticmethod
    @left_uncompiled
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        if ctx.back is not None:
            (grad,) = _rounded_gradient(ctx, grad)
        if inside is not None:
            grad = keep_inside(grad, inside)
        return grad, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inside,) = ctx.saved_tensors
        return tangent.clone() if inside is None else torch.where(inside, tangent, 0.0)


class _RoundedIdentity(torch.autograd.Function):
    """Rounds forward, or does not; backward passes the gradient everywhere."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fmt: Format | Minifloat | None, options: dict[str, Any], back: _Back
    ) -> Tensor:
        ctx.back = back
        return x.view_as(x) if fmt is None else round_one(x, fmt, **options)

    @staticmethod
    @left_uncompiled
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        if ctx.back is not None:
            (grad,) = _rounded_gradient(ctx, grad)
        return grad, None, None, None

    @staticmethod
    def jvp(_ctx: object, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent.clone()


@left_uncompiled
def fake_quantize(
    x: Tensor,
    fmt: FixedPoint | Minifloat,
    *,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
    ste: StraightThrough = "clip",
) -> Tensor:
    """Round as ``fixedpoint_kernels.quantize`` does, with a straight-through gradient.

    Args:
        x: Values, any shape, float32, bfloat16 or float16.
        fmt: The format.
        rounding: ``"stochastic"`` or ``"nearest"``.
        seed: Of the noise.
        stream: Of the noise.
        ste: The gradient is that of the identity, and 0 where the value was clamped
            (``"clip"``); or that of the identity everywhere (``"identity"``), which lets
            saturated values run away.

    Returns:
        Shape and dtype of ``x``. Its gradient may be differentiated again: as if ``x`` had only been
        clamped, or with ``"identity"`` had stayed. What ``torch.export`` and
        ``torch.jit.trace`` make of it is for inference: its gradient is 0.

    Raises:
        TypeError: ``x`` is no tensor of these dtypes.
        ValueError: ``ste`` is unknown.
    """
    if ste not in get_args(StraightThrough):
        raise ValueError(f"ste must be one of {get_args(StraightThrough)}, got {ste!r}")
    check_floating(x, "fake_quantize")
    options = {"rounding": rounding, "seed": seed, "stream": stream}
    if is_exported():
        return quantize(x.detach(), fmt, **options)
    if ste == "identity":
        return _RoundedIdentity.apply(x, fmt, options, None)  # pyright: ignore[reportReturnType]
    return _FakeQuantize.apply(x, fmt, options, None, None)  # pyright: ignore[reportReturnType]


def is_differentiated(x: Tensor) -> bool:
    """Say whether a derivative by ``x`` is wanted; what traces and exports make is for inference."""
    if is_exported():
        return False
    return (x.requires_grad and torch.is_grad_enabled()) or unpack_dual(x).tangent is not None


def round_with_gradient(
    x: Tensor,
    fmt: Format | Minifloat | None,
    options: dict[str, Any],
    *,
    ste: StraightThrough,
    tally: Tally,
    back: _Back,
) -> Tensor:
    """Round ``x`` as ``round_one``; where a derivative is wanted, with a straight-through one.

    Args:
        x: Values, float32, bfloat16 or float16.
        fmt: The format; None: ``x`` stays.
        options: Of ``round_one``.
        ste: See ``fake_quantize``; block floating point does not clamp.
        tally: Counts what ``"clip"`` clamps.
        back: Format and options by which to round the gradient that comes back; None: not.

    Raises:
        TypeError: ``x`` is inside of ``torch.func``, and has a gradient.
    """
    if not is_differentiated(x):
        return x if fmt is None else round_one(x.detach(), fmt, **options)
    check_untransformed(x=x)
    if ste == "identity" or not isinstance(fmt, FixedPoint | Minifloat):
        return _RoundedIdentity.apply(x, fmt, options, back)  # pyright: ignore[reportReturnType]
    return _FakeQuantize.apply(x, fmt, options, tally, back)  # pyright: ignore[reportReturnType]


def _round_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    """Round a gradient on its way back, as the policy wants it.

    What is not finite becomes NaN, so that an optimizer or a gradient scaler sees it; with it all that
    shares its power of two.
    """
    fmt, options = ctx.back
    is_block = isinstance(fmt, BlockFloat) and grad.numel()
    seen = torch.linalg.vector_norm(grad, math.inf) if is_block else grad
    return (round_one(grad, fmt, **options).add_(seen * 0),)  # 0 times an infinity is NaN


_rounded_gradient: Any = once_differentiable(
    _round_gradient,
    "gradients that are rounded on their way back have no second derivative: where gradients are "
    "differentiated again, use a policy, or a marvin.Quantizer, that does not round them",
)
