"""Which formats a layer multiplies, and whether integer units hold them."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fixedpoint_kernels import FixedPoint, products
from fixedpoint_kernels._torch_private.modes import is_fake
from fixedpoint_kernels._torch_private.modules import (
    has_backward_hooks,
    hooks_of,
    own_forward_hooks,
)
from fixedpoint_kernels.norms import norms_many
from fixedpoint_kernels.sides import for_each_side
from marvin.channels import ChannelFormat
from marvin.compiled import is_traced
from marvin.freezing import FrozenRounding
from marvin.hooks import rounders_of
from marvin.layers import carried_parameters
from marvin.model_formats import ModuleFormats
from marvin.rounder import ForwardState, Rounder

__all__ = [
    "BITS",
    "MOST_BITS",
    "OPTIONS",
    "PREPACKED",
    "Execution",
    "Options",
    "Product",
    "carried",
    "choose",
    "choose_plain",
    "has_hooks",
    "has_nan",
    "is_prepacked",
    "is_transposed",
    "rounding_of",
    "size_of",
    "weight_of",
    "why_no_kernel",
    "window_of",
]

BITS = 8
MOST_BITS = 24
"""Of a weight whose inputs have fractional lengths of their own: its digits' sums, put together, fit in int64."""
OPTIONS = "integer_options"
"""Name of the attribute in which a converted module has its ``Options``."""
PREPACKED = "integer_prepacked"
"""Name of the attribute of a module whose weight stays laid out between calls: how often ``prepack`` was called."""
_LARGE = 2**15  # elements
Execution = Literal["integer", "simulation"]
_Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Options:
    """How a layer's products are computed.

    Args:
        input_gradient_bits: 8, or None for the input's gradient in float.
        weight_gradient_bits: 8, or None for the weight's gradient in float.
        execution: ``"integer"``; or ``"simulation"``, the same step in PyTorch's float32.
        fused: Whether a layer's products, its codes and its bias may be one operation.
    """

    input_gradient_bits: int | None = BITS
    weight_gradient_bits: int | None = BITS
    execution: Execution = "integer"
    fused: bool = True


@dataclass(frozen=True)
class Product:
    """What a layer multiplies.

    Args:
        inputs: Format of the input, which has been rounded to it.
        weight: Format of the weight.
        window: Stride, padding and dilation; None of a linear layer.
        groups: Of a convolution.
        is_transposed: Of a linear layer: whether fractional lengths differ by input, not by output.
    """

    inputs: FixedPoint
    weight: FixedPoint | ChannelFormat
    window: tuple[_Numbers, _Numbers, _Numbers] | None
    groups: int = 1
    is_transposed: bool = False

    @property
    def weight_fmt(self) -> FixedPoint:
        """Format of the weight, of channels whose shift is 0."""
        return self.weight.fmt if isinstance(self.weight, ChannelFormat) else self.weight

    @property
    def shifts(self) -> _Numbers:
        """How many fractional bits more each output channel has (input, ``is_transposed``); nothing where all are alike."""
        return self.weight.shifts if isinstance(self.weight, ChannelFormat) else ()


def carried(module: nn.Module) -> tuple[ModuleFormats, ForwardState | None]:
    """Return the formats that a module rounds by, and what its model shares; none if it has none.

    Raises:
        ValueError: The module's buffer does not hold formats.
    """
    for rounder in rounders_of(module):
        return rounder.formats(module), rounder.state
    for hook in hooks_of(module, FrozenRounding):
        return hook.formats_of(module), None
    return ModuleFormats(), None


def rounding_of(module: nn.Module) -> tuple[ModuleFormats, list[Rounder], int]:
    """Return a module's formats, its rounders, and how many of its hooks before ``forward`` round; of a frozen one, too."""
    rounders = rounders_of(module)
    if rounders:
        return rounders[0].formats(module), rounders, len(rounders)
    frozen = hooks_of(module, FrozenRounding)  # one before, one behind
    formats = frozen[0].formats_of(module) if frozen else ModuleFormats()
    return formats, [], len(frozen) // 2


def has_hooks(module: nn.Module, own: int | None = None) -> bool:
    """Say whether a module has hooks of others; ``own``: how many round, where that is known."""
    before, after = own_forward_hooks(module)
    if before or after:
        own = rounding_of(module)[2] if own is None else own
        if len(before) > own or len(after) > own:
            return True
    return has_backward_hooks(module)


def rounds_inputs(module: nn.Module) -> bool:
    """Say whether a module rounds what it takes, by its formats of now."""
    before, _ = own_forward_hooks(module)
    return bool(before) and rounding_of(module)[0].rounds


