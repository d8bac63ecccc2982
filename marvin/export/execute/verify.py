"""The proof: the integer reference beside the simulation, layer by layer."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.undo import all_or_nothing
from marvin.export.execute import integer
from marvin.export.execute.simulate import simulate
from marvin.export.graph.nodes import (
    Affine,
    AveragePool,
    Network,
    Operation,
    Round,
    Value,
    Weighted,
    check_network,
)
from marvin.export.graph.transformers import Norm
from marvin.export.passes.fold import absorbed
from marvin.refused import check_model

__all__ = ["Difference", "Row", "compare", "evaluating", "verify"]

_FLOAT32_BITS = 24


@dataclass(frozen=True)
class Row:
    """One operation.

    Args:
        name: Of the operation.
        kind: What it is, such as ``"conv"``.
        fmt: Format of its weights, of its scale, or of what it rounds to; None of others.
        terms: K, the products summed for one code.
        bits: Length of a word that holds every code.
        is_bounded: ``K * 2**(WL_w + WL_a - 2) <= 2**24``: float32 computes this layer without
            error whatever the weights and the activations; None where there are no products.
        is_exact: Float32 computes it without error with these weights, whatever the activations;
            or, of a batch normalisation, the rounding that follows.
        different: Codes of the sample in which the float32 simulation of the whole network
            up to here differs from the integer reference.
        elements: Codes of the sample.
    """

    name: str
    kind: str
    fmt: FixedPoint | None
    terms: int
    bits: int
    is_bounded: bool | None
    is_exact: bool
    different: int
    elements: int

    @property
    def verdict(self) -> str:
        """What is known of the operation, in words."""
        if self.different:
            return f"float32 differs in {self.different} of {self.elements}"
        return "exact" if self.is_exact else f"equal on these {self.elements}"


@dataclass(frozen=True)
class Difference:
    """How a layer of a model and the exported network differ on a sample.

    Args:
        name: Of the module.
        different: Values that are not equal.
        elements: Values compared.
        largest: The largest difference, in steps of the layer's format.
    """

    name: str
    different: int
    elements: int
    largest: float


def verify(network: Network, sample: Tensor) -> list[Row]:
    """Compare the integer reference with the float32 simulation of the same network.

    Args:
        network: From ``describe``.
        sample: What the network takes, shape ``(n, *network.input.shape)``, float32.

    Returns:
        One row an operation, in the order of computation.

    Raises:
        ExportError: ``sample`` has another shape, or holds a NaN.
        TypeError: ``network`` is not a ``Network``.
    """
    check_network(network)
    codes = integer.run_all(network, sample)
    simulated = simulate(network, sample)
    rows = []
    rounded = absorbed(network)
    for op in network.operations[1:]:
        name = rounded.get(op.name, op.name)
        want = _numbers(codes[name], network.values[name].fl)
        got = simulated[name].double().numpy()
        row = _row(network, op, int((want != got).sum()), want.size)
        rows.append(replace(row, is_exact=True) if op.name in rounded else row)
    return rows


def compare(network: Network, model: nn.Module, sample: Tensor) -> list[Difference]:
    """Compare the integer reference with the trained model, in eval mode, module by module.

    They differ where batch normalisation became an affine map in fixed point, where a float32
    sum was rounded, and in all that follows.

    Args:
        network: From ``describe``.
        model: What it was made of. It is in eval mode meanwhile.
        sample: What both take, shape ``(n, *network.input.shape)``, float32.

    Returns:
        One row for each module without others inside whose output is a value of the network, in the order
        of calls.

    Raises:
        ExportError: ``sample`` has another shape, or holds a NaN.
        TypeError: ``network`` is not a ``Network``, or ``model`` no module.
    """
    check_network(network)
    check_model(model, "compare(network, model, samples)")
    codes = integer.run_all(network, sample)
    seen: dict[str, Tensor] = {}
    with all_or_nothing(model.modules()), evaluating(model), torch.no_grad():
        handles = [
            module.register_forward_hook(partial(_keep, seen, name))
            for name, module in model.named_modules()
            if not list(module.children())
        ]
        model(sample)
        for handle in handles:
            handle.remove()
    rows = []
    for name, got in seen.items():
        names = [n for n in (f"{name}.out", f"{name}.last", name) if n in codes]
        # of a layer over positions, the name alone may be that of another order
        value = next((n for n in names if network.values[n].shape == got.shape[1:]), None)
        if value is not None:
            fl = network.values[value].fl
            gap = np.abs(_numbers(codes[value], fl) - got.numpy()) * 2.0**fl
            rows.append(Difference(name, int((gap != 0).sum()), gap.size, float(gap.max())))
    return rows


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and back in its own after."""
    modes: Mapping[nn.Module, bool] = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _keep(
    seen: dict[str, Tensor], name: str, _module: nn.Module, _inputs: object, y: Tensor
) -> None:
    seen.setdefault(name, y.detach().double())  # of several calls, the first has the name


def _numbers(codes: Any, fl: int) -> Any:
    """Return what codes are worth, as float64: nearest where they have more than 53 bits."""
    return codes.astype(np.float64) * 2.0**-fl


def _row(network: Network, op: Operation, different: int, elements: int) -> Row:
    value = network.values[op.name]
    fmt, is_bounded = None, None
    if isinstance(op, Weighted):
        fmt = op.weight_fmt
        is_bounded = _is_bounded(network.values[op.inputs[0]], op.word, value.terms)
    elif isinstance(op, Affine):
        fmt = op.scale_fmt
    elif isinstance(op, Norm):
        fmt = op.gain_fmt
    elif isinstance(op, Round | AveragePool):
        fmt = op.fmt
    is_exact = value.is_exact(_FLOAT32_BITS)
    if isinstance(op, Round) and op.inputs[0] not in network.values:
        is_exact = True  # what comes in is float32
    kind = type(op).__name__.lower()
    return Row(
        op.name, kind, fmt, value.terms, value.bits, is_bounded, is_exact, different, elements
    )


def _is_bounded(x: Value, weight: FixedPoint, terms: int) -> bool:
    return terms * 2 ** (weight.wl + x.bits - 2) <= 2**_FLOAT32_BITS
