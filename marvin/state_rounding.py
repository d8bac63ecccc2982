"""Momenta and masters in few bits: simulated low-precision optimizer state."""

from typing import get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fixedpoint_kernels.rounding import Rounding
from marvin.noise import Purpose, stream
from marvin.quantized import Quantized
from marvin.quantizer import Number
from marvin.rounding import round_one
from marvin.warned import warn_user
from marvin.wrappers import unwrapped

__all__ = ["round_state"]

_MOMENTA = "momentum_buffer", "exp_avg", "exp_avg_sq"


def round_state(
    optimizer: Quantized,
    *,
    momentum: Number | None = None,
    master: Number | None = None,
    rounding: Rounding = "stochastic",
) -> RemovableHandle:
    """Round momenta and masters after each step of the wrapped optimizer.

    The order is that of QPyTorch: the wrapped optimizer moves the masters; these are rounded to
    ``master``; the weights are rounded from them as always; momenta are rounded to ``momentum``. It is a
    simulation: everything stays float32. Noise is of the optimizer's seed and step, so a resumed
    training, where this is called again, has the same bits. A warning names an optimizer that has no momentum
    to round after its first step. Copies and pickles of the optimizer do not
    round, as they have no hooks of torch's: call this for them, too.

    Args:
        optimizer: Of fixed point.
        momentum: Format of ``momentum_buffer``, ``exp_avg`` and ``exp_avg_sq``. None: float32.
        master: Format of the masters, which others call accumulators. None: float32.
        rounding: ``"stochastic"`` or ``"nearest"``.

    Returns:
        A handle: ``remove()`` ends it.

    Raises:
        TypeError: ``optimizer`` is not one of fixed point, or a format is not a ``FixedPoint``,
            ``BlockFloat`` or ``Minifloat``; in ``step``: parameters are sharded.
        ValueError: Nothing is to be rounded; the optimizer has ``compact_state``; ``rounding`` is unknown.

    Source:
        ``qtorch.optim.OptimLP``.
    """
    if not isinstance(optimizer, Quantized):
        raise TypeError(
            "round_state needs an optimizer of fixed point, such as marvin.Quantized(optimizer, "
            f"policy), got {type(optimizer).__name__}"
        )
    optimizer = unwrapped(optimizer)
    _check(optimizer, momentum, master, rounding)
    is_sought = momentum is not None

    @torch.no_grad()
    def after(wrapped: Optimizer, _args: object, _keywords: object) -> None:
        nonlocal is_sought
        if is_sought:
            is_sought = False
            _name_missing(wrapped)
        first, place = stream(Purpose.QUANTIZER, optimizer._counts.step, 2**19), 0
        for p in (p for group in wrapped.param_groups for p in group["params"]):
            momenta = wrapped.state.get(p, {})
            for x, fmt in [(p, master), *((momenta.get(name), momentum) for name in _MOMENTA)]:
                if p.grad is not None and isinstance(x, Tensor) and fmt is not None:
                    noise = {"seed": optimizer.param_groups[0]["seed"], "stream": first + place}
                    x.copy_(round_one(x, fmt, rounding=rounding, **noise))
                place += 1

    return optimizer.optimizer.register_step_post_hook(after)


def _check(
    optimizer: Quantized, momentum: Number | None, master: Number | None, rounding: Rounding
) -> None:
    """Refuse what ``round_state`` cannot do."""
    if momentum is None and master is None:
        raise ValueError("round_state needs a format: write momentum= or master=")
    if any(group["compact_state"] for group in optimizer.param_groups):
        raise ValueError("state is compact already, got compact_state=True: leave one of them out")
    if rounding not in get_args(Rounding):
        raise ValueError(f"rounding must be one of {get_args(Rounding)}, got {rounding!r}")
    for fmt in (momentum, master):
        if not isinstance(fmt, Number | None):
            raise TypeError(f"a format must be a FixedPoint, BlockFloat or Minifloat, got {fmt!r}")


def _name_missing(wrapped: Optimizer) -> None:
    """Warn of an optimizer that has no momentum after a step."""
    if not any(name in own for own in wrapped.state.values() for name in _MOMENTA):
        warn_user(
            f"round_state rounds {', '.join(_MOMENTA)}, of which {type(wrapped).__name__} has none: "
            "nothing is rounded to momentum; leave it out, or give the optimizer a momentum"
        )
