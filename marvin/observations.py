"""What the passes of a step tell of the layers' inputs, and masters of their weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.survey import mask_and_survey, round_and_survey
from marvin.ranges import Range, need
from marvin.ranks import min_over_ranks, sum_over_ranks
from marvin.shards import Shard, spread, whole_norms, widest

__all__ = ["Inputs", "Observations", "weight_ranges"]

_FEWER = 1, 2  # integer bits that a weight may have less than its largest value needs


@dataclass
class _Sums:
    """One entry a pass, on the device.

    Args:
        counts: Magnitudes, shape ``(MAGNITUDES,)``.
        forward: Smallest value, sum of squares, and values clamped, shape ``(3,)``.
        gradients: Squared norms, 0-d.
    """

    counts: list[Tensor] = field(default_factory=list)
    forward: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class _Surveyed(torch.autograd.Function):
    """Rounds forward; measures forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fmt: FixedPoint | None, clip: bool, has_gradient: bool, sums: _Sums
    ) -> Tensor:
        y, marks, counts, scalars = round_and_survey(x.detach(), fmt)
        sums.counts.append(counts)
        sums.forward.append(scalars)
        ctx.save_for_backward(marks)
        ctx.clips, ctx.has_gradient, ctx.sums = fmt is not None and clip, has_gradient, sums
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        (marks,) = ctx.saved_tensors
        clip = ctx.clips and ctx.has_gradient
        masked, squares = mask_and_survey(grad, marks, clip=clip)
        ctx.sums.gradients.append(squares)
        return masked if ctx.has_gradient else None, None, None, None, None


@dataclass(frozen=True)
class Inputs:
    """What a step told of one layer's inputs.

    Args:
        counts: How many values have which magnitude, see ``fixedpoint_kernels.survey``.
        lowest: Smallest value.
        power: Mean square.
        saturated: Share of values that were clamped.
        gradient: Squared 2-norm of a sample's gradient, where the input is not 0 and was not
            clamped, mean over the samples; None where no gradient came.
    """

    counts: list[int]
    lowest: float
    power: float
    saturated: float
    gradient: float | None

    def range(self, tolerance: float) -> Range:
        """Return the range that leaves out at most a share of ``tolerance``."""
        return Range(self.lowest < 0, need(self.counts, tolerance), self.power, self.saturated)


class Observations:
    """Collects what layers see between two steps of the optimizer.

    Everything adds up over forward passes and processes, so that micro-batches and processes tell
    what their batch would. The host waits for the device in ``read``; on a GPU, also to count
    magnitudes.
    """

    def __init__(self) -> None:
        self.samples = 0
        """How many samples went forward."""
        self._layers: dict[int, _Sums] = {}

    def clear(self) -> None:
        """Forget all."""
        self.samples = 0
        self._layers = {}

    def count(self, inputs: Sequence[Any]) -> None:
        """Count the samples of one forward pass: the first dimension of a module's first input."""
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim:
            self.samples += len(inputs[0])

    def round(
        self, layer: int, x: Tensor, fmt: FixedPoint | None, *, clip: bool
    ) -> tuple[Tensor, Tensor]:
        """Round a layer's input to nearest, measure it, and its gradient when that comes back.

        Args:
            layer: Position of the layer.
            x: The input, float32, bfloat16 or float16, not empty.
            fmt: The format; None: not rounded.
            clip: Whether the gradient is 0 where the value was clamped.

        Returns:
            What the layer will see, a tensor that no other module uses; and how many values were
            clamped, 0-d.
        """
        sums = self._layers.setdefault(layer, _Sums())
        y = _Surveyed.apply(
            x if x.requires_grad else x.detach().requires_grad_(), fmt, clip, x.requires_grad, sums
        )
        return y, sums.forward[-1][2]  # pyright: ignore[reportReturnType]

    def read(self, samples: int) -> dict[int, Inputs]:
        """Return what was seen, by position.

        Args:
            samples: How many went forward in this process; the loss was their mean.
        """
        if not self._layers:
            return {}
        counts = torch.stack([torch.stack(sums.counts).sum(0) for sums in self._layers.values()])
        lowest, added = torch.stack([_scalars(sums) for sums in self._layers.values()]).split(
            [1, 3], dim=1
        )
        added = torch.cat([added, torch.full_like(lowest, samples)], dim=1)
        added[:, 2] *= float(samples) ** 2  # of the samples' own losses, not of their mean
        scalars = torch.cat([min_over_ranks(lowest), sum_over_ranks(added)], dim=1)
        found = {}
        rows = zip(
            self._layers.items(), sum_over_ranks(counts).tolist(), scalars.tolist(), strict=True
        )
        for (layer, sums), table, (low, squares, clamped, gradient, every) in rows:
            total = sum(table)
            known = gradient / every if sums.gradients and every else None
            found[layer] = Inputs(table, low, squares / total, clamped / total, known)
        return found


def weight_ranges(
    masters: Sequence[Tensor], shards: Sequence[Shard], per_channel: Sequence[bool]
) -> list[Range]:
    """Return the ranges of weights, which are signed and need leave out nothing.

    Args:
        masters: What this process holds of each, float32; the whole is not empty.
        shards: Where that is.
        per_channel: Whether those of the first dimension's entries are wanted too: then nothing
            is clipped.
    """
    if not masters:
        return []
    ranges = spread(masters, shards)
    needs = [_length_of(max(-one.low, one.high)) for one in ranges]
    limits = [[2.0 ** ((n or 0) - bits) for n in needs] for bits in _FEWER]
    wide = widest(masters[0].device)
    sizes = torch._foreach_abs(list(masters))
    parts = [torch.stack(torch._foreach_norm(sizes, 2, wide))]
    for limit in limits:
        over = torch._foreach_sub(sizes, limit)
        torch._foreach_clamp_min_(over, 0.0)
        parts.append(torch.stack(torch._foreach_norm(over, 2, wide)))
    norms = torch.stack(whole_norms(parts, [shards] * len(parts))).T.tolist()
    return [
        Range(
            True,
            needed,
            norm * norm / shard.numel,
            channels=tuple(map(_length_of, largest)),
            clipping=() if largest else tuple(over * over / shard.numel for over in clipped),
        )
        for needed, shard, (norm, *clipped), largest in zip(
            needs, shards, norms, _channels(masters, shards, per_channel), strict=True
        )
    ]


def _channels(
    masters: Sequence[Tensor], shards: Sequence[Shard], per_channel: Sequence[bool]
) -> list[list[float]]:
    """Return the largest magnitude of each channel, for those that want it."""
    found: list[list[float]] = [[] for _ in masters]
    chosen = [i for i, wanted in enumerate(per_channel) if wanted]
    if chosen:
        rows = [shards[i].rows(masters[i].flatten(1).abs().amax(1)) for i in chosen]
        values = iter(torch.cat(rows).tolist())
        for i, row in zip(chosen, rows, strict=True):
            found[i] = [next(values) for _ in row]
    return found


def _scalars(sums: _Sums) -> Tensor:
    forward = torch.stack(sums.forward)
    gradient = torch.stack(sums.gradients).sum() if sums.gradients else forward.new_zeros(())
    return torch.cat([forward[:, :1].amin(0), forward[:, 1:].sum(0), gradient.view(1)])


def _length_of(largest: float) -> int | None:
    """Return ``ceil(log2(largest))``; None where there is none."""
    if not 0 < largest < math.inf:
        return None
    mantissa, exponent = math.frexp(largest)
    return exponent - (mantissa == 0.5)
