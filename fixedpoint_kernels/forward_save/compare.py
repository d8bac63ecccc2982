"""A plan beside what ``torch.compile`` makes within the same bytes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from fixedpoint_kernels.forward_save import compiling, conversion, measure, sample
from fixedpoint_kernels.forward_save.planned import Candidate, Plan

__all__ = ["Sample", "compared"]

EXACT = "the model as it is"
DRAWS = "error not measured, for compiled code draws other random numbers"


class Sample(NamedTuple):
    """A model in training mode, not converted, and what to call it with."""

    model: nn.Module
    inputs: sample.Given
    loss: sample.Loss | None

    def gradients(self, model: nn.Module) -> measure.Gradients:
        """Return the gradients of a model in the place of this one."""
        return sample.gradients(model, self.inputs, self.loss)

    def kept_bytes(self, model: nn.Module) -> int:
        """Return what a compiled model keeps."""
        self.gradients(model)  # compiles both passes
        return sample.kept_bytes(model, self.inputs)


class _Entry(NamedTuple):
    """One to compare: ``choices`` are applied to the model while ``made`` runs."""

    choices: conversion.Choices
    made: nn.Module
    row: Candidate


def compared(
    given: Sample, exact: Plan, plan: Plan | None, choices: conversion.Choices, most: int
) -> Plan:
    """Return the candidate with the least time to the same loss, and what was measured of each.

    Args:
        given: The model and the sample.
        exact: A plan that changes nothing.
        plan: What the other choices gave; None: they cannot meet the budget.
        choices: What becomes of layers by that plan.
        most: Bytes to keep.

    Returns:
        A plan that has candidates; if all are left out, nothing was found.
    """
    model = given.model
    entries = [_Entry({}, model, Candidate(EXACT, None, exact.exact_bytes))]
    if choices and plan is not None:
        row = Candidate("the plan", None, plan.predicted_bytes, 0.0, plan.gradient_error)
        entries.append(_Entry(choices, model, row))

    def budgeted() -> compiling.Within:
        return compiling.largest_within(model, given.kept_bytes, most)

    def planned() -> compiling.Within:
        made = compiling.Compiled(model, 1.0)
        return compiling.Within(made, 1.0, given.kept_bytes(made))

    entries.append(_compiled(f"{EXACT}, compiled", model, {}, budgeted, most))
    if choices:
        entries.append(_compiled("the plan, compiled", model, choices, planned, most))
    rows = _measured(given, entries, 0.0 if plan is None else plan.gradient_error)
    if exact.exact_bytes > most:
        rows = (replace(rows[0], left_out=f"more than {most:,}"), *rows[1:])
    found = replace(plan or exact, exact_step_s=rows[0].step_s, candidates=rows)
    fits = [place for place, row in enumerate(rows) if not row.left_out]
    if not fits:
        return found
    best = min(fits, key=lambda place: rows[place].cost)
    taken = rows[best]
    if taken.memory_budget is None:
        return replace(found, step_s=taken.step_s)
    return replace(
        found,
        layers=found.layers if entries[best].choices else exact.layers,
        predicted_bytes=taken.kept_bytes,
        peak_bytes=0,
        step_s=taken.step_s,
        gradient_error=taken.gradient_error,
        memory_budget=taken.memory_budget,
    )


def _compiled(
    name: str,
    model: nn.Module,
    choices: conversion.Choices,
    make: Callable[[], compiling.Within],
    most: int,
) -> _Entry:
    """Return what was compiled, or why it was left out."""
    try:
        with conversion.converted(choices):
            found = make()
    except Exception as error:  # whatever a compiler raises: the plan goes on without
        row = Candidate(name, None, left_out=f"it does not compile: {_words(error)}")
        return _Entry(choices, model, row)
    row = Candidate(name, found.memory_budget, found.kept_bytes)
    if found.made is None or found.kept_bytes > most:
        row = replace(row, left_out=f"more than {most:,}")
    else:
        row = replace(row, name=f"{name} with memory budget {found.memory_budget:.4g}")
    return _Entry(choices, found.made or model, row)


def _words(error: Exception) -> str:
    """Return an error in a line; Dynamo wraps what a backend raises."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"


def _measured(given: Sample, entries: list[_Entry], plan_error: float) -> tuple[Candidate, ...]:
    """Return the entries' rows, with times and errors."""
    model, inputs, _ = given
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    times: list[list[float]] = [[] for _ in entries]
    for _ in range(measure.RUNS):
        for entry, own in zip(entries, times, strict=True):
            if not entry.row.left_out:
                with conversion.converted(entry.choices):
                    run = partial(given.gradients, entry.made)
                    run()  # compiled code may be made anew
                    own.append(measure.seconds(run, device))
    draws, want, rows = sample.draws_random_numbers(model, inputs), given.gradients(model), []
    for (choices, made, row), own in zip(entries, times, strict=True):
        step_s, error, note = min(own, default=0.0), row.gradient_error, row.note
        if row.memory_budget is not None and not row.left_out:
            if draws:
                error, note = plan_error if choices else 0.0, DRAWS
            else:
                with conversion.converted(choices):
                    error = measure.relative_error(given.gradients(made), want) ** 0.5
        rows.append(replace(row, step_s=step_s, gradient_error=error, note=note))
    return tuple(rows)
