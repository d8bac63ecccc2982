"""Convolutions and linear layers whose products are of integers, where their formats allow it."""

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from fixedpoint_kernels._torch_private.modes import is_transformed, is_watched
from fixedpoint_kernels.watch import stock_class
from marvin.compiled import is_exported, is_traced
from marvin.integer import autograd, lone_run
from marvin.integer.formats import (
    OPTIONS,
    Options,
    Product,
    carried,
    choose,
    has_nan,
    weight_of,
    why_no_kernel,
)
from marvin.integer.strayed import look_at
from marvin.model_formats import ModuleFormats
from marvin.rounder import FLOATS, ForwardState

__all__ = [
    "CLASSES",
    "OPTIONS",
    "OTHERS",
    "IntegerConv1d",
    "IntegerConv2d",
    "IntegerLinear",
    "TransposedLinear",
    "features_of",
    "integer_class",
    "is_linear",
    "keep_out_of_compilation",
    "stock_class",
    "uncompiled",
]

_Run = TypeVar("_Run")


class IntegerConv1d(nn.Conv1d):
    """A convolution in one dimension whose products are of integers where formats allow it.

    ``marvin.integer.convert`` alone makes these layers, of ``torch.nn.Conv1d``, whose arguments and attributes they
    keep; ``marvin.integer.revert`` makes that of them again.
    """

    _integer_stock = nn.Conv1d

    def forward(self, input: Tensor) -> Tensor:
        """Return (samples, outputs, length) of (samples, channels, length).

        Raises:
            TraceError: ``torch.fx`` traces a layer that trains or multiplies codes.
        """
        return _forward(self, input)


class IntegerConv2d(nn.Conv2d):
    """A convolution in two dimensions whose products are of integers where formats allow it.

    ``marvin.integer.convert`` alone makes these layers, of ``torch.nn.Conv2d``, whose arguments and attributes they
    keep; ``marvin.integer.revert`` makes that of them again.
    """

    _integer_stock = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        """Return (samples, outputs, height, width) of (samples, channels, height, width).

        Raises:
            TraceError: ``torch.fx`` traces a layer that trains or multiplies codes.
        """
        return _forward(self, input)


class _FromFloats:
    """Goes before a linear layer in a class's bases."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as any module; where codes can be made of what comes in at once, its hooks need not round it."""
        y = lone_run.from_floats(self, args[0]) if len(args) == 1 and not kwargs else None
        return super().__call__(*args, **kwargs) if y is None else y  # pyright: ignore


