"""Giving a model formats to carry: by an optimizer, from a state, or none any more."""

import fnmatch
import inspect
from collections.abc import Collection, Iterable
from typing import get_args

import torch
from torch import nn

from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels.rounding import Rounding
from fixedpoint_kernels.undo import all_or_nothing
from marvin.activations import Entry, QuantizedActivations
from marvin.carriers import EXCLUDED, FOLLOWERS, OTHERS, assign, others_of
from marvin.compiled import check_uncompiled
from marvin.hooks import detach, hook
from marvin.layers import parameters_of, parametrisations_of
from marvin.model_formats import ModuleFormats
from marvin.quantized import Quantized
from marvin.refused import check_model
from marvin.rounder import ForwardState, Rounder, channels_of
from marvin.straight_through import StraightThrough
from marvin.wrappers import unwrapped

__all__ = ["argument_names", "prepare", "prepared", "quantize_activations"]

_Item = str | type[nn.Module] | nn.Module
_Choice = Iterable[_Item] | _Item | None


@left_uncompiled
@torch.inference_mode(False)  # or no step could write the formats
def quantize_activations(
    model: nn.Module,
    optimizer: Quantized,
    *,
    ste: StraightThrough = "clip",
    eval_rounding: Rounding = "nearest",
    include: _Choice = None,
    exclude: _Choice = None,
) -> QuantizedActivations:
    """Make layers round their inputs and outputs to their own, current format.

    That holds for every module that owns a parameter of ``optimizer``, and for normalisation and
    average pooling without one, which take the format of the module before them. In training
    mode rounding is stochastic, with noise of the optimizer's seed and a count of roundings
    that its state keeps, or as the policy has it; in eval mode it is ``eval_rounding``. What a
    layer before has already rounded to the same format is not rounded again. Tensors inside of
    tuples, lists and dictionaries are rounded too, and those given by keyword; not arguments
    whose name has ``mask`` in it.

    The model carries its formats: each of these modules gets a buffer ``fixed_point``, which is
    saved and loaded with the model, and which ``optimizer`` writes when a format changes. A copy
    of the model keeps the formats that it has, and is tied to nothing. A second call takes the
    place of the first, but for modules whose weight is another optimizer's, which decides: those go on
    rounding as they did, so a model may have two optimizers, each with a call of its own. A call that is
    refused or interrupted changes nothing.

    Args:
        model: Changed by hooks and buffers; ``remove()`` undoes it.
        optimizer: Whose formats to use.
        ste: Straight-through gradient: see ``fake_quantize``.
        eval_rounding: ``"nearest"``, or ``"stochastic"`` (always the same noise).
        include: Modules, their names (with wildcards as of ``fnmatch``) or classes: no others round.
            None: all. A module does not stand for those inside of it.
        exclude: Modules that do not round, their names or classes.

    Returns:
        A handle: ``report`` names what rounds and what does not, ``remove()`` undoes it,
        ``saturation()`` tells how much was clamped.

    Raises:
        TypeError: ``model`` is no module, or what ``torch.compile`` returned, or ``optimizer`` not one
            of fixed point; ``include`` or ``exclude`` has something else than modules, names and classes.
        ValueError: No module of ``model`` has a parameter of ``optimizer``; an argument is
            unknown, or ``include`` or ``exclude`` names no module.

    Source:
        MARViN, section 3.2; that inputs and outputs are rounded comes from its authors' code.
        Differs: ``"clip"``, where theirs passes the gradient of saturated values too.
    """
    check_model(model, "quantize_activations(model, optimizer)")
    check_uncompiled(model, "quantize_activations(model, optimizer)")
    if not isinstance(optimizer, Quantized):
        raise TypeError(
            "quantize_activations needs an optimizer of fixed point, such as marvin.MSGD(...) or "
            f"marvin.Quantized(optimizer, policy), got {type(optimizer).__name__}"
        )
    optimizer = unwrapped(optimizer)
    if ste not in get_args(StraightThrough) or eval_rounding not in get_args(Rounding):
        raise ValueError(
            f"ste must be one of {get_args(StraightThrough)} and eval_rounding one of "
            f"{get_args(Rounding)}, got {ste!r} and {eval_rounding!r}"
        )
    if not any(p in optimizer for p in model.parameters()):
        raise ValueError(
            "no module of the model has a parameter of this optimizer: make the optimizer of this model's, "
            "marvin.Quantized(torch.optim.Adam(model.named_parameters()), policy)"
        )
    others = others_of(model, optimizer, optimizer.forward_state)
    with optimizer.carrying(model):
        handle = _attached(model, optimizer.forward_state, include, exclude, others)
        handle.ste, handle.eval_rounding = ste, eval_rounding
        assign(handle, optimizer)
        if not handle.layers() and OTHERS not in handle.left.values():
            raise ValueError(f"no module that may round is left: {handle.report}")
        optimizer.carry(handle)
        return handle


