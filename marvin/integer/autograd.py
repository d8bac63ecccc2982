"""The three products of a layer, and the rounding of the gradient between them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv1d_input, conv1d_weight, conv2d_input, conv2d_weight

from fixedpoint_kernels import FixedPoint, decode, encode, products
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels.memory import check_untransformed
from fixedpoint_kernels.once import once_differentiable
from fixedpoint_kernels.products.reference import powers_of_two
from fixedpoint_kernels.products.shapes import NOT_FINITE
from fixedpoint_kernels.strides import lies_last
from marvin.freezing import nearest_codes
from marvin.integer.formats import Options, Product

__all__ = ["Layer", "Noise", "lies_as", "multiply", "multiply_traceably", "once"]

once = partial(
    once_differentiable,
    message="products of integers have no second derivative: where gradients are differentiated "
    "again, use marvin.integer.revert(model)",
)
"""For backward passes on integer units."""
_EXACT = 2**24  # integers up to there are float32
_WRITTEN = torch.float32, torch.bfloat16  # by the kernels


class Noise(NamedTuple):
    """Which noise rounds a gradient."""

    seed: int
    stream: int
    second: int  # stream of another rounding, where channels of the weight have shifts


@dataclass(frozen=True)
class Layer:
    """How a layer multiplies in one call.

    Args:
        product: Formats and window.
        options: How products are computed.
        noise: Of the gradient's rounding; None: gradients in float.
    """

    product: Product
    options: Options
    noise: Noise | None = None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
    """Return a layer's output, under autograd.

    Args:
        x: Values of the input's format, (samples, channels, ...) or (samples, ..., features),
            float32, bfloat16 or float16; others count as the nearest value of the format.
        weight: Values of the weight's format; so too.
        bias: Of each output, or None.
        layer: What else there is to know.

    Returns:
        The integer sums, rounded to float32 once, times a power of two, plus the bias; in the
        dtype of ``x``, or in that of autocast.

    Raises:
        TypeError: A tensor is inside of ``torch.func``.
    """
    check_untransformed(x=x, weight=weight, bias=bias)
    dtype = _dtype_of_result(x)
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    ):
        return _Multiply.apply(x, weight, bias, layer, dtype)  # pyright: ignore[reportReturnType]
    codes, own = _codes(x, layer.product.inputs), _codes_of_weight(weight, layer.product)
    return _forward(codes, own, bias, layer, dtype)


def multiply_traceably(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
    """Return what ``multiply`` does without gradients, in operators that can be traced."""
    product = layer.product
    with warnings.catch_warnings():  # that formats become constants of the trace, as they shall
        if torch.jit.is_tracing():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
        scaled = weight * _of_shifts(product, weight) if product.shifts else weight
        codes, own = _traceable(x, product.inputs), _traceable(scaled, product.weight_fmt)
        return _forward(codes, own, bias, layer, _dtype_of_result(x))


class _Multiply(torch.autograd.Function):
    """Keeps codes for backward: a byte an element."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, dtype: torch.dtype
    ) -> Tensor:
        codes, own = _codes(x, layer.product.inputs), _codes_of_weight(weight, layer.product)
        ctx.save_for_backward(codes, own)
        ctx.layer, ctx.dtypes = layer, [getattr(t, "dtype", None) for t in (x, weight, bias)]
        return _forward(codes, own, bias, layer, dtype).data  # no view: it may be changed in place

    @staticmethod
    @left_uncompiled
    @once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        codes, own = ctx.saved_tensors
        found = _Gradients(grad, codes, own, ctx.layer)
        ways = found.of_input, found.of_weight, found.of_bias
        needed = zip(ctx.needs_input_grad, ways, ctx.dtypes, strict=False)
        return *(way().to(dtype) if needs else None for needs, way, dtype in needed), None, None


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, dtype: torch.dtype
) -> Tensor:
    """Multiply codes."""
    product, kind = layer.product, dtype if dtype in _WRITTEN else torch.float32
    if layer.options.execution == "simulation":
        values = decode(weight, product.weight_fmt)
        values = values / _of_shifts(product, values) if product.shifts else values
        y = _convolved(decode(x, product.inputs), values, product)
    elif product.shifts and product.is_transposed:
        y = _by_digits(x, weight, product)
    else:
        fl = product.inputs.fl + product.weight_fmt.fl
        exponents = -fl - _integers(product.shifts, x) if product.shifts else -fl
        run = products.linear if product.window is None else products.convolve
        y = run(x, weight, exponents=exponents, dtype=kind, **_window(product))
    y = y.to(dtype) if product.window is None else lies_as(y, x).to(dtype)
    if bias is None:
        return y
    return y + bias.to(dtype).view(-1, *[1] * (y.dim() - 2 if product.window else 0))


