"""Batch norm's statistics, estimated anew for the weights of now."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixedpoint_kernels._torch_private import BatchNormBase
from marvin.ranks import sum_over_ranks
from marvin.settings import check_batches

__all__ = ["reestimate_batch_norm"]

_Batch = Tensor | Sequence[object] | Mapping[str, object]


@torch.no_grad()
def reestimate_batch_norm(model: nn.Module, batches: Iterable[_Batch]) -> tuple[str, ...]:
    """Set the running statistics of batch norm to the means over some batches of training.

    Training leaves averages over the weights of many steps behind. While weights move fast, they fit
    the weights of now badly, and a validation measures that. This goes forward through the batches,
    each layer of batch norm normalising by the statistics of the batch, and then keeps the means of
    these: what ``momentum=None`` gives, in float64. All else is as in eval mode: activations are
    rounded to nearest, dropout is off, no random number is drawn. Nothing but the running statistics
    changes; the mode of each module comes back. Training does not read these statistics, so it goes
    on with the same bits.

    Of several processes (``torch.distributed``) all must call this, each with batches of its own;
    each keeps the mean over all of them.

    Args:
        model: Float, with quantised activations, converted by ``marvin.integer.convert`` or frozen;
            not what ``torch.compile`` returned, but what it was given.
        batches: Each a tensor, a tuple or list whose first item is the model's input, as of a
            ``DataLoader``, or a mapping of keywords; on the model's device. 10 to 20 are enough.
            Drawn from only where there are statistics.

    Returns:
        Names of the modules that have new statistics. Those that no batch came through keep theirs.

    Raises:
        TypeError: ``batches`` is one tensor.
        ValueError: There is no batch, no batch came through batch norm though the model has it, or a
            batch has but one value for each channel. The statistics are then as before.

    Examples:
        >>> marvin.reestimate_batch_norm(model, itertools.islice(loader, 16))
        >>> accuracy = evaluate(model)
    """
    check_batches(batches, "reestimate_batch_norm(model, [x])")
    norms = {
        name: _Statistics(module)
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and module.running_mean is not None
    }
    if not norms:
        return ()
    modes = {module: module.training for module in model.modules()}
    hooks = [
        norm.module.register_forward_pre_hook(norm, with_kwargs=True) for norm in norms.values()
    ]
    try:
        model.eval()
        for batch in batches:
            _forward(model, batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
        for norm in norms.values():
            norm.restore()
    found = tuple(name for name, norm in norms.items() if norm.keep())
    if not found:
        raise ValueError(
            "at least one batch must come through a module of batch norm, got none; of a model that "
            "torch.compile returned, give the one that it was made of"
        )
    return found


class _Statistics:
    """Makes a module in eval mode normalise by its batch, and adds up what the batches were like."""

    def __init__(self, module: BatchNormBase) -> None:
        assert module.running_mean is not None
        assert module.running_var is not None
        self.module = module
        self.running = module.running_mean, module.running_var
        self.before = [own.clone() for own in self.running]
        self.sums = torch.zeros(
            2, len(self.before[0]), dtype=torch.float64, device=self.before[0].device
        )
        self.batches = 0

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        if x.dtype is not torch.float64:
            x = x.float()
        mean, variance = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
        F.batch_norm(x, mean, variance, training=True, momentum=1.0)
        self.sums += torch.stack([mean, variance])
        self.batches += 1
        count = x.numel() // x.shape[1]
        biased = variance * ((count - 1) / count)  # by which batch norm in training divides
        for own, value in zip(self.running, (mean, biased), strict=True):
            own.copy_(value)

    def restore(self) -> None:
        """Put back the statistics that the module had."""
        for own, value in zip(self.running, self.before, strict=True):
            own.copy_(value)

    def keep(self) -> bool:
        """Give the module the mean over all batches of all processes; say whether there were some."""
        count = self.sums.new_tensor([self.batches])
        total = sum_over_ranks(torch.cat([self.sums.flatten(), count]))
        if not (batches := float(total[-1])):
            return False
        for own, value in zip(self.running, total[:-1].view_as(self.sums) / batches, strict=True):
            own.copy_(value)
        return True


def _forward(model: nn.Module, batch: _Batch) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    else:
        model(batch[0] if isinstance(batch, tuple | list) else batch)
