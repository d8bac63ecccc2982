"""Convolution and linear layers that keep their input in few bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F

from fixedpoint_kernels._torch_private.modes import is_transformed
from fixedpoint_kernels._torch_private.modules import ConvolutionHook, in_place_of, padding_around
from fixedpoint_kernels._torch_private.tensors import base_of
from fixedpoint_kernels.forward_save import maps, recompute, scope
from fixedpoint_kernels.forward_save.checkpoint import Found
from fixedpoint_kernels.forward_save.settings import Division
from fixedpoint_kernels.once import once_differentiable

__all__ = [
    "Convolution",
    "Divided",
    "Linear",
    "Pack",
    "Recomputed",
    "TransposedConvolution",
    "convolution",
    "linear",
]

Pack = Callable[[Tensor, torch.dtype | None], maps.Packed]


class Divided(nn.Module):
    """What layers share that keep their input in few bits while they train."""

    _division: Division
    _noise: Tensor
    _layer: str

    def _keeps(self, input: Tensor) -> bool:
        """Whether something will be kept for backward; otherwise torch's own layer runs."""
        if not (self.training and torch.is_grad_enabled() and maps.is_dense(input)):
            return False
        tensors = input, *self.parameters()  # a parametrised weight is a child's
        is_kept = any(tensor.requires_grad for tensor in tensors)
        if is_kept and not torch.compiler.is_compiling() and is_transformed():
            self._refuse_forward_mode(tensors)
        return is_kept

    def _refuse_forward_mode(self, tensors: Sequence[Tensor]) -> None:
        if any(unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise TypeError(
                f"layer {self._layer!r}: activations that are kept in few bits must be differentiated in reverse "
                "mode, got forward mode of torch.autograd.forward_ad or torch.func: use it in eval mode, which is "
                "exact, or after forward_save.revert(model)"
            )

    def spatial(self, x: Tensor) -> int:
        """Return how many trailing dimensions of ``x`` make up a plane: features alone."""
        return 1

    def arranged(self, x: Tensor) -> Tensor:
        """Return the input as it is packed."""
        return x

    def _pack(self, x: Tensor, dtype: torch.dtype | None = None) -> maps.Packed:
        if isinstance(base_of(x), nn.Parameter):  # it is there anyway
            return maps.whole(x)
        try:
            spatial, keeping = self.spatial(x), self._keeping()
            is_asked = x.is_floating_point() and x.numel() and keeping.rows is None
            if is_asked and not (
                torch.compiler.is_compiling() or maps.is_smaller(x, spatial, keeping)
            ):
                return maps.whole(x)
            return maps.pack(x, spatial, keeping, self._noise, dtype, by=self._layer)
        except TypeError as error:
            raise TypeError(f"layer {self._layer!r}: {error}") from error

    def _keeping(self) -> Division:
        """Return how the input is kept."""
        return replace(self._division, rows=None)

    def _own(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Run torch's own layer, exactly where it does not train."""
        if self.training or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with scope.paused():
            return forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return torch's own, and how the input is kept."""
        return ", ".join(filter(None, [super().extra_repr(), f"keeps={self._words()}"]))

    def _words(self) -> str:
        return str(self._division)


class _Geometry(NamedTuple):
    """The numbers of a convolution, in the order of ``aten::convolution``."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class Convolution(Divided, ConvolutionHook):
    """Goes before ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``."""

    def spatial(self: Any, x: Tensor) -> int:
        """Return the dimensions of the kernel."""
        return len(self.kernel_size)

    def convolve(
        self, own: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """See ``ConvolutionHook``."""
        if not self._keeps(x):
            return self._own(own, x, weight, bias)
        x, padding = _padded(self, x)
        zeros = (0,) * len(padding)
        geometry = _Geometry(self.stride, padding, self.dilation, False, zeros, self.groups)  # pyright: ignore
        return _convolve(self, x, weight, bias, geometry)


class TransposedConvolution(Divided):
    """Goes before ``nn.ConvTranspose1d``, ``nn.ConvTranspose2d`` or ``nn.ConvTranspose3d``."""

    def spatial(self: Any, x: Tensor) -> int:
        """Return the dimensions of the kernel."""
        return len(self.kernel_size)

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Return torch's own."""
        if not self._keeps(input):
            return self._own(super().forward, input, output_size)
        extra = self._output_padding(
            *(input, output_size, self.stride, self.padding, self.kernel_size),
            *(len(self.kernel_size), self.dilation),
        )
        numbers = self.stride, self.padding, self.dilation, True, tuple(extra), self.groups
        return _convolve(self, input, self.weight, self.bias, _Geometry(*numbers))


class Linear(Divided):
    """Goes before ``nn.Linear``."""

    def _keeping(self) -> Division:
        return self._division

    def _words(self) -> str:
        return self._division.of_linear

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not self._keeps(input):
            return self._own(super().forward, input)
        return linear(input, self.weight, self.bias, self._pack)


class Recomputed(Divided):
    """Goes before any class: keeps the input alone, and computes the rest again."""

    def spatial(self, x: Tensor) -> int:
        """Return all dimensions but batch and channels; features where there are none."""
        return max(1, min(x.dim() - 2, 3))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the class itself returns."""
        own = super().forward
        if len(args) != 1 or kwargs or not self._keeps(args[0]):
            return self._own(own, *args, **kwargs)
        parameters = [p for p in self.parameters() if p.requires_grad]
        found = Found(self)  # running statistics move in the first run alone

        def run(x: Tensor, *given: Tensor) -> Tensor:
            is_again = torch.is_grad_enabled()
            others = dict(zip(parameters, given, strict=True))
            with scope.paused(), found.of_run(is_again=is_again), in_place_of(self, others):
                return own(x)

        return recompute.again(run, [args[0], *parameters], self._pack, is_random=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, pack: Pack) -> Tensor:
    """Return ``F.linear``, whose backward has of ``x`` what ``pack`` keeps."""
    dtype = maps.autocast_dtype(x)
    kept = pack(x, dtype) if weight.requires_grad else maps.NOTHING
    rows = x  # not in one piece: torch multiplies it as it is
    if x.is_contiguous():
        rows = x[None] if x.dim() == 1 else x.flatten(0, -2)  # views stay outside of the Function
    out = _Linear.apply(rows, made_small(weight, dtype), bias, dtype, *kept)  # pyright: ignore
    return out.view(*x.shape[:-1], out.shape[-1]) if x.is_contiguous() else out  # pyright: ignore


def made_small(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return what to keep of a weight: the parameter, which is there anyway, or its cast."""
    return weight if dtype is None or maps.is_parameter(weight) else weight.to(dtype)


def _padded(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Pad what a convolution's own padding cannot, as torch does; return what is left to pad."""
    around = padding_around(module)
    if module.padding_mode != "zeros":
        return F.pad(x, around, mode=module.padding_mode), (0,) * len(module.kernel_size)
    if not isinstance(module.padding, str):
        return x, tuple(module.padding)
    left, right = around[-2::-2], around[-1::-2]
    extra = [r - l for l, r in zip(left, right, strict=True)]
    if any(extra):  # one more at the end
        x = F.pad(x, [n for e in reversed(extra) for n in (0, e)])
    return x, tuple(left)


def _convolve(
    module: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry
) -> Tensor:
    return _run(x, weight, bias, geometry, module._pack)


def convolution(  # noqa: PLR0913  torch's own arguments
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    pack: Pack,
) -> Tensor:
    """Return ``F.conv1d`` to ``conv3d``, whose backward has of ``input`` what ``pack`` keeps."""
    sides = weight.dim() - 2

    def each(n: int | Sequence[int]) -> tuple[int, ...]:
        return (n,) * sides if isinstance(n, int) else tuple(n) * (sides // len(n))

    window = each(stride), each(padding), each(dilation)
    geometry = _Geometry(*window, False, (0,) * sides, groups)
    return _run(input, weight, bias, geometry, pack)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry, pack: Pack) -> Tensor:
    if x.dim() == len(geometry.stride) + 1:  # one sample; views stay outside of the Function
        return _run(x[None], weight, bias, geometry, pack)[0]
    dtype = maps.autocast_dtype(x)
    kept = pack(x, dtype) if weight.requires_grad else maps.NOTHING
    weight = made_small(weight, dtype)
    return _Convolution.apply(x, weight, bias, dtype, *kept, geometry)  # pyright: ignore


class _Convolution(torch.autograd.Function):
    """``aten::convolution``, which keeps what ``pack`` returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        dtype, *parts, ctx.form, ctx.geometry = rest
        ctx.save_for_backward(weight, *parts)
        ctx.is_kept = parts[0] is not None
        ctx.shape, ctx.bias_sizes = x.shape, None if bias is None else list(bias.shape)
        return torch.convolution(*maps.cast(dtype, x, weight, bias), *ctx.geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        weight, *parts = ctx.saved_tensors
        x = grad.new_empty(ctx.shape)
        if ctx.is_kept:
            x = maps.restore(parts, ctx.form).to(grad.dtype)
        needed = list(ctx.needs_input_grad[:3])
        gradients = torch.ops.aten.convolution_backward(
            grad, x, weight.to(grad.dtype), ctx.bias_sizes, *ctx.geometry, needed
        )
        return *gradients, *(None,) * 6


class _Linear(torch.autograd.Function):
    """``linear``, which keeps what ``pack`` returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        dtype, *parts, ctx.form = rest
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *parts)
        return F.linear(*maps.cast(dtype, x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        weight, *parts = ctx.saved_tensors
        dx = dw = db = None
        leading = grad.shape[:-1]
        grad = grad.reshape(leading.numel(), grad.shape[-1])
        if ctx.needs_input_grad[0]:
            dx = (grad @ weight.to(grad.dtype)).view(*leading, weight.shape[1])
        if ctx.needs_input_grad[1]:
            dw = maps.weight_gradient(grad, parts, ctx.form)
        if ctx.needs_input_grad[2]:
            db = grad.sum(0)
        return dx, dw, db, *(None,) * 5
