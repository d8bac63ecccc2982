"""Convert a model and take it back."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fixedpoint_kernels.forward_save import activations, sample, swap
from fixedpoint_kernels.forward_save.report import Call, Kept, Replaced, Report
from fixedpoint_kernels.forward_save.settings import FewBit, few_bit_settings

__all__ = ["convert", "revert"]


class _Choice(NamedTuple):
    """What becomes of a module: classes put before its own, and attributes; or why nothing does."""

    bases: tuple[type, ...] = ()
    attributes: dict[str, Any] | None = None
    keeps: str = ""
    note: str = ""
    reason: str = ""


def convert(model: nn.Module, *, few_bit: Any = None, sample_input: Any = None) -> Report:
    """Make the modules of a model keep less for backward, in place.

    A converted module is the same object with a subclass of its class: weights, hooks, names,
    dtype, mode, ties and keys of ``state_dict`` stay, and values of the forward pass are torch's.

    Args:
        model: Any module; not converted before.
        few_bit: Activations keep so many bits an element, 1 to 8, or
            ``{"bits": 3, "weight": "normal"}``; see ``fixedpoint_kernels.few_bit``.
        sample_input: What to call the model with, a tensor or a tuple; it runs once, in the mode
            it is in. Then the report also names functions called in a ``forward``, and layers
            whose replacement saves nothing.

    Returns:
        What was replaced, what was not and why; print it.

    Raises:
        ValueError: Nothing is asked for, there is nothing to convert, or the model was converted
            before; a setting is out of range.
    """
    settings = few_bit_settings(few_bit)
    if settings is None:
        raise ValueError("convert needs few_bit, got none")
    _refuse_converted(model)
    choices = _choices(model, settings)
    chosen = {name: choice for name, (_, choice) in choices.items() if choice.bases}
    if not chosen:
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(f"the model must have a layer to convert, got {', '.join(kinds)}")
    seen = None if sample_input is None else sample.observe(model, sample_input)
    report = _report(choices, seen)
    for name, choice in chosen.items():
        swap.swap_(choices[name][0], choice.bases, choice.attributes or {})
    return report


def revert(model: nn.Module) -> None:
    """Undo ``convert``: every module gets its own class back.

    Raises:
        ValueError: No module is converted, or the class of one was changed since.
    """
    converted = {name: m for name, m in model.named_modules() if swap.is_converted(m)}
    if not converted:
        raise ValueError("the model must have converted layers to revert, got none")
    for name, module in converted.items():
        if not swap.is_restorable(module):
            raise ValueError(
                f"layer {name!r} must have the class that convert gave it, "
                f"got {type(module).__name__}: undo what was done to it since"
            )
    for module in converted.values():
        swap.restore_(module)


def _refuse_converted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if swap.is_converted(module):
            raise ValueError(
                f"the model must not be converted yet, got layer {name!r} converted: "
                "revert first, and ask for everything in one call"
            )


def _choices(model: nn.Module, settings: FewBit) -> dict[str, tuple[nn.Module, _Choice]]:
    """Return what becomes of each module that is an activation, by name."""
    choices: dict[str, tuple[nn.Module, _Choice]] = {}
    for name, module in model.named_modules():
        choice = _few_bit(module, settings)
        if choice is not None:
            choices[name] = module, choice
    return choices


def _few_bit(module: nn.Module, settings: FewBit) -> _Choice | None:
    if not activations.is_activation(module):
        return None
    kind = activations.few_bit_of(module)
    reason = unfit(module) or ("" if kind else activations.why_not(module))
    if reason:
        return _Choice(reason=reason)
    bits = 1 if kind in activations.STEPWISE else settings.bits
    bases: tuple[type, ...] = (activations.FEW_BIT[kind],)
    note = ""
    if getattr(module, "inplace", False):
        bases, note = (activations.InPlace, *bases), "works in place by a copy"
    attributes = {"bits": bits, "weight": settings.weight}
    return _Choice(bases, attributes, _bits(bits), note)


def _bits(bits: int) -> str:
    return f"{bits} bit{'s' if bits > 1 else ''} an element"


def unfit(module: nn.Module) -> str:
    """Say why a module of any kind cannot get another class, ``""`` if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    if "forward" in vars(module):
        return "its forward was put on the object"
    if any(map(is_lazy, module.parameters(recurse=False))):
        return "it has no shape yet: run the model once first"
    return ""


def _report(choices: dict[str, tuple[nn.Module, _Choice]], seen: sample.Seen | None) -> Report:
    named = [(name, type(module).__name__, choice) for name, (module, choice) in choices.items()]
    replaced = tuple(Replaced(n, kind, c.keeps, c.note) for n, kind, c in named if c.bases)
    kept = tuple(Kept(n, kind, c.reason) for n, kind, c in named if not c.bases)
    if seen is None:
        return Report(replaced, kept)
    names = {row.layer for row in replaced}
    calls = [Call(*call) for call in seen.calls if call[1] in activations.CALLS]
    ran = {layer for layer, _ in seen.calls}
    idle = [n for n in names if n in ran and not seen.alone(n, names)]
    if idle:
        warnings.warn(
            f"these layers save nothing, for another operation keeps the same tensor: "
            f"{', '.join(sorted(idle))}",
            stacklevel=3,
        )
    own = tuple(c for c in calls if c.layer not in choices)
    return Report(replaced, kept, own, tuple(n for n in choices if n in idle))