def choose(module: nn.Module, formats: ModuleFormats) -> Product | str:
    """Return what ``module`` multiplies on integers, or why it does not.

    Args:
        module: A convolution or a linear layer.
        formats: That it carries.
    """
    window = window_of(module)
    if isinstance(window, str):
        return window
    names = [name for name, _ in carried_parameters(module)]
    weights = dict(zip(names, formats.weights, strict=False))
    inputs, weight = formats.inputs, weights.get("weight")
    if inputs is not None and "weight" not in weights:
        return "its weight is computed from other parameters"
    for what, fmt in (("inputs", inputs), ("weights", weight)):
        if fmt is None:
            return f"its {what} are float32"
        if fmt.wl > BITS:
            return f"its {what} have {fmt.wl} bits, more than {BITS}"
    if not isinstance(inputs, FixedPoint) or not isinstance(weight, (FixedPoint, ChannelFormat)):
        return "its inputs or weights are in block floating point"
    turned = is_transposed(module)
    product = Product(inputs, weight, window, getattr(module, "groups", 1), turned)
    if product.shifts and (reason := _why_no_shifts(module, product)):
        return reason
    return product if product.weight_fmt.signed else "its weights are unsigned"


def choose_plain(module: nn.Module, formats: ModuleFormats) -> Product | None:
    """Return what ``module`` multiplies where it does no more than that; None: it has to run alone.

    Formats of outputs, of samples and of gradients, and options, are more.
    """
    others = formats.outputs, formats.samples, formats.gradients
    if any(fmt is not None for fmt in others) or getattr(module, OPTIONS) != Options():
        return None
    product = choose(module, formats)
    return None if isinstance(product, str) else product


def _why_no_shifts(module: nn.Module, product: Product) -> str:
    """Say why a layer is not multiplied by its formats by channel; "" where it is."""
    count, channels = len(product.shifts), weight_of(module).shape[-1 * product.is_transposed]
    if not torch.jit.is_tracing() and count != channels:  # in such a trace, sizes are tensors
        return (
            f"its weight has {channels} channels, its formats are of {count}: make an optimizer of the "
            "weights of now, and call marvin.quantize_activations again"
        )
    if product.is_transposed and product.weight.wl + max(product.shifts) > MOST_BITS:
        return f"fractional lengths of its weight differ so much that a sum would need codes of more than {MOST_BITS} bits"
    return ""


def is_prepacked(*modules: nn.Module) -> bool:
    """Say whether weights of modules stay laid out between calls; see ``marvin.integer.prepack``."""
    return all(PREPACKED in vars(module) for module in modules)


def is_transposed(module: nn.Module) -> bool:
    """Say whether a linear layer's weight is (features, outputs), as transformers' ``Conv1D`` has it."""
    return not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight of a layer, outputs first, as it lies."""
    weight: torch.Tensor = module.weight  # pyright: ignore[reportAssignmentType]
    return weight.mT if is_transposed(module) else weight


def has_nan(x: torch.Tensor) -> bool:
    """Say whether a tensor on the CPU has NaN, for which there is no code; one pass that only reads.

    While a model is traced or compiled, nobody can know.
    """
    if x.device.type != "cpu" or is_traced() or is_fake(x):
        return False
    # infinities of both signs may add up to NaN
    return math.isnan(size_of(x)) and bool(x.detach().isnan().any())


def size_of(x: torch.Tensor) -> float:
    """Return a number that is finite only where all elements are; large ones may add up to infinity."""
    own = x.detach()
    if own.numel() < _LARGE or own.dtype is not torch.float32:
        return float(own.sum())
    return float(norms_many([own]))  # torch would wake its threads for it


def why_no_kernel(device: torch.device, groups: int = 1) -> str:
    """Say why products on a device would be slower than floats; "" where they are not.

    Args:
        device: Of the layer.
        groups: Of a convolution.
    """
    path = products.path()
    if device.type == "cuda" and groups > 1:
        return f"it has {groups} groups, which are multiplied one by one on a GPU"
    if device.type != "cpu" or path.is_own or path.reason == products.FORCED:
        return ""
    return f"this processor has no kernel of integers: {path.reason}"


def window_of(module: nn.Module) -> tuple[_Numbers, _Numbers, _Numbers] | str | None:
    """Return how a convolution moves, None for a linear layer, or why there is no such product."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d)):  # torch 2.9's compiler knows no unions
        return None
    if module.padding_mode != "zeros":
        return f"its border is not 0, but padding_mode={module.padding_mode!r}"
    sides = 1 if isinstance(module, nn.Conv1d) else 2
    stride, dilation = for_each_side(module.stride, sides), for_each_side(module.dilation, sides)
    padding = module.padding
    if padding == "same":
        kernel = for_each_side(module.kernel_size, sides)
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(r % 2 for r in reach):
            return "padding='same' of an even kernel pads one side more than the other"
        padding = tuple(r // 2 for r in reach)
    elif isinstance(padding, str):
        padding = (0,) * sides
    return stride, for_each_side(padding, sides), dilation
