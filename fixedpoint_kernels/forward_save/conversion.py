"""Convert a model and take it back."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor, nn

from fixedpoint_kernels.forward_save import activations, compiling, offload, sample, swap
from fixedpoint_kernels.forward_save.calls import Scoped
from fixedpoint_kernels.forward_save.checkpoint import Checkpointed
from fixedpoint_kernels.forward_save.choices import Choice, caller, choose
from fixedpoint_kernels.forward_save.handlers import keeps
from fixedpoint_kernels.forward_save.layers import Recomputed
from fixedpoint_kernels.forward_save.noise import new_noise
from fixedpoint_kernels.forward_save.planned import Plan, PlannedLayer
from fixedpoint_kernels.forward_save.report import Call, Kept, Replaced, Report
from fixedpoint_kernels.forward_save.settings import (
    Division,
    FewBit,
    division_settings,
    few_bit_settings,
)
from fixedpoint_kernels.undo import all_or_nothing

__all__ = ["convert", "revert"]

Choices = dict[str, tuple[nn.Module, Choice]]
Settings = tuple[FewBit | None, Division | None]
RUNS_AGAIN = "its inputs, and runs again"
OFFLOADED = "small tensors; offloaded: the others lie in the host's memory"
BLOCKS = {  # what becomes of a block, by its way
    "recompute": Choice((Checkpointed,), {}, RUNS_AGAIN),
    "offload": Choice((offload.Offloaded,), {}, OFFLOADED),
}


def convert(  # noqa: PLR0913  each is one choice of the user
    model: nn.Module,
    *,
    few_bit: FewBit | Mapping[str, object] | int | None = None,
    division: Division | Mapping[str, object] | bool | None = None,
    plan: Plan | None = None,
    calls: bool = True,
    sample_input: sample.Inputs | None = None,
    seed: int = 0,
) -> Report:
    """Make the modules of a model keep less for backward, in place.

    A converted module is the same object with a subclass of its class: weights, hooks, names,
    dtype, mode, ties and keys of ``state_dict`` stay, and values of the forward pass are torch's, but for the last bit of Tanh, Sigmoid and SiLU.

    ``division`` makes convolution, linear and normalisation layers keep their input as block means
    and residuals of a few bits while they train; a tensor that two layers keep is packed once. Step
    functions and dropout then keep 1 bit, max pooling 8 bits an output, average pooling nothing:
    their gradients are exact. In eval mode and without gradients torch's own layers run.

    A plan with a ``memory_budget`` also compiles the model in place, as ``model.compile()`` does,
    for eval mode and other shapes too. Code is made at the first step of each shape. A graph that
    breaks is an error there, and so is a missing C++ compiler. Copies and pickles are compiled anew.

    Where it is interrupted, or the sample fails, the model stays as it was.

    Args:
        model: Any module; not converted before.
        few_bit: Activations keep so many bits an element, 1 to 8, or True for 3, or
            ``{"bits": 3, "weight": "normal"}``; see ``fixedpoint_kernels.few_bit``.
        division: ``{"block": 8, "bits": 2}``, or True for that; see
            ``fixedpoint_kernels.division``. ``"method"`` may name another way, to compare.
        plan: What ``forward_save.plan`` chose for each layer, in place of the two above; functions
            that a forward calls then stay as they are. Blocks that it offloads do so on a GPU, and
            run elsewhere as they are.
        calls: Whether functions called in a ``forward`` keep less, too: see ``saving``.
        sample_input: What to call the model with, a tensor, a tuple of arguments or a mapping of
            keywords; it runs once, in the mode it is in. Then the report also names functions called in a ``forward``, and layers
            whose replacement saves nothing.
        seed: Of the noise of ``division``, which nothing else uses; in a distributed run, give
            each process its own. ``state`` tells how much of it is used.

    Returns:
        What was replaced, what was not and why; print it.

    Raises:
        TypeError: ``model`` is no module, ``plan`` no plan, or the sample none of these.
        ValueError: Nothing is asked for, there is nothing to convert, or the model was converted
            before; a setting is out of range; the plan is of another model, or compiles a model
            that is compiled already.
    """
    swap.check_model(model, "convert")
    settings = few_bit_settings(few_bit), division_settings(division)
    if (settings == (None, None)) == (plan is None):
        raise ValueError("convert needs few_bit and division, one of them, or a plan alone")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan must be what forward_save.plan returned, got {plan!r}")
    refuse_converted(model)
    memory_budget = plan and plan.memory_budget
    if memory_budget is not None and compiling.is_compiled(model):
        raise ValueError(
            "the plan compiles the model, which must not be compiled yet, got one that is: build it "
            "again without compile()"
        )
    if plan is None:
        choices = choices_of(model, lambda _: settings, calls=calls)
    else:
        choices = planned(model, plan.layers, needs_one=memory_budget is None)
    applied = dict(choices)
    if memory_budget is not None:
        own = choices[""][1] if "" in choices else None
        applied[""] = model, compiling.compiled_in_place(own, memory_budget)
    with all_or_nothing(model.modules()):
        before = None if sample_input is None else sample.observe(model, sample_input)
        noise = apply(applied, seed)
        after = None if sample_input is None else sample.observe(model, sample_input)
        noise[1] = 0  # the sample used some
        report = _report(choices, before, after, settings if calls and not plan else (None, None))
        if memory_budget is not None:  # not earlier: whoever watches compiled code sees no layers
            compiling.compile_(model)
        return replace(report, memory_budget=memory_budget)


def revert(model: nn.Module) -> None:
    """Undo ``convert``: every module gets its own class back, and is not compiled.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: No module is converted, or the class of one was changed since.
    """
    swap.check_model(model, "revert")
    converted = {name: m for name, m in model.named_modules() if swap.is_converted(m)}
    if not converted:
        raise ValueError("the model must have converted layers to revert, got none")
    for name, module in converted.items():
        if not swap.is_restorable(module):
            raise ValueError(
                f"layer {name!r} must have the class that convert gave it, "
                f"got {type(module).__name__}: undo what was done to it since"
            )
    with all_or_nothing(converted.values()):
        for module in converted.values():
            swap.restore_(module)
        offload.clear()


def planned(model: nn.Module, layers: Sequence[PlannedLayer], *, needs_one: bool = True) -> Choices:
    """Return what becomes of each module by a plan.

    Raises:
        ValueError: ``layers`` has one that the model has not, or of another class, or nothing
            becomes of any and ``needs_one``.
    """
    modules = dict(model.named_modules())
    for row in layers:
        came = type(modules[row.layer]).__name__ if row.layer in modules else "no such layer"
        if came != row.module:
            raise ValueError(
                f"the plan is of another model: layer {row.layer!r} must be {row.module}, "
                f"got {came}"
            )
    settings = {row.layer: row.settings for row in layers}
    blocks = {row.layer: BLOCKS[row.way] for row in layers if row.way}
    return choices_of(
        model, lambda name: settings.get(name, (None, None)), blocks=blocks, needs_one=needs_one
    )


def refuse_converted(model: nn.Module) -> None:
    """Raise if a module is converted.

    Raises:
        ValueError: A module is; names it.
    """
    found = {name: m for name, m in model.named_modules() if swap.is_converted(m)}
    layers = [name for name, module in found.items() if not isinstance(module, Scoped)]
    for name in layers or found:
        raise ValueError(
            f"the model must not be converted yet, got layer {name!r} converted: "
            "revert first, and ask for everything in one call"
        )


def choices_of(
    model: nn.Module,
    settings: Callable[[str], Settings],
    *,
    calls: bool = False,
    blocks: Mapping[str, Choice] = MappingProxyType({}),
    needs_one: bool = True,
) -> Choices:
    """Return what becomes of each module, by name.

    Args:
        model: Any module.
        settings: Of each name.
        calls: Also of those that call functions.
        blocks: What becomes of whole blocks, by name.
        needs_one: Whether something must become of one.

    Raises:
        ValueError: Nothing becomes of any.
    """
    found: Choices = {}
    hidden: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(hidden) and hidden:
            continue
        choice = choose(module, *settings(name))
        runs_again = choice is not None and Recomputed in choice.bases  # with all inside
        if isinstance(module, nn.MultiheadAttention) or runs_again:  # it never calls its modules
            hidden = (*hidden, name + "." if name else "")
        if calls and choice is None:
            choice = caller(module, *settings(name))
        choice = blocks.get(name, choice)
        if choice is not None:
            found[name] = module, choice
    if needs_one and not any(choice.bases for _, choice in found.values()):
        kinds = {type(m).__name__: "" for m in model.modules()}
        kinds |= {type(m).__name__: f" ({c.reason})" for m, c in found.values() if c.reason}
        raise ValueError(
            "the model must have a layer to convert, got "
            f"{', '.join(kind + kinds[kind] for kind in sorted(kinds))}; "
            "few_bit=3 converts activation functions, division=True other layers"
        )
    return found


def apply(choices: Choices, seed: int) -> Tensor:
    """Give modules their classes; return the noise, which those share that keep activations."""
    noise = new_noise(seed)
    for name, (module, choice) in choices.items():
        if choice.bases:
            attributes = dict(choice.attributes or {})
            if "_division" in attributes:
                attributes |= {"_noise": noise, "_layer": name}
            elif "_saving" in attributes and attributes["_saving"][1] is not None:
                attributes |= {"_noise": noise}
            swap.swap_(module, choice.bases, attributes)
    return noise


@contextmanager
def converted(choices: Choices) -> Iterator[None]:
    """Give modules their classes while this is entered."""
    with all_or_nothing(module for module, _ in choices.values()):
        apply(choices, seed=0)
        yield
        for module, choice in choices.values():
            if choice.bases:
                swap.restore_(module)


def _report(
    choices: Choices,
    before: sample.ForwardPass | None,
    after: sample.ForwardPass | None,
    settings: Settings,
) -> Report:
    """Return the report, from what was kept before the conversion and is kept after it."""
    listed = {name: pair for name, pair in choices.items() if pair[1].is_listed}
    named = [(name, type(module).__name__, choice) for name, (module, choice) in listed.items()]
    replaced = tuple(Replaced(n, kind, c.keeps, c.note) for n, kind, c in named if c.bases)
    kept = tuple(Kept(n, kind, c.reason) for n, kind, c in named if not c.bases)
    if before is None or after is None:
        return Report(replaced, kept)
    names = {row.layer for row in replaced}
    still = {(who.layer, who.function) for storage in after.saved for who in storage.savers}
    rest = {at for at in still if at[0] not in names}
    words = {RUNS_AGAIN: "nothing; runs again", OFFLOADED: "nothing; offloaded"}
    blocks = {row.layer: words[row.keeps] for row in replaced if row.keeps in words}
    idle = tuple(n for n in names.difference(blocks) if before.is_idle(n, rest))
    if idle:
        warnings.warn(
            f"these layers save nothing, for another operation keeps the same tensor: "
            f"{', '.join(idle)}",
            stacklevel=3,
        )
    found = [call for call in before.calls if call.function in activations.CALLS]
    if settings[0] is None or settings[1] is not None:  # all is asked for, not activations alone
        found += [saver for storage in before.saved for saver in storage.savers]
    rows = {}
    for call in found:
        at = call.layer, call.function
        is_less = at not in still
        less = keeps(call.function, *settings)
        over = [block for block in blocks if f"{call.layer}.".startswith(f"{block}.")]
        if over:
            is_less, less = True, blocks[over[0]]
        elif call.layer in names:
            continue
        rows[at] = Call(*at, less if is_less else "")
    own = tuple(row for row in rows.values() if row.layer not in listed)
    return Report(replaced, kept, own, idle)
