"""Products as operators of PyTorch, which ``torch.compile`` keeps; every size is checked here."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fixedpoint_kernels.memory import check_memory, in_memory
from fixedpoint_kernels.operators import define, kernels_for
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.products import reference
from fixedpoint_kernels.products.shapes import LONGEST_SUM, Window

_INTEGERS = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
_RESULTS = torch.int32, torch.int64, torch.float32, torch.bfloat16
_FLOATS = torch.float32, torch.bfloat16, torch.float16
kernels_of = kernels_for("products")


def _convolve(
    x: Tensor, weight: Tensor, exponents: Tensor | None, numbers: Sequence[int], dtype: torch.dtype
) -> Tensor:
    window = _known_forward(*map(_kind, (x, weight, exponents)), tuple(numbers), dtype)[0]
    _check_memory(x=x, weight=weight)
    if math.prod(weight.shape[1:]) > LONGEST_SUM:
        return reference.finish(_long_convolve(x, weight, window), exponents, 1, dtype)
    y, _ = kernels_of(x).convolve(x, weight, exponents, window, _held(dtype), False)
    return y if y.dtype is dtype else y.to(dtype)


def _fake_convolve(
    x: Tensor, weight: Tensor, exponents: Tensor | None, numbers: Sequence[int], dtype: torch.dtype
) -> Tensor:
    _, shape = _checked_forward(x, weight, exponents, numbers, dtype)
    return _empty(x, shape, dtype)


def _convolve_with_statistics(
    x: Tensor, weight: Tensor, exponents: Tensor | None, numbers: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    window = _known_forward(*map(_kind, (x, weight, exponents)), tuple(numbers), dtype)[0]
    _check_memory(x=x, weight=weight)
    _check_length(math.prod(weight.shape[1:]), "statistics")
    parts = x, weight, exponents, window, _held(dtype), True
    y, statistics = kernels_of(x).convolve(*parts)
    assert statistics is not None  # they were asked for
    return y.to(dtype), statistics


def _fake_convolve_with_statistics(
    x: Tensor, weight: Tensor, exponents: Tensor | None, numbers: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    y = _fake_convolve(x, weight, exponents, numbers, dtype)
    return y, x.new_empty((3, weight.shape[0]), dtype=torch.int64)


def _input_gradient(
    grad: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    size: Sequence[int],
    numbers: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    given = tuple(size), tuple(numbers), dtype
    window = _known_input_gradient(*map(_kind, (grad, weight, exponents)), *given)[0]
    _check_memory(grad=grad, weight=weight)
    height, width = size
    if _backward_depth(weight, window) > LONGEST_SUM:
        sums = _long_input_gradient(grad, weight, (height, width), window)
        return reference.finish(sums, exponents, 0, dtype)
    parts = grad, weight, exponents, (height, width), window, _held(dtype)
    dx = kernels_of(grad).input_gradient(*parts)
    return dx if dx.dtype is dtype else dx.to(dtype)


def _fake_input_gradient(
    grad: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    size: Sequence[int],
    numbers: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    _, shape = _checked_input_gradient(grad, weight, exponents, size, numbers, dtype)
    return _empty(grad, shape, dtype)


def _weight_gradient(
    x: Tensor,
    grad: Tensor,
    exponents: Tensor | None,
    kernel: Sequence[int],
    numbers: Sequence[int],
) -> Tensor:
    given = tuple(kernel), tuple(numbers)
    window, shape = _known_weight_gradient(*map(_kind, (x, grad, exponents)), *given)
    _check_memory(x=x, grad=grad)
    parts = x, grad, exponents, (shape[2], shape[3]), window
    return kernels_of(x).weight_gradient(*parts).contiguous()


def _fake_weight_gradient(
    x: Tensor,
    grad: Tensor,
    exponents: Tensor | None,
    kernel: Sequence[int],
    numbers: Sequence[int],
) -> Tensor:
    _, shape = _checked_weight_gradient(x, grad, exponents, kernel, numbers)
    return x.new_empty(shape, dtype=torch.int64 if exponents is None else torch.float32)


def _round_per_sample(x: Tensor, seed: int, stream: int, first: int) -> tuple[Tensor, Tensor]:
    key = Key.checked(seed, stream, first)
    flat = _checked_samples(in_memory(x))
    elements = flat.shape[1]
    if (first + len(flat)) * -(elements // -16) >= 2**60:
        raise ValueError(f"first sample must leave room in the noise, got first={first}")
    codes, exponents = kernels_of(x).round_per_sample(flat, key)
    return _unflattened(codes, x), exponents


def _fake_round_per_sample(x: Tensor, seed: int, stream: int, first: int) -> tuple[Tensor, Tensor]:
    flat = _checked_samples(x)
    exponents = x.new_empty(flat.shape[0], dtype=torch.int32)
    return _unflattened(flat.new_empty(flat.shape, dtype=torch.int8), x), exponents


def _checked_samples(x: Tensor) -> Tensor:
    """Return samples as rows, their channels last; no copy where they lie so."""
    if x.dtype not in _FLOATS:
        raise TypeError(f"round_per_sample needs a floating tensor, got {x.dtype}")
    if x.dim() < 1:
        raise ValueError("round_per_sample needs samples along the first dimension, got none")
    laid = x.detach().movedim(1, -1) if x.dim() > 1 else x.detach()[:, None]
    return laid.contiguous().flatten(1)


def _unflattened(codes: Tensor, x: Tensor) -> Tensor:
    if x.dim() == 1:
        return codes[:, 0]
    return codes.view(x.movedim(1, -1).shape).movedim(-1, 1)


define(
    "products_convolve(Tensor x, Tensor weight, Tensor? exponents, int[] window, ScalarType dtype)"
    " -> Tensor",
    _convolve,
    _fake_convolve,
)
define(
    "products_convolve_with_statistics(Tensor x, Tensor weight, Tensor? exponents, int[] window,"
    " ScalarType dtype) -> (Tensor, Tensor)",
    _convolve_with_statistics,
    _fake_convolve_with_statistics,
)
define(
    "products_input_gradient(Tensor grad, Tensor weight, Tensor? exponents, SymInt[] size,"
    " int[] window, ScalarType dtype) -> Tensor",
    _input_gradient,
    _fake_input_gradient,
)
define(
    "products_weight_gradient(Tensor x, Tensor grad, Tensor? exponents, SymInt[] kernel,"
    " int[] window) -> Tensor",
    _weight_gradient,
    _fake_weight_gradient,
)
define(
    "products_round_per_sample(Tensor x, SymInt seed, SymInt stream, SymInt first)"
    " -> (Tensor, Tensor)",
    _round_per_sample,
    _fake_round_per_sample,
)


def _held(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a kernel's results: int64 is for sums that are longer."""
    return torch.int32 if dtype is torch.int64 else dtype


