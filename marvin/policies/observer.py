"""What the passes of a step tell of the layers' inputs, and masters of their weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels._torch_private.modes import unseen_in_checkpoints
from fixedpoint_kernels._torch_private.tensors import foreach_abs, foreach_clamp_min_, foreach_sub
from fixedpoint_kernels.norms import norms_many
from fixedpoint_kernels.observer import (
    MAGNITUDES,
    mask_and_observe,
    observe,
    round_and_observe,
)
from marvin.policies.ranges import Range, integer_bits_of
from marvin.ranks import ALONE, Processes
from marvin.shards import Shard, accumulate_dtype, spread, whole_norms

__all__ = ["Inputs", "Observer", "Sums", "inputs_of", "weight_ranges"]

_FEWER = 1, 2  # integer bits that a weight may have less than its largest value needs


class Sums:
    """Numbers on the device; passes add up.

    Attributes:
        counts: Magnitudes, shape ``(MAGNITUDES,)``.
        forward: Smallest value, sum of squares, and values clamped, shape ``(3,)``.
        clamped: Values clamped in the last pass, 0-d.
        gradient: Squared norms, 0-d; None before a gradient came.
    """

    def __init__(self) -> None:
        self.counts = self.forward = self.clamped = torch.empty(0, device="cpu")
        self.passes = 0
        self.gradient: Tensor | None = None

    def add(self, counts: Tensor, forward: Tensor) -> None:
        """Take one pass."""
        self.clamped = forward[2]
        if self.passes:
            counts = self.counts + counts
            lowest = torch.minimum(self.forward[:1], forward[:1])
            forward = torch.cat([lowest, self.forward[1:] + forward[1:]])
        self.counts, self.forward, self.passes = counts, forward, self.passes + 1

    def add_gradient(self, squares: Tensor) -> None:
        """Take the gradient of one pass."""
        self.gradient = squares if self.gradient is None else self.gradient + squares

    def scalars(self) -> Tensor:
        """Return ``forward``, ``gradient``, and whether there was one, in one vector."""
        gradient = self.forward.new_zeros(()) if self.gradient is None else self.gradient
        has_gradient = torch.full_like(self.forward[:1], self.gradient is not None)
        return torch.cat([self.forward, gradient.view(1), has_gradient])

    @classmethod
    def unseen(cls, device: torch.device) -> Self:
        """Return the sums of a layer through which nothing went."""
        own = cls()
        none = [math.inf, 0.0, 0.0]
        own.counts = torch.zeros(MAGNITUDES, dtype=torch.int64, device=device)
        own.forward = torch.tensor(none, dtype=accumulate_dtype(device), device=device)
        return own


class _Observed(torch.autograd.Function):
    """Rounds forward; measures forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fmt: FixedPoint | None, clip: bool, has_gradient: bool, sums: Sums
    ) -> Tensor:
        y, ste_mask, counts, scalars = round_and_observe(x.detach(), fmt)
        with unseen_in_checkpoints():
            sums.add(counts, scalars)
        ctx.save_for_backward(ste_mask)
        ctx.clips, ctx.has_gradient, ctx.sums = fmt is not None and clip, has_gradient, sums
        return y

    @staticmethod
    @left_uncompiled
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        (ste_mask,) = ctx.saved_tensors
        clip = ctx.clips and ctx.has_gradient
        if torch.is_grad_enabled():  # to be differentiated again: this is not the loss's gradient
            with torch.no_grad():
                passed, _ = mask_and_observe(torch.ones_like(grad), ste_mask, clip=clip)
            masked = torch.where(passed != 0, grad, grad.new_zeros(()))
        else:
            masked, squares = mask_and_observe(grad, ste_mask, clip=clip)
            ctx.sums.add_gradient(squares)
        return masked if ctx.has_gradient else None, None, None, None, None


@dataclass(frozen=True)
class Inputs:
    """What a step told of one layer's inputs.

    Args:
        counts: How many values have which magnitude, see ``fixedpoint_kernels.observer``.
        lowest: Smallest value.
        power: Mean square.
        saturated: Share of values that were clamped, of those that are not 0.
        gradient: Squared 2-norm of a sample's gradient, where the input is not 0 and was not
            clamped, mean over the samples; None where no gradient came.
    """

    counts: list[int]
    lowest: float
    power: float
    saturated: float
    gradient: float | None

    def range(self, tolerance: float) -> Range:
        """Return the range that leaves out at most a share of ``tolerance`` of what is not 0.

        What lies beyond counts in the mean square as the range's end.
        """
        bits, total = integer_bits_of(self.counts, tolerance), sum(self.counts)
        rounded, power = 1 - self.counts[0] / total if total else 1.0, self.power
        if bits is not None:
            # a magnitude counts as the largest that it may be, so that outliers alone are cut
            sizes = enumerate(self.counts[1:], -126)
            power = min(power, sum(n * 4.0 ** min(size, bits) for size, n in sizes) / total)
        return Range(self.lowest < 0, bits, power, self.saturated, rounded=rounded)


