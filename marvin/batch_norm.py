"""Batch norm's statistics, estimated anew for the weights of now."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels._torch_private.modules import BatchNormBase
from fixedpoint_kernels.undo import all_or_nothing
from marvin.ranks import sum_over_ranks
from marvin.refused import check_batches, check_model
from marvin.warned import listed

__all__ = ["reestimate_batch_norm"]

_Batch = Tensor | Sequence[object] | Mapping[str, object]


@left_uncompiled
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

    Batch norm that is frozen, in eval mode within a model that trains, keeps its statistics and
    normalises by them, as training does. Of a model that is in eval mode as a whole, all are new.

    Of several processes (``torch.distributed``) all must call this, each with batches of its own;
    each keeps the mean over all of them.

    Args:
        model: Float, with quantised activations, converted by ``marvin.integer.convert`` or frozen;
            not what ``torch.compile`` returned, but what it was given.
        batches: Each a tensor, a tuple or list whose first item is the model's input, as of a
            ``DataLoader``, or a mapping of keywords; on the model's device. 10 to 20 are enough.
            Drawn from only where there are statistics to estimate.

    Returns:
        Names of the modules that have new statistics. Those that are frozen, or that no batch came
        through, keep theirs.

    Raises:
        TypeError: ``batches`` is one tensor, or ``model`` no module.
        ValueError: There is no batch, no batch came through batch norm though the model has it, or a
            batch has but one value for each channel, or statistics are not finite. They are then
            as before, as they are after an interrupt.

    Examples:
        >>> marvin.reestimate_batch_norm(model, itertools.islice(loader, 16))
        >>> accuracy = evaluate(model)
    """
    check_model(model, "reestimate_batch_norm(model, batches)")
    check_batches(batches, "reestimate_batch_norm(model, [x])")
    modes = {module: module.training for module in model.modules()}
    is_evaluated = not any(modes.values())
    norms = {
        name: _Statistics(module)
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and module.running_mean is not None
        if module.training or is_evaluated  # the others are frozen: training reads their statistics
    }
    if not norms:
        return ()
    running = [own for norm in norms.values() for own in norm.running]
    with all_or_nothing(model.modules(), tensors=running):
        hooks = [
            norm.module.register_forward_pre_hook(norm, with_kwargs=True) for norm in norms.values()
        ]
        model.eval()
        for batch in batches:
            _forward(model, batch)
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
        totals = {name: norm.means() for name, norm in norms.items()}
        found = {name: means for name, means in totals.items() if means is not None}
        if wrong := [name for name, means in found.items() if not means.isfinite().all()]:
            raise ValueError(f"batch norm must see finite values, got others at {listed(wrong)}")
        if not found:
            raise ValueError(
                "at least one batch must come through a module of batch norm, got none; of a model "
                "that torch.compile returned, give the one that it was made of"
            )
        for name, means in found.items():
            norms[name].keep(means)
        return tuple(found)


class _Statistics:
    """Makes a module in eval mode normalise by its batch, and adds up what the batches were like."""

    def __init__(self, module: BatchNormBase) -> None:
        assert module.running_mean is not None
        assert module.running_var is not None
        self.module = module
        self.running = module.running_mean, module.running_var
        mean = module.running_mean
        self.sums = torch.zeros(2, len(mean), dtype=torch.float64, device=mean.device)
        self.batches = 0

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        if not x.numel():
            return
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

    def means(self) -> Tensor | None:
        """Return the means over all batches of all processes, of the running statistics' dtype; None of none."""
        count = self.sums.new_tensor([self.batches])
        total = sum_over_ranks(torch.cat([self.sums.flatten(), count]))
        if not (batches := float(total[-1])):
            return None
        return (total[:-1].view_as(self.sums) / batches).to(self.running[0].dtype)

    def keep(self, means: Tensor) -> None:
        """Give the module new statistics."""
        for own, value in zip(self.running, means, strict=True):
            own.copy_(value)


def _forward(model: nn.Module, batch: _Batch) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    else:
        model(batch[0] if isinstance(batch, tuple | list) else batch)
