"""The step in plain PyTorch, parameter by parameter: torch's SGD, then ``quantize``."""

from collections.abc import Sequence

from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding import reference
from fixedpoint_kernels.rounding.reference import Rounding
from fixedpoint_kernels.sgd.targets import Moves


def step_many(  # noqa: PLR0913  noise has three coordinates
    masters: Sequence[Tensor],
    weights: Sequence[Tensor],
    fmts: Sequence[FixedPoint | None],
    moves: Moves,
    *,
    rounding: Rounding,
    seed: int,
    stream: int,
    offsets: Sequence[int],
) -> None:
    """See ``fixedpoint_kernels.sgd``; the first three and ``offsets`` are those of ``Targets``."""
    own = moves.rows, moves.grads, moves.momenta, moves.is_first, moves.rates
    for row, grad, momentum, is_first, rates in zip(*own, strict=True):
        master, step = masters[row], grad
        if rates.weight_decay:
            step = step.add(master, alpha=rates.weight_decay)
        if momentum is not None:
            if is_first:
                momentum.copy_(step)
            else:
                momentum.mul_(rates.momentum).add_(step)
            step = step.add(momentum, alpha=rates.momentum) if rates.nesterov else momentum
        master.add_(step, alpha=-rates.lr)
    for master, weight, fmt, offset in zip(masters, weights, fmts, offsets, strict=True):
        if fmt is None:
            weight.copy_(master)
            continue
        key = Key(seed, stream, offset)
        reference.quantize(master.view(-1), weight.view(-1), None, fmt, rounding, key)
        stream += 1
