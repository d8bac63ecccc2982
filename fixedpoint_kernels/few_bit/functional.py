"""Activations with the signatures of ``torch.nn.functional``, and ``bits`` and ``weight``.

Each returns torch's own values, bit for bit, and keeps ``bits`` bits an element for backward. On a
GPU, where value and code come from one pass, values may be 2 units in the last place off. The
stepwise ones (ReLU and the like) need 1 bit, whatever ``bits`` says, and their gradients are exact.
``weight`` is where the table is accurate: ``"uniform"`` on [-10, 10], or ``"normal"``, best after
normalisation. Parameters other than torch's defaults are solved for at the first call.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private import compiled_as_constant
from fixedpoint_kernels.few_bit.autograd import apply
from fixedpoint_kernels.few_bit.fused import Fused, fused_of
from fixedpoint_kernels.few_bit.integrals import Function, Weight
from fixedpoint_kernels.few_bit.named import function_of, table_of
from fixedpoint_kernels.few_bit.operators import register


def celu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.celu`` with a few-bit gradient."""
    refuse_inplace(inplace)
    return _run("celu", input, (float(alpha),), bits, weight)


def elu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.elu`` with a few-bit gradient."""
    refuse_inplace(inplace)
    return _run("elu", input, (float(alpha),), bits, weight)


def gelu(
    input: Tensor,
    *,
    approximate: str = "none",
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.gelu`` with a few-bit gradient."""
    return _run("gelu", input, (approximate,), bits, weight)


def hardshrink(
    input: Tensor,
    lambd: float = 0.5,
    *,
    bits: int = 1,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.hardshrink`` with an exact gradient from 1 bit."""
    return _run("hardshrink", input, (float(lambd),), bits, weight)


def hardsigmoid(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int = 1,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.hardsigmoid`` with an exact gradient from 1 bit."""
    refuse_inplace(inplace)
    return _run("hardsigmoid", input, (), bits, weight)


def hardswish(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.hardswish`` with a few-bit gradient."""
    refuse_inplace(inplace)
    return _run("hardswish", input, (), bits, weight)


def hardtanh(
    input: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
    *,
    bits: int = 1,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.hardtanh`` with an exact gradient from 1 bit."""
    refuse_inplace(inplace)
    return _run("hardtanh", input, (float(min_val), float(max_val)), bits, weight)


def leaky_relu(
    input: Tensor,
    negative_slope: float = 0.01,
    inplace: bool = False,
    *,
    bits: int = 1,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.leaky_relu`` with an exact gradient from 1 bit."""
    refuse_inplace(inplace)
    return _run("leaky_relu", input, (float(negative_slope),), bits, weight)


def logsigmoid(
    input: Tensor,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.logsigmoid`` with a few-bit gradient."""
    return _run("logsigmoid", input, (), bits, weight)


def mish(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.mish`` with a few-bit gradient."""
    refuse_inplace(inplace)
    return _run("mish", input, (), bits, weight)


def relu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int = 1,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.relu`` with an exact gradient from 1 bit."""
    refuse_inplace(inplace)
    return _run("relu", input, (), bits, weight)


def relu6(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int = 1,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.relu6`` with an exact gradient from 1 bit."""
    refuse_inplace(inplace)
    return _run("relu6", input, (), bits, weight)


def selu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.selu`` with a few-bit gradient."""
    refuse_inplace(inplace)
    return _run("selu", input, (), bits, weight)


def sigmoid(
    input: Tensor,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.sigmoid`` with a few-bit gradient."""
    return _run("sigmoid", input, (), bits, weight)


def silu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.silu`` with a few-bit gradient."""
    refuse_inplace(inplace)
    return _run("silu", input, (), bits, weight)


def softplus(
    input: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.softplus`` with a few-bit gradient."""
    return _run("softplus", input, (float(beta), float(threshold)), bits, weight)


def softshrink(
    input: Tensor,
    lambd: float = 0.5,
    *,
    bits: int = 1,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.softshrink`` with an exact gradient from 1 bit."""
    return _run("softshrink", input, (float(lambd),), bits, weight)


def softsign(
    input: Tensor,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.softsign`` with a few-bit gradient."""
    return _run("softsign", input, (), bits, weight)


def tanh(
    input: Tensor,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.tanh`` with a few-bit gradient."""
    return _run("tanh", input, (), bits, weight)


def tanhshrink(
    input: Tensor,
    *,
    bits: int = 3,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.tanhshrink`` with a few-bit gradient."""
    return _run("tanhshrink", input, (), bits, weight)


def threshold(
    input: Tensor,
    threshold: float,
    value: float,
    inplace: bool = False,
    *,
    bits: int = 1,
    weight: Weight = "uniform",
) -> Tensor:
    """``torch.nn.functional.threshold`` with an exact gradient from 1 bit."""
    refuse_inplace(inplace)
    return _run("threshold", input, (float(threshold), float(value)), bits, weight)


def refuse_inplace(inplace: bool) -> None:
    """Raise if an activation was asked to overwrite its input."""
    if inplace:
        raise ValueError("few-bit activations work out of place, got inplace=True")


def _run(name: str, x: Tensor, parameters: tuple[Any, ...], bits: int, weight: Weight) -> Tensor:
    find = _found if torch.compiler.is_compiling() else _remembered
    function, key, fused = find(name, parameters, bits, weight)
    return apply(function, x, key, fused)


def _found(
    name: str, parameters: tuple[Any, ...], bits: int, weight: Weight
) -> tuple[Function, str, Fused | None]:
    """Return what ``apply`` wants."""
    key = table_key(name, bits, weight, *parameters)
    return function_of(name, parameters), key, fused_of(name, parameters)


_remembered = lru_cache(maxsize=256)(_found)


def table_key(name: str, bits: int, weight: Weight, *parameters: Any) -> str:
    """Return the key of an activation's table, which the operators know from then on."""
    return register(table_of(name, parameters, bits, weight))


compiled_as_constant(table_key)