class IntegerLinear(_FromFloats, nn.Linear):
    """A linear layer whose products are of integers where formats allow it.

    ``marvin.integer.convert`` alone makes these layers, of ``torch.nn.Linear``, whose arguments and attributes they
    keep; ``marvin.integer.revert`` makes that of them again.
    """

    _integer_stock = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Return (samples, ..., outputs) of (samples, ..., features).

        Raises:
            TraceError: ``torch.fx`` traces a layer that trains or multiplies codes.
        """
        return _forward(self, input)


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: IntegerConv1d,
    nn.Conv2d: IntegerConv2d,
    nn.Linear: IntegerLinear,
}
OTHERS = {
    "transformers.pytorch_utils.Conv1D": "IntegerConv1D",  # its weight is (features, outputs)
    "timm.layers.linear.Linear": "IntegerTimmLinear",  # as nn.Linear, but for TorchScript
}
"""Linear layers of other packages by name, and the names of their classes with integer products."""


class TransposedLinear(_FromFloats):
    """Goes before transformers' ``Conv1D``, a linear layer whose weight is (features, outputs), in a class's bases."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (samples, ..., outputs) of (samples, ..., features).

        Raises:
            TraceError: ``torch.fx`` traces a layer that trains or multiplies codes.
        """
        return _forward(self, x)


def integer_class(kind: type) -> type | None:
    """Return the class whose products are of integers; None where a layer of class ``kind`` has none."""
    name = OTHERS.get(f"{kind.__module__}.{kind.__qualname__}")
    return CLASSES.get(kind) if name is None else _of_others(kind, name)


def is_linear(module: nn.Module | None) -> bool:
    """Say whether a module is a converted linear layer."""
    return isinstance(module, IntegerLinear | TransposedLinear)


def features_of(layer: Any) -> tuple[int, int]:
    """Return how many outputs and inputs a converted linear layer says that it has."""
    if isinstance(layer, TransposedLinear):
        return layer.nf, layer.nx  # pyright: ignore[reportAttributeAccessIssue]: of transformers
    return layer.out_features, layer.in_features


@cache
def _of_others(kind: type, name: str) -> type:
    scope = {
        "__module__": __name__,
        "__doc__": "A linear layer; see ``marvin.integer.convert``.",
        "_integer_stock": kind,
    }
    base = IntegerLinear if issubclass(kind, nn.Linear) else TransposedLinear
    return type(name, (base, kind), scope)


def __getattr__(name: str) -> type:
    """Return the class with integer products of a layer of ``OTHERS``, of which a pickle has the name."""
    for path, own in OTHERS.items():
        if own == name:
            return _of_others(pkgutil.resolve_name(":".join(path.rsplit(".", 1))), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_DIMS = {IntegerConv1d: 3, IntegerConv2d: 4}


def _forward(module: Any, x: Tensor) -> Tensor:
    """Multiply codes where the formats of now allow it, else as the layer that was."""
    kind = getattr(type(module), "_integer_stock", None)
    if kind is None:  # reverted, but others keep the method of before, as accelerate does
        return type(module).forward(module, x)
    stock = kind.forward
    formats, state = carried(module)
    if state is not None:
        return uncompiled(_train)(module, x, stock, formats, state)
    product = _chosen(module, x, formats)
    if product is None:
        return stock(module, x)
    options = getattr(module, OPTIONS)
    layer = autograd.Layer(product, options)
    if not is_traced():
        look_at(module)
        y = _alone(module, x, product, options, None)
        if y is not None:
            return y
        if not is_watched():
            return autograd.multiply(x, weight_of(module), module.bias, layer)
    y = autograd.multiply_traceably(x, weight_of(module), module.bias, layer)
    if is_exported() or not lone_run.wants_gradient(module, x):
        return y
    floats = stock(module, x)  # codes have no gradients
    return y.detach() + (floats - floats.detach())


def _train(
    module: Any,
    x: Tensor,
    stock: Callable[[nn.Module, Tensor], Tensor],
    formats: ModuleFormats,
    state: ForwardState,
) -> Tensor:
    product, noise = _chosen(module, x, formats), None
    if product is None:
        return stock(module, x)
    if not module.training:
        look_at(module)
    elif torch.is_grad_enabled():
        noise = autograd.Noise(*state.noise_of_gradients())
    options = getattr(module, OPTIONS)
    y = _alone(module, x, product, options, noise)
    if y is not None:
        return y
    layer = autograd.Layer(product, options, noise)
    return autograd.multiply(x, weight_of(module), module.bias, layer)


def _alone(
    module: nn.Module, x: Tensor, product: Product, options: Options, noise: autograd.Noise | None
) -> Tensor | None:
    """Return the output of a layer that can be one operation; ``noise``: None where nothing goes backward."""
    if options != Options() or (noise is None and lone_run.wants_gradient(module, x)):
        return None
    return lone_run.multiply(module, x, product, noise or autograd.Noise(0, 0, 0))


def _untraceable() -> TraceError:
    return TraceError(
        "torch.fx must trace a model without integer products, got a converted one: call "
        "marvin.integer.revert(model) first, and marvin.integer.convert(traced) afterwards"
    )


def _chosen(module: nn.Module, x: Tensor, formats: ModuleFormats) -> Product | None:
    product = choose(module, formats)
    if isinstance(x, fx.Proxy) and not isinstance(product, str):
        raise _untraceable()
    if not isinstance(x, Tensor):
        return None  # torch says what a layer takes
    dims = next((d for kind, d in _DIMS.items() if isinstance(module, kind)), max(x.dim(), 2))
    if isinstance(product, str) or x.dtype not in FLOATS or x.dim() != dims or is_transformed():
        return None
    if is_exported() and torch.onnx.is_in_onnx_export():
        return None  # ONNX does not have these operators
    if not is_traced() and not len(x):
        return None  # products of no sample are none
    if torch.compiler.is_compiling() or getattr(module, OPTIONS).execution == "simulation":
        return product
    return None if why_no_kernel(x.device, product.groups) or has_nan(x) else product


def keep_out_of_compilation() -> None:
    """Make what keeps training out of torch.compile, which takes a second the first time; and count products."""
    uncompiled(_train)
    import_module("fixedpoint_kernels.products.flops")  # costs nothing more now


def uncompiled(run: _Run) -> _Run:
    """Return a function that torch.compile leaves as it is: it cannot look into the kernels."""
    if run not in _eager:
        _eager[run] = torch.compiler.disable(run)
    return _eager[run]


_eager: dict[object, Any] = {}
