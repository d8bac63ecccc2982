"""Choose for each layer what it keeps, so that all fits into a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from fixedpoint_kernels.forward_save import (
    checkpoint,
    compare,
    compiling,
    conversion,
    measure,
    offload,
    peak,
    sample,
    search,
    swap,
)
from fixedpoint_kernels.forward_save.choices import choose
from fixedpoint_kernels.forward_save.ledger import EXACT, Group, Ledger, State, is_inside
from fixedpoint_kernels.forward_save.planned import Plan, PlannedLayer
from fixedpoint_kernels.forward_save.settings import Division, FewBit
from fixedpoint_kernels.undo import all_or_nothing

__all__ = ["CHOICES", "LEVELS", "plan"]

CHOICES = "few_bit", "division", "recompute"
OFFLOAD = "offload"  # only where it is asked for: the model must be on a GPU
COMPILE = "compile"  # only where it is asked for: it takes minutes, and a C++ compiler
LEVELS = ((8, 8), (4, 4), (3, 2), (2, 1), (1, 1))  # bits of a few-bit code, bits of DIVISION
MEASURED = 2  # the level whose time and gradient error are measured
GRAINS = 1.0, 0.25, 0.0625  # of what is kept: most that one block may make again at once


class _TooLittle(ValueError):
    """A budget cannot be met.

    Args:
        came: Bytes.
        least: Bytes that can be.
        reason: What else to know.
    """

    def __init__(self, came: int, least: int, reason: str = ""):
        super().__init__(
            f"budget_bytes must be at least {least:,}, the least that was found for this model and "
            f"this sample, got {came:,}{reason}"
        )
        self.least = least


class Question(NamedTuple):
    """What a plan is made for: a model in training mode that is not converted, and a sample."""

    model: nn.Module
    inputs: sample.Given
    settings: Sequence[conversion.Settings]  # of each level
    layers: conversion.Choices  # that can be converted, with what becomes of them
    blocks: Sequence[str]  # that may run again
    loss: sample.Loss | None  # of the model's output
    away: Sequence[str] = ()  # blocks that may be offloaded

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return _device_of(self.model)


def plan(  # noqa: PLR0913  each is one choice of the user
    model: nn.Module,
    sample_input: sample.Inputs | None = None,
    *,
    sample_args: Sequence[object] = (),
    sample_kwargs: Mapping[str, object] | None = None,
    budget_bytes: int | None = None,
    peak_bytes: int | None = None,
    choices: str | Sequence[str] = ("few_bit", "division"),
    block: int = 8,
    loss: sample.Loss | None = None,
) -> Plan:
    """Choose what each layer keeps for backward, so that a training step fits into a budget.

    Where it is interrupted, the model stays as it was.

    The model runs on the sample: once as it is and once at each of five levels of bits, to count
    what autograd keeps; each layer and each block alone, as it is and changed, for its time; a
    step for each group of layers that keep a tensor in common, for the error that they bring into
    the model's gradient at 3 bits and DIVISION's 2; errors at other levels are scaled by how far
    what comes back is from what went in. Starting from the model as it is, the choice with the least
    cost for each byte is taken until the budget holds; then those are taken back that are not
    needed. The cost is the time to the same loss: the time of a step times the number of steps,
    which grows with the noise of the gradient, see ``Ledger.cost``. What was chosen then runs as a
    whole, and the plan has what was measured there.

    With ``"compile"``, what was chosen so is compared with two that ``torch.compile`` makes: the
    model as it is, with the largest ``activation_memory_budget`` that keeps no more than the
    budget; and what was chosen, compiled. The one with the least time to the same loss is taken.

    Args:
        model: Any module in training mode, not converted; left as it was.
        sample_input: What to call it with, of the batch size that the budget is for: a tensor, a
            tuple of arguments, or a mapping of keywords.
        sample_args: Arguments by position, in place of ``sample_input``.
        sample_kwargs: Arguments by keyword, in place of ``sample_input``.
        budget_bytes: Most bytes to keep between forward and backward pass.
        peak_bytes: Most bytes of tensors at once in forward and backward pass, beyond the model and
            the sample: what is kept, what a layer works with, what a block makes again, and
            gradients. In place of ``budget_bytes``, or beside it; not with ``"compile"``, for that
            is not counted in compiled code.
        choices: Any of ``"few_bit"``, ``"division"``, ``"recompute"``, which makes blocks (modules
            with layers inside) keep their inputs alone and run again in the backward pass, and two
            that are not in ``CHOICES``: ``"offload"``, which lets the tensors of blocks lie in the
            host's memory until the backward pass, for a model on a GPU; and ``"compile"``, which
            needs a C++ compiler, and minutes. These two do not go together. One choice may be a text
            alone.
        block: Edge of DIVISION's blocks.
        loss: Gives the loss of the model's output; None: the output's own ``loss``, the output if
            it is one number, otherwise a random sum of it.

    Returns:
        The plan; ``convert(model, plan=plan)`` applies it.

    Raises:
        TypeError: ``model`` is no module; there is no sample, one in two forms, or of another type.
        ValueError: The budget was not met by anything found (the message has the least bytes that were), there is
            none or it is no number, a choice is unknown, the model is in eval mode, converted, or
            has nothing to convert; with ``"offload"``, the model is not on a GPU; with
            ``"compile"``, there is a ``peak_bytes``, or the model is compiled already.
    """
    if budget_bytes is None and peak_bytes is None:
        raise ValueError("a plan needs budget_bytes, peak_bytes, or both, got neither")
    for name, value in (("budget_bytes", budget_bytes), ("peak_bytes", peak_bytes)):
        if value is not None and not (isinstance(value, int | float) and value >= 0):  # nor NaN
            raise ValueError(f"{name} must be a number of bytes, 0 or more, got {value!r}")
    swap.check_model(model, "plan")
    if not model.training:
        raise ValueError("a plan needs the model in training mode, got eval mode")
    conversion.refuse_converted(model)
    inputs = sample.given(sample_input, sample_args, sample_kwargs)
    wanted = _checked(choices, _device_of(model))
    if COMPILE in wanted and (budget_bytes is None or peak_bytes is not None):
        raise ValueError(
            "the choice 'compile' needs budget_bytes alone: compiled code takes memory that "
            f"peak_bytes does not count, got peak_bytes={peak_bytes}"
        )
    if COMPILE in wanted and compiling.is_compiled(model):
        raise ValueError("the choice 'compile' needs a model that is not compiled, got one that is")
    question = _question(model, inputs, wanted, block, loss)
    with all_or_nothing(model.modules(), tensors=model.buffers()):
        try:
            ledger = _measured(question)
            if COMPILE in wanted and budget_bytes is not None:
                return _or_compiled(question, ledger, budget_bytes)
            return _found(question, ledger, budget_bytes, peak_bytes)
        finally:
            offload.clear()


def _or_compiled(question: Question, ledger: Ledger, budget: int) -> Plan:
    """Return the best of a plan of the other choices, and of what ``torch.compile`` makes."""
    exact = _proven(question, Plan(_rows(question, ledger, ledger.start), 0, 0, 0, budget), ledger)
    model, inputs, loss = question.model, question.inputs, question.loss
    try:
        plan = _found(question, ledger, budget, None)
        choices, least = _choices(question, plan.layers), plan.smallest_bytes
    except _TooLittle as error:
        plan, choices, least = None, {}, error.least
    found = compare.compared(compare.Sample(model, inputs, loss), exact, plan, choices, budget)
    least = min([least, *(one.kept_bytes for one in found.candidates if one.kept_bytes)])
    if all(one.left_out for one in found.candidates):
        reasons = "".join(f"; {one.name}: {one.left_out}" for one in found.candidates)
        raise _TooLittle(budget, least, reasons)
    return replace(found, smallest_bytes=least)


def _found(
    question: Question, ledger: Ledger, budget_bytes: int | None, peak_bytes: int | None
) -> Plan:
    """Return the plan of the choices but ``"compile"``.

    Raises:
        ValueError: A limit cannot be met.
    """
    paths, least = [*search.paths(ledger)], search.least(ledger)
    least = min((state for path in [[least], *paths] for state in path), key=ledger.kept_bytes)
    paths.append([least])
    smallest = ledger.kept_bytes(least)
    if budget_bytes is not None and budget_bytes < smallest:
        raise _TooLittle(budget_bytes, smallest)

    def proven(spare: int) -> Plan:
        within = None if budget_bytes is None else max(smallest, budget_bytes - spare)
        state = _chosen(question, ledger, paths, (within, peak_bytes))
        plan = Plan(_rows(question, ledger, state), 0, 0, smallest, budget_bytes, peak_bytes)
        return _proven(question, plan, ledger)

    spare, plan = 0, proven(0)
    while budget_bytes is not None and plan.predicted_bytes > budget_bytes:
        if budget_bytes - spare <= smallest:
            raise _TooLittle(budget_bytes, plan.predicted_bytes)
        spare += spare + plan.predicted_bytes - budget_bytes  # a run kept more than arithmetic has
        plan = proven(spare)
    return plan


def _chosen(
    question: Question,
    ledger: Ledger,
    paths: Sequence[Sequence[State]],
    limits: tuple[int | None, int | None],
) -> State:
    """Return the cheapest state that was found within limits of bytes and peak."""
    budget, limit = limits
    state = ledger.start
    if budget is not None:
        firsts = [
            next((state for state in path if ledger.kept_bytes(state) <= budget), None)
            for path in paths
        ]
        fits = [search.without_waste(ledger, state, budget) for state in firsts if state]
        state = min(fits, key=ledger.cost)
    peak_bytes = 0 if limit is None else _peak(question, ledger, state)
    if limit is None or peak_bytes <= limit:
        return state
    return _under_peak(question, ledger, limit, budget, peak_bytes)


def _device_of(model: nn.Module) -> torch.device:
    """Return where a model is."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _checked(choices: str | Sequence[str], device: torch.device) -> set[str]:
    """Return the choices, all of which are known and can be had on the device."""
    wanted = {choices} if isinstance(choices, str) else set(choices)
    known = *CHOICES, OFFLOAD, COMPILE
    if not wanted or wanted - set(known):
        came = ", ".join(map(repr, sorted(wanted - set(known)))) or "none"
        raise ValueError(f"choices must be among {', '.join(known)}, got {came}")
    if OFFLOAD in wanted and device.type != offload.DEVICE:
        raise ValueError(
            f"the choice 'offload' needs a model on a GPU, got one on {device}: leave 'offload' "
            "out, or move the model to a GPU first"
        )
    if {OFFLOAD, COMPILE} <= wanted:
        raise ValueError(
            "choices cannot have 'offload' and 'compile' together, got both: compiled code "
            "offloads nothing"
        )
    return wanted