def _empty(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)


def _long_convolve(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Return int64 sums of more products than int32 holds, from parts that it does."""
    if window.groups > 1:
        return reference.convolve(x, weight, None, window, torch.int64, False)[0]
    step, run = LONGEST_SUM // weight[0, 0].numel(), kernels_of(x).convolve
    parts = zip(x.split(step, 1), weight.split(step, 1), strict=True)
    return sum(run(*part, None, window, torch.int32, False)[0].long() for part in parts)  # type: ignore[return-value]


def _long_input_gradient(
    grad: Tensor, weight: Tensor, size: tuple[int, int], window: Window
) -> Tensor:
    if window.groups > 1:
        return reference.input_gradient(grad, weight, None, size, window, torch.int64)
    step, run = LONGEST_SUM // weight[0, 0].numel(), kernels_of(grad).input_gradient
    parts = zip(grad.split(step, 1), weight.split(step, 0), strict=True)
    return sum(run(*part, None, size, window, torch.int32).long() for part in parts)  # type: ignore[return-value]


class _Kind(NamedTuple):
    """What checks read of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


_Checked = Tensor | _Kind


def _kind(x: Tensor | None) -> _Kind | None:
    return None if x is None else _Kind(x.dtype, x.shape, x.device)


def _checked_forward(
    x: _Checked,
    weight: _Checked,
    exponents: _Checked | None,
    numbers: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Window, tuple[int, ...]]:
    window = _window_of(tuple(numbers))
    _check_codes("x", x, (torch.int8, torch.uint8), 4)
    _check_weight(weight, window)
    if x.shape[1] != weight.shape[1] * window.groups:
        shape, groups = tuple(weight.shape), window.groups
        what = f"weight of shape {shape}" + f" in {groups} groups" * (groups > 1)
        if groups == 1 and shape[2:] == (1, 1):
            what = f"linear layer, or 1 x 1 convolution, with a weight of shape {shape[:2]}"
        raise ValueError(
            f"a {what} needs {weight.shape[1] * groups} input channels, got {x.shape[1]}"
        )
    size = _outputs(x.shape[2:], weight.shape[2:], window)
    _check_exponents(exponents, weight.shape[0], "output channel", x, weight)
    _check_dtype(dtype, exponents, weight.shape[1] * weight.shape[2] * weight.shape[3])
    return window, (x.shape[0], weight.shape[0], *size)


def _checked_input_gradient(
    grad: _Checked,
    weight: _Checked,
    exponents: _Checked | None,
    size: Sequence[int],
    numbers: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Window, tuple[int, ...]]:
    window = _window_of(tuple(numbers))
    _check_codes("grad", grad, (torch.int8,), 4)
    _check_weight(weight, window)
    if len(size) != 2 or min(size) < 1:
        raise ValueError(f"size must be two positive numbers, got {tuple(size)}")
    wanted = weight.shape[0], *_outputs(size, weight.shape[2:], window)
    _check_gradient(grad, wanted)
    _check_exponents(exponents, grad.shape[0], "sample", grad, weight)
    _check_dtype(dtype, exponents, _backward_depth(weight, window))
    return window, (grad.shape[0], weight.shape[1] * window.groups, *size)


def _checked_weight_gradient(
    x: _Checked,
    grad: _Checked,
    exponents: _Checked | None,
    kernel: Sequence[int],
    numbers: Sequence[int],
) -> tuple[Window, tuple[int, ...]]:
    window = _window_of(tuple(numbers))
    _check_codes("x", x, (torch.int8, torch.uint8), 4)
    _check_codes("grad", grad, (torch.int8,), 4)
    if len(kernel) != 2 or min(kernel) < 1:
        raise ValueError(f"kernel must be two positive numbers, got {tuple(kernel)}")
    if x.shape[1] % window.groups or grad.shape[1] % window.groups:
        raise ValueError(
            f"channels must be multiples of groups={window.groups}, got {x.shape[1]} of x and "
            f"{grad.shape[1]} of grad"
        )
    _check_gradient(grad, (grad.shape[1], *_outputs(x.shape[2:], kernel, window)))
    if grad.shape[0] != x.shape[0]:
        raise ValueError(f"x and grad need as many samples, got {x.shape[0]} and {grad.shape[0]}")
    _check_exponents(exponents, grad.shape[0], "sample", x, grad)
    return window, (grad.shape[1], x.shape[1] // window.groups, *kernel)


# each answer is given again: a check of the same takes longer than to look it up
_known_forward, _known_input_gradient, _known_weight_gradient = map(
    lru_cache(maxsize=256), (_checked_forward, _checked_input_gradient, _checked_weight_gradient)
)


@lru_cache(maxsize=256)
def _window_of(numbers: tuple[int, ...]) -> Window:
    if len(numbers) != 7:
        raise ValueError(f"a window has 7 numbers, got {len(numbers)}")
    window = Window(*(tuple(numbers[i : i + 2]) for i in (0, 2, 4)), groups=numbers[6])  # type: ignore[arg-type]
    if min(*window.stride, *window.dilation, window.groups) < 1 or min(window.padding) < 0:
        raise ValueError(
            f"stride, dilation and groups must be 1 or more and padding 0 or more, got {window}"
        )
    return window


def _check_codes(name: str, x: _Checked, dtypes: tuple[torch.dtype, ...], dims: int) -> None:
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be codes of {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if len(x.shape) != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(x.shape)}")


def _check_memory(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        check_memory(x, name)


def _check_weight(weight: _Checked, window: Window) -> None:
    _check_codes("weight", weight, (torch.int8,), 4)
    if min(weight.shape) < 1 or weight.shape[0] % window.groups:
        raise ValueError(
            f"weight must have elements, and outputs in {window.groups} equal groups, got shape "
            f"{tuple(weight.shape)}"
        )
    if weight.shape[2] * weight.shape[3] > LONGEST_SUM:
        raise ValueError(
            f"a kernel must have {LONGEST_SUM} elements or fewer, got {tuple(weight.shape[2:])}"
        )


def _check_gradient(grad: _Checked, wanted: tuple[int, ...]) -> None:
    if tuple(grad.shape[1:]) != wanted:
        raise ValueError(
            f"grad must have the shape of the output, (samples, {', '.join(map(str, wanted))}), "
            f"got {tuple(grad.shape)}"
        )


def _check_exponents(exponents: _Checked | None, count: int, of: str, *others: _Checked) -> None:
    devices = {x.device for x in others} | ({exponents.device} if exponents is not None else set())
    if len(devices) > 1:
        raise ValueError(
            f"codes and exponents must be on one device, got {sorted(map(str, devices))}"
        )
    if exponents is None:
        return
    if exponents.dtype is not torch.int32:
        raise TypeError(f"exponents must be int32, got {exponents.dtype}")
    if len(exponents.shape) != 1 or exponents.shape[0] not in (1, count):
        raise ValueError(
            f"exponents must be one, or one for each {of} ({count}), got shape "
            f"{tuple(exponents.shape)}"
        )


def _check_dtype(dtype: torch.dtype, exponents: _Checked | None, depth: int) -> None:
    if dtype not in _RESULTS:
        raise TypeError(f"dtype must be one of {_RESULTS}, got {dtype}")
    if dtype.is_floating_point != (exponents is not None):
        raise TypeError(f"floating results need exponents, integers none; got dtype={dtype}")
    if dtype is torch.int32:
        _check_length(depth, "dtype=torch.int32")


def _check_length(depth: int, name: str) -> None:
    if depth > LONGEST_SUM:
        raise ValueError(
            f"{name} holds sums of {LONGEST_SUM} products or fewer, got {depth}: "
            "use dtype=torch.int64, or exponents"
        )


def _backward_depth(weight: _Checked, window: Window) -> int:
    return weight.shape[0] // window.groups * weight.shape[2] * weight.shape[3]


def _outputs(size: Sequence[int], kernel: Sequence[int], window: Window) -> tuple[int, int]:
    height, width = window.outputs((size[0], size[1]), (kernel[0], kernel[1]))
    if height < 1 or width < 1:
        raise ValueError(
            f"an input of {tuple(size)} is smaller than a kernel of {tuple(kernel)} with {window}"
        )
    return height, width
