"""TNVS: truncated normal initialisation with variance scaling."""

import math

import torch
from torch import Tensor, nn

from marvin.refused import check_model

__all__ = ["tnvs_"]

_TRUNCATION = math.sqrt(3)  # in standard deviations
_TRUNCATED_STD = 0.814636  # of a unit normal cut off there


@torch.no_grad()
def tnvs_(
    target: nn.Module | Tensor,
    scale: float = 0.5,
    *,
    correct_variance: bool = False,
    generator: torch.Generator | None = None,
) -> nn.Module | Tensor:
    """Initialise weights from a truncated normal distribution, in place.

    Weights come from ``N(0, sigma**2)`` cut off at ``sqrt(3) sigma``, with
    ``sigma = sqrt(scale / n)`` and ``n`` the number of inputs of one output, as ``torch.nn.init``
    counts it: elements of ``weight[0]``, also of transposed convolutions, where these are others. In
    a module, weights with two or more dimensions are drawn so, biases become 0, the scales of normalisation layers
    1; anything else stays.

    Args:
        target: A module (with everything in it), or one weight of shape
            ``(outputs, inputs, *kernel)``.
        scale: Variance scale; 2 and more for deep networks without normalisation.
        correct_variance: Divide by 0.8145, so that the truncated draw has the standard deviation
            ``sigma``.
        generator: Source of randomness; torch's global one by default.

    Returns:
        ``target``.

    Raises:
        TypeError: ``target`` is neither a module nor a tensor.
        ValueError: ``scale`` is not above 0 and finite, or a single weight has fewer than two dimensions.

    Source:
        MARViN, section 3.1. Differs: the paper's variance is ``0.663 scale / n`` because of the
        truncation; ``correct_variance`` undoes that.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be above 0 and finite, got {scale}")
    if isinstance(target, Tensor):
        _draw(target, scale, correct_variance, generator)
        return target
    check_model(target, "tnvs_(model)")
    for module in target.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                _draw(parameter, scale, correct_variance, generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in type(module).__name__.lower():
                nn.init.ones_(parameter)
    return target


def _draw(
    weight: Tensor, scale: float, correct_variance: bool, generator: torch.Generator | None
) -> None:
    if weight.ndim < 2:
        raise ValueError(f"TNVS needs a weight of 2 or more dimensions, got {tuple(weight.shape)}")
    if not weight.numel():
        return
    sigma = math.sqrt(scale / weight[0].numel())
    if correct_variance:
        sigma /= _TRUNCATED_STD
    cut = _TRUNCATION * sigma
    nn.init.trunc_normal_(weight, 0.0, sigma, -cut, cut, generator=generator)