def _question(
    model: nn.Module,
    inputs: sample.Given,
    choices: set[str],
    block: int,
    loss: sample.Loss | None,
) -> Question:
    """Return what there is to choose from.

    Raises:
        ValueError: Nothing.
    """
    settings = [
        (
            FewBit(code) if "few_bit" in choices else None,
            Division(block, bits) if "division" in choices else None,
        )
        for code, bits in LEVELS
    ]
    blocks = checkpoint.blocks(model) if "recompute" in choices else []
    away = checkpoint.blocks(model) if OFFLOAD in choices else []
    layers: conversion.Choices = {}
    is_compiled = COMPILE in choices
    if choices & {"few_bit", "division"}:
        needs_one = not (blocks or away or is_compiled)
        every = conversion.choices_of(model, lambda _: settings[MEASURED], needs_one=needs_one)
        layers = {name: pair for name, pair in every.items() if pair[1].bases}
    if not (layers or blocks or away or is_compiled):
        what = "to offload" if OFFLOAD in choices else "to run again"
        raise ValueError(
            f"the model must have a block {what}, a module with layers inside, got {type(model).__name__} without one: "
            "put layers into an nn.Sequential, or write choices=('few_bit', 'division')"
        )
    return Question(model, inputs, settings, layers, blocks, loss, away)


