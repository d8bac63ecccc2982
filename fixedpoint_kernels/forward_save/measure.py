"""What each choice costs: seconds of a step, and noise of the gradient; measured on a sample."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fixedpoint_kernels.forward_save import (
    activations,
    conversion,
    maps,
    norms,
    offload,
    sample,
    swap,
)
from fixedpoint_kernels.forward_save.calls import Scoped
from fixedpoint_kernels.forward_save.checkpoint import Checkpointed, copied_buffers
from fixedpoint_kernels.forward_save.choices import Choice
from fixedpoint_kernels.forward_save.layers import (
    Convolution,
    Divided,
    Linear,
    TransposedConvolution,
)
from fixedpoint_kernels.forward_save.noise import new_noise

__all__ = [
    "Costs",
    "costs",
    "gradient_errors",
    "offload_costs",
    "relative_error",
    "returned_errors",
    "seconds",
]

RUNS = 3
SAME = 1e-4  # of a gradient's length: what the order of sums may change
CENTRED = norms.BatchNorm, norms.GroupNorm, norms.LayerNorm  # take the mean away
OWN_WEIGHT = Convolution, Linear, TransposedConvolution  # their input's gradient needs no input
PLAIN = Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size


class Costs(NamedTuple):
    """What was measured.

    Args:
        layers_s: Seconds that a converted layer adds to a step, by name.
        blocks_s: Seconds that a block adds that runs again.
        refused: Blocks that cannot run again, and why.
    """

    layers_s: dict[str, float]
    blocks_s: dict[str, float]
    refused: dict[str, str]


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return how long ``run`` takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def costs(
    model: nn.Module, inputs: sample.Inputs, layers: conversion.Choices, blocks: Iterable[str]
) -> Costs:
    """Run each layer and each block alone, as it is and changed, on what it gets in the model.

    Args:
        model: In training mode.
        inputs: What to call it with.
        layers: What becomes of layers, by name.
        blocks: Modules that may run again; one is refused whose second run differs.
    """
    found, blocks = Costs({}, {}, {}), set(blocks)

    def see(name: str, module: nn.Module, given: sample.Given) -> None:
        if name in layers and layers[name][1].bases:
            added = _added(module, given, layers[name][1])[0]
            found.layers_s[name] = found.layers_s.get(name, 0.0) + added
        if name in blocks:
            added, reason = _block(module, given)
            found.blocks_s[name] = found.blocks_s.get(name, 0.0) + added
            if reason:
                found.refused[name] = reason

    sample.visit(model, inputs, see)
    return found


def offload_costs(
    model: nn.Module, inputs: sample.Inputs, blocks: Iterable[str]
) -> dict[str, float]:
    """Return the seconds that each block adds to a step whose tensors go to the host.

    Args:
        model: In training mode.
        inputs: What to call it with.
        blocks: Modules, each of which runs alone.
    """
    found, blocks = {}, set(blocks)

    def see(name: str, module: nn.Module, given: sample.Given) -> None:
        if name in blocks:
            added = _added(module, given, Choice((offload.Offloaded,)))[0]
            found[name] = found.get(name, 0.0) + added

    sample.visit(model, inputs, see)
    return found


def _block(module: nn.Module, given: sample.Given) -> tuple[float, str]:
    strange = sorted(
        {type(v).__name__ for v in sample.leaves_of(given) if not isinstance(v, PLAIN)}
    )
    if strange:
        return 0.0, f"it is called with {', '.join(strange)}, which a second run might change"
    try:
        added, before, after = _added(module, given, Choice((Checkpointed,)))
    except RuntimeError as error:  # torch's checkpoint, where the second run differs
        return 0.0, f"its second run fails: {str(error).partition(chr(10))[0]}"
    if relative_error(after, before) > SAME**2:
        return 0.0, "its second run gives other gradients"
    return added, ""


Gradients = Sequence[Tensor | None]


def _added(
    module: nn.Module, given: sample.Given, choice: Choice
) -> tuple[float, Gradients, Gradients]:
    """Return the seconds that a choice adds to a module's two passes, and gradients without and with."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    times: tuple[list[float], list[float]] = [], []
    last: list[Gradients] = [[], []]

    def run(place: int) -> None:
        last[place] = _alone(module, given)

    for _ in range(RUNS):
        times[0].append(seconds(partial(run, 0), device))
        with conversion.converted({"": (module, choice)}):
            times[1].append(seconds(partial(run, 1), device))
    return max(0.0, min(times[1]) - min(times[0])), last[0], last[1]


