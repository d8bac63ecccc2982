"""Activations with the signatures of ``torch.nn.functional``, and ``bits`` and ``weight``.

There is one for each entry of the table (``fixedpoint_kernels.few_bit.activations``), under its
name: ``functional.gelu(x, approximate="tanh", bits=3, weight="normal")``.

Each returns torch's own values, bit for bit, and keeps ``bits`` bits an element for backward. Of
Sigmoid and SiLU on a CPU the last bit may differ, as it does between torch's numbers of threads; Tanh is
within one unit of the last place of exact, and the 0 of Softshrink has no sign. On a GPU, where value and code come from one pass, values may be 2 units in the last place off. The
stepwise ones (ReLU and the like) need 1 bit, whatever ``bits`` says, and their gradients are exact.
``weight`` is where the table is accurate: ``"uniform"`` on [-10, 10], or ``"normal"``, best after
normalisation. Parameters other than torch's defaults are solved for at the first call.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.compiling import compiled_as_constant, constants
from fixedpoint_kernels.few_bit.activations import ENTRIES, Entry, Parameters
from fixedpoint_kernels.few_bit.autograd import apply
from fixedpoint_kernels.few_bit.fused import Fused, fused_of
from fixedpoint_kernels.few_bit.integrals import Function, Weight
from fixedpoint_kernels.few_bit.named import function_of, table_of
from fixedpoint_kernels.few_bit.operators import register

_NEEDED = inspect.Parameter.empty
_HALVES = torch.bfloat16, torch.float16


def make(entry: Entry) -> Callable[..., Tensor]:
    """Return the function of an entry of the table."""
    name, defaults = entry.name, entry.defaults
    options = tuple((p.name, p.default) for p in entry.signature.parameters.values())
    is_optional = all(default is not _NEEDED for _, default in options)

    def function(
        input: Tensor,
        *arguments: object,
        bits: int = entry.bits,
        weight: Weight = "uniform",
        **named: object,
    ) -> Tensor:
        if is_optional and not arguments and not named:
            return run(name, input, defaults, bits, weight)
        parameters = _parameters(name, options, arguments, named)
        return run(name, input, parameters, bits, weight)

    how = "an exact gradient from 1 bit" if entry.exact else "a few-bit gradient"
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"``torch.nn.functional.{name}`` with {how}."
    tensor = inspect.Parameter("input", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    function.__signature__ = with_bits(entry, [tensor], Tensor)  # pyright: ignore[reportFunctionMemberAccess]
    return function


def with_bits(
    entry: Entry, first: Iterable[inspect.Parameter], returns: type[Tensor] | None
) -> inspect.Signature:
    """Return the signature of torch's, with ``bits`` and ``weight``."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    bits = inspect.Parameter("bits", keyword, default=entry.bits, annotation=int)
    weight = inspect.Parameter("weight", keyword, default="uniform", annotation=Weight)
    parameters = [*first, *entry.signature.parameters.values(), bits, weight]
    return inspect.Signature(parameters, return_annotation=returns)


def _parameters(
    name: str,
    options: tuple[tuple[str, Any], ...],
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Parameters:
    """Return the values of the parameters in a call, from torch's names and defaults."""
    rest = options[len(arguments) :]
    values = [*arguments, *[named.get(option, default) for option, default in rest]]
    is_known = len(named) == sum([option in named for option, _ in rest])
    if not is_known or len(values) != len(options) or _NEEDED in values:
        takes = ", ".join(option for option, _ in options) or "no parameter"
        got = ", ".join([*map(repr, arguments), *(f"{n}={v!r}" for n, v in named.items())])
        raise TypeError(f"{name} takes the input and {takes}, got {got or 'the input alone'}")
    if options[-1][0] == "inplace":
        refuse_inplace(values.pop())
    return numbers(values)


def numbers(values: Iterable[Any]) -> Parameters:
    """Return parameters as tables are looked up by them."""
    return tuple([value if isinstance(value, str) else float(value) for value in values])


def refuse_inplace(inplace: bool) -> None:
    """Raise if an activation was asked to overwrite its input.

    Raises:
        ValueError: ``inplace`` is true.
    """
    if inplace:
        raise ValueError("few-bit activations work out of place, got inplace=True")


def run(name: str, x: Tensor, parameters: Parameters, bits: int, weight: Weight) -> Tensor:
    """Return an activation's value, which keeps ``bits`` bits an element for backward.

    Raises:
        TypeError: ``x`` is no tensor, or of integers that torch's own does not take.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor, got {type(x).__name__}: write torch.as_tensor(x)")
    find, compared = _remembered, parameters
    if torch.compiler.is_compiling():
        find, compared = _found, constants(parameters)
        parameters, (bits,) = compared, constants([bits])
        (weight,) = constants([weight])  # pyright: ignore[reportAssignmentType]  a literal is to it any text
    if x.dtype in _HALVES and ENTRIES[name].rounds_parameters:
        compared = _rounded(x.dtype, *parameters)
    function, key, fused = find(name, parameters, compared, bits, weight)
    if x.is_floating_point():
        return apply(function, x, key, fused)
    try:
        return apply(function, x, key, fused)
    except NotImplementedError as error:
        raise TypeError(
            f"{name} takes a floating tensor, got {x.dtype}: write x.float()"
        ) from error


@compiled_as_constant
def _rounded(dtype: torch.dtype, *parameters: float | str) -> Parameters:
    """Return numbers rounded to ``dtype``, by way of float32 as torch does."""
    info = torch.finfo(dtype)
    values = [float(np.float32(value)) for value in parameters]
    octaves = [2.0 ** (math.frexp(value)[1] - 1) for value in values]
    steps = [info.eps * max(octave, info.tiny) for octave in octaves]
    return tuple([float(np.rint(v / step)) * step for v, step in zip(values, steps, strict=True)])


def _found(
    name: str, parameters: Parameters, compared: Parameters, bits: int, weight: Weight
) -> tuple[Function, str, Fused | None]:
    """Return what ``apply`` wants; ``compared`` are the parameters as the kernels compare with them."""
    key = table_key(name, bits, weight, *compared)
    return function_of(name, parameters), key, fused_of(name, compared)


_remembered = lru_cache(maxsize=256, typed=True)(_found)  # True is no 1


@compiled_as_constant
def table_key(name: str, bits: int, weight: Weight, *parameters: float | str) -> str:
    """Return the key of an activation's table, which the operators know from then on."""
    return register(table_of(name, parameters, bits, weight))


FUNCTIONS = {name: make(entry) for name, entry in ENTRIES.items()}
globals().update(FUNCTIONS)


def __getattr__(name: str) -> Callable[..., Tensor]:  # for type checkers: the names are set above
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