def _measured(question: Question) -> Ledger:
    """Run the model as it is, at each level, and its layers and blocks alone."""
    model, inputs, settings, layers, blocks, _, away = question
    exact = sample.observe(model, inputs, blocks)
    costs = measure.costs(model, inputs, layers, blocks)
    for name in sorted(exact.written):
        costs.refused.setdefault(name, "its input is written to after it ran")
    offload_s = measure.offload_costs(model, inputs, away) if away else {}
    runs = {}
    for level, at_level in enumerate(settings if layers else ()):
        every = conversion.choices_of(model, lambda _, s=at_level: s, needs_one=False)
        with conversion.converted(every):
            runs[level] = sample.observe(model, inputs)
    step_s = min(_step_s(question) for _ in range(measure.RUNS))
    ledger = Ledger(exact, runs, layers, costs, step_s, offload_s)
    _measure_errors(question, ledger.groups)
    return ledger


def _measure_errors(question: Question, groups: Sequence[Group]) -> None:
    """Note the error of the gradient for each group at one level, and scale it to the others."""
    model, inputs, settings, layers, _, loss, _ = question
    if not layers:
        return
    returned = measure.returned_errors(model, inputs, layers, settings)
    local = [
        {name: returned.get(name, [0.0] * len(settings)) for name in group.layers}
        for group in groups
    ]
    noisy = [{name for name, errors in one.items() if errors[MEASURED]} for one in local]
    measured = measure.gradient_errors(model, inputs, loss, layers, noisy)
    for group, errors, error in zip(groups, local, measured, strict=True):
        sums = [sum(of_layer) for of_layer in zip(*errors.values(), strict=True)]
        scale = error / sums[MEASURED] if sums[MEASURED] else 1.0
        for level, total in enumerate(sums):
            group.errors[level] = scale * total
            group.shares[level] = {
                name: of_layer[level] / total if total else 0.0 for name, of_layer in errors.items()
            }