def _alone(module: nn.Module, given: sample.Given) -> Gradients:
    """Return the gradients of one call of a module, of its inputs and parameters."""
    leaves: list[Tensor] = []

    def fresh(value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1] * 1  # it may write to it

    alike = copied_buffers(module), sample.own_random_numbers(module)  # in all calls
    with torch.enable_grad(), alike[0], alike[1]:
        torch.manual_seed(0)
        args, kwargs = sample.mapped(fresh, given)
        out = sample.tensors_in(module.forward(*args, **kwargs))
        out = [t for t in out if t.requires_grad]
        wanted = leaves + [p for p in module.parameters() if p.requires_grad]
        if not out or not wanted:
            return []
        ones = [torch.ones_like(t) for t in out]
        return torch.autograd.grad(out, wanted, ones, allow_unused=True)


def relative_error(got: Gradients, want: Gradients) -> float:
    """Return the squared distance of gradients over their squared length."""
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if g is not None and w is not None]
    size = sum(float(w.double().square().sum()) for _, w in pairs)
    error = sum(float((g.double() - w.double()).square().sum()) for g, w in pairs)
    return error / size if size > 0 else 0.0


def gradient_errors(
    model: nn.Module,
    inputs: sample.Inputs,
    loss: sample.Loss | None,
    layers: conversion.Choices,
    groups: Sequence[set[str]],
) -> list[float]:
    """Return the squared error that each group of converted layers brings into the gradient.

    Those whose noise stays in the gradient of their own weight run together, others alone.

    Args:
        model: Not converted.
        inputs: What to call it with.
        loss: Of its output.
        layers: What becomes of layers.
        groups: Names of layers; one without names is not measured.

    Returns:
        Over the squared length of the gradient of the model as it is.
    """
    wanted = {id(p): at for at, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    want = sample.gradients(model, inputs, loss)
    own = [all(issubclass(layers[name][1].bases[0], OWN_WEIGHT) for name in g) for g in groups]
    together = [name for group, is_own in zip(groups, own, strict=True) if is_own for name in group]
    with conversion.converted({name: layers[name] for name in together}):
        got = sample.gradients(model, inputs, loss)
    errors = []
    for group, is_own in zip(groups, own, strict=True):
        if is_own:
            parameters = {id(p) for name in group for p in layers[name][0].parameters()}
            places = {wanted[p] for p in parameters if p in wanted}
            alone = [
                g if at in places else w for at, (g, w) in enumerate(zip(got, want, strict=True))
            ]
        else:
            with conversion.converted({name: layers[name] for name in group}):
                alone = sample.gradients(model, inputs, loss)
        errors.append(relative_error(alone, want))
    return errors


def returned_errors(
    model: nn.Module,
    inputs: sample.Inputs,
    layers: conversion.Choices,
    levels: Sequence[conversion.Settings],
) -> dict[str, list[float]]:
    """Return how far what comes back is from what went into each layer, at each level.

    For DIVISION it is the squared error over the square (of what varies, where the layer
    normalises); for an activation function, that of its derivative. Of several calls of a layer,
    the largest counts.

    Args:
        model: Not converted.
        inputs: What to call it with.
        layers: What becomes of layers, at any of the levels.
        levels: Settings.
    """
    errors: dict[str, list[float]] = {}
    noise = new_noise(0)

    def see(name: str, module: nn.Module, given: sample.Given) -> None:
        tensors = [v for v in (*given.args, *given.kwargs.values()) if isinstance(v, Tensor)]
        if not (swap.is_converted(module) and tensors):
            return
        x, found = tensors[0].detach(), errors.setdefault(name, [0.0] * len(levels))
        for place, level in enumerate(levels):
            found[place] = max(found[place], _error(module, x, level, noise))

    with conversion.converted(layers):
        sample.visit(model, inputs, see)
    return errors


def _error(module: nn.Module, x: Tensor, settings: conversion.Settings, noise: Tensor) -> float:
    few_bit, division = settings
    if isinstance(module, Divided) and division:
        x = module.arranged(x)
        packed = maps.pack(x, module.spatial(x), division, noise)
        return _relative(maps.restore(_parts(packed), packed.form), x, isinstance(module, CENTRED))
    if isinstance(module, Scoped) and division:
        packed = maps.pack(x, max(1, min(x.dim() - 2, 3)), division, noise)
        return _relative(maps.restore(_parts(packed), packed.form), x)
    if not (isinstance(module, (*activations.SMOOTH, activations.OwnValues)) and few_bit):
        return 0.0
    undo, few = swap.undo_of(module), vars(module)
    bits, few["bits"] = few["bits"], few_bit.bits
    got = _slope(partial(undo.bases[-1].forward, module), x)
    few["bits"] = bits
    return _relative(got, _slope(partial(undo.original.forward, module), x))


def _parts(packed: maps.Packed) -> list[Tensor]:
    return [part for part in packed[:3] if part is not None]


def _relative(got: Tensor, want: Tensor, is_centred: bool = False) -> float:
    """Return the squared error over the squared size, 0 for what is 0."""
    got, want = got.double(), want.double()
    size = (want - want.mean() if is_centred else want).square().sum()
    return float((got - want).square().sum() / size) if size > 0 else 0.0


def _slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(function(x * 1).sum(), x)[0]  # it may write to x * 1
