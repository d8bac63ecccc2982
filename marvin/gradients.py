"""One group's gradients in a step: regularised, rounded, normalised, and measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marvin.policy import Measured, Policy
from marvin.rounding import Format, round_many

__all__ = ["Gradients", "gather", "nonfinite", "read"]


@dataclass
class Gradients:
    """Lists of one length, and those of the layers among them; nothing has reached the state yet.

    Args:
        group: The parameter group.
        params: Parameters that have a gradient.
        values: Their gradients, float32; new tensors where they were normalised.
        norms: 2-norms before normalisation, 0-d.
        layers: Places of the layers in the lists above.
        measured: What the policy computed from the layers' gradients.
        penalty: The L1 penalty, 0-d; None without one.
    """

    group: dict[str, Any]
    params: list[Tensor]
    values: list[Tensor]
    norms: list[Tensor]
    layers: list[int]
    measured: Measured
    penalty: Tensor | None


def gather(
    group: dict[str, Any],
    state: Mapping[Tensor, dict[str, Any]],
    policy: Policy,
    format_of: Callable[[Tensor], Format | None],
    noise: tuple[int, int],
) -> Gradients:
    """Collect a group's gradients; ``noise`` is the seed and first stream of their rounding.

    Raises:
        RuntimeError: A gradient is sparse.
    """
    params = [p for p in group["params"] if p.grad is not None]
    grads = [_dense(p) for p in params]
    if not params:
        return Gradients(group, [], [], [], [], Measured(), None)
    penalty = _add_l1(group, params, grads) if group["l1"] else None
    if group["quantize_gradients"]:
        grads = _rounded(grads, [format_of(p) for p in params], noise)
    norms = list(torch._foreach_norm(grads))
    if group["normalize_gradients"]:
        stacked = torch.stack(norms)
        grads = list(torch._foreach_div(grads, torch.where(stacked > 0, stacked, 1.0).unbind()))
    layers = [i for i, p in enumerate(params) if "layer" in state[p]]
    measured = policy.measure([state[params[i]] for i in layers], [grads[i] for i in layers])
    return Gradients(group, params, grads, norms, layers, measured, penalty)


def read(
    batches: Sequence[Gradients], loss: float | Tensor | None
) -> tuple[float | None, list[list[float]], list[list[float]]]:
    """Bring loss (with its penalties), norms and the policy's numbers to the host in one go."""
    device = batches[0].norms[0].device
    scalars = [t for batch in batches for t in (*batch.norms, *batch.measured.numbers)]
    extra = [batch.penalty for batch in batches if batch.penalty is not None]
    if loss is not None:
        extra.append(torch.as_tensor(loss, dtype=torch.float32).detach().reshape(()))
    values = iter(torch.stack([t.to(device) for t in (*scalars, *extra)]).tolist())
    norms, numbers = [], []
    for batch in batches:
        norms.append([next(values) for _ in batch.norms])
        numbers.append([next(values) for _ in batch.measured.numbers])
    return (None if loss is None else sum(values)), norms, numbers


def nonfinite(
    batches: Sequence[Gradients],
    loss: float | None,
    norms: Sequence[Sequence[float]],
    names: Mapping[Tensor, str],
) -> list[str]:
    """Name what is not finite."""
    wrong = [] if loss is None or math.isfinite(loss) else [f"loss {loss}"]
    for batch, values in zip(batches, norms, strict=True):
        for p, norm in zip(batch.params, values, strict=True):
            if not math.isfinite(norm):
                wrong.append(f"gradient of {names[p]} with norm {norm}")
    return wrong


def _dense(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided:
        raise RuntimeError("the optimizer needs dense gradients, got a sparse one")
    return grad.float()


def _add_l1(group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> Tensor:
    """Add the penalty's gradient, out of place, and return the penalty."""
    places = [i for i, p in enumerate(params) if group["l1_params"] == "all" or p.ndim >= 2]
    penalty = torch.zeros((), device=params[0].device)
    for i in places:
        grads[i] = grads[i].add(params[i].sign(), alpha=group["l1"])
        penalty = penalty + params[i].float().abs().sum()
    return penalty * group["l1"]


def _rounded(
    grads: list[Tensor], formats: Sequence[Format | None], noise: tuple[int, int]
) -> list[Tensor]:
    places = [i for i, fmt in enumerate(formats) if fmt is not None]
    kept = [fmt for fmt in formats if fmt is not None]
    seed, stream = noise
    rounded = round_many([grads[i] for i in places], kept, seed=seed, stream=stream)
    result = list(grads)
    for i, grad in zip(places, rounded, strict=True):
        result[i] = grad
    return result
