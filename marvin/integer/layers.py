"""Convolutions and linear layers whose products are of integers, where their formats allow it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from marvin.activations import FLOATS
from marvin.integer import autograd
from marvin.integer.formats import Options, carried, choose, why_no_kernel

__all__ = [
    "CLASSES",
    "OPTIONS",
    "IntegerConv1d",
    "IntegerConv2d",
    "IntegerLinear",
    "keep_out_of_compilation",
]

OPTIONS = "integer_options"
"""Name of the attribute in which a converted module has its ``Options``."""


class IntegerConv1d(nn.Conv1d):
    """A convolution in one dimension; see ``marvin.integer.convert``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (samples, outputs, length) of (samples, channels, length)."""
        return _forward(self, input, super().forward)


class IntegerConv2d(nn.Conv2d):
    """A convolution in two dimensions; see ``marvin.integer.convert``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (samples, outputs, height, width) of (samples, channels, height, width)."""
        return _forward(self, input, super().forward)


class IntegerLinear(nn.Linear):
    """A linear layer; see ``marvin.integer.convert``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (samples, ..., outputs) of (samples, ..., features)."""
        return _forward(self, input, super().forward)


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: IntegerConv1d,
    nn.Conv2d: IntegerConv2d,
    nn.Linear: IntegerLinear,
}
_DIMS = {IntegerConv1d: 3, IntegerConv2d: 4}


def _forward(module: Any, x: Tensor, stock: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiply codes where the formats of now allow it, else as the layer that was."""
    options: Options = getattr(module, OPTIONS)
    formats, state = carried(module)
    product = choose(module, formats)
    dims = next((d for kind, d in _DIMS.items() if isinstance(module, kind)), max(x.dim(), 2))
    if isinstance(product, str) or x.dtype not in FLOATS or x.dim() != dims:
        return stock(x)
    if options.execution == "integer" and why_no_kernel(x.device):
        return stock(x)
    if state is None:  # frozen
        layer = autograd.Layer(product, options)
        return autograd.multiply_traceably(x, module.weight, module.bias, layer)
    noise = None
    if module.training and torch.is_grad_enabled():
        noise = autograd.Noise(*state.noise_of_gradients())
    layer = autograd.Layer(product, options, noise)
    keep_out_of_compilation()
    return _multiply["eager"](x, module.weight, module.bias, layer)


def keep_out_of_compilation() -> None:
    """Keep ``multiply`` out of torch.compile, which cannot look into the kernels."""
    if "eager" not in _multiply:  # takes a second the first time
        _multiply["eager"] = torch.compiler.disable(autograd.multiply)


_multiply: dict[str, Any] = {}
