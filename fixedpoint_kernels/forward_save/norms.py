"""Normalisation layers that keep their input in few bits, and its statistics exactly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fixedpoint_kernels.forward_save import maps
from fixedpoint_kernels.forward_save import norm_functions as functions
from fixedpoint_kernels.forward_save.layers import Divided, Pack

__all__ = [
    "BatchNorm",
    "GroupNorm",
    "LayerNorm",
    "OwnRMSNorm",
    "RMSNorm",
    "batch_norm",
    "group_norm",
    "layer_norm",
    "rms_norm",
]


class BatchNorm(Divided):
    """Goes before ``nn.BatchNorm1d``, ``nn.BatchNorm2d``, ``nn.BatchNorm3d`` or ``nn.SyncBatchNorm``.

    Where processes exchange statistics, torch's own runs.
    """

    def spatial(self, x: Tensor) -> int:
        """Return all dimensions but batch and channels; features where there are none."""
        return max(1, x.dim() - 2)

    def arranged(self, x: Tensor) -> Tensor:
        """Return the input with a plane a channel, where it has no pixels."""
        return functions.by_channel(x)

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own, and move the running statistics as torch does."""
        others = self.running_mean, self.running_var, self.weight, self.bias
        if not self._keeps(input) or _is_refused(input, others) or _is_synchronised(self):
            return super().forward(input)
        self._check_input_dim(input)
        rest = *others[2:], True, _momentum(self), self.eps
        return batch_norm(input, *others[:2], *rest, pack=self._pack)


class LayerNorm(Divided):
    """Goes before ``nn.LayerNorm``."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not self._keeps(input):
            return self._own(super().forward, input)
        rest = self.normalized_shape, self.weight, self.bias, self.eps
        return layer_norm(input, *rest, pack=self._pack)


class GroupNorm(Divided):
    """Goes before ``nn.GroupNorm``."""

    num_groups: int

    def spatial(self, x: Tensor) -> int:
        """Return all dimensions but batch and channels; features where there are none."""
        return max(1, x.dim() - 2)

    def arranged(self, x: Tensor) -> Tensor:
        """Return the input with a plane a group, where it has no pixels."""
        return functions.by_group(x, self.num_groups)

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not self._keeps(input) or not input.numel():
            return self._own(super().forward, input)
        rest = self.num_groups, self.weight, self.bias, self.eps
        return group_norm(input, *rest, pack=self._pack)


class RMSNorm(Divided):
    """Goes before ``nn.RMSNorm``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return torch's own."""
        if not self._keeps(x):
            return self._own(super().forward, x)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, pack=self._pack)


class OwnRMSNorm(Divided):
    """Goes before an RMS norm of another package: its own values, the formula's gradient."""

    _eps: str
    _offset: float

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the class itself returns."""
        own = super().forward
        if len(args) != 1 or kwargs or not self._keeps(args[0]):
            return self._own(own, *args, **kwargs)
        x, weight, eps = args[0], self.weight, getattr(self, self._eps)
        norm = functions.RMS(tuple(weight.shape), eps, self._offset, lambda x, *_: own(x))
        return functions.RMSNorm.apply(x, weight, *self._pack(x), norm)  # pyright: ignore


def batch_norm(  # noqa: PLR0913  torch's own arguments
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    pack: Pack,
) -> Tensor:
    """Return ``F.batch_norm``; outside of training, ``input`` is kept for the weight alone."""
    running = running_mean, running_var
    if training:
        if _is_refused(input, (*running, weight, bias)):
            return F.batch_norm(input, *running, weight, bias, True, momentum, eps)
        kept = pack(functions.by_channel(input), None)
        return functions.BatchNorm.apply(input, weight, bias, *kept, running, (momentum, eps))  # pyright: ignore
    is_needed = weight is not None and weight.requires_grad
    kept = pack(functions.by_channel(input), None) if is_needed else maps.NOTHING
    return functions.FrozenBatchNorm.apply(input, weight, bias, *running, eps, *kept)  # pyright: ignore


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    pack: Pack,
) -> Tensor:
    """Return ``F.layer_norm``."""
    shape = tuple(normalized_shape)
    whole = _cast(input, lambda: F.layer_norm(input.new_zeros(shape), shape))
    kept = pack(input, whole.dtype)
    return functions.LayerNorm.apply(whole, weight, bias, *kept, shape, eps)  # pyright: ignore


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    pack: Pack,
) -> Tensor:
    """Return ``F.group_norm``."""
    one = 1, input.shape[1], 2
    whole = _cast(input, lambda: F.group_norm(input.new_zeros(one), num_groups))
    rows = functions.by_group(input, num_groups)
    # a number less itself is 0, of which noise would be all
    is_alone = input.shape[1:].numel() == num_groups
    kept = maps.whole(input) if is_alone else pack(rows, whole.dtype)
    return functions.GroupNorm.apply(whole, weight, bias, *kept, num_groups, eps)  # pyright: ignore


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    pack: Pack,
) -> Tensor:
    """Return ``F.rms_norm``."""
    shape = tuple(normalized_shape)
    whole = _cast(input, lambda: F.rms_norm(input.new_zeros(shape), shape))
    kept = pack(input, whole.dtype)
    return functions.RMSNorm.apply(whole, weight, *kept, functions.RMS(shape, eps))  # pyright: ignore


def _cast(x: Tensor, probe: Callable[[], Tensor]) -> Tensor:
    """Return ``x`` as autocast would hand it to a layer, which ``probe`` calls on little."""
    if maps.autocast_dtype(x) is None:
        return x
    return x.to(probe().dtype)


def _is_refused(x: Tensor, others: Sequence[Tensor | None]) -> bool:
    """Whether torch refuses to normalise ``x``; its own function then says so.

    Args:
        x: To be normalised.
        others: Must have one number a channel: torch's operator writes behind what is shorter.
    """
    if x.dim() < 2 or x.numel() <= x.shape[1]:
        return True
    return any(own is not None and own.shape != x.shape[1:2] for own in others)


def _is_synchronised(norm: nn.Module) -> bool:
    """Whether processes exchange statistics, as torch's own layer knows how to."""
    if not isinstance(norm, nn.SyncBatchNorm) or not dist.is_available():
        return False
    return dist.is_initialized() and dist.get_world_size(norm.process_group) > 1


def _momentum(norm: Any) -> float:
    """Count the batch, and return its weight in the running statistics."""
    if not norm.track_running_stats or norm.num_batches_tracked is None:
        return 0.0 if norm.momentum is None else norm.momentum
    norm.num_batches_tracked.add_(1)
    if norm.momentum is None:  # the mean of all batches
        return 1.0 / float(norm.num_batches_tracked)
    return norm.momentum
