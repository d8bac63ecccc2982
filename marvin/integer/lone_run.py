"""Running a layer that no chain takes as one operation, where it is a linear layer; see ``token_autograd``.

So is a convolution that cuts images into patches: all places of a patch are features.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixedpoint_kernels import tokens
from fixedpoint_kernels._torch_private import is_watched
from fixedpoint_kernels.tokens import Segment
from marvin.integer.autograd import Noise, lies_as
from marvin.integer.formats import Product
from marvin.integer.programs import Programs
from marvin.integer.token_autograd import is_plain, program_of, run_tokens, threads_of

if TYPE_CHECKING:
    from fixedpoint_kernels.tokens.program import Program

__all__ = ["multiply"]


def multiply(module: nn.Module, x: Tensor, product: Product, noise: Noise) -> Tensor | None:
    """Return the output of a layer under autograd; None where it has to be multiplied otherwise.

    Forward has the bits of ``autograd.multiply``. Backward, sums for the bias are added up in another order.

    Args:
        module: A linear layer, or a convolution.
        x: Values of the input's format, (samples, ..., features) or (samples, channels, height, width).
        product: Formats; both gradients have 8 bits.
        noise: Of the gradient's rounding.
    """
    weight, bias = (getattr(module, name) for name in ("weight", "bias"))
    if type(x) not in (Tensor, nn.Parameter) or x.dtype is not torch.float32 or not x.numel():
        return None
    if (
        x.device.type != "cpu"
        or tokens.path() is None
        or torch.is_autocast_enabled("cpu")
        or is_watched()
    ):
        return None
    if product.window is None:
        return _multiplied(module, x, weight, bias, product, noise)
    size = _patch(x, weight, product)
    if size is None:
        return None
    is_first = weight.is_contiguous()
    features = _patches(x, size, is_first)
    laid = weight if is_first else weight.permute(0, 2, 3, 1)
    y = _multiplied(module, features.flatten(1, 2), laid.flatten(1), bias, product, noise)
    return None if y is None else lies_as(y.view(*features.shape[:3], -1).permute(0, 3, 1, 2), x)


def _multiplied(
    module: nn.Module,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: Product,
    noise: Noise,
) -> Tensor | None:
    (outputs, inputs), rows = weight.shape, x.shape[:-1].numel()
    more = -inputs % 16, -outputs % 16  # features that are added, of 0
    if product.shifts or x.shape[-1] != inputs or (more[1] and rows != len(x)):
        return None  # what is added to each of several rows would move the noise of the others
    if not all(own is None or is_plain(own) for own in (weight, bias)):
        return None
    shape = outputs + more[1], inputs + more[0]
    own = _LAYERS.get(module)
    if own is None:
        own = _LAYERS[module] = _Lone()
    segment = own.segment(product, shape)
    if len(x) < threads_of(segment, rows):
        return None
    if any(more):
        x, weight = F.pad(x, (0, more[0])), F.pad(weight, (0, more[0], 0, more[1]))
        bias = None if bias is None else F.pad(bias, (0, more[1]))
    (y,) = run_tokens(own, segment, [noise[:2]], (x,), (weight, bias))
    return y[..., :outputs].contiguous()


def _patch(x: Tensor, weight: Tensor, product: Product) -> tuple[int, int] | None:
    """Return height and width of the patches that a convolution cuts images into; None where it does not."""
    if x.dim() != 4 or product.window is None or product.groups != 1:
        return None
    stride, padding, dilation = product.window
    size, whole = (weight.shape[2], weight.shape[3]), (x.shape[2], x.shape[3])
    if any(padding) or any(d != 1 for d in dilation) or x.shape[1] != weight.shape[1]:
        return None
    are_cut = all(n % k == 0 for n, k in zip(whole, size, strict=True))
    return size if size == whole or (size == tuple(stride) and are_cut) else None


def _patches(x: Tensor, size: tuple[int, int], is_first: bool) -> Tensor:
    """Return (samples, rows, columns, features) of patches; of the features, channels come first or last."""
    down, across = size
    cut = x.unflatten(3, (-1, across)).unflatten(2, (-1, down))  # n, c, rows, down, columns, across
    return cut.permute(*((0, 2, 4, 1, 3, 5) if is_first else (0, 2, 4, 3, 5, 1))).flatten(3)


class _Lone:
    """A layer's programs."""

    def __init__(self) -> None:
        self._programs: Programs[Program] = Programs()
        self._segment: tuple[tuple[object, ...], Segment] | None = None

    def segment(self, product: Product, shape: tuple[int, int]) -> Segment:
        """Return what is computed; the last one is remembered."""
        key = product.inputs, product.weight_fmt, shape
        if self._segment is None or self._segment[0] != key:
            operation = tokens.Linear(0, *key, clip=False)
            self._segment = key, Segment((shape[1],), (operation,), (1,))
        return self._segment[1]

    def program(
        self, segment: Segment, x: Tensor, inputs: Sequence[bool], weights: Sequence[bool]
    ) -> "Program":
        """Return the program for values of the shape of ``x``."""
        return program_of(self._programs, segment, x, inputs, weights)

    def note(self, program: "Program", xs: Sequence[Tensor]) -> None:
        """Count nothing: who rounded the input has counted."""


_LAYERS: WeakKeyDictionary[nn.Module, _Lone] = WeakKeyDictionary()
