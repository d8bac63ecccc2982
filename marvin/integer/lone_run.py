"""Running a layer that no chain takes as one operation, where it is a linear layer; see ``token_autograd``.

So is a convolution that cuts images into patches: all places of a patch are features.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixedpoint_kernels import tokens
from fixedpoint_kernels._torch_private.modes import is_watched
from fixedpoint_kernels._torch_private.modules import is_called_plainly, own_parameters
from fixedpoint_kernels.fused.stamp import Stamp
from fixedpoint_kernels.memory import is_float32
from fixedpoint_kernels.products.shapes import sums_fit
from fixedpoint_kernels.tokens import Segment
from marvin.compiled import is_traced
from marvin.integer.autograd import Noise, lies_as
from marvin.integer.formats import (
    Product,
    choose_plain,
    has_hooks,
    is_prepacked,
    is_transposed,
    rounding_of,
)
from marvin.integer.programs import Programs
from marvin.integer.token_autograd import (
    NO_NOISE,
    LinearCall,
    is_plain,
    run_tokens,
    threads_of,
)
from marvin.model_formats import ModuleFormats
from marvin.rounder import Rounder

if TYPE_CHECKING:
    from fixedpoint_kernels.tokens.program import Program

__all__ = ["forget", "from_floats", "multiply", "wants_gradient"]

_Pair = tuple[Tensor, Tensor | None]


def multiply(module: Any, x: Tensor, product: Product, noise: Noise) -> Tensor | None:
    """Return the output of a layer under autograd; None where it has to be multiplied otherwise.

    Forward has the bits of ``autograd.multiply``. Backward, sums for the bias are added up in another order.

    Args:
        module: A linear layer, or a convolution.
        x: Values of the input's format, (samples, ..., features) or (samples, channels, height, width).
        product: Formats; both gradients have 8 bits.
        noise: Of the gradient's rounding.
    """
    weight, bias = module.weight, module.bias
    call = _Call(False, noise, (weight, bias))
    if not _is_taken(x):
        return None
    if product.window is None:
        return _multiplied(module, x, (weight, bias), product, call)
    size = _patch(x, weight, product)
    if size is None:
        return None
    is_first = weight.is_contiguous()
    features = _patches(x, size, is_first)
    laid = weight if is_first else weight.permute(0, 2, 3, 1)
    y = _multiplied(module, features.flatten(1, 2), (laid.flatten(1), bias), product, call)
    return None if y is None else lies_as(y.view(*features.shape[:3], -1).permute(0, 3, 1, 2), x)


def from_floats(module: Any, x: object) -> Tensor | None:
    """Return the output of a converted layer from what its hooks have not rounded; None: they have to.

    Codes are made, and NaN is seen, in the pass that multiplies. All bits, and what is counted, are those of
    rounding first.

    Args:
        module: A linear layer.
        x: What it is called with; (samples, ..., features) float32 where there is a result.
    """
    if is_traced() or not is_called_plainly(module):
        return None
    if not isinstance(x, Tensor) or not _is_taken(x) or x.dim() < 2:
        return None
    formats, rounders, count = rounding_of(module)
    if count != 1 or has_hooks(module, 1):
        return None
    product = choose_plain(module, formats)
    if product is None:
        return None
    if rounders:
        return _trained(module, x, product, formats, rounders[0])
    if wants_gradient(module, x):
        return None
    own = module.weight, module.bias
    call = _Call(formats.ste == "clip", NO_NOISE, own)
    y = _multiplied(module, x, own, product, call)
    return None if call.nans else y


def forget(module: nn.Module) -> None:
    """Let a layer begin anew: what it was told of its weight is no longer true."""
    _LAYERS.pop(module, None)


def _trained(
    module: Any, x: Tensor, product: Product, formats: ModuleFormats, rounder: Rounder
) -> Tensor | None:
    """Return the output of a layer that is not frozen, and count as its hooks would."""
    state, goes_back = rounder.state, wants_gradient(module, x)
    trains = module.training and torch.is_grad_enabled()
    if (goes_back and not trains) or not _rounds_plainly(module, rounder, formats, x):
        return None
    before = state.gradients
    noise = Noise(*state.noise_of_gradients()) if trains else NO_NOISE
    own = module.weight, module.bias
    call = _Call(formats.ste == "clip", noise, own)
    y = _multiplied(module, x, own, product, call)
    if y is None or call.nans:
        state.gradients = before  # drawn again by who multiplies it
        return None
    state.waiting.discard(rounder.name)
    if trains:
        rounder.count(len(x))
        if call.clip and x.requires_grad:
            rounder.tally.add(call.clamped, x.numel())
    return y


def wants_gradient(module: nn.Module, x: Tensor) -> bool:
    """Say whether a call of a layer has a pass backward."""
    return torch.is_grad_enabled() and (
        x.requires_grad or any(p.requires_grad for _, p in own_parameters(module))
    )


def _is_taken(x: Tensor) -> bool:
    """Say whether kernels may take a tensor now."""
    if type(x) not in (Tensor, nn.Parameter) or x.dtype is not torch.float32 or not x.numel():
        return False
    is_seen = torch.is_autocast_enabled("cpu") or is_watched()
    return x.device.type == "cpu" and tokens.path() is not None and not is_seen


def _rounds_plainly(module: nn.Module, rounder: Rounder, formats: ModuleFormats, x: Tensor) -> bool:
    """Say whether hooks would only round ``x`` to nearest and count what is clamped."""
    rounding = rounder.state.rounding if module.training else formats.eval_rounding
    observes = rounder.observer is not None and module.training and torch.is_grad_enabled()
    if rounding != "nearest" or observes:
        return False
    if module.training and not x.requires_grad and not rounder.data.total:
        return False  # data are looked at now and then
    return rounder.state.format_of(x) != formats.inputs


def _multiplied(
    module: nn.Module,
    x: Tensor,
    own: _Pair,
    product: Product,
    call: "_Call",
) -> Tensor | None:
    lone = _LAYERS.get(module)
    if lone is None:
        lone = _LAYERS[module] = _Lone()
    (weight, bias), is_turned, rows = own, is_transposed(module), x.shape[:-1].numel()
    if weight.dim() != 2:
        return None
    outputs, inputs = reversed(weight.shape) if is_turned else weight.shape
    more = -inputs % 16, -outputs % 16  # features that are added, of 0
    if x.shape[-1] != inputs or (is_turned and product.shifts):
        return None  # fractional lengths by feature
    if more[1] and rows != len(x):
        return None  # what is added to each of several rows would move the noise of the others
    if not is_plain(weight) or not (bias is None or is_float32(bias, (outputs,))):
        return None
    shape = outputs + more[1], inputs + more[0]
    if not sums_fit(shape):
        return None
    segment = lone.segment(product, shape, call.clip, is_turned)
    call.programs = lone.programs
    if len(x) < threads_of(segment, rows):
        return None
    x = F.pad(x, (0, more[0])) if more[0] else x  # by nothing it copies
    weight, bias, call.stamp = lone.given(module, own, more, call.parameters)
    shifts = product.shifts and (*product.shifts, *[0] * more[1])
    (y,) = run_tokens(call, segment, [LinearCall(call.noise, shifts)], (x,), (weight, bias))
    return y[..., :outputs].contiguous() if more[1] else y


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


class _Given(NamedTuple):
    """Weight and bias with features added, of 0; and the stamp of the layer's own, where it is prepacked."""

    weight: Tensor
    bias: Tensor | None
    stamp: Stamp | None


