"""How far exported numbers may be from the model's: as far as their words explain, no farther."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from marvin.export.errors import ExportError
from marvin.export.follow import Step
from marvin.export.network import Affine, Network, Value, Weighted
from marvin.export.norm import exact_norm

__all__ = ["check_numbers"]

_FLOAT32 = 2.0**-24


def check_numbers(model: nn.Module, network: Network, steps: Sequence[Step]) -> None:
    """Compare weights, biases, and scales and offsets of batch normalisation with the model's.

    Args:
        model: What was exported.
        network: As what.
        steps: The calls of the model.

    Raises:
        ExportError: A number is farther from the model's than rounding it explains; named, with
            both distances.
    """
    kept = {op.name for op in network.operations}
    for step in steps:
        for name in step.operations:
            op = network.operation(name) if name in kept else None
            if isinstance(op, Weighted):
                _check_layer(op, model.get_submodule(step.module), network.values[op.inputs[0]])
            elif isinstance(op, Affine):
                _check_norm(op, model.get_submodule(step.module), network.values[op.inputs[0]])


def _check_layer(op: Weighted, module: Any, x: Value) -> None:
    weight = op.weight.double() * op.weight_fmt.lsb
    _check(f"{op.name}.weight", weight, module.weight, torch.zeros(()))
    if op.bias is not None:
        products = _step(x.fl + op.weight_fmt.fl) * _powers(op.twos)
        half = torch.clamp(products, min=op.bias_fmt.lsb) / 2
        _check(f"{op.name}.bias", op.bias.double() * op.bias_fmt.lsb, module.bias, half)


def _check_norm(op: Affine, module: Any, x: Value) -> None:
    scale, offset = (n.cpu() for n in exact_norm(module))
    zeros = (op.scale & -op.scale).clamp(min=1).double()  # of bits that may have been cut off
    cut = zeros * op.scale_fmt.lsb
    is_zero = op.scale == 0  # too short for what rounds it: the report tells the accuracy
    most = torch.where(is_zero, op.scale_fmt.max_code * op.scale_fmt.lsb, cut)
    _check(f"{op.name}.scale", op.scale.double() * op.scale_fmt.lsb, scale, most)
    sums = _step(x.fl) * _powers([x.channel(i).twos for i in range(len(scale))])
    steps = torch.clamp(sums, min=_step(op.offset_fmt.fl - op.scale_fmt.fl))
    most = (scale.abs() + cut) * steps + offset.abs() * _FLOAT32 + op.offset_fmt.lsb
    _check(f"{op.name}.offset", op.offset.double() * op.offset_fmt.lsb, offset, most)


def _check(name: str, got: Tensor, want: Tensor, most: Tensor) -> None:
    gap = (got - want.detach().cpu().double()).abs()
    wrong = gap > most
    if wrong.any():
        raise ExportError(
            f"{name}: {int(wrong.sum())} of {gap.numel()} exported numbers are up to "
            f"{float(gap[wrong].max()):.3g} from the model's, rounding explains "
            f"{float(most.max()):.3g}"
        )


def _step(fl: int) -> float:
    return 2.0**-fl


def _powers(exponents: Sequence[int]) -> Tensor:
    return 2.0 ** torch.tensor(exponents, dtype=torch.float64)
