"""Gradients in a step: regularised, rounded, normalised, and measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.tensors import foreach_div
from fixedpoint_kernels.compact import Sum
from fixedpoint_kernels.memory import Places, places_on_cpu
from fixedpoint_kernels.norms import norms_many
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.strides import is_dense
from marvin.compact import CompactTensors, is_compact, key_of
from marvin.plans import Members
from marvin.policies.base import Policy, check_measured
from marvin.policies.records import Measured
from marvin.rounding import Format, round_many
from marvin.settings import Group
from marvin.shards import Shard, accumulate_dtype, local, locals_of, sum_vectors, whole_norms

__all__ = ["Gradients", "by_layer", "complete", "gather", "nonfinite", "read"]


@dataclass
class Gradients:
    """One group's. Lists of one length; nothing has reached the state yet.

    Args:
        group: The parameter group.
        members: Parameters that have a gradient.
        values: What this process holds of their gradients, float32; normalised by ``complete``.
        norms: 2-norms before normalisation, shape ``(n,)``: ``accumulate_dtype``, of what this process holds;
            after ``complete`` float32, of the whole. Not finite where a gradient was not before rounding.
        penalties: L1 penalties, shape ``(n,)``, ``accumulate_dtype``, of what this process holds; None without.
        places: Where ``values`` lie; None where a kernel takes them not, or that is not known.
        measured: What the policy computed from the layers' gradients.
        numbers: Its norms, of the whole layers, float32, shape ``(layers,)`` or ``(0,)``.
    """

    group: Group
    members: Members
    values: list[Tensor]
    norms: Tensor
    penalties: Tensor | None
    places: Places | None
    measured: Measured = field(default_factory=Measured)
    numbers: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))


def gather(
    group: Group,
    members: Members,
    format_of: Callable[[Tensor], Format | None],
    noise: tuple[int, int],
) -> Gradients:
    """Collect a group's gradients; ``noise`` is the seed and first stream of their rounding.

    Raises:
        RuntimeError: A gradient is sparse.
    """
    params, grads = members.params, _dense(members.params)
    penalties = _add_l1(group, params, grads) if group["l1"] else None
    places, norms = _measured(grads)
    formats = [format_of(p) for p in params] if group["quantize_gradients"] else []
    if any(fmt is not None for fmt in formats):
        grads = _rounded(grads, members.shards, formats, noise)
        places, rounded = _measured(grads)
        norms = torch.where(norms.isfinite(), rounded, norms)  # rounding clamps an infinity
    return Gradients(group, members, grads, norms, penalties, places)


def complete(
    batches: Sequence[Gradients],
    policy: Policy,
    shared: object,
    noise: Key,
) -> None:
    """Normalise the gradients, and let the policy measure them.

    ``noise``: of states in this step; see ``marvin.compact.key_of``.

    Raises:
        TypeError: The policy's ``measure`` gave no ``Measured``.
        ValueError: It did not measure each layer.

    Where processes share parameters, that takes three collectives at most, whatever the number
    of layers: norms, penalties, and the policy's norms of what was normalised.
    """
    norms = whole_norms([b.norms for b in batches], [b.members.shards for b in batches])
    with_l1 = [b for b in batches if b.penalties is not None]
    penalties = sum_vectors(
        [b.penalties for b in with_l1 if b.penalties is not None],
        [b.members.shards for b in with_l1],
    )
    for batch, penalty in zip(with_l1, penalties, strict=True):
        batch.penalties = penalty
    for batch, norm in zip(batches, norms, strict=True):
        batch.norms = norm
        if batch.group["normalize_gradients"]:
            divisors = torch.where(norm > 0, norm, 1.0).unbind()
            batch.values, batch.places = list(foreach_div(batch.values, divisors)), None
        members = batch.members
        grads = [batch.values[i] for i in members.layers]
        batch.measured = policy.measure(shared, _tensors(members, noise), grads)
        check_measured(policy, batch.measured, len(grads))
    measured = [b for b in batches if b.measured.norms]
    numbers = whole_norms(
        [torch.stack(list(b.measured.norms)) for b in measured],
        [[b.members.shards[i] for i in b.members.layers] for b in measured],
    )
    for batch, vector in zip(measured, numbers, strict=True):
        batch.numbers = vector


def read(
    batches: Sequence[Gradients], loss: float | Tensor | None
) -> tuple[float | None, list[list[float]], list[list[float]]]:
    """Bring loss (with its penalties), norms and the policy's numbers to the host in one go.

    ``loss`` has one element; norms are of each gradient, numbers of each layer, group by group.
    """
    device = batches[0].norms.device
    vectors = [t for batch in batches for t in (batch.norms, batch.numbers)]
    vectors += [b.penalties.sum().float().view(1) for b in batches if b.penalties is not None]
    if loss is not None:
        vectors.append(
            torch.as_tensor(loss, dtype=torch.float32, device=device).detach().reshape(1)
        )
    values = iter(torch.cat([t.to(device) for t in vectors]).tolist())
    norms, numbers = [], []
    for batch in batches:
        norms.append(list(islice(values, len(batch.values))))
        numbers.append(list(islice(values, len(batch.numbers))))
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
        for p, norm in zip(batch.members.params, values, strict=True):
            if not math.isfinite(norm):
                wrong.append(f"gradient of {names[p]} with norm {norm}")
    return wrong


def by_layer(
    batches: Sequence[Gradients],
    norms: Sequence[Sequence[float]],
    numbers: Sequence[Sequence[float]],
) -> dict[int, tuple[float, float | None, Mapping[str, Tensor | Sum]]]:
    """Return norm, the policy's number and the policy's tensors of each layer with a gradient.

    By position among the optimizer's parameters.
    """
    found = {}
    for batch, own_norms, own_numbers in zip(batches, norms, numbers, strict=True):
        members = batch.members
        for place, (i, index) in enumerate(zip(members.layers, members.positions, strict=True)):
            number = own_numbers[place] if own_numbers else None
            tensors = {name: values[place] for name, values in batch.measured.tensors.items()}
            found[index] = own_norms[i], number, tensors
    return found


def _dense(params: Sequence[Tensor]) -> list[Tensor]:
    grads = [p.grad for p in params if p.grad is not None]
    if any(grad.layout is not torch.strided for grad in grads):
        raise RuntimeError(
            "the optimizer needs dense gradients, got a sparse one: write nn.Embedding without sparse=True"
        )
    return [grad if grad.dtype is torch.float32 else grad.float() for grad in locals_of(grads)]


def _tensors(members: Members, noise: Key) -> list[Mapping[str, Tensor]]:
    """Return the policy's tensors of the layers; what is compact is decoded when it is asked for."""
    rows = zip(members.states, members.positions, members.layers, strict=True)
    return [
        CompactTensors(own, key_of(noise, index, members.shards[i])) if is_compact(own) else own
        for own, index, i in rows
    ]