def _step_s(question: Question) -> float:
    run = partial(sample.gradients, question.model, question.inputs, question.loss)
    return measure.seconds(run, question.device)


def _under_peak(
    question: Question, ledger: Ledger, limit: int, budget: int | None, seen: int
) -> State:
    """Return the cheapest state that was found to hold the limit, in steps that really run.

    A block that runs again is there as a whole for a while, so paths are tried whose blocks keep
    no more than some share of all. ``seen`` is a peak that is too high.

    Raises:
        ValueError: None was found.
    """
    whole, lowest, found = ledger.kept_bytes(ledger.start), [seen], []
    for grain in GRAINS if ledger.blocks else GRAINS[:1]:
        for path in search.paths(ledger, grain * whole):
            fits = [s for s in path if budget is None or ledger.kept_bytes(s) <= budget]
            state, least = search.first_under(fits, partial(_peak, question, ledger), limit)
            lowest += [] if least is None else [least]
            if state is not None:
                found.append(state)
                break  # the others have fewer choices
    if not found:
        raise ValueError(
            f"peak_bytes must be at least {min(lowest):,}, the least that was found for this "
            f"sample, got {limit:,}"
        )
    return min(found, key=ledger.cost)


def _peak(question: Question, ledger: Ledger, state: State) -> int:
    """Return the bytes of tensors at once in a real step."""
    with conversion.converted(_choices(question, _rows(question, ledger, state))):
        return _peak_now(question)


def _peak_now(question: Question) -> int:
    run = partial(sample.gradients, question.model, question.inputs, question.loss)
    return peak.peak_of(run, question.device)


def _choices(question: Question, rows: Sequence[PlannedLayer]) -> conversion.Choices:
    if not any(row.is_changed for row in rows):
        return {}
    return conversion.planned(question.model, rows)


def _rows(question: Question, ledger: Ledger, state: State) -> tuple[PlannedLayer, ...]:
    """Return what becomes of layers and blocks, in the model's order."""
    at = {name: place for place, group in enumerate(ledger.groups) for name in group.layers}
    rows = []
    for name, module in question.model.named_modules():
        kind = type(module).__name__
        over = next((block for block in state.blocks if is_inside(name, block)), None)
        if name in state.again:
            added = ledger.costs.blocks_s[name]
            keeps = conversion.RUNS_AGAIN
            rows.append(PlannedLayer(name, kind, keeps, 0.0, (None, None), "recompute", added))
        elif name in state.away:
            added, keeps = ledger.offload_s[name], conversion.OFFLOADED
            rows.append(PlannedLayer(name, kind, keeps, 0.0, (None, None), OFFLOAD, added))
        elif name in question.layers and over is not None:
            word = "runs again" if over in state.again else "is offloaded"
            keeps = f"nothing: {over} {word}"
            rows.append(PlannedLayer(name, kind, keeps, 0.0, (None, None)))
        elif name in question.layers:
            group, level = (at[name], state.levels[at[name]]) if name in at else (0, EXACT)
            if level == EXACT:
                rows.append(PlannedLayer(name, kind, "whole tensors", 0.0, (None, None)))
                continue
            settings = question.settings[level]
            choice = choose(module, *settings)
            error = ledger.groups[group].error_of(name, level)
            added = ledger.costs.layers_s.get(name, 0.0)
            keeps = choice.keeps if choice else ""
            rows.append(PlannedLayer(name, kind, keeps, error, settings, "", added))
    return tuple(rows)


def _proven(question: Question, plan: Plan, ledger: Ledger) -> Plan:
    """Return the plan with what a model converted by it really keeps and takes."""
    model, inputs, loss = question.model, question.inputs, question.loss
    choices = _choices(question, plan.layers)
    want = sample.gradients(model, inputs, loss)
    exact_peak = _peak_now(question)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(measure.RUNS):
        times[0].append(_step_s(question))
        with conversion.converted(choices):
            times[1].append(_step_s(question))
    with conversion.converted(choices):
        kept = sample.observe(model, inputs).size_bytes
        peak_bytes = _peak_now(question)
        got = sample.gradients(model, inputs, loss)
    return replace(
        plan,
        exact_bytes=ledger.kept_bytes(ledger.start),
        predicted_bytes=kept,
        exact_peak_bytes=exact_peak,
        peak_bytes=peak_bytes,
        exact_step_s=min(times[0]),
        step_s=min(times[1]),
        gradient_error=measure.relative_error(got, want) ** 0.5,
        refused=tuple(ledger.costs.refused.items()),
    )