class Observer:
    """Collects what one layer sees between two steps of the optimizer.

    Everything adds up over forward passes and processes, so that micro-batches and processes tell
    what their batch would. On a GPU, counting magnitudes waits for the device; nothing else does.
    """

    def __init__(self) -> None:
        self.sums: Sums | None = None

    def round(self, x: Tensor, fmt: FixedPoint | None, *, clip: bool) -> tuple[Tensor, Tensor]:
        """Round a layer's input to nearest, measure it, and its gradient when that comes back.

        Args:
            x: The input, float32, bfloat16 or float16, not empty.
            fmt: The format; None: not rounded.
            clip: Whether the gradient is 0 where the value was clamped.

        Returns:
            What the layer will see, a tensor that no other module uses; and how many values were
            clamped, 0-d.
        """
        self.sums = self.sums or Sums()
        y = _Observed.apply(
            x if x.requires_grad else x.detach().requires_grad_(),
            fmt,
            clip,
            x.requires_grad,
            self.sums,
        )
        return y, self.sums.clamped  # pyright: ignore[reportReturnType]

    def see(self, x: Tensor, fmt: FixedPoint | None) -> Callable[[Tensor], None]:
        """Measure a layer's input that is rounded elsewhere, by the same format.

        Args:
            x: As of ``round``.
            fmt: As of ``round``.

        Returns:
            What measures the gradient of that input, as it comes back, once.
        """
        sums = self.sums = self.sums or Sums()
        ste_mask, counts, scalars = observe(x.detach(), fmt)
        with unseen_in_checkpoints():
            sums.add(counts, scalars)

        def of_gradient(grad: Tensor) -> None:
            sums.add_gradient(mask_and_observe(grad, ste_mask, clip=False)[1])

        return of_gradient


def inputs_of(
    observers: Mapping[int, Observer],
    samples: int,
    device: torch.device | None = None,
    processes: Processes = ALONE,
) -> dict[int, Inputs]:
    """Return what layers saw, by their key; in one transfer. Those that saw nothing are left out.

    Args:
        observers: Of the layers; of several processes each has the same.
        samples: How many went forward in this process; the loss was their mean.
        device: Where the processes communicate; None: on the CPU.
        processes: Those that train the layers.
    """
    all_sums = {key: observer.sums for key, observer in observers.items()}
    if not processes.groups:  # others may have seen what this process did not
        all_sums = {key: sums for key, sums in all_sums.items() if sums is not None}
    if not all_sums:
        return {}
    rows = [
        Sums.unseen(device or torch.device("cpu")) if sums is None else sums
        for sums in all_sums.values()
    ]
    counts = torch.stack([sums.counts for sums in rows])
    lowest, added = torch.stack([sums.scalars() for sums in rows]).split([1, 4], dim=1)
    added = torch.cat([added, torch.full_like(lowest, samples)], dim=1)
    added[:, 2] *= float(samples) ** 2  # of the samples' own losses, not of their mean
    scalars = torch.cat([processes.min(lowest), processes.sum(added)], dim=1)
    found = {}
    values = zip(all_sums, processes.sum(counts).tolist(), scalars.tolist(), strict=True)
    for key, table, (low, squares, clamped, gradient, has_gradient, every) in values:
        if not (total := sum(table)):
            continue
        known = gradient / every if has_gradient and every else None
        saturated = clamped / max(total - table[0], 1)
        found[key] = Inputs(table, low, squares / total, saturated, known)
    return found


def weight_ranges(
    masters: Sequence[Tensor], shards: Sequence[Shard], per_channel: Sequence[bool]
) -> list[Range]:
    """Return the ranges of weights, which are signed and need leave out nothing.

    Args:
        masters: What this process holds of each, float32. Of one without elements the range is that
            of zeros, without channels.
        shards: Where that is.
        per_channel: Whether those of the first dimension's entries are wanted too: then nothing
            is clipped.
    """
    if not masters:
        return []
    ranges = spread(masters, shards)
    lengths = [_length_of(max(-one.low, one.high)) for one in ranges]
    limits = [[2.0 ** ((n or 0) - bits) for n in lengths] for bits in _FEWER]
    wide = accumulate_dtype(masters[0].device)
    sizes = foreach_abs(list(masters))
    parts = [norms_many(sizes, dtype=wide)]
    for limit in limits:
        over = foreach_sub(sizes, limit)
        foreach_clamp_min_(over, 0.0)
        parts.append(norms_many(over, dtype=wide))
    norms = torch.stack(whole_norms(parts, [shards] * len(parts))).T.tolist()
    counts = [max(shard.numel, 1) for shard in shards]
    return [
        Range(
            True,
            needed,
            norm * norm / count,
            channels=tuple(map(_length_of, largest)),
            clipping=() if largest else tuple(over * over / count for over in clipped),
        )
        for needed, count, (norm, *clipped), largest in zip(
            lengths, counts, norms, _channels(masters, shards, per_channel), strict=True
        )
    ]


def _channels(
    masters: Sequence[Tensor], shards: Sequence[Shard], per_channel: Sequence[bool]
) -> list[list[float]]:
    """Return the largest magnitude of each channel, for those that want it."""
    found: list[list[float]] = [[] for _ in masters]
    chosen = [i for i, wanted in enumerate(per_channel) if wanted and shards[i].numel]
    if chosen:
        rows = [shards[i].rows(masters[i].flatten(1).abs().amax(1)) for i in chosen]
        values = iter(torch.cat(rows).tolist())
        for i, row in zip(chosen, rows, strict=True):
            found[i] = [next(values) for _ in row]
    return found


def _length_of(largest: float) -> int | None:
    """Return ``ceil(log2(largest))``; None where there is none."""
    if not 0 < largest < math.inf:
        return None
    mantissa, exponent = math.frexp(largest)
    return exponent - (mantissa == 0.5)