def _add_l1(group: Group, params: Sequence[Tensor], grads: list[Tensor]) -> Tensor:
    """Add the penalty's gradient, out of place, and return the penalties; what is maximised loses them."""
    wide = accumulate_dtype(grads[0].device)
    rate = -group["l1"] if group.get("maximize") else group["l1"]
    penalties = [grads[0].new_zeros((), dtype=wide)] * len(params)
    for i, p in enumerate(params):
        if group["l1_params"] == "all" or p.ndim >= 2:
            weight = local(p)
            grads[i] = grads[i].add(weight.sign(), alpha=rate)
            penalties[i] = weight.abs().sum(dtype=wide) * rate
    return torch.stack(penalties)


def _measured(grads: list[Tensor]) -> tuple[Places | None, Tensor]:
    """Return where gradients lie, and their norms."""
    places = places_on_cpu(grads, is_dense)
    return places, norms_many(grads, dtype=accumulate_dtype(grads[0].device), places=places)


def _rounded(
    grads: list[Tensor],
    shards: Sequence[Shard],
    formats: Sequence[Format | None],
    noise: tuple[int, int],
) -> list[Tensor]:
    places = [i for i, fmt in enumerate(formats) if fmt is not None]
    kept = [fmt for fmt in formats if fmt is not None]
    seed, stream = noise
    offsets = [shards[i].offset for i in places]
    chosen = [grads[i] for i in places]
    rounded = round_many(chosen, kept, seed=seed, stream=stream, offsets=offsets)
    result = list(grads)
    for i, grad in zip(places, rounded, strict=True):
        result[i] = grad
    return result