def _by_digits(x: Tensor, weight: Tensor, product: Product) -> Tensor:
    """Return the sums of a linear layer whose inputs have fractional lengths of their own, rounded to float32 once.

    All weights as integers of the longest fractional length have more than 8 bits: they are cut into signed digits
    of 8, the least first, each an output of its own.
    """
    most, fmt = max(product.shifts), product.inputs
    count = -((product.weight_fmt.wl + most) // -8)
    kind = torch.int16 if count <= 2 else torch.int32
    whole = weight.to(kind) << (most - _integers(product.shifts, x)).to(kind)
    digits = []
    for _ in range(count):
        digits.append(whole.to(torch.int8))  # the bits that are left
        whole = (whole - digits[-1]) >> 8
    own, fl = torch.cat(digits), fmt.fl + product.weight_fmt.fl + most
    if count == 2 and 128 * max(-fmt.min_code, fmt.max_code) * x.shape[-1] <= _EXACT:
        places = torch.tensor([0, 8], dtype=torch.int32, device=x.device)
        y = products.linear(x, own, exponents=places.repeat_interleave(len(weight)) - fl)
        low, high = y.chunk(2, -1)
        return low + high  # both exact
    total, *rest = reversed(products.linear(x, own, dtype=torch.int64).chunk(count, -1))
    for lower in rest:
        total = total * 256 + lower
    return total.float() * 2.0**-fl


def lies_as(y: Tensor, x: Tensor) -> Tensor:
    """Return ``y``, which kernels write channels last, as a convolution of ``x`` would lie.

    A model may take a ``view`` of it, or of what later layers return: they go by strides, where one channel or
    one place lies in both formats.

    Args:
        y: (samples, channels, height, width), or without height.
        x: So too; or (samples, features), of which there is nothing to lay.
    """
    if y.dim() == 2:
        return y
    is_last = x.dim() == 4 and lies_last(x)
    form = torch.channels_last if is_last else torch.contiguous_format
    y = y.contiguous(memory_format=form)  # itself, where it lies in both
    maps = y.unsqueeze(2) if y.dim() == 3 else y
    return y if lies_last(maps) == is_last else y.clone(memory_format=form)


class _Gradients:
    """The gradients of a layer, from that of its output.

    Args:
        grad: The output's gradient, float.
        x: Codes of the input.
        weight: Codes of the weight.
        layer: As of ``multiply``.
    """

    def __init__(self, grad: Tensor, x: Tensor, weight: Tensor, layer: Layer) -> None:
        self.grad, self.x, self.weight, self.layer = grad, x, weight, layer

    def of_bias(self) -> Tensor:
        """Return float sums."""
        dims = [d for d in range(self.grad.dim()) if d != self._channels]
        return self.grad.sum(dims, dtype=torch.float32)

    def of_input(self) -> Tensor:
        """Return the product of the gradient with the weight, shape of the input."""
        product, way = self.layer.product, self._of_input()
        if product.shifts and product.is_transposed:
            way = way / _powers(product.shifts, way, way.dim() - 1)
        return way

    def _of_input(self) -> Tensor:
        product, fmt = self.layer.product, self.layer.product.weight_fmt
        grad, noise = self.grad, self.layer.noise
        by_output = product.shifts and not product.is_transposed
        if by_output:  # w = codes / shifts: they go to the gradient
            grad = grad / _powers(product.shifts, grad, self._channels)
        if noise is None or self.layer.options.input_gradient_bits is None:
            return _input_gradient(grad.float(), decode(self.weight, fmt), self.x.shape, product)
        codes, exponents = (
            self._rounded if not by_output else _rounded(grad, noise.seed, noise.second, product)
        )
        powers = torch.where(
            exponents == NOT_FINITE, exponents, (exponents - fmt.fl).clamp(max=127)
        )
        if self.layer.options.execution == "simulation":
            return _input_gradient(
                _values(codes, powers), self.weight.float(), self.x.shape, product
            )
        if product.window is None:
            return products.linear_input_gradient(codes, self.weight, exponents=powers)
        return products.convolve_input_gradient(
            codes, self.weight, self.x.shape[2:], exponents=powers, **_window(product)
        )

    def of_weight(self) -> Tensor:
        """Return the product of the gradient with the input, shape of the weight."""
        product, fmt = self.layer.product, self.layer.product.inputs
        if self.layer.noise is None or self.layer.options.weight_gradient_bits is None:
            x = decode(self.x, fmt)
            return _weight_gradient(x, self.grad.float(), self.weight.shape, product)
        codes, exponents = self._rounded
        if self.layer.options.execution == "simulation":
            values = _values(codes, exponents)
            y = _weight_gradient(self.x.float(), values, self.weight.shape, product)
        elif product.window is None:
            y = products.linear_weight_gradient(self.x, codes, exponents=exponents)
        else:
            kernel = self.weight.shape[2:]
            y = products.convolve_weight_gradient(
                self.x, codes, kernel, exponents=exponents, **_window(product)
            )
        return y * fmt.lsb

    @cached_property
    def _rounded(self) -> tuple[Tensor, Tensor]:
        assert self.layer.noise is not None
        seed, stream, _ = self.layer.noise
        return _rounded(self.grad, seed, stream, self.layer.product)

    @property
    def _channels(self) -> int:
        return self.grad.dim() - 1 if self.layer.product.window is None else 1


def _rounded(grad: Tensor, seed: int, stream: int, product: Product) -> tuple[Tensor, Tensor]:
    """Return codes and exponents; a sample is an entry of the first dimension."""
    flat = grad.reshape(len(grad), -1) if product.window is None else grad
    codes, exponents = products.round_per_sample(flat, seed=seed, stream=stream)
    return codes.view(grad.shape), exponents


def _values(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return what codes stand for, float32."""
    return codes * powers_of_two(exponents).view(-1, *[1] * (codes.dim() - 1))


def _codes(x: Tensor, fmt: FixedPoint) -> Tensor:
    """Return codes that lie as ``x`` does: channels last stay last."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return encode(x.detach().permute(0, 2, 3, 1), fmt, rounding="nearest").permute(0, 3, 1, 2)
    return encode(x.detach(), fmt, rounding="nearest")


def _codes_of_weight(weight: Tensor, product: Product) -> Tensor:
    """Return codes, channels last as kernels want them, of a copy: FSDP2 frees the weight's memory."""
    form = torch.channels_last if weight.dim() == 4 else torch.contiguous_format
    if product.is_transposed:
        form = torch.preserve_format  # codes are turned, in less time
    own = weight.detach().clone(memory_format=form)
    if product.shifts:
        own.mul_(_of_shifts(product, own))
    if product.is_transposed:
        return _codes(own.mT, product.weight_fmt).mT
    return _codes(own, product.weight_fmt)


def _traceable(x: Tensor, fmt: FixedPoint) -> Tensor:
    return nearest_codes(x, fmt).to(torch.int8 if fmt.signed else torch.uint8)


def _of_shifts(product: Product, weight: Tensor) -> Tensor:
    """Return ``2**shift`` of each channel, to be multiplied with the weight, outputs first."""
    return _powers(product.shifts, weight, int(product.is_transposed))


def _powers(shifts: Sequence[int], x: Tensor, dim: int) -> Tensor:
    """Return ``2**shift``, to be multiplied with ``x`` along ``dim``: float32, as float16 ends at 2**15."""
    powers = torch.tensor([2.0**shift for shift in shifts], dtype=torch.float32, device=x.device)
    return powers.view([-1 if d == dim else 1 for d in range(x.dim())])


def _integers(shifts: Sequence[int], x: Tensor) -> Tensor:
    return torch.tensor(shifts, dtype=torch.int32, device=x.device)


def _window(product: Product) -> dict[str, Any]:
    if product.window is None:
        return {}
    names = "stride", "padding", "dilation", "groups"
    return dict(zip(names, (*product.window, product.groups), strict=True))


def _dtype_of_result(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _convolved(x: Tensor, weight: Tensor, product: Product) -> Tensor:
    if product.window is None:
        return F.linear(x, weight)
    convolve = F.conv1d if x.dim() == 3 else F.conv2d
    return convolve(x, weight, None, **_window(product))


def _input_gradient(grad: Tensor, weight: Tensor, shape: torch.Size, product: Product) -> Tensor:
    if product.window is None:
        return grad @ weight
    run = conv1d_input if grad.dim() == 3 else conv2d_input
    return run(shape, weight, grad, **_window(product))


def _weight_gradient(x: Tensor, grad: Tensor, shape: torch.Size, product: Product) -> Tensor:
    if product.window is None:
        return grad.flatten(0, -2).mT @ x.flatten(0, -2)
    run = conv1d_weight if grad.dim() == 3 else conv2d_weight
    return run(x, shape, grad, **_window(product))
