"""Choose bits for each layer so that what is kept fits into a budget."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels.forward_save import activations, conversion, maps, norms, sample, swap
from fixedpoint_kernels.forward_save.calls import Scoped
from fixedpoint_kernels.forward_save.layers import Divided
from fixedpoint_kernels.forward_save.noise import new_noise
from fixedpoint_kernels.forward_save.settings import Division, FewBit, Plan, PlannedLayer

__all__ = ["LEVELS", "plan"]

LEVELS = ((8, 8), (4, 4), (3, 2), (2, 1), (1, 1))  # bits of a few-bit code, bits of DIVISION
CENTRED = norms.BatchNorm, norms.GroupNorm, norms.LayerNorm  # take the mean away
Level = int  # -1: exact; otherwise an index of LEVELS


@dataclass
class _Group:
    """Layers that keep tensors in common, so that they must change together.

    Args:
        layers: Their names.
        sizes: Bytes kept at each level, -1 for exact.
        errors: Estimated at each level.
        level: The one chosen.
    """

    layers: set[str]
    sizes: dict[Level, int] = field(default_factory=dict)
    errors: dict[Level, float] = field(default_factory=dict)
    level: Level = -1


def plan(
    model: nn.Module,
    sample_input: sample.Inputs,
    *,
    budget_bytes: int,
    block: int = 8,
) -> Plan:
    """Choose bits for each layer so that what is kept for backward fits into a budget.

    The model runs once as it is and once at each of five levels, and what autograd saves is
    counted, so predicted bytes are those of a real run; parameters and buffers are left out.
    The error of a layer is estimated on the sample: for DIVISION, the squared error of what comes
    back over its square (of what varies, where the layer normalises); for an activation
    function, that of its derivative. Starting from exact, the step with the least added error for
    each byte saved is taken until the budget holds. Layers that keep a tensor in common change
    together, for one alone would save nothing.

    Args:
        model: Any module in training mode, not converted; left as it was.
        sample_input: What to call it with, of the batch size that the budget is for: a tensor, a
            tuple of arguments, or a mapping of keywords.
        budget_bytes: Most bytes to keep between forward and backward pass.
        block: Edge of DIVISION's blocks.

    Returns:
        The plan; ``convert(model, plan=plan)`` applies it.

    Raises:
        ValueError: The budget cannot be met (the message has the least bytes that can), the model
            is in eval mode, converted, or has nothing to convert.
    """
    if not model.training:
        raise ValueError("a plan needs the model in training mode, got eval mode")
    conversion.refuse_converted(model)
    every = conversion.choices_of(model, lambda _: (FewBit(), Division(block)))
    names = [name for name, (_, choice) in every.items() if choice.bases]
    exact = sample.observe(model, sample_input)
    groups = _groups(exact, names)
    rest = _bytes(exact, lambda layers: not layers & set(names))
    errors = _estimates(model, sample_input, block)
    for level in range(len(LEVELS)):
        converted = _observe_level(model, sample_input, level, block)
        for group in groups:
            group.sizes[level] = _converted_bytes(group, exact, converted, set(names))
            group.errors[level] = sum(errors[name][level] for name in group.layers)
    smallest = rest + sum(min(group.sizes.values()) for group in groups)
    if budget_bytes < smallest:
        raise ValueError(
            f"budget_bytes must be at least {smallest:,}, the least that this model can keep for "
            f"this sample, got {budget_bytes:,}"
        )
    _spend(groups, budget_bytes - rest)
    total = rest + sum(group.sizes[group.level] for group in groups)
    levels = {name: group.level for group in groups for name in group.layers}
    rows = tuple(
        _row(name, every[name][0], levels.get(name, -1), errors.get(name, {}), block)
        for name in names
    )
    return Plan(rows, exact.size_bytes, total, smallest, budget_bytes)


def _settings(level: Level, block: int) -> tuple[FewBit | None, Division | None]:
    if level < 0:
        return None, None
    code, residual = LEVELS[level]
    return FewBit(code), Division(block, residual)


def _row(
    name: str, module: nn.Module, level: Level, errors: dict[Level, float], block: int
) -> PlannedLayer:
    settings, keeps = _settings(level, block), "whole tensors"
    choice = conversion.choices_of(module, lambda _: settings)[""][1] if level >= 0 else None
    if choice is not None:
        keeps = choice.keeps
    return PlannedLayer(name, type(module).__name__, keeps, errors.get(level, 0.0), settings)


def _groups(exact: sample.ForwardPass, names: Iterable[str]) -> list[_Group]:
    """Return the convertible layers that keep anything, those with a tensor in common together."""
    known, groups = set(names), []
    for storage in exact.saved:
        together = storage.layers & known
        if together:
            for group in [g for g in groups if g.layers & together]:
                together |= group.layers
                groups.remove(group)
            groups.append(_Group(together))
    for group in groups:
        group.sizes[-1] = _bytes(exact, lambda layers, group=group: bool(layers & group.layers))
        group.errors[-1] = 0.0
    return groups


def _bytes(forward: sample.ForwardPass, wanted: Callable[[set[str]], bool]) -> int:
    """Return the bytes of tensors whose layers ``wanted`` accepts."""
    return sum(storage.size_bytes for storage in forward.saved if wanted(storage.layers))


def _converted_bytes(
    group: _Group, exact: sample.ForwardPass, converted: sample.ForwardPass, names: set[str]
) -> int:
    """Return what stays because another operation keeps it, and what the layers keep instead."""
    stays = _bytes(exact, lambda layers: bool(layers & group.layers) and bool(layers - names))
    return stays + _bytes(converted, lambda layers: bool(layers & group.layers))


def _spend(groups: list[_Group], budget: int) -> None:
    """Lower levels, the least error for a byte first, until all fits into ``budget``."""
    total = sum(group.sizes[-1] for group in groups)
    while total > budget:
        steps = [
            ((group.errors[level] - group.errors[group.level]) / saved, group, level)
            for group in groups
            for level in group.sizes
            if (saved := group.sizes[group.level] - group.sizes[level]) > 0
        ]
        _, group, level = min(steps, key=lambda step: step[0])
        total -= group.sizes[group.level] - group.sizes[level]
        group.level = level


def _observe_level(
    model: nn.Module, inputs: sample.Inputs, level: Level, block: int
) -> sample.ForwardPass:
    """Run the model converted at one level."""
    with _converted(model, level, block):
        return sample.observe(model, inputs)


@contextmanager
def _converted(model: nn.Module, level: Level, block: int) -> Iterator[None]:
    choices = conversion.choices_of(model, lambda _: _settings(level, block))
    conversion.apply(choices, seed=0)
    try:
        yield
    finally:
        conversion.revert(model)


def _estimates(
    model: nn.Module, inputs: sample.Inputs, block: int
) -> dict[str, dict[Level, float]]:
    """Return the error of each layer at each level, on what goes into it.

    Of several calls of a layer, the largest error counts.
    """
    errors: dict[str, dict[Level, float]] = {}
    noise = new_noise(0)

    def see(name: str, module: nn.Module, x: Tensor) -> None:
        if not swap.is_converted(module):
            return
        found = errors.setdefault(name, {})
        for level in range(len(LEVELS)):
            error = _error(module, x.detach(), _settings(level, block), noise)
            found[level] = max(found.get(level, 0.0), error)

    with _converted(model, 0, block):
        sample.visit(model, inputs, see)
    return errors


def _error(
    module: nn.Module, x: Tensor, settings: tuple[FewBit | None, Division | None], noise: Tensor
) -> float:
    few_bit, division = settings
    if isinstance(module, Divided) and division:
        packed: Any = maps.pack(x, module.spatial(x), division, noise)
        back = maps.unpack(packed[:-1], packed.form)
        return _relative(back, x, isinstance(module, CENTRED))
    if isinstance(module, Scoped) and division:
        packed = maps.pack(x, max(1, min(x.dim() - 2, 3)), division, noise)
        return _relative(maps.restore(packed[:-1], packed.form), x)
    if not (isinstance(module, (*activations.SMOOTH, activations.OwnValues)) and few_bit):
        return 0.0
    undo, few = swap.undo_of(module), vars(module)
    bits, few["bits"] = few["bits"], few_bit.bits
    got = _slope(partial(undo.bases[-1].forward, module), x)
    few["bits"] = bits
    return _relative(got, _slope(partial(undo.original.forward, module), x))


def _relative(got: Tensor, want: Tensor, is_centred: bool = False) -> float:
    """Return the squared error over the squared size, 0 for what is 0."""
    got, want = got.double(), want.double()
    size = (want - want.mean() if is_centred else want).square().sum()
    return float((got - want).square().sum() / size) if size > 0 else 0.0


def _slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(function(x * 1).sum(), x)[0]  # it may write to x * 1