class _Lone:
    """A layer's programs."""

    def __init__(self) -> None:
        self.programs: Programs[Program] = Programs()
        self._segment: tuple[tuple[object, ...], Segment] | None = None
        self._given: _Given | None = None  # where it is prepacked

    def given(
        self, module: nn.Module, own: _Pair, more: tuple[int, int], parameters: _Pair
    ) -> _Given:
        """Return a layer's weight and bias.

        Args:
            module: The layer.
            own: Its weight, of two dimensions, and its bias.
            more: How many inputs and outputs are added.
            parameters: Of which ``own`` is made.
        """
        given = self._given
        if given is not None and given.stamp is not None and given.stamp.is_of(parameters):
            return given
        weight, bias = own
        stamp = Stamp(parameters) if is_prepacked(module) else None
        if any(more):
            across, down = reversed(more) if is_transposed(module) else more
            weight = F.pad(weight, (0, across, 0, down))
            bias = None if bias is None else F.pad(bias, (0, more[1]))
        given = _Given(weight, bias, stamp)
        self._given = given if stamp else None
        return given

    def segment(
        self, product: Product, shape: tuple[int, int], clip: bool, is_turned: bool
    ) -> Segment:
        """Return what is computed; the last one is remembered."""
        key = product.inputs, product.weight_fmt, shape, clip, is_turned, bool(product.shifts)
        found = self._segment  # threads may come at once
        if found is None or found[0] != key:
            operation = tokens.Linear(0, *key)
            self._segment = found = key, Segment((shape[1],), (operation,), (1,))
        return found[1]


class _Call:
    """One call of a layer, how many elements of its input were clamped, and how many threads met NaN.

    Args:
        clip: Whether the gradient of clamped inputs is 0.
        noise: Of the gradient's rounding.
        parameters: The layer's weight, as it lies, and its bias.
    """

    programs: "Programs[Program]"  # a layer's own, before it runs

    def __init__(self, clip: bool, noise: Noise, parameters: _Pair) -> None:
        self.clip, self.noise, self.clamped, self.nans = clip, noise, 0, 0
        self.parameters = parameters
        self.stamp: Stamp | None = None

    def note(
        self, segment: Segment, xs: Sequence[Tensor], counts: Sequence[tuple[int, int]]
    ) -> None:
        """Take the counts."""
        ((self.clamped, self.nans),) = counts


_LAYERS: WeakKeyDictionary[nn.Module, _Lone] = WeakKeyDictionary()