@left_uncompiled
def prepare(
    model: nn.Module, *, include: _Choice = None, exclude: _Choice = None
) -> QuantizedActivations:
    """Make a float model able to load the state of one whose activations are quantised.

    Every module that could round gets a buffer for its formats, at first float32. Loading a state
    fills them, and the model computes the same bits as the one that was saved, without an
    optimizer. A state without formats loads too: then formats stay as they were, float32 in a model
    that was just prepared.

    Args:
        model: Changed by hooks and buffers; ``remove()`` undoes it.
        include: As of ``quantize_activations``.
        exclude: As of ``quantize_activations``.

    Returns:
        A handle: ``remove()`` undoes it.

    Raises:
        TypeError: ``model`` is no module, or what ``torch.compile`` returned; ``include`` or ``exclude``
            has something else than modules, names and classes.
        ValueError: ``include`` or ``exclude`` names what the model does not have.

    Examples:
        >>> marvin.prepare(model)
        >>> model.load_state_dict(torch.load("model.pt"))
    """
    check_model(model, "prepare(model)")
    check_uncompiled(model, "prepare(model)")
    return prepared(model, include=include, exclude=exclude, is_awaited=True)


def prepared(
    model: nn.Module, *, include: _Choice = None, exclude: _Choice = None, is_awaited: bool = False
) -> QuantizedActivations:
    """Do as ``prepare``; ``is_awaited``: whether a state is to bring the formats.

    Raises:
        TypeError: As ``prepare``.
        ValueError: As ``prepare``.
    """
    with all_or_nothing(model.modules()):
        handle = _attached(model, ForwardState(), include, exclude)
        for entry in handle.entries:
            own = (None,) * len(channels_of(entry.module))
            formats = ModuleFormats(weights=own, is_awaited=is_awaited)
            entry.rounder.write(entry.module, formats)
        return handle


def _attached(
    model: nn.Module,
    state: ForwardState,
    include: _Choice,
    exclude: _Choice,
    others: Collection[nn.Module] = (),
) -> QuantizedActivations:
    """Put hooks on the modules that could round, without formats yet, in the place of earlier ones.

    Args:
        model: Is changed.
        state: What its modules will share.
        include: See ``quantize_activations``.
        exclude: See ``quantize_activations``.
        others: Modules that stay as they are.

    Raises:
        TypeError: ``include`` or ``exclude`` has something else than modules, names and classes.
        ValueError: It has a name that no module has, or a module of another model.
    """
    chosen, inside = _chosen(model, include, exclude), parametrisations_of(model)
    handle = QuantizedActivations([], state)
    for name, module in model.named_modules():
        if module in others:
            handle.left[name] = OTHERS
        else:
            detach(module)
        could = bool(parameters_of(module)) or isinstance(module, FOLLOWERS)
        is_chosen = name in chosen or module in inside
        if could and not is_chosen:
            handle.left.setdefault(name, EXCLUDED)
        if (could and is_chosen) or module is model:
            rounder = Rounder(name, state, argument_names(module), is_root=module is model)
            handle.entries.append(Entry(module, rounder))
            if module not in others:
                hook(module, rounder)
    return handle


def _chosen(model: nn.Module, include: _Choice, exclude: _Choice) -> set[str]:
    """Return the names of modules that ``include`` and ``exclude`` leave."""
    modules = dict(model.named_modules())
    found = [set(modules), set[str]()]
    for place, (what, choice) in enumerate((("include", include), ("exclude", exclude))):
        if choice is None:
            continue
        found[place] = set()
        items = [choice] if isinstance(choice, str | type | nn.Module) else choice
        for item in items if isinstance(items, Iterable) else [items]:
            if not isinstance(item, str | type | nn.Module):
                raise TypeError(
                    f"{what} must have names, classes or modules, got {item!r:.60}: write "
                    f'{what}=["0", torch.nn.Linear, model[0]], say'
                )
            names = {name for name, module in modules.items() if _is_meant(name, module, item)}
            if not names:
                raise ValueError(
                    f"{what} must choose modules that the model has, got {item!r:.60}, of which it has none: "
                    "print(model) shows them"
                )
            found[place] |= names
    return found[0] - found[1]


def _is_meant(name: str, module: nn.Module, item: _Item) -> bool:
    if isinstance(item, nn.Module):
        return module is item
    return fnmatch.fnmatch(name, item) if isinstance(item, str) else isinstance(module, item)


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of what a module's ``forward`` takes by position."""
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        known = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in known if parameter.kind in positional]
