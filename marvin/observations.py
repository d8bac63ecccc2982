"""What the passes of a step tell of the layers' inputs, and masters of their weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from marvin.ranges import MAGNITUDES, Range, need
from marvin.ranks import min_over_ranks, sum_over_ranks
from marvin.shards import Shard, spread, whole_norms, widest

__all__ = ["Inputs", "Observations", "magnitudes", "weight_ranges"]


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


@dataclass(frozen=True)
class Inputs:
    """What a step told of one layer's inputs.

    Args:
        counts: How many values have which magnitude, see ``marvin.ranges.MAGNITUDES``.
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

    def watch(self, layer: int, x: Tensor, y: Tensor, inside: Tensor | None) -> Tensor:
        """Measure a layer's input now, and its gradient when that comes back.

        Args:
            layer: Position of the layer.
            x: The input before rounding, floating, not empty.
            y: What the layer will see.
            inside: Which values were not clamped; None: all.

        Returns:
            ``y``, as a tensor that no other module uses and that gets a gradient.
        """
        values = x.detach().float()
        sums = self._layers.setdefault(layer, _Sums())
        sums.counts.append(magnitudes(values))
        counted, clamped = values != 0, values.new_zeros(())
        if inside is not None:
            counted &= inside
            clamped = clamped + (x.numel() - inside.count_nonzero())
        sums.forward.append(torch.stack([values.amin(), values.square().sum(), clamped]))
        y = y.view_as(y) if y.requires_grad else y.detach().requires_grad_()

        def measure(grad: Tensor) -> None:
            counting = torch.where(counted, grad.float(), 0.0)
            sums.gradients.append(counting.square_().sum())

        y.register_hook(measure)
        return y

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


def magnitudes(x: Tensor) -> Tensor:
    """Count the values of each magnitude.

    Args:
        x: float32, any shape.

    Returns:
        int64, shape ``(MAGNITUDES,)``; see there.
    """
    bits = x.contiguous().view(torch.int32) & 0x7FFFFFFF  # without the sign
    # the biased exponent, one more where the mantissa is not 0; NaN overflows to 256
    places = bits.add_(0x7FFFFF).bitwise_right_shift_(23).bitwise_and_(0x1FF)
    return torch.bincount(places.flatten(), minlength=MAGNITUDES)


def weight_ranges(
    masters: Sequence[Tensor], shards: Sequence[Shard], per_channel: Sequence[bool]
) -> list[Range]:
    """Return the ranges of weights, which are signed and leave out nothing.

    Args:
        masters: What this process holds of each, float32; the whole is not empty.
        shards: Where that is.
        per_channel: Whether those of the first dimension's entries are wanted too.
    """
    if not masters:
        return []
    parts = torch.stack(torch._foreach_norm(list(masters), 2, widest(masters[0].device)))
    (norms,) = whole_norms([parts], [shards])
    channels = _channels(masters, shards, per_channel)
    return [
        Range(
            True,
            _length_of(max(-one.low, one.high)),
            norm * norm / one.shard.numel,
            channels=tuple(map(_length_of, largest)),
        )
        for one, norm, largest in zip(
            spread(masters, shards), norms.tolist(), channels, strict=True
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
